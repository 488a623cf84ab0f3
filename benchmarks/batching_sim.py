"""When batches go, simulated: the worker's own gathering on a clock that jumps, with callers that
come at random or wait for their answers.

A body takes a·n + b seconds. `none` lets whatever is there go whenever the body is free, `fixed`
waits up to 50 ms for a full batch, `adaptive` is the default. The same seeds each time, so the
table is the same everywhere: `python -m benchmarks.batching_sim`."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import percentile
from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.batcher import Batcher
from pilotlight.worker.process.call_threads import CallThreads
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.spans import CallSpans
from pilotlight.worker.user_code.target import Method, Style
from tests.snapshotter.cuda import virtual_time

LARGEST, WAIT_MS = 32, 50.0
RULES = {
    "none": BatchPolicy(max_batch_size=LARGEST, wait_ms=0),
    "fixed": BatchPolicy(max_batch_size=LARGEST, wait_ms=WAIT_MS, adaptive=False),
    "adaptive": BatchPolicy(max_batch_size=LARGEST, wait_ms=WAIT_MS),
}
COSTS_MS = ((1.0, 20.0), (2.0, 5.0), (5.0, 40.0))
"""(a, b): mostly fixed, mostly per item, and slow."""
RATES_PER_S = (10, 40, 100, 200, 400)
CALLERS = (1, 4, 16, 32)
OPEN_S, ROUNDS, BACK_S = 20.0, 100, 0.002
"""Of random arrivals; of callers that wait for their answers; and how long such a caller takes to
be back."""
MOST_LOAD = 0.85
"""Rates at which full batches alone would be busier than this are left out: no rule helps there."""


@dataclass(eq=False)
class Call:
    """One call, as the gathering knows it."""

    id: str = "req"
    stopped: str | None = None
    seconds: float = 0.0
    expires_at: float = 0.0
    spans: CallSpans = field(default_factory=lambda: CallSpans("req"))


class Model:
    """A body that takes a·n + b, behind a gathering; how long its calls took."""

    def __init__(
        self, policy: BatchPolicy, *, per_item_s: float, fixed_s: float, max_inputs: int
    ) -> None:
        self.took_ms: list[float] = []
        self.batches = 0
        self._per_item_s, self._fixed_s = per_item_s, fixed_s
        method = Method(
            name="f",
            call=self._run,
            style=Style.COROUTINE,
            binder=Binder(self._run),
            example=None,
            check=None,
            batch=policy,
        )
        self._loop = asyncio.get_running_loop()
        self._gathering = Batcher(
            {"f": method}, max_inputs=max_inputs, threads=CallThreads(), clock=self._loop.time
        )

    async def _run(self, values: list[int]) -> Sequence[int]:
        self.batches += 1
        await asyncio.sleep(self._per_item_s * len(values) + self._fixed_s)
        return values

    async def call(self) -> None:
        """One call."""
        began = self._loop.time()
        await self._gathering.share("f", Call(), (1,), {}, None)
        self.took_ms.append((self._loop.time() - began) * 1000)


async def at_random(model: Model, per_s: float) -> None:
    """Poisson arrivals."""
    dice, calls = random.Random(3), []
    for _ in range(int(per_s * OPEN_S)):
        calls.append(asyncio.ensure_future(model.call()))
        await asyncio.sleep(dice.expovariate(per_s))
    await asyncio.gather(*calls)


async def in_turn(model: Model, callers: int) -> None:
    """Callers that each wait for their answer."""
    dice = random.Random(5)

    async def caller() -> None:
        for _ in range(ROUNDS):
            await model.call()
            await asyncio.sleep(dice.uniform(0.5, 1.5) * BACK_S)

    await asyncio.gather(*(caller() for _ in range(callers)))


async def simulated(
    rule: str, cost_ms: tuple[float, float], *, per_s: float = 0, callers: int = 0
) -> tuple[float, float, float]:
    """(mean latency, its 99th percentile, mean size): once it has learnt."""
    slots = 2 * LARGEST  # one lane: a body that others wait for
    model = Model(
        RULES[rule], per_item_s=cost_ms[0] / 1000, fixed_s=cost_ms[1] / 1000, max_inputs=slots
    )
    await (at_random(model, per_s) if per_s else in_turn(model, callers))
    learnt = model.took_ms[len(model.took_ms) // 5 :]
    return statistics.mean(learnt), percentile(learnt, 99), len(model.took_ms) / model.batches


def table() -> Iterator[str]:
    """Lines of markdown: mean and 99th percentile of the latency in milliseconds, and the mean
    size."""
    yield "| a, b (ms) | calls | " + " | ".join(f"`{rule}`" for rule in RULES) + " |"
    yield "|---|---|" + "---|" * len(RULES)
    for a, b in COSTS_MS:
        loads = [
            (f"{rate}/s at random", {"per_s": rate})
            for rate in RATES_PER_S
            if rate * (a + b / LARGEST) < MOST_LOAD * 1000
        ]
        loads += [(f"{n} in turn", {"callers": n}) for n in CALLERS]
        for name, load in loads:
            cells = [virtual_time.run(simulated(rule, (a, b), **load)) for rule in RULES]
            yield (
                f"| {a:g}, {b:g} | {name} | "
                + " | ".join(f"{mean:.0f} / {p99:.0f} ({size:.1f})" for mean, p99, size in cells)
                + " |"
            )


if __name__ == "__main__":
    for line in table():
        print(line)
