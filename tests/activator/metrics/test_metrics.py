"""What is counted, under which labels, and that the number of series is bounded whatever tenants
do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from activator.coordination.state import SharedStatistics
from activator.metrics.metrics import OTHER, LabelLimiter, Metrics
from pilotlight.errors import BudgetReserved, NotFound, OverBudget, OverQuota, PilotlightError, Shed
from tests.activator.conftest import Edge
from tests.fakes.routes import TENANT, change, route_of, spec_of


def target(number: int, tenant: str = "t-1") -> Any:
    """As much of a Target as is counted by."""
    return SimpleNamespace(
        function_id=f"f-{tenant}-{number}", tenant=tenant, app="app", function=f"f{number}"
    )


def samples(metrics: Metrics, name: str) -> Iterator[tuple[dict[str, str], float]]:
    """Labels and value of every sample of that name."""
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == name:
                yield sample.labels, sample.value


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample, None when it is not there."""
    return metrics.registry.get_sample_value(name, labels)


def test_functions_beyond_the_bound_are_summed() -> None:
    metrics = Metrics(series=2)

    for number in range(10):
        metrics.answered_warm(target(number), 200, exec_s=0.01)

    assert (
        value(
            metrics,
            "pilotlight_requests_total",
            tenant="t-1",
            app="app",
            function="f1",
            status="200",
        )
        == 1
    )
    assert (
        value(
            metrics,
            "pilotlight_requests_total",
            tenant=OTHER,
            app=OTHER,
            function=OTHER,
            status="200",
        )
        == 8
    )
    assert (
        value(
            metrics, "pilotlight_execution_seconds_count", tenant=OTHER, app=OTHER, function=OTHER
        )
        == 8
    )
    assert len(list(samples(metrics, "pilotlight_requests_total"))) == 3


def test_who_was_there_first_keeps_its_series() -> None:
    metrics = Metrics(series=1)
    metrics.answered_warm(target(0), 200, exec_s=0.01)
    metrics.answered_warm(target(1), 200, exec_s=0.01)

    metrics.answered_warm(target(0), 200, exec_s=0.01)

    assert (
        value(
            metrics,
            "pilotlight_requests_total",
            tenant="t-1",
            app="app",
            function="f0",
            status="200",
        )
        == 2
    )


def test_statuses_that_an_application_makes_up_are_bounded_too() -> None:
    metrics = Metrics()

    for status in range(200, 600):
        metrics.answered_warm(target(0), status, exec_s=0.01)

    found = {
        labels["status"]: count for labels, count in samples(metrics, "pilotlight_requests_total")
    }
    assert len(found) < 30
    assert sum(found.values()) == 400
    assert found["5xx"] == 100


def test_instances_of_functions_beyond_the_bound_are_summed() -> None:
    metrics = Metrics(series=1)
    metrics.collect_instances(lambda: {("t-1", "app", f"f{i}", "running"): 2 for i in range(4)})

    assert (
        value(
            metrics,
            "pilotlight_instances",
            tenant=OTHER,
            app=OTHER,
            function=OTHER,
            state="running",
        )
        == 6
    )


def test_waiting_calls_are_counted_by_tenant_and_priority() -> None:
    metrics = Metrics(series=1)
    metrics.collect_waiting(lambda: {("t-1", "batch"): 3, ("t-2", "batch"): 4, ("t-3", "batch"): 5})

    assert value(metrics, "pilotlight_waiting_calls", tenant="t-1", priority="batch") == 3
    assert value(metrics, "pilotlight_waiting_calls", tenant=OTHER, priority="batch") == 9


def test_only_tenants_with_series_of_their_own_have_their_names_told() -> None:
    metrics = Metrics(series=1)
    metrics.collect_tenants(lambda: {"t-1": "acme", "t-2": "umbrella"})

    assert [labels["name"] for labels, _ in samples(metrics, "pilotlight_tenant")] == [
        "acme",
        OTHER,
    ]


def test_allowances_beyond_the_bound_are_summed() -> None:
    metrics = Metrics(series=1)
    now = SharedStatistics(
        members=2, is_reachable=True, refused=0, allowance={"r1": 3, "r2": 4, "r3": 5}
    )
    metrics.collect_shared(lambda: now)

    assert value(metrics, "pilotlight_instance_allowance", revision="r1") == 3
    assert value(metrics, "pilotlight_instance_allowance", revision=OTHER) == 9


@pytest.mark.parametrize(
    "error, name, labels",
    [
        (
            OverQuota("", quota="requests_per_s", of="key"),
            "pilotlight_quota_refusals_total",
            {"of": "key", "quota": "requests_per_s"},
        ),
        (Shed("", priority="batch"), "pilotlight_shed_calls_total", {"priority": "batch"}),
        (OverBudget(""), "pilotlight_budget_refusals_total", {"type": "over-budget"}),
        (BudgetReserved(""), "pilotlight_budget_refusals_total", {"type": "budget-reserved"}),
    ],
)
def test_a_refusal_says_why_and_whose(
    error: PilotlightError, name: str, labels: dict[str, str]
) -> None:
    metrics = Metrics()

    metrics.count_rejected(error, "t-1")

    assert value(metrics, name, tenant="t-1", **labels) == 1
    assert value(metrics, "pilotlight_requests_refused_total", status=str(error.status)) == 1


def test_other_refusals_have_a_status_only() -> None:
    metrics = Metrics()

    metrics.count_rejected(NotFound(""), "t-1")

    assert value(metrics, "pilotlight_requests_refused_total", status="404") == 1
    assert not list(samples(metrics, "pilotlight_quota_refusals_total"))


def test_refusals_of_tenants_beyond_the_bound_are_summed() -> None:
    metrics = Metrics(series=3)

    for i in range(50):
        metrics.count_rejected(OverQuota("", quota="concurrent", of="tenant"), f"t-{i}")

    assert (
        value(
            metrics,
            "pilotlight_quota_refusals_total",
            tenant=OTHER,
            of="tenant",
            quota="concurrent",
        )
        == 47
    )


def test_waits_are_observed_by_priority_and_unbilled_calls_counted() -> None:
    metrics = Metrics()

    metrics.waited("realtime", 0.2)
    metrics.unbilled()

    assert value(metrics, "pilotlight_priority_wait_seconds_count", priority="realtime") == 1
    assert value(metrics, "pilotlight_unbilled_calls_total") == 1


def test_names_say_how_many_they_know() -> None:
    names = LabelLimiter(2)
    names.of("a")

    assert repr(names) == "<LabelLimiter 1/2>"


async def test_a_removed_function_has_no_series_after_its_last_scrape(edge: Edge) -> None:
    metrics = edge.metrics
    edge.add(route_of(spec_of()))
    edge.add(route_of(spec_of("kept")))
    for name in ("hello", "kept"):
        for _ in range(2):
            assert (await edge.call(f"shop/{name}:invoke", json={"x": 1})).status_code == 200

    def seen() -> set[str]:
        page = generate_latest(metrics.registry).decode()
        return set(re.findall(r'function="(\w+)"', page))

    assert seen() == {"hello", "kept"}
    removed = dataclasses.replace(change(9, route_of(spec_of())), value=None)
    assert edge.table.apply(removed)
    gone = metrics.delete_removed(edge.table.functions.deployed(), frozenset())
    assert (gone, seen()) == ({(TENANT, "shop", "hello")}, {"hello", "kept"})
    gone = metrics.delete_removed(edge.table.functions.deployed(), gone)
    assert (gone, seen()) == (set(), {"kept"})
    assert len(metrics.functions.names()) == 1
