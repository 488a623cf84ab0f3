"""A request's life, through real HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from activator.balancing.instance_lifecycle import STUCK_GRACE_S
from activator.http.request import Request
from pilotlight.spec.function import Clocks, MethodSpec, WeightsSpec
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors as agent_errors
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of


async def forever(request: WorkerRequest) -> WorkerAnswer:
    """A function that never returns."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def until(condition: object, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


def problem_of(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, object] = response.json()
    assert body["instance"] == response.headers["x-request-id"]
    return body


async def test_a_cold_call_starts_an_instance_and_a_second_one_finds_it_warm(edge: Edge) -> None:
    edge.add(route_of(spec_of()))

    cold = await edge.call(json={"x": 1})
    warm = await edge.call(json={"x": 2})

    assert (cold.status_code, cold.json(), cold.headers["pilotlight-start"]) == (
        200,
        {"x": 1},
        "COLD",
    )
    assert (warm.json(), warm.headers["pilotlight-start"]) == ({"x": 2}, "WARM")
    assert warm.headers["pilotlight-revision"] == "v1-abcdef"
    assert {part.split(";")[0] for part in warm.headers["server-timing"].split(", ")} == {
        "queue",
        "start",
        "exec",
    }
    assert len(edge.fleet.started) == 1


async def test_call_that_waited_for_a_start_says_where_its_weights_were(edge: Edge) -> None:
    edge.add(
        route_of(
            spec_of(
                weights=(
                    WeightsSpec(name="tokens", manifest="1" * 64),
                    WeightsSpec(name="minilm", manifest="2" * 64),
                )
            )
        )
    )

    cold = await edge.call(json={"x": 1})
    warm = await edge.call(json={"x": 2})

    assert cold.headers["server-timing"].endswith(', weights;desc="nvme"')  # the farthest of both
    assert "weights" not in warm.headers["server-timing"]


async def test_each_call_is_in_the_ledger_with_the_cost_that_its_answer_named(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    answers = [await edge.call(json={"x": n}) for n in range(3)]

    records = await edge.settle()

    assert sorted(records) == sorted(f"{a.headers['x-request-id']}/1" for a in answers)
    for answer in answers:
        record = records[f"{answer.headers['x-request-id']}/1"]
        assert (record.cost, record.status, record.outcome, record.app, record.key) == (
            answer.headers["pilotlight-cost"],
            200,
            "ok",
            "shop",
            f"k-{KEY}",
        )


async def test_a_caller_cannot_choose_the_id_that_its_bill_is_unique_by(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    ids = {
        (await edge.call(json={"x": 1}, headers={"x-request-id": "mine"})).headers["x-request-id"]
        for _ in range(2)
    }

    assert len(ids) == 2
    assert len(await edge.settle()) == 2


@pytest.mark.parametrize(
    "content,type,parameter",
    [
        pytest.param(b"{", "invalid-input", None, id="malformed JSON"),
        pytest.param(b'{"x": "one"}', "invalid-input", "x", id="wrong type"),
        pytest.param(b'{"x": 1, "zz": 1}', "invalid-input", "zz", id="unknown argument"),
    ],
)
async def test_bad_arguments_are_refused_before_anything_is_started_or_billed(
    edge: Edge, content: bytes, type: str, parameter: str | None
) -> None:
    edge.add(route_of(spec_of()))
    answer = await edge.call(content=content)

    body = problem_of(answer)
    assert (answer.status_code, str(body["type"]).rsplit("/", 1)[1], body.get("parameter")) == (
        400,
        type,
        parameter,
    )
    assert edge.fleet.started == []
    assert await edge.settle() == {}


@pytest.mark.parametrize("declared", [True, False], ids=["declared length", "chunked"])
async def test_a_body_over_the_limit_is_refused(edge: Edge, declared: bool) -> None:
    edge.add(route_of(spec_of()))

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    answer = await edge.call(content=b"x" * 2000 if declared else chunks())

    assert answer.status_code == 413
    assert problem_of(answer)["limit_bytes"] == 1000


@pytest.mark.parametrize("body_clock_s", [0.5])
async def test_a_body_that_comes_too_slowly_is_given_up(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(edge.url.rpartition(":")[2]))
    head = (
        f"POST /v1/functions/shop/hello:invoke HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        f"{KEY}\r\ncontent-length: 10\r\n\r\n"
    )
    writer.write(head.encode() + b"12345")
    answer = await reader.readline()
    writer.close()

    assert answer == b"HTTP/1.1 400 Bad Request\r\n"


@pytest.mark.parametrize("head_clock_s", [0.5])
async def test_a_head_that_comes_too_slowly_is_cut_off(edge: Edge) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(edge.url.rpartition(":")[2]))
    writer.write(b"POST /v1/functions/shop/hello:invoke HTTP/1.1\r\nhost:")
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_head_over_the_limit_is_refused(edge: Edge) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(edge.url.rpartition(":")[2]))
    writer.write(b"GET /healthz HTTP/1.1\r\nx-big: " + b"x" * 5000)
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_an_unknown_function_and_another_tenants_are_equally_not_found(edge: Edge) -> None:
    edge.add(route_of(spec_of("theirs"), tenant="t-000000000002"))

    unknown, theirs = (
        await edge.call("shop/nothing:invoke"),
        await edge.call("shop/theirs:invoke", json={"x": 1}),
    )

    assert (unknown.status_code, theirs.status_code) == (404, 404)
    assert (
        str(problem_of(theirs)["detail"]).replace("theirs", "nothing")
        == problem_of(unknown)["detail"]
    )


