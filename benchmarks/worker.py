"""What a warm call costs a worker: CPU time of its process per call, for each kind of function.

A worker alone, without an activator, an agent or a slot; h2load on its Unix socket, a closed loop,
32 connections. With `--other TREE`, the worker of another checkout takes turns with this one in the
same run: the ratio of two trees is steadier than either number."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.harness import ROOT, Report, Row, interleave, options, paired_ratio, phase
from benchmarks.load import h2load
from pilotlight.protocol import HEADER_CALL, HEADER_DEADLINE, WORKER_INVOKE
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.record_json import to_json

NEEDS = ("h2load",)
HEADERS = {
    HEADER_DEADLINE: "300.000",
    HEADER_CALL: "req-0123456789abcdef0123456789abcdef",
    "content-type": "application/json",
}
"""Those of a warm call."""
CODE = '''"""Kinds of functions: what it costs to get there is what is measured."""

import asyncio


class Service:
    async def returns(self, text: str) -> str:
        return text

    async def suspends(self, text: str) -> str:
        await asyncio.sleep(0)
        return text

    def plain(self, text: str) -> str:
        return text
'''
KINDS = {
    "returns": "async def that does not suspend",
    "suspends": "async def that suspends once",
    "plain": "def, in a call thread",
}
MAX_INPUTS = 64
START_S = 30.0
OURS, OTHER = "worker", "other tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A worker that serves: its process, and its socket."""

    pid: int
    socket: Path

    def call(self, kind: str, *, seconds: float) -> float:
        """CPU microseconds per call, under load."""
        before = cpu_ns(self.pid)
        load = h2load(
            f"http://worker{WORKER_INVOKE}{kind}",
            body=peers.ECHO_BODY,
            headers=HEADERS,
            seconds=seconds,
            unix=self.socket,
        )
        return (cpu_ns(self.pid) - before) / load.requests / 1000


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--other", type=Path)
    known, rest = parser.parse_known_args()
    given = options(__doc__ or "", rest, name="benchmarks.worker", needs=NEEDS)
    seconds, rounds = (1.0, 3) if given.quick else (2.0, 7)
    trees = {OURS: ROOT, **({OTHER: known.other.resolve()} if known.other else {})}
    report = Report("worker alone: CPU time per call, 32 connections")
    with contextlib.ExitStack() as held:
        workers = {name: held.enter_context(running(tree)) for name, tree in trees.items()}
        for kind, note in KINDS.items():
            measure(report, workers, kind, note, seconds=seconds, rounds=rounds)
    report.finish(given)


def measure(
    report: Report,
    workers: dict[str, Alone],
    kind: str,
    note: str,
    *,
    seconds: float,
    rounds: int,
) -> None:
    """Rows and the ratio of one kind of function."""
    arms: dict[str, Callable[[], float]] = {
        name: functools.partial(worker.call, kind, seconds=seconds)
        for name, worker in workers.items()
    }
    with phase(kind):
        for arm in arms.values():
            arm()  # what is created at the first call
        samples = interleave(arms, rounds=rounds)
    for name, values in samples.items():
        report.rows.append(Row.of(f"{kind}: {name}", "us", values, note=note))
    if OTHER in samples:
        report.ratio(f"worker_cpu_{kind}_vs_other", paired_ratio(samples[OURS], samples[OTHER]))


@contextlib.contextmanager
def running(tree: Path) -> Iterator[Alone]:
    """The worker of a checkout, become an instance itself, as it does in a pod."""
    folder = Path(tempfile.mkdtemp(prefix="plwk"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_S)
    try:
        (folder / "work").mkdir()
        (folder / "code").mkdir()
        (folder / "code" / "app.py").write_text(CODE)
        (folder / "launch.json").write_text(json.dumps(_launch(tree, folder, theirs.fileno())))
        boot = tree / "functions" / "pilotlight" / "worker" / "boot.py"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(boot), str(folder / "launch.json")],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        try:
            _wait(ours, "snapshot_point")
            yield Alone(pid=process.pid, socket=_serve(ours, folder))
        finally:
            process.kill()
            process.wait()
    finally:
        ours.close()
        shutil.rmtree(folder)


def _launch(tree: Path, folder: Path, control: int) -> dict[str, Any]:
    spec = FunctionSpec(
        name="f",
        module="app",
        qualname="Service",
        kind=FunctionKind.CLASS,
        methods=tuple(MethodSpec(name=kind) for kind in KINDS),
        bundle="0" * 64,
        scaling=Scaling(max_inputs=MAX_INPUTS),
    )
    return {
        "entry": to_json(spec),
        "revision": "f-0000000000000001@v1-bench",
        "code": str(folder / "code"),
        "site": [sysconfig.get_paths()["purelib"]],
        "runtime": [str(tree / "functions")],
        "weights": {},
        "env": {},
        "control_fd": control,
        "work": str(folder / "work"),
    }


def _serve(control: socket.socket, folder: Path) -> Path:
    path = folder / "i.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        go_ours, go_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with go_ours, go_theirs:
            order = json.dumps({"op": "serve", "instance": "i-1", "env": {}}).encode()
            socket.send_fds(control, [order], [listener.fileno(), 1, 2, go_theirs.fileno()])
            go_ours.send(json.dumps({"env": {}}).encode())
            _wait(control, "ready")
    return path


def _wait(control: socket.socket, event: str) -> None:
    while True:
        data, descriptors, *_ = socket.recv_fds(control, 256 * 1024, 4)
        for descriptor in descriptors:
            os.close(descriptor)
        message = json.loads(data) if data else {"event": "failed", "error": "it ended"}
        if message["event"] == event:
            return
        if message["event"] == "failed":
            raise RuntimeError(f"the worker did not start: {message['error']}")


def cpu_ns(pid: int) -> int:
    """CPU time of a process's threads so far (proc(5), schedstat)."""
    return sum(
        int((task / "schedstat").read_text().split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


if __name__ == "__main__":
    main()
