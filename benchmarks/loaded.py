"""The same deploy and the same COLD start on an idle machine and beside programs that compute on
each processor, in turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks import stack
from benchmarks.harness import Report, Row, interleave, phase
from benchmarks.subjects import HELLO

_SPIN = "while True: pass"


def measure(report: Report, *, rounds: int) -> None:
    """Rows `hello/deploy …` and `hello/COLD …`, and how many times as long each takes beside the
    load: at most 3 is what we ask for."""
    with (
        stack.running() as platform,
        phase(f"hello: {rounds} deploys and COLD starts, idle and loaded"),
    ):
        arms = {"idle": lambda: _once(platform, "idle"), "loaded": lambda: _loaded(platform)}
        runs = interleave(arms, rounds=rounds)
    for arm, pairs in runs.items():
        report.rows.append(
            Row.of(f"hello/deploy {arm}", "ms", [deploy_ms for deploy_ms, _ in pairs])
        )
        report.rows.append(Row.of(f"hello/COLD {arm}", "ms", [cold_ms for _, cold_ms in pairs]))


def _loaded(platform: stack.Stack) -> tuple[float, float]:
    with spinning(len(os.sched_getaffinity(0))):
        return _once(platform, "loaded")


def _once(platform: stack.Stack, arm: str) -> tuple[float, float]:
    """A deploy with its snapshot proven, and a COLD start; each of its own app, in ms."""
    stamp = time.monotonic_ns()
    kept, cold = f"bench-kept-{arm}-{stamp}", f"bench-cold-{arm}-{stamp}"
    began = time.perf_counter()
    platform.deploy(HELLO.source, app=kept, scaledown_window=2)
    deploy_ms = (time.perf_counter() - began) * 1000
    platform.deploy(HELLO.source, app=cold, scaledown_window=2, snapshot=False)
    platform.wait_zero(cold)
    answer = platform.invoke(cold, HELLO.function, HELLO.arguments)
    if answer.start != "COLD":
        raise stack.StackFailed(f"{cold} came up by {answer.start}")
    with platform.client as client:
        for app in (kept, cold):
            client.delete_app(app)
    return deploy_ms, answer.milliseconds


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Processes that want a processor each all the time, with the priority of an ordinary
    program."""
    spinners = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
