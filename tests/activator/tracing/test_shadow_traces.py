"""The copy of a call has a trace of its own, linked to the call's, and takes no room from its
tenant's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from activator.calls.trace_context import ERROR
from activator.settings import ActivatorSettings
from pilotlight.core.tracing.trace_context import parse_traceparent, root_span_id
from pilotlight.spec.observations import SHADOW_ARM
from tests.activator.conftest import Edge
from tests.activator.gateway.test_shadow_traffic import V2, World
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(traces_sampled=0.0)


@pytest.fixture(name="world")
async def _world(edge: Edge, script: Script) -> AsyncIterator[World]:
    world = World(edge, script, tracer=edge.tracer)
    world.deploy()
    await world.call()
    await world.ready()
    edge.traces.clear()
    yield world
    await world.shadows.aclose()


async def test_the_copy_of_a_call_whose_trace_is_kept_is_kept_and_linked(world: World) -> None:
    await world.call(headers=SAMPLED)
    await until(lambda: any(trace["kept_for"] == "shadow" for trace in world.edge.traces))
    original = next(trace for trace in world.edge.traces if trace["id"] == TRACE)
    (copy,) = (trace for trace in world.edge.traces if trace["kept_for"] == "shadow")
    assert copy["id"] != TRACE
    assert copy["revision"] == V2
    root = copy["spans"][0]
    assert root["links"] == [f"{TRACE}-{root_span_id(original['call'])}"]
    assert root["attributes"]["pilotlight.arm"] == SHADOW_ARM
    parent = parse_traceparent(world.copies[0].headers["traceparent"].encode())
    assert parent is not None
    assert (parent.trace_id, parent.is_sampled) == (copy["id"], True)


async def test_copies_of_others_are_not_kept_even_if_they_fail(world: World) -> None:
    async def fail_copies(request: WorkerRequest) -> WorkerAnswer:
        is_copy = request.headers.get("pilotlight-arm") == SHADOW_ARM
        return WorkerAnswer(status=500 if is_copy else 200)

    world.script.now = fail_copies
    await world.call()
    await world.quiet()
    assert world.seen.statuses == [500]
    assert ERROR not in [trace["kept_for"] for trace in world.edge.traces]
