"""Calls gather, go, come back, and leave: the whole of it on a clock that jumps."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pilotlight.sdk.batches import WrongResults, item_hints
from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.batching.batcher import Batcher
from pilotlight.worker.batching.items import BatchShare
from pilotlight.worker.process.call_threads import CallThreads
from pilotlight.worker.user_code.arguments import Binder
from pilotlight.worker.user_code.spans import CallSpans
from pilotlight.worker.user_code.target import Method, Style
from tests.snapshotter.cuda import virtual_time

Body = Callable[[list[Any]], Awaitable[Sequence[Any]]]

PER_ITEM_S = 0.001
FIXED_S = 0.02
POLICY = BatchPolicy(max_batch_size=8, wait_ms=50, adaptive=False)
ADAPTIVE = BatchPolicy(max_batch_size=8, wait_ms=50)


@dataclass(eq=False)
class FakeCall:
    """A call as the gathering knows it."""

    id: str = "req-1"
    stopped: str | None = None
    seconds: float = 0.0
    expires_at: float = 0.0
    spans: CallSpans = field(default_factory=lambda: CallSpans("req-1"))


class World:
    """A gathering with one method, its body, and what the body was called with."""

    def __init__(
        self, policy: BatchPolicy = POLICY, *, body: Body | None = None, max_inputs: int = 16
    ) -> None:
        self.batches: list[list[Any]] = []
        self.waits: list[float] = []
        self.shares: list[BatchShare] = []
        self._body = body
        method = Method(
            name="f",
            call=self._run,
            style=Style.COROUTINE,
            binder=Binder(self._run, hints=item_hints(self._run)),
            batch=policy,
            example=None,
            check=None,
        )
        self._loop = asyncio.get_running_loop()
        self.gathering = Batcher(
            {"f": method}, max_inputs=max_inputs, threads=CallThreads(), clock=self._loop.time
        )

    async def _run(self, values: list[Any]) -> Sequence[Any]:
        self.batches.append(values)
        if self._body is not None:
            return await self._body(values)
        await asyncio.sleep(PER_ITEM_S * len(values) + FIXED_S)
        return [value * 2 for value in values]

    async def call(
        self,
        value: Any,
        *,
        priority: bytes | None = None,
        deadline_s: float | None = None,
        call: FakeCall | None = None,
    ) -> Any:
        """One call's result; raises what it raises."""
        call = call or FakeCall()
        if deadline_s is not None:
            call.seconds, call.expires_at = deadline_s, self._loop.time() + deadline_s
        share = await self.gathering.share("f", call, (value,), {}, priority)
        self.shares.append(share)
        if not share.ok:
            raise share.value
        return share.value

    async def calls(self, *values: Any, **more: Any) -> list[Any]:
        """Several at once: results, or errors."""
        return await asyncio.gather(
            *(self.call(value, **more) for value in values), return_exceptions=True
        )

    def told(self, name: str) -> list[str]:
        """One of the numbers of the answers' header lines, of those that are the first of their
        batch."""
        parts = [
            dict(part.split("=") for part in share.line.decode().strip().split(": ")[1].split(";"))
            for share in self.shares
        ]
        return [part[name] for part in parts if part["first"] == "1"]


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test in virtual time."""

    def wrapped(*args: Any, **kwargs: Any) -> None:
        virtual_time.run(test(*args, **kwargs))

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    vars(wrapped)["__signature__"] = inspect.signature(test)
    return wrapped


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual
async def test_calls_that_come_together_are_one_batch_and_each_gets_its_own_result() -> None:
    world = World()

    assert await world.calls(1, 2, 3) == [2, 4, 6]

    assert world.batches == [[1, 2, 3]]
    assert world.told("reason") == ["waited"]
    assert world.told("size") == ["3"]
    assert now() == pytest.approx(0.05 + 0.023)


@virtual
async def test_a_full_batch_goes_at_once() -> None:
    world = World()

    await world.calls(*range(8))

    assert world.told("reason") == ["full"]
    assert now() == pytest.approx(0.028)


@virtual
async def test_what_comes_while_one_computes_gathers_for_the_next() -> None:
    world = World()

    results = await world.calls(*range(20))

    assert results == [2 * n for n in range(20)]
    assert [len(batch) for batch in world.batches] == [8, 8, 4]
    assert world.told("reason") == ["full", "full", "waited"], (
        "the last one had waited for long enough by then"
    )


@virtual
async def test_a_batch_in_the_making_goes_when_its_first_call_has_waited() -> None:
    world = World()
    first = asyncio.ensure_future(world.call(1))
    await asyncio.sleep(0.04)
    second = asyncio.ensure_future(world.call(2))

    assert await first == 2
    assert now() == pytest.approx(0.05 + 0.022)
    assert await second == 4
    assert world.batches == [[1, 2]]


@virtual
async def test_results_are_errors_where_the_body_put_errors() -> None:
    async def body(values: list[Any]) -> list[Any]:
        return [ValueError("odd") if value % 2 else value for value in values]

    world = World(body=body)
    results = await world.calls(1, 2, 3, 4)

    assert [repr(result) for result in results] == [
        "ValueError('odd')",
        "2",
        "ValueError('odd')",
        "4",
    ]
    assert len(world.batches) == 1


@virtual
async def test_when_the_body_raises_only_the_guilty_call_fails() -> None:
    async def body(values: list[Any]) -> list[Any]:
        if 13 in values:
            raise LookupError("unlucky")
        return values

    world = World(body=body)
    results = await world.calls(11, 12, 13, 14)

    assert [repr(result) for result in results] == ["11", "12", "LookupError('unlucky')", "14"]
    assert world.batches == [[11, 12, 13, 14], [11], [12], [13], [14]], (
        "each once more, and no more than once"
    )
    assert world.told("reason") == ["retried"] * 4


@virtual
async def test_a_function_that_must_not_see_a_call_twice_fails_for_all() -> None:
    async def body(_: list[Any]) -> list[Any]:
        raise LookupError("unlucky")

    world = World(BatchPolicy(max_batch_size=8, wait_ms=50, retry_alone=False), body=body)
    results = await world.calls(1, 2, 3)

    assert [repr(result) for result in results] == ["LookupError('unlucky')"] * 3
    assert len(world.batches) == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@virtual
async def test_a_body_that_wants_out_is_not_asked_again(error: BaseException) -> None:
    async def body(_: list[Any]) -> list[Any]:
        raise error

    world = World(body=body)
    shares = await asyncio.gather(
        *(world.gathering.share("f", FakeCall(), (n,), {}, None) for n in range(3))
    )

    assert [share.value for share in shares] == [error] * 3
    assert len(world.batches) == 1
    world._body = None
    assert await world.call(4) == 8, "and the next batch runs"


@pytest.mark.parametrize(
    "answer, says",
    [
        ([1, 2], "2 results for a batch of 3 items"),
        ([1, 2, 3, 4], "4 results for a batch of 3 items"),
        (None, "returned NoneType: return a list with one result for each of the 3 items"),
        ("abc", "returned str"),
        ({1: 2}, "returned dict"),
        (np.zeros(()), "0 results for a batch of 3 items"),
    ],
)
@virtual
async def test_a_wrong_number_of_results_is_an_error_that_names_both(
    answer: Any, says: str
) -> None:
    async def body(_: list[Any]) -> Any:
        return answer

    world = World(body=body)
    results = await world.calls(1, 2, 3)

    assert len(world.batches) == 1, "it would be as wrong alone"
    for result in results:
        assert isinstance(result, WrongResults)
        assert says in str(result)


@virtual
async def test_rows_of_an_array_are_results() -> None:
    async def body(values: list[Any]) -> Any:
        return np.arange(len(values) * 2).reshape(-1, 2)

    assert [list(row) for row in await World(body=body).calls(1, 2)] == [[0, 1], [2, 3]]


@virtual
async def test_one_odd_shape_is_no_part_of_the_others_batch() -> None:
    async def body(values: list[Any]) -> list[Any]:
        return list(np.stack(values).sum(axis=1))

    world = World(body=body)
    results = await world.calls(np.ones(3), np.ones(3), np.ones(4), np.ones(3))

    assert [float(result) for result in results] == [3, 3, 4, 3]
    assert sorted(len(batch) for batch in world.batches) == [1, 3]


@virtual
async def test_an_odd_shape_among_known_ones_does_not_wait_for_its_like() -> None:
    world = World(ADAPTIVE)
    for _ in range(3):
        await world.calls(np.ones(3), np.ones(3))
    began = now()

    await world.call(np.ones(4))

    assert now() - began == pytest.approx(0.021)
    assert world.told("reason")[-1] == "alone"


@virtual
async def test_buckets_of_lengths_and_priorities_stay_apart() -> None:
    world = World(BatchPolicy(max_batch_size=8, wait_ms=50, buckets=(4,)))
    await asyncio.gather(
        *(world.call(text) for text in ("a", "bb", "long enough", "cc")),
        *(world.call("dd", priority=b"realtime") for _ in range(2)),
    )

    assert world.batches == [["dd", "dd"], ["a", "bb", "cc"], ["long enough"]], (
        "and what is urgent goes first"
    )


@virtual
async def test_what_is_least_urgent_does_not_wait_for_ever() -> None:
    world = World()
    least = asyncio.ensure_future(world.call(0, priority=b"batch"))

    async def urgent() -> None:
        while not least.done():
            await world.call(1, priority=b"realtime")

    await asyncio.gather(*(urgent() for _ in range(16)))

    assert now() < 3


@virtual
async def test_a_member_that_leaves_before_its_batch_goes_is_not_in_it() -> None:
    world = World()
    leaving = FakeCall()
    tasks = [
        asyncio.ensure_future(world.call(n, call=leaving if n == 2 else None)) for n in (1, 2, 3)
    ]
    await asyncio.sleep(0.01)
    leaving.stopped = "left"
    tasks[1].cancel()

    assert await tasks[0] == 2
    assert await tasks[2] == 6
    assert world.batches == [[1, 3]]
    assert tasks[1].cancelled()


@virtual
async def test_a_batch_goes_on_for_those_who_are_still_there() -> None:
    world = World()
    leaving = FakeCall()
    tasks = [asyncio.ensure_future(world.call(n, call=leaving if n == 1 else None)) for n in (1, 2)]
    await asyncio.sleep(0.06)
    leaving.stopped = "left"
    tasks[0].cancel()

    assert await tasks[1] == 4
    assert world.told("size") == ["2"], "the one that is answered tells of the batch"


@virtual
async def test_a_batch_that_all_have_left_is_stopped_and_the_last_to_leave_sees_its_end() -> None:
    ended: list[float] = []

    async def body(_: list[Any]) -> list[Any]:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(1)
            ended.append(now())
        return []

    world = World(body=body)
    callers = [FakeCall(), FakeCall()]
    tasks = [asyncio.ensure_future(world.call(n, call=callers[n])) for n in (0, 1)]
    await asyncio.sleep(0.06)
    for caller, task in zip(callers, tasks, strict=True):
        caller.stopped = "left"
        task.cancel()
    await asyncio.wait(tasks)

    assert ended == [pytest.approx(1.06)]
    world._body = None
    assert await world.call(2) == 4


@virtual
async def test_a_member_that_left_is_not_tried_alone() -> None:
    leaving = FakeCall()

    async def body(values: list[Any]) -> list[Any]:
        await asyncio.sleep(0.01)
        if len(values) > 1:
            leaving.stopped = "left"
            raise ValueError("one of these")
        return values

    world = World(body=body)
    await asyncio.wait(
        [asyncio.ensure_future(world.call(n, call=leaving if n == 2 else None)) for n in (1, 2, 3)],
        timeout=1,
    )

    assert world.batches == [[1, 2, 3], [1], [3]]


@virtual
async def test_a_deadline_lets_a_batch_go_early() -> None:
    world = World()
    await world.calls(1, 2, 3)
    await world.call(1)
    began = now()

    results = await asyncio.gather(world.call(1), world.call(2, deadline_s=0.04))

    assert list(results) == [2, 4]
    assert now() - began < 0.04
    assert world.told("reason")[-1] == "deadline"


@virtual
async def test_nothing_waits_for_calls_that_cannot_come() -> None:
    world = World(max_inputs=4)

    await world.calls(1, 2, 3, 4)

    assert world.told("reason") == ["idle"]
    assert now() == pytest.approx(0.024)


@virtual
async def test_a_draining_instance_waits_for_nobody() -> None:
    world = World()
    tasks = [asyncio.ensure_future(world.call(n)) for n in (1, 2)]
    await asyncio.sleep(0.01)

    world.gathering.drain()

    assert await asyncio.gather(*tasks) == [2, 4]
    assert now() == pytest.approx(0.01 + 0.022)
    assert world.told("reason") == ["drained"]


@virtual
async def test_concurrency_that_was_asked_for_gives_more_lanes() -> None:
    world = World(max_inputs=32)

    await world.calls(*range(24))

    assert [len(batch) for batch in world.batches] == [8, 8, 8]
    assert now() == pytest.approx(0.028), "three at once, and one could gather"


@virtual
async def test_the_time_that_a_batch_was_held_is_told_apart_from_waiting_for_a_lane() -> None:
    world = World()
    await world.calls(*range(12))

    assert [float(ms) for ms in world.told("wait_ms")] == [0, pytest.approx(50, abs=0.5)]
    assert [float(ms) for ms in world.told("held_ms")] == [0, pytest.approx(22, abs=0.5)], (
        "for 28 of 50 ms another one computed"
    )


# -- the adaptive wait -----------------------------------------------------------------------------
async def closed_loop(world: World, *, callers: int, rounds: int) -> None:
    """So many callers, each of which calls again as soon as it was answered."""

    async def caller() -> None:
        for _ in range(rounds):
            await world.call(1)

    await asyncio.gather(*(caller() for _ in range(callers)))


async def open_loop(world: World, *, per_s: float, seconds: float) -> list[float]:
    """Calls at random times (Poisson), and how long each took."""
    dice, tasks, took = random.Random(7), [], []

    async def one() -> None:
        began = now()
        await world.call(1)
        took.append(now() - began)

    end = now() + seconds
    while now() < end:
        tasks.append(asyncio.ensure_future(one()))
        await asyncio.sleep(dice.expovariate(per_s))
    await asyncio.gather(*tasks)
    return took


@virtual
async def test_a_lone_caller_is_soon_not_kept_waiting() -> None:
    world = World(ADAPTIVE)
    await closed_loop(world, callers=1, rounds=20)
    began = now()

    await closed_loop(world, callers=1, rounds=100)

    assert (now() - began) / 100 < 1.1 * (FIXED_S + PER_ITEM_S)
    assert Counter(world.told("reason")).most_common(1)[0][0] == "alone"


@virtual
async def test_few_callers_are_waited_for_but_not_for_one_more() -> None:
    world = World(ADAPTIVE)
    await closed_loop(world, callers=5, rounds=20)
    began, world.batches = now(), []

    await closed_loop(world, callers=5, rounds=100)

    assert len(world.batches) < 1.1 * 100, "they go together"
    assert (now() - began) / 100 < 1.1 * (FIXED_S + 5 * PER_ITEM_S), "and nobody waits for a sixth"


@virtual
async def test_callers_of_two_batches_in_turn_come_to_share_one() -> None:
    world = World(BatchPolicy(max_batch_size=32, wait_ms=50), max_inputs=64)
    early = asyncio.ensure_future(closed_loop(world, callers=6, rounds=60))
    await asyncio.sleep(FIXED_S / 2)

    await asyncio.gather(early, closed_loop(world, callers=6, rounds=60))

    assert {len(batch) for batch in world.batches[-20:-2]} == {12}, (
        "who waited for a free body waits a moment longer for its callers"
    )


@virtual
async def test_slow_traffic_does_not_pay_for_a_long_configured_wait() -> None:
    took = {}
    for name, policy in {"adaptive": ADAPTIVE, "fixed": POLICY}.items():
        took[name] = sorted(await open_loop(World(policy), per_s=8, seconds=60))

    median = {name: times[len(times) // 2] for name, times in took.items()}
    assert median["fixed"] > 0.07
    assert median["adaptive"] < 0.035


@virtual
async def test_dense_traffic_is_gathered_and_nobody_is_held_longer_than_configured() -> None:
    world = World(BatchPolicy(max_batch_size=32, wait_ms=50), max_inputs=64)

    took = await open_loop(world, per_s=300, seconds=20)

    assert max(float(ms) for ms in world.told("held_ms")) <= 50.5
    assert len(took) / len(world.batches) > 4, (
        "300 calls a second at 21 ms each are six times what one lane could do singly"
    )
    assert sorted(took)[len(took) // 2] < 0.06, (
        "and waiting adds next to nothing to what they wait for each other anyway"
    )


@virtual
async def test_batching_that_does_not_pay_is_left_alone() -> None:
    async def linear(values: list[Any]) -> list[Any]:
        await asyncio.sleep(0.01 * len(values))
        return values

    world = World(ADAPTIVE, body=linear)
    await open_loop(world, per_s=50, seconds=10)
    world.shares = []

    await open_loop(world, per_s=50, seconds=10)

    assert sum(float(ms) for ms in world.told("held_ms")) / len(world.shares) < 1
