"""Calls through real HTTP: which traces are kept, and what is in them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.exposition import generate_latest

from activator.calls.trace_context import ASKED, Trace
from activator.settings import ActivatorSettings
from activator.tracing.trace_builder import Json
from activator.tracing.tracer import BURST_S, RATES, Sampling
from pilotlight.core.tracing.trace_context import (
    attempt_span_id,
    parse_traceparent,
    root_span_id,
    trace_id_for_call,
)
from pilotlight.spec.function import FunctionKind
from pilotlight.spec.policies import Objectives, RetryPolicy
from snapshotter import errors as agent_errors
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import route_of, spec_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(traces_sampled=0.0)


@pytest.fixture(name="patient")
def _patient() -> Objectives:
    """Nothing is slow on a loaded machine."""
    return Objectives(warm_latency_s=3600.0, first_token_s=3600.0)


@pytest.fixture(name="warm")
async def _warm(edge: Edge, patient: Objectives) -> Edge:
    """A function with an instance, and no trace yet."""
    edge.add(route_of(spec_of(objectives=patient)))
    await edge.call(json={"x": 0})
    edge.traces.clear()
    return edge


def spans(trace: Json) -> dict[str, Json]:
    return {span["name"]: span for span in trace["spans"]}


def tree(trace: Json) -> dict[str, str]:
    """Name → its parent's name."""
    names = {span["id"]: span["name"] for span in trace["spans"]}
    return {span["name"]: names.get(span["parent"], span["parent"]) for span in trace["spans"]}


async def failing(request: WorkerRequest) -> WorkerAnswer:
    return WorkerAnswer(
        status=500,
        body=b'{"detail":"no"}',
        outcome="raised",
        content_type="application/problem+json",
    )


def received(edge: Edge) -> list[dict[str, str]]:
    return [
        request.headers for worker in edge.fleet.workers.values() for request in worker.requests
    ]


async def test_a_call_that_waited_for_a_start_is_kept_with_its_phases(
    edge: Edge, patient: Objectives
) -> None:
    edge.add(route_of(spec_of(objectives=patient)))
    answer = await edge.call(json={"x": 1})
    (trace,) = edge.traces
    assert (trace["kept_for"], trace["start_kind"], trace["call"]) == (
        "cold",
        "COLD",
        answer.headers["x-request-id"],
    )
    assert trace["id"] == trace_id_for_call(trace["call"])
    route = "POST /v1/functions/shop/hello:invoke"
    assert {"fork": "start", "start": route, "exec": route}.items() <= tree(trace).items()
    root = spans(trace)[route]
    assert (root["kind"], root["parent"], root["id"]) == ("server", "", root_span_id(trace["call"]))
    assert root["attributes"]["faas.coldstart"] is True
    assert root["attributes"]["http.response.status_code"] == 200
    assert root["attributes"]["pilotlight.start_kind"] == "COLD"
    assert spans(trace)["start"]["attributes"]["pilotlight.node"]
    assert all(
        span["begin_ms"] >= 0 and span["begin_ms"] + span["ms"] <= root["ms"] + 0.01
        for span in trace["spans"]
    )


async def test_a_worker_is_asked_for_its_spans_where_the_call_waited_for_a_start(
    edge: Edge, patient: Objectives
) -> None:
    edge.add(route_of(spec_of(objectives=patient)))
    await edge.call(json={"x": 1})
    parent = parse_traceparent(received(edge)[0]["traceparent"].encode())
    assert parent == (edge.traces[0]["id"], attempt_span_id(edge.traces[0]["call"]), True)


async def test_an_ordinary_warm_call_leaves_no_trace_and_tells_its_worker_nothing(
    warm: Edge,
) -> None:
    await warm.call(json={"x": 1})
    assert warm.traces == []
    assert "traceparent" not in received(warm)[-1]


async def test_a_caller_that_keeps_its_trace_finds_the_call_in_it(warm: Edge) -> None:
    await warm.call(
        json={"x": 1}, headers={**SAMPLED, "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"}
    )
    (trace,) = warm.traces
    assert (trace["id"], trace["kept_for"], trace["spans"][0]["parent"]) == (TRACE, "asked", SPAN)
    told = received(warm)[-1]
    assert parse_traceparent(told["traceparent"].encode()) == (
        TRACE,
        attempt_span_id(trace["call"]),
        True,
    )
    assert told["tracestate"] == "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
    assert spans(trace)["exec"]["id"] == attempt_span_id(trace["call"])
    assert TRACE in generate_latest(warm.metrics.registry).decode()  # type: ignore[no-untyped-call]  # as an exemplar


