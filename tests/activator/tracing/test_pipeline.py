"""What one activator has for traces, put together: both ways out, and what Prometheus is told of
them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from activator.tracing.pipeline import TracePipeline
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import new_call_id
from tests.fakes.calls import call_of
from tests.fakes.routes import spec_of, target_of


@pytest.mark.slow  # waits until traces are given up
async def test_a_kept_trace_goes_both_ways_and_what_is_lost_on_either_is_counted(
    short_tmp: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    desk = TracePipeline(
        share=0.0,
        controller=Endpoint.at(short_tmp / "none.sock"),
        token="t",
        activator="a-0",
        endpoint=nobody,
        exemplars=None,
    )
    registry = CollectorRegistry()
    desk.collect(registry)
    call = call_of(target_of(spec_of()), b"", id=new_call_id())
    desk.tracer.failed(call, "unavailable", 503)
    assert registry.get_sample_value("pilotlight_traces_kept_total", {"reason": "error"}) == 1

    await desk.aclose()

    lost = {
        where: registry.get_sample_value("pilotlight_traces_dropped_total", {"where": where})
        for where in ("rate", "controller")
    }
    assert lost == {"rate": 0, "controller": 1}
    assert registry.get_sample_value("pilotlight_traces_dropped_total", {"where": "collector"}) == 1
