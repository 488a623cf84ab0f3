"""Submitted calls tried again: what is, how often, until when; what becomes of those that fail for
the last time, and of repeats."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx
import pytest

from activator.async_calls.records import payload, queued
from activator.billing.journal import Recovered
from activator.billing.recovery import HeldCall
from activator.calls.call import Call
from activator.routing.traffic_split import RoutingDecision
from pilotlight.protocol import HEADER_REPLAYED
from pilotlight.spec.function import Clocks
from pilotlight.spec.policies import Fallback, RetryPolicy
from pilotlight.spec.traffic import Arm, ExperimentTraffic
from snapshotter import errors as agent_errors
from tests.activator.async_calls.test_service import finished, get
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import until
from tests.fakes.calls import call_of
from tests.fakes.fake_controller import FakeController
from tests.fakes.fake_worker import Flaky, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import TENANT, TEST_KEY, route_of, spec_of, split_route, target_of

AT_ONCE = RetryPolicy(max_retries=3, initial_delay_s=0.001, max_delay_s=0.002)
LATER = RetryPolicy(max_retries=3, initial_delay_s=3600.0, max_delay_s=3600.0, jitter=0.0)


async def submit(edge: Edge, **headers: str) -> httpx.Response:
    return await edge.call("shop/hello:submit", json={"x": 1}, headers=headers)


async def ended(edge: Edge, **headers: str) -> dict[str, Any]:
    return await finished(edge, (await submit(edge, **headers)).json()["id"])


async def test_a_call_that_raised_is_made_again_and_its_function_is_told_which_attempt_it_is(
    edge: Edge, controller: FakeController
) -> None:
    flaky = edge.fleet.behaviour = Flaky(2)
    edge.add(route_of(spec_of(retries=AT_ONCE)))
    record = await ended(edge)

    assert (record["state"], record["attempt"], record["is_dead"]) == ("SUCCEEDED", 3, False)
    assert flaky.attempts == ["1", "2", "3"]
    assert sorted(r.attempt for r in (await edge.settle()).values()) == [1, 2, 3]  # each is billed


async def test_a_call_that_fails_to_the_last_is_a_dead_letter_with_what_its_function_was_given(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    flaky = edge.fleet.behaviour = Flaky(99)
    edge.add(route_of(spec_of(retries=AT_ONCE)))
    call_id = (await submit(edge)).json()["id"]
    await until(lambda: controller.calls.get(call_id, {}).get("state") == "FAILED")
    shipped = controller.calls[call_id]

    assert (len(flaky.attempts), shipped["attempt"], shipped["is_dead"], shipped["status"]) == (
        4,
        4,
        True,
        500,
    )
    assert base64.b64decode(shipped["payload"]["body"]) == b'{"x":1}'
    assert shipped["payload"]["key"] == f"k-{KEY}"
    await until(lambda: not edge.calls.pending)
    assert edge.books.journal.statistics().held_calls == 0


async def test_without_a_policy_one_failure_is_the_last(
    edge: Edge, controller: FakeController
) -> None:
    flaky = edge.fleet.behaviour = Flaky(99)
    edge.add(route_of(spec_of()))

    assert (await ended(edge))["is_dead"] is True
    assert flaky.attempts == ["1"]


async def test_a_start_that_fails_is_tried_again(edge: Edge, controller: FakeController) -> None:
    edge.add(route_of(spec_of(retries=AT_ONCE)))
    edge.fleet.failures = [agent_errors.StartFailed("no such module")]
    assert (await ended(edge))["state"] == "SUCCEEDED"


async def test_an_answer_that_breaks_off_is_tried_again_because_nobody_saw_a_byte_of_it(
    edge: Edge, controller: FakeController
) -> None:
    seen: list[str] = []
    kills: list[asyncio.Task[None]] = []

    async def breaks_off_once(request: WorkerRequest) -> WorkerAnswer:
        seen.append(request.headers["pilotlight-call"])
        if len(seen) > 1:
            return await echo(request)

        async def items() -> Any:
            yield b"1\n"
            kills.append(asyncio.create_task(edge.fleet.kill(edge.fleet.started[-1], "killed")))
            await asyncio.Event().wait()

        return WorkerAnswer(chunks=items(), content_type="application/x-ndjson")

    edge.fleet.behaviour = breaks_off_once
    edge.add(route_of(spec_of(retries=AT_ONCE)))
    record = await ended(edge)

    assert (record["state"], record["attempt"]) == ("SUCCEEDED", 2)
    assert seen[0] == seen[1]


async def test_what_the_caller_did_wrong_is_neither_tried_again_nor_a_dead_letter(
    edge: Edge, controller: FakeController
) -> None:
    async def refuses(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=400, body=b"{}", outcome="invalid")

    edge.fleet.behaviour = refuses
    edge.add(route_of(spec_of(retries=AT_ONCE)))
    record = await ended(edge)

    assert (record["state"], record["attempt"], record["is_dead"]) == ("FAILED", 1, False)


async def test_nothing_is_tried_again_past_the_callers_deadline(
    edge: Edge, controller: FakeController
) -> None:
    flaky = edge.fleet.behaviour = Flaky(99)
    edge.add(route_of(spec_of(retries=LATER)))

    assert (await ended(edge, **{"pilotlight-timeout": "30"}))["state"] == "FAILED"
    assert flaky.attempts == ["1"]


async def test_nothing_is_tried_again_when_its_result_would_not_be_kept_any_more(
    edge: Edge, controller: FakeController
) -> None:
    flaky = edge.fleet.behaviour = Flaky(99)
    edge.add(route_of(spec_of(retries=LATER, clocks=Clocks(result_ttl_s=60))))

    assert (await ended(edge))["state"] == "FAILED"
    assert flaky.attempts == ["1"]


async def test_between_attempts_a_call_holds_no_slot_and_can_be_cancelled(
    edge: Edge, controller: FakeController
) -> None:
    edge.fleet.behaviour = Flaky(1)
    edge.add(route_of(spec_of(retries=LATER)))
    first = (await submit(edge)).json()["id"]
    await until(
        lambda: (held := edge.calls.pending.get(first)) is not None and held.record.attempt == 1
    )
    assert (await get(edge, first)).json()["state"] == "QUEUED"

    assert (await ended(edge))["state"] == "SUCCEEDED"  # max_inputs is 1: the slot is free
    cancel = await edge.client.post(
        f"{edge.url}/v1/calls/{first}:cancel", headers={"authorization": f"Bearer {KEY}"}
    )
    assert cancel.json()["state"] == "CANCELLED"


async def test_a_fallback_answers_only_when_no_attempt_is_left(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(
        route_of(
            spec_of(retries=AT_ONCE, fallback=(Fallback(kind="static", body={"sorry": True}),))
        )
    )
    edge.fleet.failures = [agent_errors.StartFailed("no such module")]
    assert (await ended(edge))["result"] == {"x": 1}
    await edge.fleet.kill(edge.fleet.started[-1], "killed")
    edge.fleet.failures = [agent_errors.StartFailed("no such module")] * 8
    assert (await ended(edge))["result"] == {"sorry": True}


async def test_a_webhook_that_a_call_names_is_on_its_record(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))

    assert (await ended(edge, **{"pilotlight-webhook": "ops"}))["webhook"] == "ops"
    refused = await submit(edge, **{"pilotlight-webhook": "not a name!"})
    assert (refused.status_code, refused.json()["parameter"]) == (400, "pilotlight-webhook")


async def test_a_submit_that_is_repeated_under_a_key_is_one_call(
    edge: Edge, controller: FakeController, shipping: object
) -> None:
    edge.add(route_of(spec_of()))
    answers = await asyncio.gather(
        *(submit(edge, **{"idempotency-key": "order-1"}) for _ in range(4))
    )
    call_id = answers[0].json()["id"]

    assert {(a.status_code, a.json()["id"]) for a in answers} == {(202, call_id)}
    assert [a.headers.get(HEADER_REPLAYED) for a in answers].count("true") == 3
    await until(lambda: controller.calls.get(call_id, {}).get("state") == "SUCCEEDED")
    await until(lambda: not edge.calls.pending)
    # the controller has it by now: an activator may have started again
    again = await submit(edge, **{"idempotency-key": "order-1"})
    assert (again.json()["id"], again.headers[HEADER_REPLAYED]) == (call_id, "true")
    assert sum(len(w.requests) for w in edge.fleet.workers.values()) == 1


async def test_a_key_with_other_arguments_is_a_conflict_and_with_another_caller_another_call(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of()))
    edge.add_key("pl_second")
    first = await submit(edge, **{"idempotency-key": "order-1"})
    other = await edge.call(
        "shop/hello:submit", json={"x": 2}, headers={"idempotency-key": "order-1"}
    )
    second = await edge.call(
        "shop/hello:submit", key="pl_second", json={"x": 2}, headers={"idempotency-key": "order-1"}
    )

    assert (first.status_code, other.status_code, second.status_code) == (202, 409, 202)
    assert first.json()["id"] != second.json()["id"]


async def resume(edge: Edge, call: Call, attempts: int) -> None:
    """A call that the process before had begun so many times, in its journal."""
    caller = edge.table.authenticate(f"Bearer {KEY}".encode(), 0.0)
    kept = payload(queued(caller, call, fingerprint="", webhook=""), call)
    await edge.books.journal.submit(call.id, kept)
    left = HeldCall(id=call.id, segment=0, offset=0, length=0, attempts=attempts)
    edge.books.recovered = Recovered(lost=(), unfinished=(left,), undelivered=())
    async with asyncio.TaskGroup() as tasks:
        for shipping in edge.calls.start(tasks):
            shipping.cancel()


@pytest.mark.parametrize("attempts, expected", [(1, 0), (3, 2)])
async def test_an_attempt_that_our_own_end_cut_off_is_not_counted_against_a_call(
    edge: Edge, controller: FakeController, attempts: int, expected: int
) -> None:
    edge.add(route_of(spec_of(retries=AT_ONCE)))
    target = target_of(spec_of(retries=AT_ONCE))
    call = call_of(target, b'{"x":1}', key_id=f"k-{KEY}")
    flaky = edge.fleet.behaviour = Flaky(99)
    await resume(edge, call, attempts)
    record = await finished(edge, "req-1")

    assert flaky.attempts[0] == str(attempts + 1)
    assert len(flaky.attempts) == 1 + AT_ONCE.max_retries - expected
    assert record["attempt"] == attempts + len(flaky.attempts)


async def test_a_tenant_that_is_suspended_between_two_attempts_ends_the_call(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of(retries=AT_ONCE)))

    async def suspends(request: WorkerRequest) -> WorkerAnswer:
        edge.add_tenant("owner", suspended=True)
        return WorkerAnswer(status=500, body=b"{}", outcome="raised")

    edge.fleet.behaviour = suspends
    call_id = (await submit(edge)).json()["id"]
    held = edge.calls.pending.get(call_id)
    assert held is not None
    await until(lambda: held.record.state == "FAILED")

    assert (held.record.status, held.record.is_dead, held.record.attempt) == (403, True, 1)


async def test_a_function_that_can_in_a_moment_is_waited_for_and_no_two_attempts_have_one_number(
    edge: Edge, controller: FakeController
) -> None:
    """Its fallback would answer at once; a submitted call has time."""
    asked: list[str] = []

    async def fails_the_first(request: WorkerRequest) -> WorkerAnswer:
        asked.append(request.headers.get("pilotlight-attempt", "1"))
        edge.tell("secret", f"{TENANT}/main/token", TEST_KEY.secrets.seal('{"token": "s"}'))
        return (
            WorkerAnswer(status=500, body=b"{}", outcome="raised")
            if len(asked) == 1
            else await echo(request)
        )

    edge.fleet.behaviour = fails_the_first
    edge.add(route_of(spec_of(name="other")))
    edge.add(
        route_of(
            spec_of(secrets=("token",), fallback=(Fallback(kind="function", function="other"),))
        )
    )
    asyncio.get_running_loop().call_later(
        0.1, edge.tell, "secret", f"{TENANT}/main/token", TEST_KEY.secrets.seal('{"token": "s"}')
    )
    record = await ended(edge)
    billed = await edge.settle()

    assert len(billed) == len(asked), "each attempt has a record"
    assert (record["revision"], {r.function for r in billed.values()}) == ("v1-abcdef", {"hello"})


async def test_a_call_that_is_run_by_the_next_life_stays_in_its_arm(
    edge: Edge, controller: FakeController
) -> None:
    arms = (
        Arm(name="a", revision="v1-aaaaaa", share=50),
        Arm(name="b", revision="v2-bbbbbb", share=50),
    )
    experiment = ExperimentTraffic(id="x-1", salt="s", unit="header:x-user", percent=100, arms=arms)
    edge.add(
        split_route(spec_of(), {"v1-aaaaaa": 100}, named=("v2-bbbbbb",), experiment=experiment)
    )
    target = edge.table.targets_of(f"{TENANT}/main/shop/hello")[1]
    choice = RoutingDecision(target, experiment="x-1", arm="b", unit="0123456789abcdef")
    call = call_of(target, b'{"x":1}', key_id=f"k-{KEY}", choice=choice)
    await resume(edge, call, 1)
    await finished(edge, "req-1")
    (record,) = (await edge.settle()).values()
    (request,) = (request for worker in edge.fleet.workers.values() for request in worker.requests)

    assert (record.experiment, record.arm, record.unit, record.revision) == (
        "x-1",
        "b",
        "0123456789abcdef",
        "v2-bbbbbb",
    )
    assert request.headers["pilotlight-arm"] == "b"


async def test_a_call_whose_arm_is_gone_is_in_no_experiment(
    edge: Edge, controller: FakeController
) -> None:
    edge.add(route_of(spec_of(), revision="v1-aaaaaa"))
    gone = target_of(spec_of(), revision="v2-bbbbbb")
    call = call_of(
        gone,
        b'{"x":1}',
        key_id=f"k-{KEY}",
        choice=RoutingDecision(gone, experiment="x-1", arm="b", unit="0123456789abcdef"),
    )
    await resume(edge, call, 1)
    await finished(edge, "req-1")
    (record,) = (await edge.settle()).values()

    assert (record.experiment, record.arm, record.unit, record.revision) == (
        "",
        "",
        "",
        "v1-aaaaaa",
    )
