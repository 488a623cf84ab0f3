"""A small shim for tests of the worker: boots the real worker as a subprocess and speaks the slot's
contract with it.

It does no isolation. What it shares with the real shim is the contract of
docs/reference/internals/shim.md: launch file, control channel, orders with descriptors, the environment on `go`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from pilotlight.protocol import CONTENT_PICKLE, HEADER_TRUSTED_PICKLE
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.record_json import to_json
from tests.fakes.plain_http import NO_TLS
from tests.fakes.process_trees import kill_tree

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "functions"
PICKLED = {"content-type": CONTENT_PICKLE, HEADER_TRUSTED_PICKLE: "1"}
"""Headers of a call that is a pickle, as the activator sends one of the function's own tenant."""
WAIT_S = 30.0
"""Bound of every wait: far above what anything here takes, so that a hang fails and a slow machine
does not."""


class ShimTimeout(Exception):
    """Raised when the worker did not send what was waited for; carries what it wrote to stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeParked:
    """A fork that waits: its name, its pid, and our end of its channel."""

    name: str
    pid: int
    channel: socket.socket


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeInstance:
    """An instance that was ordered: its socket's path, the reading ends of its output, our end of
    `go`."""

    id: str
    path: str
    stdout: int
    stderr: int
    go: int


def pid_of(pidfd: int) -> int:
    """The process behind a descriptor (pidfd_open(2)). Raises ProcessLookupError when it has
    ended."""
    [pid] = [
        int(line.split()[1])
        for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
        if line.startswith("Pid:")
    ]
    if pid <= 0:
        raise ProcessLookupError(f"the process behind descriptor {pidfd} has ended")
    return pid


class FakeShim:
    """Owns one worker process. Use as a context manager: leaving it ends the worker and all its
    children."""

    def __init__(
        self,
        code: Mapping[str, str],
        spec: FunctionSpec,
        *,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pl"))
        self._code, self.work = self.root / "code", self.root / "work"
        self._code.mkdir()
        self.work.mkdir()
        for name, text in code.items():
            (self._code / name).parent.mkdir(parents=True, exist_ok=True)
            (self._code / name).write_text(textwrap.dedent(text))
        for name, data in (files or {}).items():
            (self._code / name).write_bytes(data)
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(WAIT_S)
        launch = {
            "entry": to_json(spec),
            "revision": "f-0000000000000001@v1-test",
            "code": str(self._code),
            "site": [sysconfig.get_paths()["purelib"]],
            "runtime": [str(RUNTIME)],
            "weights": {},
            "env": dict(env or {}),
            "control_fd": theirs.fileno(),
            "work": str(self.work),
        }
        self.before_boot(launch)
        (self.root / "launch.json").write_text(json.dumps(launch))
        command = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            str(RUNTIME / "pilotlight/worker/boot.py"),
            str(self.root / "launch.json"),
        ]
        self._stderr = (self.root / "stderr").open("wb")
        out = self._stderr
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        theirs.close()
        self._backlog: list[dict[str, Any]] = []
        self.descriptors: list[int] = []
        self.pids: list[int] = []

    def __repr__(self) -> str:
        return f"<FakeShim worker={self.process.pid} children={self.pids}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Whole trees, before any of their processes ends: one that stands still for a snapshot does
        # not end with its parent, and is in no tree any longer once its parent is gone.
        kill_tree(self.process.pid)
        for pidfd in self.pids:  # forks of a worker that had ended
            with contextlib.suppress(ProcessLookupError):
                kill_tree(pid_of(pidfd))
            os.close(pidfd)
        self.process.wait(WAIT_S)
        self.control.close()
        self._stderr.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        shutil.rmtree(self.root)

    def before_boot(self, launch: dict[str, Any]) -> None:
        """Called with the launch file's content before it is written: a place for other shims to
        add to it."""

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self.process.pid

    def wait_event(self, event: str, *, instance: str | None = None) -> dict[str, Any]:
        """The next event of that name (and of that instance); others are kept. Raises ShimTimeout,
        also when `failed` comes instead."""
        for i, message in enumerate(self._backlog):
            if message["event"] == event and (
                instance is None or message.get("instance") == instance
            ):
                return self._backlog.pop(i)
        while True:
            message = self.receive()
            if message["event"] == event and (
                instance is None or message.get("instance") == instance
            ):
                return message
            if message["event"] == "failed":
                raise ShimTimeout(
                    f"waited for {event}, the worker failed: {message['error']['traceback']}"
                )
            self._backlog.append(message)

    def receive(self) -> dict[str, Any]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.control, 256 * 1024, 4)
        except TimeoutError as e:
            raise ShimTimeout(
                f"nothing came in {WAIT_S} s; the worker wrote: {self.worker_output()}"
            ) from e
        self.pids += descriptors
        if not data:
            raise ShimTimeout(f"the worker closed its channel; it wrote: {self.worker_output()}")
        message: dict[str, Any] = json.loads(data)
        return message

    def park(self, name: str = "p-1", *, entry_files: Sequence[int] = ()) -> FakeParked:
        """Have a fork parked and wait until it says so."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        go_theirs, go_ours = os.pipe()
        with theirs:
            body = json.dumps({"op": "park", "instance": name, "env": {}}).encode()
            socket.send_fds(self.control, [body], [theirs.fileno(), go_theirs, *entry_files])
        os.close(go_theirs)
        os.write(go_ours, b"g")
        os.close(go_ours)
        pid = self.wait_event("forked", instance=name)["pid"]
        self.wait_event("parked", instance=name)
        return FakeParked(name=name, pid=pid, channel=ours)

    def assign(
        self, parked: FakeParked, instance: str, env: Mapping[str, str] | None = None
    ) -> FakeInstance:
        """Make it an instance and wait until it is ready."""
        ordered = self.order("assign", instance, env, go=False, to=parked.channel)
        parked.channel.close()
        self.wait_event("ready", instance=instance)
        return ordered

    def order(
        self,
        op: str,
        instance: str,
        env: Mapping[str, str] | None = None,
        *,
        go: bool = True,
        to: socket.socket | None = None,
        entry_files: Sequence[int] = (),
    ) -> FakeInstance:
        """Send `fork` or `serve` with the four descriptors, and `go` unless told not to; `assign`
        has the first three, and `env`."""
        path = str(self.root / f"{instance}.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            stdout, stdout_theirs = os.pipe()
            stderr, stderr_theirs = os.pipe()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            go_theirs, go_ours = theirs.detach(), ours.detach()
            body = json.dumps(
                {"op": op, "instance": instance, "env": dict(env or {}) if op == "assign" else {}}
            ).encode()
            descriptors = [listener.fileno(), stdout_theirs, stderr_theirs, go_theirs, *entry_files]
            socket.send_fds(
                to or self.control, [body], descriptors[:3] if op == "assign" else descriptors
            )
            for descriptor in (stdout_theirs, stderr_theirs, go_theirs):
                os.close(descriptor)
        self.descriptors += [stdout, stderr, go_ours]
        ordered = FakeInstance(id=instance, path=path, stdout=stdout, stderr=stderr, go=go_ours)
        if go:
            self.let_wake(ordered, env)
        return ordered

    def let_wake(self, instance: FakeInstance, env: Mapping[str, str] | None = None) -> None:
        """Send `go` with the environment; an order that was refused is no error."""
        with contextlib.suppress(ConnectionError):
            os.write(instance.go, json.dumps({"env": dict(env or {})}).encode())

    def start(
        self, instance: str = "i-1", env: Mapping[str, str] | None = None, *, op: str = "fork"
    ) -> FakeInstance:
        """Bring an instance up and wait until it is ready."""
        ordered = self.order(op, instance, env)
        self.wait_event("ready", instance=instance)
        return ordered

    def worker_output(self) -> str:
        """What the worker wrote before it was an instance."""
        return (self.root / "stderr").read_text(errors="replace")

    def wait_exit(self) -> int:
        """The worker's exit status."""
        return self.process.wait(WAIT_S)

    def hang_up(self) -> None:
        """Close the control channel, as a dying shim does."""
        self.control.close()


def signal_pidfd(pidfd: int, number: int) -> None:
    """Send a signal through a pidfd. Raises ProcessLookupError when the process is gone."""
    import signal

    signal.pidfd_send_signal(pidfd, number)


def read_until(descriptor: int, wanted: bytes = b"\n") -> bytes:
    """What comes out of a pipe until `wanted` is in it, or its end. Raises ShimTimeout."""
    data = b""
    while wanted not in data:
        if not select.select([descriptor], [], [], WAIT_S)[0]:
            raise ShimTimeout(f"wanted {wanted!r}, got {data!r}")
        piece = os.read(descriptor, 65536)
        if not piece:
            break
        data += piece
    return data


async def wait_for_running(client: httpx.AsyncClient, count: int) -> None:
    """Ask the instance until that many calls run; the test's own timeout bounds it."""
    while (await client.get("/health")).json()["running"] != count:
        continue


def function_spec(
    *,
    name: str = "f",
    module: str = "app",
    qualname: str = "f",
    kind: FunctionKind = FunctionKind.FUNCTION,
    methods: Sequence[MethodSpec] = (MethodSpec(),),
    max_inputs: int = 1,
    pickled: str | None = None,
) -> FunctionSpec:
    """A spec for tests."""
    return FunctionSpec(
        name=name,
        module=module,
        qualname=qualname,
        kind=kind,
        methods=tuple(methods),
        bundle="0" * 64,
        pickled=pickled,
        scaling=Scaling(max_inputs=max_inputs),
    )


def call(instance: FakeInstance, method: str = "", arguments: object = ()) -> object:
    """Call an instance with JSON."""
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
        base_url="http://worker",
        timeout=30,
    ) as client:
        response = client.post(f"/invoke/{method}", json=arguments)
        assert response.status_code == 200, response.text
        return response.json()