async def test_without_a_valid_key_nothing_is_answered_and_guessing_is_slowed_down(
    edge: Edge,
) -> None:
    edge.stop_the_clock_of_strangers()
    edge.add(route_of(spec_of()))
    # a key that was valid once is known, and needs no look-up
    assert (await edge.call(json={"x": 1})).status_code == 200
    answers = [await edge.call(json={"x": 1}, key=f"wrong-{n}") for n in range(40)]

    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 30
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert (await edge.call(json={"x": 1})).status_code == 200


async def test_a_revoked_key_stops_working_at_once(edge: Edge) -> None:
    from pilotlight.protocol import FeedChange

    edge.add(route_of(spec_of()))
    assert (await edge.call(json={"x": 1})).status_code == 200
    edge.table.apply(FeedChange(seq=99, kind="key", key=f"k-{KEY}", value=None))

    assert (await edge.call(json={"x": 1})).status_code == 401


async def test_a_key_of_one_environment_does_not_reach_another(edge: Edge) -> None:
    edge.add(route_of(spec_of(), environment="staging"))
    edge.add_key("pl_staging", environment="staging")

    assert (await edge.call(json={"x": 1}, key="pl_staging")).status_code == 200
    assert (
        await edge.call(json={"x": 1}, headers={"pilotlight-environment": "staging"})
    ).status_code == 200
    assert (
        await edge.call(json={"x": 1}, key="pl_staging", headers={"pilotlight-environment": "main"})
    ).status_code == 403


async def test_a_burst_on_a_cold_function_starts_as_many_instances_as_it_may_at_once(
    edge: Edge,
) -> None:
    edge.add(route_of(spec_of(scaling=Scaling(max_inputs=1, max_instances=8))))
    edge.fleet.gate.clear()
    calls = [asyncio.create_task(edge.call(json={"x": n})) for n in range(30)]
    await until(lambda: len(edge.fleet.started) == 8)
    edge.fleet.gate.set()
    answers = await asyncio.gather(*calls)

    assert [a.status_code for a in answers] == [200] * 30
    assert len(edge.fleet.started) == 8


