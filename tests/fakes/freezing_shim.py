"""A shim that can have a worker stand still for a snapshot and revive it, without CRIU: what waits
in accept() is woken where it stands.

That is all a worker sees of a restore but for the clock. The real thing, images included, is tested
in tests/snapshotter."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.spec.function import FunctionSpec
from tests.fakes.fake_shim import WAIT_S, FakeShim, ShimTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A process that stands still, or could not: what it said, and where it waits."""

    said: dict[str, Any]
    path: str


class FreezingShim(FakeShim):
    """A FakeShim with `checkpoint`, `revive` and `prove`."""

    def __init__(
        self,
        code: Mapping[str, str],
        spec: FunctionSpec,
        *,
        work: Mapping[str, str] | None = None,
        secret_variables: Sequence[str] = (),
    ) -> None:
        self._work_files, self._secret_variables = dict(work or {}), list(secret_variables)
        super().__init__(code, spec)

    def before_boot(self, launch: dict[str, Any]) -> None:
        """Its files and the names of its secrets are there when the worker begins."""
        launch["secret_variables"] = self._secret_variables
        for name, text in self._work_files.items():
            (self.work / name).write_text(text)

    def checkpoint(self, name: str = "c-1", *, in_place: bool = False) -> Frozen:
        """Order one and wait until the process says how it stands."""
        path = str(self.root / f"{name}.sock")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        go_theirs, go_ours = os.pipe()
        op = "checkpoint_in_place" if in_place else "checkpoint"
        with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen(1)
            body = json.dumps({"op": op, "instance": name, "env": {}}).encode()
            descriptors = [listener.fileno(), theirs.fileno()] + ([] if in_place else [go_theirs])
            socket.send_fds(self.control, [body], descriptors)
            theirs.close()
            os.write(go_ours, b"g")
            os.close(go_theirs)
            os.close(go_ours)
            ours.settimeout(WAIT_S)
            said = ours.recv(256 * 1024)
            if not said:
                raise ShimTimeout(
                    f"the channel was closed without a word; the worker wrote: "
                    f"{self.worker_output()}"
                )
            assert ours.recv(1) == b""  # closed behind it
        return Frozen(said=json.loads(said), path=path)

    def revive(self, frozen: Frozen) -> None:
        """Connect to it: this shim speaks with that process from now on, and the worker that it
        came from is on its own."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(WAIT_S)
        connection.connect(frozen.path)
        self.control.close()
        self.control = connection

    def freeze(self, name: str = "c-1", *, in_place: bool = False) -> Frozen:
        """Checkpoint it, expect that nothing was in the way, and revive it."""
        frozen = self.checkpoint(name, in_place=in_place)
        assert frozen.said["obstacles"] == []
        if not in_place:
            # with its pidfd: the worker that knows it ends as soon as the fork is revived
            self.wait_event("forked", instance=name)
        self.revive(frozen)
        return frozen

    def prove(self, *, records: bool = False) -> dict[str, Any]:
        """Have the examples answered again; the process leaves after it, or with `records` when
        this shim hangs up."""
        order = {"op": "prove", "instance": "proof", "env": {}, "records": records}
        self.control.send(json.dumps(order).encode())
        return self.wait_event("proved", instance="proof")
