"""What workers tell of batches: counted once each, bounded, believed no further than it makes
sense; and how full batches are."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from activator.calls.call import priority_lines
from activator.fairness.queue_priority import DEFAULT_RANK
from activator.metrics.batching import Batches
from activator.metrics.call_counters import LabelLimiter
from activator.metrics.metrics import Metrics
from activator.routing.call_target import CallTarget
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import BatchPolicy
from tests.activator.conftest import Edge
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.routes import SCHEMA, route_of, spec_of, target_of

METHOD = MethodSpec(
    schema=SCHEMA, parameters=("x", "y"), batch=BatchPolicy(max_batch_size=8, wait_ms=5)
)
LABELS = {"tenant": "t-000000000001", "app": "shop", "function": "hello"}


def told(
    size: int = 4,
    *,
    first: bool = True,
    reason: str = "full",
    wait_ms: float = 3.0,
    held_ms: float = 1.0,
) -> bytes:
    return f"size={size};wait_ms={wait_ms};held_ms={held_ms};compute_ms=20.5;reason={reason};first={int(first)}".encode()


@pytest.fixture
def target() -> CallTarget:
    return target_of(spec_of(methods=(METHOD,)))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"pilotlight_batch_{name}", {**LABELS, **labels})


def test_a_batch_counts_once_and_the_waits_of_all_its_calls_count(
    metrics: Metrics, target: CallTarget
) -> None:
    for first in (True, False, False, False):
        metrics.batches.answered(target, "", told(4, first=first), 1.0)

    assert (sample(metrics, "size_count"), sample(metrics, "size_sum")) == (1, 4)
    assert (sample(metrics, "compute_seconds_count"), sample(metrics, "compute_seconds_sum")) == (
        1,
        0.0205,
    )
    assert sample(metrics, "wait_seconds_count") == 4
    assert sample(metrics, "wait_seconds_sum") == pytest.approx(0.012)
    assert sample(metrics, "held_seconds_sum") == pytest.approx(0.004)
    assert sample(metrics, "releases_total", reason="full") == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"size=4",
        told(0),
        told(10**6),
        told(wait_ms=-1),
        told(wait_ms=float("nan")),
        told(wait_ms=float("inf")),
        b"size=x;wait_ms=1;held_ms=1;compute_ms=1;reason=full;first=1",
        b"\xff\xfe;;==;",
        told().replace(b"4", b"\xb2"),
    ],
)
def test_what_makes_no_sense_counts_for_nothing(
    metrics: Metrics, target: CallTarget, nonsense: bytes
) -> None:
    metrics.batches.answered(target, "", nonsense, 1.0)

    assert sample(metrics, "size_count") is None
    assert metrics.batches.occupancy(target.key, 1.0) is None


def test_reasons_that_a_worker_makes_up_make_no_series(
    metrics: Metrics, target: CallTarget
) -> None:
    for number in range(100):
        metrics.batches.answered(target, "", told(reason=f"mine-{number}"), 1.0)

    assert sample(metrics, "releases_total", reason="other") == 100


def test_occupancy_is_the_mean_share_of_the_greatest_size_and_fades_away(
    target: CallTarget,
) -> None:
    batches = Batches(LabelLimiter(10))
    assert batches.occupancy(target.key, 0.0) is None
    batches.answered(target, "", told(8), 0.0)
    batches.answered(target, "", told(2), 0.0)

    assert batches.occupancy(target.key, 0.0) == pytest.approx((1 + 0.25) / 2)
    assert batches.occupancy(target.key, 20.0) == pytest.approx((1 + 0.25) / 2), (
        "silence is no emptiness"
    )
    assert batches.occupancy(target.key, 60.0) is None, "and after a while it is no news"


def test_new_batches_outweigh_old_ones(target: CallTarget) -> None:
    batches = Batches(LabelLimiter(10))
    for _ in range(10):
        batches.answered(target, "", told(8), 0.0)

    for _ in range(10):
        batches.answered(target, "", told(1), 30.0)

    assert batches.occupancy(target.key, 30.0) == pytest.approx(1 / 8, abs=0.06)


def test_calls_that_were_tried_alone_say_nothing_of_how_full_batches_are(
    target: CallTarget,
) -> None:
    batches = Batches(LabelLimiter(10))
    batches.answered(target, "", told(1, reason="retried"), 0.0)

    assert batches.occupancy(target.key, 0.0) is None


def test_only_a_function_that_gathers_calls_is_told_of_priorities(target: CallTarget) -> None:
    realtime = replace(DEFAULT_RANK, priority=Priority.REALTIME)

    assert priority_lines(target, realtime) == b"\r\npilotlight-priority: realtime"
    assert priority_lines(target, DEFAULT_RANK) == b""
    assert priority_lines(target_of(spec_of()), realtime) == b""


class Gatherer:
    """A worker that answers calls together, so many at a time."""

    def __init__(self) -> None:
        self.size = 1
        self._here: list[asyncio.Future[None]] = []

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        """With the priority that it was told, and what a worker says of batches."""
        is_first = not self._here
        self._here.append(asyncio.get_running_loop().create_future())
        mine = self._here[-1]
        if len(self._here) == self.size:
            for one in self._here:
                one.set_result(None)
            self._here = []
        await mine
        told_so = "pilotlight-batch: " + told(self.size, first=is_first).decode()
        return WorkerAnswer(
            body=json.dumps(request.headers.get("pilotlight-priority")).encode(), headers=(told_so,)
        )


@pytest.fixture(name="gatherer")
def _gatherer() -> Gatherer:
    return Gatherer()


@pytest.fixture(name="behaviour")
def _behaviour(gatherer: Gatherer) -> Behaviour:
    return gatherer


ROUTE = route_of(spec_of(methods=(METHOD,), scaling=Scaling(max_inputs=16)))


async def test_answers_on_every_way_are_counted_and_workers_hear_of_the_priority(
    edge: Edge,
) -> None:
    edge.add(ROUTE)

    # waits for a start
    first = await edge.call(json={"x": 1}, headers={"pilotlight-priority": "batch"})
    # goes the warm way
    second = await edge.call(json={"x": 2}, headers={"pilotlight-priority": "batch"})
    third = await edge.call(json={"x": 2})

    assert [answer.json() for answer in (first, second, third)] == ["batch", "batch", None]
    assert "pilotlight-batch" not in first.headers, "what a worker tells the activator stays there"
    assert sample(edge.metrics, "size_count") == sample(edge.metrics, "wait_seconds_count") == 3
    (throttler,) = edge.scaler.throttlers()
    assert edge.metrics.batches.occupancy(throttler.target.key) == pytest.approx(1 / 8)


async def test_calls_of_a_batch_share_the_bill_for_its_time(edge: Edge, gatherer: Gatherer) -> None:
    edge.add(ROUTE)
    await edge.call(json={"x": 0})
    await edge.settle()
    gatherer.size = 8

    began_ns = time.monotonic_ns()
    await asyncio.gather(*(edge.call(json={"x": x}) for x in range(8)))
    took_ns = time.monotonic_ns() - began_ns

    records = [record for record in (await edge.settle()).values() if record.kind == "CALL"][1:]
    billed_ns = sum(record.billed_ns for record in records)
    assert len(records) == 8
    assert max(record.exec_ms for record in records) * 1_000_000 <= billed_ns <= took_ns, (
        "one instance's time, paid for once"
    )