async def test_a_full_queue_answers_429_with_the_time_to_come_back(edge: Edge) -> None:
    edge.add(route_of(spec_of(scaling=Scaling(max_queued=2, max_instances=1))))
    edge.fleet.gate.clear()
    waiting = [asyncio.create_task(edge.call(json={"x": n})) for n in range(2)]
    await until(lambda: edge.queue.waiting == 2)
    refused = await edge.call(json={"x": 3})
    edge.fleet.gate.set()

    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert [a.status_code for a in await asyncio.gather(*waiting)] == [200, 200]


async def test_a_failed_start_is_answered_with_the_users_own_error(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    error = {"type": "ModuleNotFoundError", "message": "No module named 'pandas'"}
    edge.fleet.failures = [
        agent_errors.StartFailed("import failed", {"error": error, "log_tail": ["boom"]})
    ]

    answer = await edge.call(json={"x": 1})

    assert answer.status_code == 502
    assert (problem_of(answer)["error"], problem_of(answer)["log_tail"]) == (error, ["boom"])


async def test_a_start_that_somebody_stopped_is_made_again_for_the_calls_that_wait(
    edge: Edge,
) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.failures = [agent_errors.StartStopped("instance i-1 was stopped while it started")]

    assert (await edge.call(json={"x": 1})).status_code == 200


async def test_no_capacity_is_503_with_the_reason_and_a_time(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.failures = [
        agent_errors.NoCapacity("memory", {"resource": "memory", "asked": 2, "free": 1})
    ]

    answer = await edge.call(json={"x": 1})

    assert (answer.status_code, problem_of(answer)["resource"]) == (503, "memory")
    assert "retry-after" in answer.headers


async def test_a_caller_may_wait_less_than_the_functions_own_clock(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.gate.clear()
    answer = await edge.call(json={"x": 1}, headers={"pilotlight-timeout": "0.05"})

    assert (answer.status_code, problem_of(answer)["clock"]) == (504, "queue")


class TestNeverReturning:
    """With a function that never returns."""

    @pytest.fixture(name="behaviour")
    def _behaviour(self) -> Behaviour:
        return forever

    async def test_it_is_cut_off_by_its_execution_clock_billed_and_replaced(
        self, edge: Edge
    ) -> None:
        edge.add(route_of(spec_of(clocks=Clocks(execution_s=0.05))))
        answer = await edge.call(json={"x": 1})
        await until(lambda: edge.fleet.stopped)
        (record,) = (await edge.settle()).values()

        assert (answer.status_code, problem_of(answer)["clock"]) == (504, "execution")
        assert (record.status, record.outcome) == (504, "error")
        assert record.billed_ns >= 50_000_000
        assert [grace_s for _, grace_s in edge.fleet.stopped] == [STUCK_GRACE_S]

    async def test_who_waits_behind_it_gets_a_new_instance_at_once(self, edge: Edge) -> None:
        edge.add(
            route_of(spec_of(clocks=Clocks(execution_s=0.05), scaling=Scaling(max_instances=1)))
        )
        async with asyncio.timeout(STUCK_GRACE_S):
            answers = await asyncio.gather(*(edge.call(json={"x": n}) for n in range(2)))

        assert [problem_of(answer)["clock"] for answer in answers] == ["execution", "execution"]
        assert len(edge.fleet.started) == 2

    async def test_a_caller_that_leaves_frees_its_slot_at_once(self, edge: Edge) -> None:
        edge.add(route_of(spec_of()))
        task = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
        (worker,) = edge.fleet.workers.values()
        task.cancel()
        await until(lambda: worker.cancelled == 1)
        (record,) = (await edge.settle()).values()

        assert (record.status, record.outcome) == (499, "cancelled")
        (scaled,) = edge.scaler.revisions.values()
        assert scaled.throttler.in_flight == 0

    async def test_a_caller_that_leaves_the_queue_leaves_no_trace(self, edge: Edge) -> None:
        edge.add(route_of(spec_of()))
        edge.fleet.gate.clear()
        task = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: edge.queue.waiting == 1)
        task.cancel()
        await until(lambda: edge.queue.waiting == 0)

        assert await edge.settle() == {}

    async def test_an_instance_that_dies_under_a_call_is_a_502_with_the_reason(
        self, edge: Edge
    ) -> None:
        edge.add(route_of(spec_of()))
        task = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
        await edge.fleet.kill(edge.fleet.started[0], "out_of_memory")
        answer = await task

        assert (answer.status_code, problem_of(answer)["reason"]) == (502, "out_of_memory")
        assert "ran out of memory" in str(problem_of(answer)["detail"])

    async def test_the_reason_is_the_agents_also_when_the_instance_was_about_to_be_stopped(
        self, edge: Edge
    ) -> None:
        edge.add(route_of(spec_of()))
        task = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
        (scaled,) = edge.scaler.revisions.values()
        scaled.throttler.drain(next(scaled.throttler.live()))
        await edge.fleet.kill(edge.fleet.started[0], "killed")

        assert problem_of(await task)["reason"] == "killed"

    async def test_an_idempotent_call_is_tried_once_more_elsewhere(self, edge: Edge) -> None:
        edge.add(route_of(spec_of(idempotent=True)))
        task = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
        from tests.fakes.fake_worker import echo

        edge.fleet.behaviour = echo
        await edge.fleet.kill(edge.fleet.started[0], "killed")
        answer = await task

        assert (answer.status_code, answer.json()) == (200, {"x": 1})
        assert sorted(r.attempt for r in (await edge.settle()).values()) == [1, 2]


async def test_a_worker_that_died_before_the_request_was_sent_is_no_error_of_the_callers(
    edge: Edge,
) -> None:
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 1})
    await edge.fleet.kill(edge.fleet.started[0], "killed", tell=False)

    answer = await edge.call(json={"x": 2})

    assert (answer.status_code, answer.json()) == (200, {"x": 2})
    assert len(edge.fleet.started) == 2


