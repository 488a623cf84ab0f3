"""What a caller waits for when the idle instance that serves it was frozen
(`activator.freeze_idle_s`), beside one that was not."""

from __future__ import annotations

import time

from benchmarks import stack
from benchmarks.harness import Report, Row, percentile, phase
from benchmarks.stack import Answer
from benchmarks.subjects import HELLO

_IDLE_S = 1.0
_FROZEN_BY_S = 2.5
"""The activator looks each second."""


def measure(report: Report, *, count: int) -> None:
    """Rows `hello/WARM idle` and `hello/WARM frozen`, and `hello/thaw`: the queue phase of the
    second, which 2 ms are to be enough for."""
    app = "bench-frozen"
    idle = _answers(app, count, None)
    frozen = _answers(app, count, _IDLE_S)
    report.rows.append(Row.of("hello/WARM idle", "ms", [answer.milliseconds for answer in idle]))
    report.rows.append(
        Row.of("hello/WARM frozen", "ms", [answer.milliseconds for answer in frozen])
    )
    thaws = [answer.timing.get("queue", 0.0) for answer in frozen]
    report.rows.append(
        Row.of("hello/thaw", "ms", thaws, note=f"longest {percentile(thaws, 100):.2f}")
    )


def _answers(app: str, count: int, freeze_idle_s: float | None) -> list[Answer]:
    with (
        stack.running(activator={"freeze_idle_s": freeze_idle_s}) as platform,
        phase(f"hello: {count} calls after a pause"),
    ):
        platform.deploy(HELLO.source, app=app, scaledown_window=60)
        platform.invoke(app, HELLO.function, HELLO.arguments)
        answers = []
        for _ in range(count):
            time.sleep(_FROZEN_BY_S)
            answers.append(platform.invoke(app, HELLO.function, HELLO.arguments))
    return [answer for answer in answers if answer.start == "WARM"]
