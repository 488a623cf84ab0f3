"""Reports of refusals: kept while the controller does not answer, within bounds, and never with a
text."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.guards.refusals import BATCH, MAX_KEPT, MAX_OF_TENANT, OTHER, RefusalReporter
from activator.http.payloads import JSON, Payload
from activator.metrics.call_counters import LabelLimiter
from activator.metrics.llm import LlmMetrics
from activator.routing.call_target import CallTarget
from pilotlight.spec.pricing import Rates
from tests.activator.llm.openai.conftest import llm
from tests.fakes.routes import TENANT, route_of


def target_of_tenant(tenant: str) -> CallTarget:
    route = route_of(llm(), tenant=tenant)
    return CallTarget(route, route.traffic[0][0], Rates(version="test"))


TARGET = target_of_tenant(TENANT)


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


def call(key: str = "k-1", target: CallTarget = TARGET) -> Call:
    return Call(
        id=f"req-{key}",
        target=target,
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
    targets = [target_of_tenant(f"t-{number}") for number in range(MAX_KEPT // 20 + 3)]
    for number in range(MAX_KEPT + 50):
        found.record_refusal(call(target=targets[number // 20]), "output", f"rule-{number}")
    found.record_refusal(call(target=target_of_tenant("t-1")), "output", "rule-21")
    assert await found.flush()
    assert max(map(len, sink.reports)) == BATCH
    entries = [entry for report in sink.reports for entry in report]
    rest = [entry for entry in entries if entry["rule"] == OTHER]
    assert len(entries) - len(rest) == MAX_KEPT
    assert sum(entry["calls"] for entry in rest) == 50
    assert {entry["key"] for entry in rest} == {""}


async def test_rules_that_a_function_makes_up_displace_no_entries_of_other_tenants() -> None:
    sink = Sink()
    found = reporter(sink)
    for _ in range(2):
        for number in range(MAX_KEPT):
            found.record_refusal(call(), "output", f"rule-{number}")
        found.record_refusal(call(target=target_of_tenant("t-other")), "input", "email")
        sink.is_down = not sink.is_down
        await found.flush()
    entries = [entry for report in sink.reports for entry in report]
    assert [(one["rule"], one["key"]) for one in entries if one["tenant"] == "t-other"] == [
        ("email", "k-1")
    ]
    assert len(entries) == MAX_OF_TENANT + 2, "of the first tenant as many, and the rest together"
    assert sum(one["calls"] for one in entries) == 2 * MAX_KEPT + 2
