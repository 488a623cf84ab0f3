"""A pod without a cluster: the real launcher as a subprocess, on a loopback address, with
directories of its own for what is mounted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import to_json
from snapshotter.types import LaunchSpec, RevisionKey, WeightsMount
from tests.fakes.process_trees import kill_tree

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = "b" * 64
WAIT_S = 30.0
_PLACES = shlex.join(
    str(place)
    for place in (Path(sys.base_prefix), Path(sys.prefix), ROOT)
    if place.is_relative_to("/root")
)
IN_SIGHT = f"""
mount -t tmpfs none /mnt
number=0
for place in {_PLACES}; do
  number=$((number + 1))
  mkdir /mnt/$number
  mount --bind "$place" /mnt/$number
done
mount -t tmpfs -o mode=755 none /root
number=0
for place in {_PLACES}; do
  number=$((number + 1))
  mkdir -p "$place"
  mount --move /mnt/$number "$place"
done
umount /mnt
"""
"""For a shell in a mount namespace of its own: of /root nothing is left but the interpreter, the
environment and the checkout, which every uid may read then."""


class Pod:
    """Owns one launcher. `node` is what the node agent would show it."""

    def __init__(
        self,
        code: Mapping[str, str],
        spec: FunctionSpec,
        *,
        startup_s: float = 60.0,
        secrets: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        weights: Sequence[WeightsMount] = (),
        wrapper: Sequence[str] = (),
        bundle: str = BUNDLE,
        labels: Mapping[str, str] | None = None,
        uid: int | None = None,
        node: Path | None = None,
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="pl"))
        self.node, self.work, self.baked = (
            node or self.root / "node",
            self.root / "work",
            self.root / "baked",
        )
        for directory in (self.node, self.work, self.baked):
            directory.mkdir(parents=True, exist_ok=True)
        self.code = self.root / "code"
        self.code.mkdir()
        for name, text in code.items():
            (self.code / name).write_text(textwrap.dedent(text))
        self.launch = LaunchSpec(
            revision=RevisionKey("f-0000000000000001@v1-test"),
            trust_domain="t-1",
            uid=uid,
            bundle=bundle,
            image=None,
            entry=to_json(spec),
            env=dict(env or {}),
            weights=tuple(weights),
            memory_bytes=512 * 1024**2,
            cpu=1.0,
            startup_timeout_s=startup_s,
            secret_variables=tuple(secrets or {}),
            labels=dict(labels or {}),
        )
        (self.root / "launch.json").write_text(json.dumps(self.launch.to_json()))
        self.variables = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}",
            "PILOTLIGHT_LAUNCH": str(self.root / "launch.json"),
            "PILOTLIGHT_NODE": str(self.node),
            "PILOTLIGHT_WORK": str(self.work),
            "PILOTLIGHT_LISTEN": "127.0.0.1:0",
            "PILOTLIGHT_BAKED": str(self.baked),
            "PILOTLIGHT_POD": "pod-1",
            **(secrets or {}),
        }
        self.wrapper = list(wrapper)
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def begin(self) -> None:
        """Start the launcher."""
        command = [*self.wrapper, sys.executable, "-m", "pilotlight.launcher"]
        with (self.root / "stdout").open("wb") as out:
            self._process = subprocess.Popen(
                command,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                cwd="/",
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher's (or its wrapper's)."""
        assert self._process is not None
        return self._process

    def wait_said(self, pattern: str) -> str:
        """The rest of the first line on stderr that matches; bounded."""
        stream = self.process.stderr
        assert stream is not None
        while (found := re.search(pattern + ".*\n", self.said)) is None:
            assert select.select([stream], [], [], WAIT_S)[0], (
                f"waited for {pattern!r}; it said:\n{self.said}"
            )
            data = os.read(stream.fileno(), 65536)
            assert data, f"waited for {pattern!r}; it ended, having said:\n{self.said}"
            self._said += data
        return found.group(0)

    @property
    def said(self) -> str:
        """All of stderr that was read so far."""
        return self._said.decode(errors="replace")

    @property
    def base_url(self) -> str:
        """Where it listens, as it said."""
        found = re.search(r"listen=(\S+)", self.wait_said("launcher.begin"))
        assert found is not None
        return f"http://{found.group(1)}"

    def client(self) -> httpx.Client:
        """For the worker; the caller closes it."""
        return httpx.Client(base_url=self.base_url, timeout=WAIT_S)

    def printed(self) -> str:
        """The worker's stdout."""
        return (self.root / "stdout").read_text()

    def terminate(self) -> None:
        """What the kubelet does first."""
        self.process.send_signal(signal.SIGTERM)

    def wait_exit(self) -> int:
        """The exit status; what was said until the end is in `said`."""
        stream = self.process.stderr
        assert stream is not None
        self._said += stream.read()
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        """Kill it, if it is there, and take its directories away."""
        if self._process is not None:
            kill_tree(self._process.pid)  # a wrapper does not take its launcher along
            self._process.wait(WAIT_S)
            assert self._process.stderr is not None
            self._process.stderr.close()
        shutil.rmtree(self.root)


@contextlib.contextmanager
def pod(code: Mapping[str, str], spec: FunctionSpec, **options: object) -> Iterator[Pod]:
    """A pod that has not begun."""
    made = Pod(code, spec, **options)  # type: ignore[arg-type]  # the same names
    try:
        yield made
    finally:
        made.close()
