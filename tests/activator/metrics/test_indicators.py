"""Prometheus is told of the same calls as the controller, for those indicators that somebody
promised."""

from __future__ import annotations

from activator.metrics.metrics import Metrics
from activator.routing.call_target import CallTarget
from pilotlight.errors import StartFailed
from pilotlight.spec.policies import Objectives
from tests.fakes.routes import spec_of, target_of


def exported(
    metrics: Metrics, target: CallTarget, sli: str = "availability"
) -> tuple[float | None, float | None, float | None]:
    labels = {"tenant": target.tenant, "app": target.app, "function": target.function, "sli": sli}
    names = (
        "pilotlight_slo_calls_total",
        "pilotlight_slo_bad_calls_total",
        "pilotlight_slo_budget",
    )
    return tuple(metrics.registry.get_sample_value(name, labels) for name in names)  # type: ignore[return-value]


def fail(metrics: Metrics, target: CallTarget) -> None:
    metrics.count_rejected(StartFailed("no"), target.tenant, target)


def test_bad_calls_are_exported_with_the_share_that_may_be() -> None:
    metrics, target = Metrics(), target_of(spec_of(objectives=Objectives(availability=0.99)))
    for _ in range(3):
        fail(metrics, target)
        metrics.observer.drain(7)
    assert exported(metrics, target) == (3, 3, 0.01)


def test_of_a_latency_that_nobody_promised_nothing_is_exported() -> None:
    metrics, target = Metrics(), target_of(spec_of())
    metrics.observer.degraded(target)
    metrics.observer.drain(7)
    assert exported(metrics, target) == (1, 0, 0.001)
    assert exported(metrics, target, "degraded") == (None, None, None)


def test_shadows_and_functions_beyond_the_bound_are_left_out() -> None:
    metrics, first, second = (
        Metrics(series=1),
        target_of(spec_of("first")),
        target_of(spec_of("second")),
    )
    metrics.observer.shadowed(first, status=500, exec_ms=1, matched=None)
    for target in (first, second):
        fail(metrics, target)
    metrics.observer.drain(7)
    assert exported(metrics, first) == (1, 1, 0.001)
    assert exported(metrics, second) == (None, None, None)
    of_others = {"tenant": "other", "app": "other", "function": "other", "sli": "availability"}
    assert metrics.registry.get_sample_value("pilotlight_slo_calls_total", of_others) is None