async def test_a_caller_that_does_not_keep_its_trace_is_still_the_parent(warm: Edge) -> None:
    await warm.call(json={"x": 1}, headers=UNSAMPLED)
    assert warm.traces == []
    parent = parse_traceparent(received(warm)[-1]["traceparent"].encode())
    assert parent is not None
    assert (parent.trace_id, parent.is_sampled, parent.span_id == SPAN) == (TRACE, False, False)


@pytest.mark.parametrize(
    "broken",
    ["nonsense", f"00-{'0' * 32}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01-x"],
)
async def test_a_broken_context_is_none(warm: Edge, broken: str) -> None:
    answer = await warm.call(json={"x": 1}, headers={"traceparent": broken, "tracestate": "a=1"})
    assert answer.status_code == 200
    assert warm.traces == []
    assert not {"traceparent", "tracestate"} & received(warm)[-1].keys()


async def test_a_flood_of_calls_that_ask_is_not_a_flood_of_traces(
    warm: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Sampling.try_acquire

    def at_once(sampling: Sampling, tenant: str, reason: str, _now: float) -> bool:
        return take(sampling, tenant, reason, 1.0)  # no time passes

    monkeypatch.setattr(Sampling, "try_acquire", at_once)
    bound = int(RATES[ASKED] * BURST_S)
    for _ in range(bound + 20):
        await warm.call(json={"x": 1}, headers=SAMPLED)
    assert len(warm.traces) == bound
    # it is told as not sampled
    assert parse_traceparent(received(warm)[-1]["traceparent"].encode()) is not None


async def test_a_failed_call_is_kept(warm: Edge, script: Script) -> None:
    script.now = failing
    await warm.call(json={"x": 1})
    (trace,) = warm.traces
    assert (trace["kept_for"], trace["status"]) == ("error", 500)
    assert spans(trace)["exec"]["error"] == trace["spans"][0]["error"] == "500"
    assert trace["spans"][0]["attributes"]["error.type"] == "500"


async def test_a_slow_call_is_kept(edge: Edge, script: Script) -> None:
    edge.add(route_of(spec_of(objectives=Objectives(warm_latency_s=0.001))))
    await edge.call(json={"x": 0})
    edge.traces.clear()

    async def take_time(request: WorkerRequest) -> WorkerAnswer:
        await asyncio.sleep(0.005)
        return await echo(request)

    script.now = take_time
    await edge.call(json={"x": 1})
    assert [trace["kept_for"] for trace in edge.traces] == ["slow"]


async def test_a_call_whose_start_failed_says_so(edge: Edge, patient: Objectives) -> None:
    edge.add(route_of(spec_of(objectives=patient)))
    edge.fleet.failures.append(agent_errors.StartFailed("its import raised"))
    answer = await edge.call(json={"x": 1})
    (trace,) = edge.traces
    assert (trace["kept_for"], trace["status"]) == ("error", answer.status_code)
    assert trace["spans"][0]["error"] == spans(trace)["queue"]["error"] == "start-failed"
    assert "exec" not in spans(trace)


async def test_an_attempt_whose_worker_died_is_a_span_of_its_own(
    edge: Edge, script: Script, patient: Objectives
) -> None:
    edge.add(route_of(spec_of(objectives=patient, idempotent=True)))
    await edge.call(json={"x": 0})
    edge.traces.clear()

    async def die_once(request: WorkerRequest) -> WorkerAnswer:
        script.now = echo
        (first, *_) = edge.fleet.workers.values()
        await first.die()
        return WorkerAnswer()

    script.now = die_once
    answer = await edge.call(json={"x": 1}, headers=SAMPLED)
    assert answer.status_code == 200
    (trace,) = edge.traces
    found = spans(trace)
    assert found["attempt 1"]["error"] == "worker-gone"
    assert found["attempt 2"]["error"] == ""
    executions = [span for span in trace["spans"] if span["name"] == "exec"]
    assert [span["error"] for span in executions] == ["worker-gone", ""]
    assert [span["parent"] for span in executions] == [
        found["attempt 1"]["id"],
        found["attempt 2"]["id"],
    ]
    assert (
        executions[0]["attributes"]["faas.instance"] != executions[1]["attributes"]["faas.instance"]
    )
    assert parse_traceparent(received(edge)[-1]["traceparent"].encode()) == (
        TRACE,
        attempt_span_id(trace["call"], 2),
        True,
    )


def reported(*rows: list[Any], ms: float = 0.1) -> str:
    return (
        "pilotlight-spans: "
        + base64.b64encode(json.dumps({"ms": ms, "spans": rows, "dropped": 0}).encode()).decode()
    )


async def test_what_user_code_recorded_hangs_below_the_workers_time(
    warm: Edge, script: Script
) -> None:
    one, two = "00000000000000a1", "00000000000000a2"

    async def tell(request: WorkerRequest) -> WorkerAnswer:
        rows = (
            [one, "", "tokenise", 0.01, 0.02, "", {"tokens": 12}],
            [two, one, "lookup", 0.01, 0.01, "KeyError", {}],
        )
        return WorkerAnswer(headers=(reported(*rows),))

    script.now = tell
    answer = await warm.call(json={"x": 1}, headers=SAMPLED)
    assert "pilotlight-spans" not in answer.headers
    (trace,) = warm.traces
    assert {"worker": "exec", "tokenise": "worker", "lookup": "tokenise"}.items() <= tree(
        trace
    ).items()
    assert spans(trace)["tokenise"]["attributes"] == {"tokens": 12}
    assert spans(trace)["lookup"]["error"] == "KeyError"


async def test_spans_that_go_in_circles_hang_below_the_worker(warm: Edge, script: Script) -> None:
    one, two = "00000000000000a1", "00000000000000a2"

    async def tell(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(
            headers=(
                reported(
                    [one, two, "a", 0, 0, "", {"id": "x", "kind": "y"}],
                    [two, one, "b", 0, 0, "", {}],
                ),
            )
        )

    script.now = tell
    await warm.call(json={"x": 1}, headers=SAMPLED)
    assert {"a": "worker", "b": "a"}.items() <= tree(warm.traces[0]).items()


async def test_a_worker_that_talks_nonsense_costs_its_own_spans_only(
    warm: Edge, script: Script
) -> None:
    async def tell(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(headers=("pilotlight-spans: nonsense",))

    script.now = tell
    assert (await warm.call(json={"x": 1}, headers=SAMPLED)).status_code == 200
    assert "exec" in spans(warm.traces[0])
    assert "worker" not in spans(warm.traces[0])


async def test_a_stream_tells_its_first_byte(warm: Edge, script: Script) -> None:
    async def two() -> Any:
        yield b"1\n"
        yield b"2\n"

    async def stream(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=two(), content_type="application/x-ndjson")

    script.now = stream
    await warm.call(json={"x": 1}, headers=SAMPLED)
    await until(lambda: len(warm.traces) == 1)
    root = warm.traces[0]["spans"][0]
    assert 0 < root["attributes"]["pilotlight.first_byte_ms"] <= root["ms"]


async def test_a_caller_that_leaves_is_no_error(warm: Edge, script: Script) -> None:
    async def never(request: WorkerRequest) -> WorkerAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    script.now = never
    call = asyncio.create_task(warm.call(json={"x": 1}))
    await until(lambda: len(received(warm)) == 2)
    call.cancel()
    await until(lambda: all(s.throttler.in_flight == 0 for s in warm.scaler.revisions.values()))
    assert warm.traces == []


# -- raw HTTP --------------------------------------------------------------------------------------
@pytest.fixture(name="web")
async def _web(edge: Edge, patient: Objectives) -> Edge:
    """A web application with an instance, and no trace yet."""
    edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI, objectives=patient)))
    await raw(edge)
    edge.traces.clear()
    return edge


