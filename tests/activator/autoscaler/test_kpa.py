"""Our decider core agrees with Knative's own expectations, row for row."""

from __future__ import annotations

from typing import Any

import pytest

from activator.autoscaler import kpa
from activator.autoscaler.windows import MaxWindow, TimeWindow
from benchmarks.autoscaling import knative_bounds
from tests.activator.autoscaler import kpa_table as table

EBC_TOLERANCE = 1


def spec_of(changes: dict[str, Any]) -> kpa.KpaSpec:
    return kpa.KpaSpec(**{**table.DECISION_DEFAULTS, **changes})


@pytest.mark.parametrize(
    "spec, start_ready, before, initial, ticks",
    [row[1:] for row in table.DECISION],
    ids=[row[0] for row in table.DECISION],
)
def test_decision_agrees_tick_by_tick(
    spec: dict[str, Any],
    start_ready: int,
    before: dict[str, Any] | None,
    initial: dict[str, Any] | None,
    ticks: list[dict[str, Any]],
) -> None:
    core = spec_of(spec)
    state = kpa.initial_state(0.0, spec=core, ready=start_ready)
    if initial is not None:
        assert {
            "in_panic": state.panic_at is not None,
            "max_panic_pods": state.max_panic,
        } == initial
    if before is not None:
        state = kpa.KpaState(
            panic_at=before["panic_time"], max_panic=before["max_panic_pods"], delay=state.delay
        )
    for tick in ticks:
        decision, state = kpa.step(
            tick["t"],
            kpa.KpaLoad(stable=tick.get("stable"), panic=tick.get("panic"), ready=tick["ready"]),
            core,
            state,
        )
        assert_tick(decision, state, tick)


def assert_tick(decision: kpa.KpaDecision, state: kpa.KpaState, tick: dict[str, Any]) -> None:
    assert decision.valid is tick.get("valid", True)
    if decision.valid:
        assert decision.desired == tick["desired"]
    if "ebc" in tick:
        assert abs(decision.excess_burst_capacity - tick["ebc"]) <= EBC_TOLERANCE
    if "in_panic" in tick:
        assert decision.in_panic is tick["in_panic"]
    if "panic_time" in tick:
        assert state.panic_at == tick["panic_time"]


@pytest.mark.parametrize("stable_s, percentage, want_s", table.PANIC_WINDOW)
def test_panic_window_agrees(stable_s: float, percentage: float, want_s: int) -> None:
    assert kpa.panic_window_s(stable_s, percentage) == want_s


@pytest.mark.parametrize(
    "window_s, granularity_s, steps",
    [row[1:] for row in table.BUCKETS],
    ids=[row[0] for row in table.BUCKETS],
)
def test_linear_window_agrees(
    window_s: int, granularity_s: int, steps: list[tuple[str, float, float]]
) -> None:
    window = TimeWindow(window_s, granularity_s=granularity_s)
    for operation, at, value in steps:
        if operation == "rec":
            window.record(at, value)
        else:
            found = window.average(at) if operation == "avg" else window.total(at)
            assert found == pytest.approx(value), (operation, at)


@pytest.mark.parametrize(
    "values, indexes, want",
    [row[1:] for row in table.MAXIMUM],
    ids=[row[0] for row in table.MAXIMUM],
)
def test_max_window_agrees(values: list[int], indexes: list[int], want: list[int]) -> None:
    window, seen = MaxWindow(size=5), []
    for index, value in zip(indexes, values, strict=True):
        window = window.record(index, value)
        seen.append(window.current)
    assert seen == want


def bounds_of(case: dict[str, Any]) -> knative_bounds.BoundsSpec:
    defaults = table.ZERO_DEFAULTS
    return knative_bounds.BoundsSpec(
        min_instances=case.get("min", 0),
        max_instances=case.get("max", 0),
        initial_scale=case.get("initial", 0),
        stable_window_s=case.get("window_s", defaults["stable_window_s"]),
        grace_s=defaults["grace_s"],
        retention_s=case.get("retention_cfg_s", defaults["retention_s"]),
        progress_deadline_s=defaults["progress_deadline_s"],
        scale_to_zero=case.get("enable_scale_to_zero", defaults["enable_scale_to_zero"]),
        always_proxied=case.get("tbc", defaults["tbc"]) == -1,
        reachable=case.get("reach") != "Unreachable",
    )


@pytest.mark.parametrize("case", table.ZERO, ids=[case["id"] for case in table.ZERO])
def test_way_to_zero_agrees(case: dict[str, Any]) -> None:
    standing = knative_bounds.RevisionStatus(
        instances=case["start_replicas"],
        activity=knative_bounds.Activity(case.get("state", "active")),
        for_s=case.get("for_s", 0),
        proxied_s=case.get("proxy_for_s"),
        is_probe_ok={"false": False, "must-not-be-called": None}.get(case.get("probe", ""), True),
        is_initialised="initial" not in case,
    )
    bounded = knative_bounds.bound(case["scale_to"], spec=bounds_of(case), standing=standing)
    assert (bounded.desired, bounded.is_applied) == (case["want_desired"], case["want_applied"])
    if "want_requeues" in case:
        assert (bounded.look_again_s is not None) == bool(case["want_requeues"])
        assert bounded.needs_probe == bool(case["want_async_probes"])
