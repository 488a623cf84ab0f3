"""Reports of refusals: kept while the controller does not answer, within bounds, and never with a
text."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.guards.refusals import BATCH, MAX_KEPT, OTHER, RefusalReporter
from activator.http.payloads import JSON, Payload
from activator.metrics.call_counters import LabelLimiter
from activator.metrics.llm import LlmMetrics
from activator.routing.call_target import CallTarget
from pilotlight.spec.pricing import Rates
from tests.activator.llm.openai.conftest import llm
from tests.fakes.routes import TENANT, route_of

ROUTE = route_of(llm())
TARGET = CallTarget(ROUTE, ROUTE.traffic[0][0], Rates(version="test"))


class Sink:
    """An audit log that can be down."""

    def __init__(self) -> None:
        self.is_down = False
        self.reports: list[list[dict[str, Any]]] = []

    async def report(self, refusals: list[dict[str, Any]]) -> None:
        """See AuditSink."""
        if self.is_down:
            raise httpx.ConnectError("no controller")
        self.reports.append(refusals)

    async def aclose(self) -> None:
        """See AuditSink."""


def call(key: str = "k-1") -> Call:
    return Call(
        id=f"req-{key}",
        target=TARGET,
        method="",
        payload=Payload(b"", JSON, JSON),
        caller=Caller(key_id=key),
    )


def reporter(sink: Sink) -> RefusalReporter:
    metrics = LlmMetrics(CollectorRegistry(), LabelLimiter(10))
    return RefusalReporter(metrics, sink, clock=lambda: 100.0)


async def test_an_entry_says_who_when_and_by_which_rule() -> None:
    sink = Sink()
    found = reporter(sink)
    found.record_refusal(call(), "input", "email")
    assert await found.flush()
    assert sink.reports == [
        [
            {
                "tenant": TENANT,
                "function": "main/shop/assistant",
                "revision": TARGET.revision,
                "key": "k-1",
                "stage": "input",
                "rule": "email",
                "call": "req-k-1",
                "calls": 1,
                "first_at": 100.0,
                "last_at": 100.0,
            }
        ]
    ]
    assert await found.flush()
    assert len(sink.reports) == 1


async def test_refusals_wait_for_the_controller_and_are_added() -> None:
    sink = Sink()
    found = reporter(sink)
    sink.is_down = True
    found.record_refusal(call(), "input", "email")
    assert not await found.flush()
    found.record_refusal(call(), "input", "email")
    assert not await found.flush()
    sink.is_down = False
    await found.aclose()
    assert [entry["calls"] for report in sink.reports for entry in report] == [2]


async def test_more_kinds_than_are_kept_are_counted_together() -> None:
    sink = Sink()
    found = reporter(sink)
    for number in range(MAX_KEPT + 50):
        found.record_refusal(call(), "output", f"rule-{number}")
    assert await found.flush()
    assert {len(report) for report in sink.reports} <= {BATCH, 1}
    entries = [entry for report in sink.reports for entry in report]
    assert len(entries) == MAX_KEPT + 1
    assert (entries[-1]["rule"], entries[-1]["calls"], entries[-1]["key"]) == (OTHER, 50, "")
