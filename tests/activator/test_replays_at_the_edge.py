"""Calls marked as replays, over real HTTP: who may mark them, where they leave no trace, and what
`ReplayRunner` makes of the answers."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activator.prediction_log.queue import PredictionQueue
from activator.settings import ActivatorSettings
from pilotlight.client.async_client import AsyncClient
from pilotlight.errors import TooManyRequests
from pilotlight.profile import Profile
from pilotlight.protocol import FunctionRoute
from pilotlight.replay import runner
from pilotlight.replay.rows import Reason, ReplayRow, Row, SkippedRow, read_file
from pilotlight.replay.runner import (
    Comparison,
    FailedCall,
    Outcome,
    ReplayedCall,
    ReplayRunner,
)
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.observations import REPLAY_ARM
from pilotlight.spec.policies import Fallback
from pilotlight.spec.prediction_log import PredictionLogSpec
from pilotlight.validation.json_paths import parse_path
from tests.activator.calls.test_fallback import broken
from tests.activator.conftest import KEY, Edge
from tests.activator.response_cache.test_cached_calls import CACHE
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest
from tests.fakes.ports import free_port
from tests.fakes.routes import spec_of, split_route

V1, V2 = "v1-aaaaaa", "v2-bbbbbb"
ALL = PredictionLogSpec(sample=1.0)
MARKED = {"pilotlight-replay": "1", "pilotlight-tag": V2}
ANY = (MethodSpec(),)


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings()


@pytest.fixture(name="queue")
def _queue(edge: Edge) -> PredictionQueue:
    queue = PredictionQueue()
    edge.log_calls(queue)
    return queue


def hello(**more: Any) -> FunctionRoute:
    return split_route(
        spec_of(**{"methods": ANY, **more}), {V1: 100}, named=(V2,), tags={"next": V2}
    )


# -- marked calls ----------------------------------------------------------------------------------
async def test_a_replay_is_answered_by_the_named_revision_and_is_not_logged(
    edge: Edge, queue: PredictionQueue
) -> None:
    edge.add(hello(log=ALL))
    for path in (f"shop/hello@{V2}:invoke", "shop/hello:invoke"):  # cold, then warm
        answer = await edge.call(path, json={"x": 1}, headers=MARKED)
        assert answer.status_code == 200, answer.text
        assert answer.headers["pilotlight-revision"] == V2
        assert answer.headers["pilotlight-arm"] == REPLAY_ARM
    assert len(queue) == 0
    requests = [r for worker in edge.fleet.workers.values() for r in worker.requests]
    assert {r.headers["pilotlight-arm"] for r in requests if r.body} == {REPLAY_ARM}
    await edge.call("shop/hello@next:invoke", json={"x": 1})
    assert len(queue) == 1


async def test_a_submitted_replay_is_not_logged(edge: Edge, queue: PredictionQueue) -> None:
    edge.add(hello(log=ALL))
    answer = await edge.call("shop/hello:submit", json={"x": 7}, headers=MARKED)
    assert answer.status_code == 202, answer.text
    found = await edge.client.get(
        f"{edge.url}/v1/calls/{answer.json()['id']}?wait_s=20",
        headers={"authorization": f"Bearer {KEY}"},
    )
    assert found.json()["state"] == "SUCCEEDED", found.text
    assert len(queue) == 0


async def test_replays_are_billed_and_counted_under_an_arm_of_their_own(edge: Edge) -> None:
    edge.add(hello())
    await edge.call(json={"x": 1}, headers=MARKED)
    (record,) = (await edge.settle()).values()
    assert (record.arm, record.experiment, record.revision) == (REPLAY_ARM, "", V2)
    assert float(record.cost) > 0
    counted = [one for one in edge.metrics.observer.drain(7) if one.answered]
    assert [(one.revision, one.arm) for one in counted] == [(V2, REPLAY_ARM)]


async def test_a_replay_names_its_revision_and_needs_the_right_to_deploy(edge: Edge) -> None:
    edge.add(hello())
    unnamed = await edge.call(json={"x": 1}, headers={"pilotlight-replay": "1"})
    assert (unnamed.status_code, unnamed.json()["parameter"]) == (400, "pilotlight-replay")
    edge.add_key("pl_calls", scope="invoke")
    refused = await edge.call(json={"x": 1}, headers=MARKED, key="pl_calls")
    assert refused.status_code == 403
    assert "deploy" in refused.json()["detail"]
    edge.add_tenant("owner")
    edge.add_tenant("acme", tenant="t-2")
    edge.add_key("pl_theirs", tenant="t-2")
    edge.add(hello(access=("acme",)))
    theirs = await edge.client.post(
        f"{edge.url}/t/owner/v1/functions/shop/hello:invoke",
        json={"x": 1},
        headers={"authorization": "Bearer pl_theirs", **MARKED},
    )
    assert theirs.status_code == 403


async def test_no_fallback_answers_a_replay(edge: Edge) -> None:
    edge.add(hello(fallback=(Fallback(kind="static", status=203, body={"a": 1}),)))
    broken(edge, "hello")
    assert (await edge.call(json={"x": 1})).status_code == 203
    assert (await edge.call(json={"x": 1}, headers=MARKED)).status_code >= 500


async def test_the_response_cache_answers_no_replay_and_keeps_none(edge: Edge) -> None:
    edge.add(hello(cache=CACHE))

    async def cached(**more: Any) -> str:
        answer = await edge.call("shop/hello@next:invoke", json={"x": 1}, **more)
        return str(answer.headers.get("pilotlight-cache", ""))

    assert await cached(headers={"pilotlight-replay": "1"}) == ""
    assert await cached() == "miss"
    assert await cached() == "hit"
    assert await cached(headers={"pilotlight-replay": "1"}) == ""


# -- the runner ------------------------------------------------------------------------------------
def row(x: Any, output: Any, *, id: str = "req-1", method: str = "") -> ReplayRow:
    return ReplayRow(
        id=id, method=method, arguments=json.dumps(x).encode(), output=output, version=V1
    )


class Replay:
    """One replay of `rows` on V2, as a command makes it."""

    def __init__(self, edge: Edge, **options: Any) -> None:
        self.outcomes: list[Outcome] = []
        self.waits: list[float] = []
        profile = Profile(
            url=options.pop("url", edge.url), api_key=options.pop("key", KEY), environment="main"
        )
        self.client = AsyncClient(profile, retry_budget_s=0.0)
        self.runner = ReplayRunner(
            self.client,
            app="shop",
            function="hello",
            revision=options.pop("revision", V2),
            on_outcome=options.pop("write", self.outcomes.append),
            on_wait=self._wait,
            comparison=Comparison(**options),
        )

    def _wait(self, refused: TooManyRequests, seconds: float) -> None:
        self.waits.append(seconds)

    async def run(self, rows: Iterator[Row], concurrency: int = 2) -> str:
        """Replay the rows; why it stopped."""
        async with self.client:
            await self.runner.run(rows, concurrency=concurrency)
        return self.runner.stopped

    def differences(self) -> list[list[tuple[Any, ...]]]:
        """Of each answered call."""
        return [
            [tuple(one) for one in outcome.differences]
            for outcome in self.outcomes
            if isinstance(outcome, ReplayedCall)
        ]


async def test_answers_are_compared_with_the_logged_ones(edge: Edge) -> None:
    edge.add(hello())
    replay = Replay(edge, ignored=(parse_path("$.at"),))
    rows: list[Row] = [
        row({"x": 1.0}, {"x": 1.0000001}),
        row({"x": 1.0, "at": 5}, {"x": 1.5, "at": 6}),
        row({"mail": "a@b"}, {"mail": "[scrubbed]"}),
        row({}, {"mail": "[scrubbed]"}),
        SkippedRow("req-2", Reason.FAILED),
    ]
    assert await replay.run(iter(rows), concurrency=1) == ""
    assert replay.differences() == [
        [],
        [(("x",), "changed", 1.5, 1.0)],
        [],
        [(("mail",), "missing", "[scrubbed]", None)],
    ]
    assert replay.outcomes[-1] == rows[-1]
    first = replay.outcomes[0]
    assert isinstance(first, ReplayedCall)
    assert first.request_id.startswith("req-")
    assert first.exec_ms is not None
    assert first.latency_ms is not None
    assert first.latency_ms >= first.exec_ms
    assert first.cost is not None


async def test_an_answer_that_is_no_json_is_different(edge: Edge, script: Script) -> None:
    async def text(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=b"1", content_type="text/plain")

    script.now = text
    edge.add(hello())
    replay = Replay(edge)
    await replay.run(iter([row({}, 1)]))
    assert replay.differences() == [[((), "changed", 1, b"1")]]


async def test_calls_wait_for_their_quota(edge: Edge) -> None:
    edge.add(hello())
    edge.add_key("pl_slow", quotas={"requests_per_s": 10, "burst": 1})
    replay = Replay(edge, key="pl_slow")
    assert await replay.run(iter([row({"x": n}, {"x": n}) for n in range(2)]), concurrency=4) == ""
    assert replay.differences() == [[]] * 2
    assert replay.waits


async def test_a_quota_that_is_used_up_for_long_is_a_failure(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MAX_QUOTA_WAIT_S", 0.5)
    edge.add(hello())
    edge.add_key("pl_slow", quotas={"requests_per_s": 0.001, "burst": 1})
    replay = Replay(edge, key="pl_slow")
    await replay.run(iter([row({}, {}), row({}, {})]), concurrency=1)
    second = replay.outcomes[1]
    assert isinstance(second, FailedCall)
    assert second.reason == "over-quota"


async def test_a_call_that_the_function_fails_is_a_failure_with_its_message(
    edge: Edge, script: Script
) -> None:
    async def fails_on_two(request: WorkerRequest) -> WorkerAnswer:
        if request.body != b"[2]":
            return WorkerAnswer(body=request.body or b"null")
        problem = {"type": "https://pilotlight.dev/problems/function-raised", "status": 500}
        body = json.dumps({**problem, "detail": "two is too many"}).encode()
        return WorkerAnswer(
            status=500, body=body, outcome="raised", content_type="application/problem+json"
        )

    script.now = fails_on_two
    edge.add(hello())
    replay = Replay(edge)
    assert await replay.run(iter([row([n], [n]) for n in range(4)]), concurrency=1) == ""
    assert replay.differences() == [[]] * 3
    (failed,) = (one for one in replay.outcomes if isinstance(one, FailedCall))
    assert (failed.reason, failed.message) == ("function-raised", "two is too many")


async def test_a_revision_that_fails_half_way_stops_the_replay(edge: Edge, script: Script) -> None:
    async def fails_from_five_on(request: WorkerRequest) -> WorkerAnswer:
        if not request.body or int(request.body.strip(b"[]")) < 5:
            return WorkerAnswer(body=request.body or b"null")
        return WorkerAnswer(status=500, body=b"{}", outcome="raised")

    script.now = fails_from_five_on
    edge.add(hello())
    replay = Replay(edge)
    stopped = await replay.run(iter([row([n], [n]) for n in range(1000)]), concurrency=1)
    assert stopped.startswith("the last 20 calls failed")
    assert len(replay.outcomes) == 5 + runner.MAX_FAILURES


@pytest.mark.parametrize("what", ["scope", "key"])
async def test_what_all_further_calls_would_be_told_stops_the_replay(edge: Edge, what: str) -> None:
    edge.add(hello())
    edge.add_key("pl_calls", scope="invoke")
    replay = Replay(edge, key={"scope": "pl_calls", "key": "pl_none"}[what])
    stopped = await replay.run(iter([row({}, {})] * 100))
    assert {"scope": "needs 'deploy'", "key": "API key"}[what] in stopped
    assert replay.outcomes == []


async def test_a_platform_that_went_away_stops_the_replay(edge: Edge) -> None:
    replay = Replay(edge, url=f"http://127.0.0.1:{free_port()}")
    assert "no platform answers" in await replay.run(iter([row({}, {})] * 100))
    assert len(replay.outcomes) <= 4


async def test_a_row_that_cannot_be_read_stops_the_replay(edge: Edge, tmp_path: Path) -> None:
    edge.add(hello())
    path = tmp_path / "calls.jsonl"
    path.write_text('{"input": [1], "output": [1]}\nno row\n')
    replay = Replay(edge)
    assert "line 2" in await replay.run(read_file(path), concurrency=1)
    assert replay.differences() == [[]]


async def test_an_outcome_that_cannot_be_written_stops_the_replay(edge: Edge) -> None:
    def full(outcome: Outcome) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    edge.add(hello())
    replay = Replay(edge, write=full)
    assert "No space left" in await replay.run(iter([row({}, {})] * 10), concurrency=1)


async def test_an_interrupted_replay_keeps_what_was_compared(edge: Edge, script: Script) -> None:
    async def hangs_on_two(request: WorkerRequest) -> WorkerAnswer:
        if request.body == b"[2]":
            await asyncio.Event().wait()
        return WorkerAnswer(body=request.body or b"null")

    script.now = hangs_on_two
    edge.add(hello())
    replay = Replay(edge)
    task = asyncio.create_task(replay.run(iter([row([n], [n]) for n in range(5)]), concurrency=1))
    await until(lambda: len(replay.outcomes) == 2)
    task.cancel()
    assert await task == "interrupted"
    assert replay.differences() == [[], []]


async def test_methods_of_a_class_are_called_by_their_names(edge: Edge) -> None:
    methods = (MethodSpec(name="rate"), MethodSpec(name="rank"))
    edge.add(hello(methods=methods))
    replay = Replay(edge)
    rows = [row({"x": 1}, {"x": 1}, method=name) for name in ("rate", "rank")]
    assert await replay.run(iter(rows)) == ""
    paths = {r.path for worker in edge.fleet.workers.values() for r in worker.requests}
    assert {"/invoke/rate", "/invoke/rank"} <= paths
    assert replay.differences() == [[], []]
