"""Requests that wake a revision: as many as calls wait, and none once nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from activator.knative.activation_requests import ActivationRequests
from activator.knative.scale_request import ReportedDemand
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.pod_maker import TcpWorker, revision_name_of
from tests.fakes.routes import spec_of, target_of

TARGET = target_of(spec_of())


class Activator:
    """Knative's: holds what comes until `answer` is given. `held` counts."""

    def __init__(self) -> None:
        self.held = 0
        self.most = 0
        self.seen = 0
        self.answers: list[int] = []

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.seen += 1
        if self.answers:
            return WorkerAnswer(status=self.answers.pop(0))
        self.held += 1
        self.most = max(self.most, self.held)
        try:
            await asyncio.Event().wait()
        finally:
            self.held -= 1
        raise AssertionError("nobody sets it")


@pytest.fixture(name="knative")
def _knative() -> Activator:
    return Activator()


@pytest.fixture(name="url")
async def _url(knative: Activator) -> AsyncIterator[str]:
    worker = await TcpWorker("127.0.0.1", 0, knative).start()
    yield f"http://127.0.0.1:{worker.port}"
    await worker.aclose()


async def test_as_many_are_held_as_calls_wait_and_none_when_the_starts_are_over(
    knative: Activator, url: str
) -> None:
    waiting = [3]
    wakes = ActivationRequests(
        url, revision_name_of=revision_name_of, waiting_of=lambda _: waiting[0]
    )
    async with wakes.requested(TARGET):
        await until(lambda: knative.held == 3)
        waiting[0] = 5
        await until(lambda: knative.held == 5)
        waiting[0] = 1
        await until(lambda: knative.held == 1)
        # another start of the same revision: the calls are the same
        async with wakes.requested(TARGET):
            assert knative.held == 1
    await until(lambda: knative.held == 0)
    await wakes.aclose()


async def test_a_flood_of_calls_wakes_no_flood(knative: Activator, url: str) -> None:
    wakes = ActivationRequests(
        url, revision_name_of=revision_name_of, waiting_of=lambda _: 10_000, most=4
    )
    async with wakes.requested(TARGET):
        await until(lambda: knative.held == 4)
    await wakes.aclose()
    assert knative.most == 4


@pytest.mark.parametrize("status", [404, 503, 504, 200])
async def test_what_is_answered_without_a_pod_for_us_is_asked_again(
    knative: Activator, url: str, status: int
) -> None:
    knative.answers = [status, status]
    wakes = ActivationRequests(url, revision_name_of=revision_name_of, waiting_of=lambda _: 1)
    async with wakes.requested(TARGET):
        await until(lambda: knative.held == 1)
        assert knative.seen == 3
        assert wakes.status(TARGET.key) == f"the activation request was answered {status}"
    await wakes.aclose()


async def test_somebody_who_does_not_answer_is_asked_again_and_named() -> None:
    wakes = ActivationRequests(
        "http://127.0.0.1:9", revision_name_of=revision_name_of, waiting_of=lambda _: 1
    )
    async with wakes.requested(TARGET):
        await until(lambda: "failed" in wakes.status(TARGET.key))
    await wakes.aclose()


class Leader:
    """A `ScaleDemand` that notes what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    async def request(self, key: str, wanted: int) -> None:
        self.said.append((key, wanted))

    async def withdraw(self, key: str) -> None:
        self.said.append((key, 0))


async def test_our_own_autoscaler_is_told_how_many_starts_wait() -> None:
    demands = ReportedDemand(leader := Leader())
    async with demands.requested(TARGET), demands.requested(TARGET):
        assert demands.status(TARGET.key)
    assert [wanted for _, wanted in leader.said] == [1, 2, 1, 0]
    assert not demands.status(TARGET.key)