class TestStreaming:
    """With a generator."""

    @pytest.fixture(name="behaviour")
    def _behaviour(self) -> Behaviour:
        async def items() -> AsyncIterator[bytes]:
            for n in range(3):
                yield b"data: %d\n\n" % n

        async def behaviour(request: WorkerRequest) -> WorkerAnswer:
            return WorkerAnswer(chunks=items(), content_type=request.headers["accept"])

        return behaviour

    async def test_server_sent_events_end_with_what_the_call_cost(self, edge: Edge) -> None:
        edge.add(route_of(spec_of(methods=(MethodSpec(is_generator=True),))))
        answer = await edge.call(json={}, headers={"accept": "text/event-stream"})
        (record,) = (await edge.settle()).values()
        events = answer.text.strip().split("\n\n")

        assert events[:3] == ["data: 0", "data: 1", "data: 2"]
        name, data = events[3].split("\n")
        assert name == "event: end"
        assert json.loads(data.removeprefix("data: "))["cost"] == record.cost
        assert record.outcome == "ok"


async def test_what_is_not_the_data_planes_needs_the_controller_and_says_so_while_it_is_down(
    edge: Edge,
) -> None:
    answer = await edge.client.get(
        f"{edge.url}/v1/apps", headers={"authorization": f"Bearer {KEY}"}
    )
    inside = await edge.client.get(
        f"{edge.url}/internal/feed", headers={"authorization": f"Bearer {KEY}"}
    )

    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    assert inside.status_code == 404


async def test_a_request_shows_itself_in_one_line() -> None:
    async def nothing() -> dict[str, object]:
        return {}

    async def drop(message: object) -> None:
        return None

    request = Request({"type": "http", "method": "GET", "path": "/x", "headers": []}, nothing, drop)

    assert repr(request) == f"<Request {request.id} GET /x>"