async def raw(edge: Edge, **headers: str) -> httpx.Response:
    return await edge.client.get(
        f"{edge.url}/fn/shop/site/page", headers={"authorization": f"Bearer {KEY}", **headers}
    )


async def test_a_raw_request_has_a_trace_and_its_function_our_span_as_parent(
    web: Edge, script: Script
) -> None:
    async def tell(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(headers=(reported(["00000000000000a1", "", "render", 0, 0, "", {}]),))

    script.now = tell
    answer = await raw(web, **SAMPLED, tracestate="a=1")
    assert "pilotlight-spans" not in answer.headers
    (trace,) = web.traces
    assert {"worker": "exec", "render": "worker", "exec": "GET /fn/shop/site"}.items() <= tree(
        trace
    ).items()
    told = received(web)[-1]
    assert parse_traceparent(told["traceparent"].encode()) == (
        TRACE,
        attempt_span_id(trace["call"]),
        True,
    )
    assert told["tracestate"] == "a=1"


async def test_a_broken_context_of_a_raw_request_does_not_reach_the_function(web: Edge) -> None:
    assert (await raw(web, traceparent="nonsense", tracestate="a=1")).status_code == 200
    assert not {"traceparent", "tracestate"} & received(web)[-1].keys()
    assert web.traces == []


async def test_a_stranger_to_a_public_function_keeps_no_trace_of_its_owner(
    edge: Edge, patient: Objectives
) -> None:
    edge.add_tenant("acme")
    edge.add(route_of(spec_of(objectives=patient, access=("*",))))
    await edge.call(json={"x": 0})
    edge.traces.clear()
    answer = await edge.client.post(
        f"{edge.url}/t/acme/v1/functions/shop/hello:invoke", json={"x": 1}, headers=SAMPLED
    )
    assert answer.status_code == 200, answer.text
    assert edge.traces == []
    parent = parse_traceparent(received(edge)[-1]["traceparent"].encode())
    assert parent is not None
    assert (parent.trace_id, parent.is_sampled) == (TRACE, False)


async def test_a_raw_request_that_fails_is_kept(web: Edge, script: Script) -> None:
    script.now = failing
    await raw(web)
    assert [(trace["kept_for"], trace["status"]) for trace in web.traces] == [("error", 500)]


# -- calls that nobody waits for -------------------------------------------------------------------
async def submitted(edge: Edge, **headers: str) -> str:
    answer = await edge.call("shop/hello:submit", json={"x": 1}, headers=headers)
    assert answer.status_code == 202
    return str(answer.json()["id"])


async def test_a_submitted_call_stays_in_its_callers_trace(warm: Edge) -> None:
    call_id = await submitted(warm, **SAMPLED)
    await until(lambda: len(warm.traces) == 1)
    (trace,) = warm.traces
    assert (trace["id"], trace["call"], trace["kept_for"]) == (TRACE, call_id, "asked")
    root = trace["spans"][0]
    assert (root["name"], root["kind"], root["parent"]) == ("shop/hello", "consumer", SPAN)
    assert root["attributes"]["faas.trigger"] == "pubsub"
    assert parse_traceparent(received(warm)[-1]["traceparent"].encode()) == (
        TRACE,
        attempt_span_id(call_id),
        True,
    )


async def test_attempts_of_a_submitted_call_are_spans_of_one_trace(
    edge: Edge, script: Script, patient: Objectives
) -> None:
    retries = RetryPolicy(max_retries=1, initial_delay_s=0.001)
    edge.add(route_of(spec_of(objectives=patient, retries=retries)))
    await edge.call(json={"x": 0})
    edge.traces.clear()

    async def fail_once(request: WorkerRequest) -> WorkerAnswer:
        script.now = echo
        return await failing(request)

    script.now = fail_once
    await submitted(edge, **SAMPLED)
    await until(lambda: len(edge.traces) == 1)
    found = spans(edge.traces[0])
    assert (found["attempt 1"]["error"], found["attempt 2"]["error"]) == ("500", "")
    assert edge.traces[0]["status"] == 200


async def test_a_call_keeps_its_trace_over_a_restart() -> None:
    trace = Trace(TRACE, SPAN, state=b"a=1", kept_for=ASKED)
    again = Trace.from_json(json.loads(json.dumps(trace.to_json())))
    assert [getattr(again, name) for name in Trace.__slots__] == [
        getattr(trace, name) for name in Trace.__slots__
    ]


async def test_a_retry_while_the_caller_waits_is_an_attempt_of_the_same_trace(
    edge: Edge, script: Script, patient: Objectives
) -> None:
    retries = RetryPolicy(max_retries=1, initial_delay_s=0.001)
    edge.add(route_of(spec_of(objectives=patient, retries=retries)))
    for _ in range(20):  # callers earn their retries by calls
        await edge.call(json={"x": 0})
    edge.traces.clear()

    async def fail_once(request: WorkerRequest) -> WorkerAnswer:
        script.now = echo
        return await failing(request)

    script.now = fail_once
    answer = await edge.call(json={"x": 1}, headers=SAMPLED)
    assert answer.status_code == 200
    (trace,) = edge.traces
    assert {"attempt 1", "attempt 2"} <= spans(trace).keys()
