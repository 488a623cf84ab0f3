"""What the controller counts of money, with a bounded number of series."""

from __future__ import annotations

from pilotlight.controller.server.metrics import OTHER, SERIES, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """One sample, None when it is not there."""
    return metrics.registry.get_sample_value(name, labels)


def test_spend_is_counted_by_tenant_and_currency() -> None:
    metrics = Metrics()

    metrics.record_spend("t-1", "USD", 1_500_000_000_000)
    metrics.record_spend("t-1", "USD", 500_000_000_000)

    assert value(metrics, "pilotlight_controller_spend_total", tenant="t-1", currency="USD") == 2


def test_a_correction_downwards_does_not_break_the_counter() -> None:
    metrics = Metrics()

    metrics.record_spend("t-1", "USD", -1)

    assert value(metrics, "pilotlight_controller_spend_total", tenant="t-1", currency="USD") == 0


def test_tenants_beyond_the_bound_are_summed() -> None:
    metrics = Metrics()

    for i in range(SERIES + 5):
        metrics.record_spend(f"t-{i}", "USD", 10**12)

    assert value(metrics, "pilotlight_controller_spend_total", tenant=OTHER, currency="USD") == 5


def test_a_budget_has_its_share_until_it_is_deleted() -> None:
    metrics = Metrics()

    metrics.set_budget_used("t-1", "b-1", 0.5)
    metrics.set_budget_used("t-1", "b-1", 0.8)
    assert (
        value(metrics, "pilotlight_controller_budget_used_ratio", tenant="t-1", budget="b-1") == 0.8
    )

    metrics.remove_budget("t-1", "b-1")
    metrics.remove_budget("t-1", "b-1")
    assert (
        value(metrics, "pilotlight_controller_budget_used_ratio", tenant="t-1", budget="b-1")
        is None
    )


def test_budgets_beyond_the_bound_are_left_out() -> None:
    metrics = Metrics()

    for i in range(SERIES + 1):
        metrics.set_budget_used("t-1", f"b-{i}", 1.0)

    assert (
        value(
            metrics, "pilotlight_controller_budget_used_ratio", tenant="t-1", budget=f"b-{SERIES}"
        )
        is None
    )
