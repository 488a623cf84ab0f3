"""Latency histograms point to traces that were kept, for whoever asks for OpenMetrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from activator.metrics.metrics import Metrics
from tests.activator.metrics.test_metrics import target

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def exemplars(metrics: Metrics) -> list[tuple[str, str, Any]]:
    """Name, bound and exemplar of every sample that has one, as a scraper reads them."""
    text = generate_openmetrics(metrics.registry).decode()  # type: ignore[no-untyped-call]  # ships none
    families = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # the same
    return [
        (s.name, s.labels["le"], s.exemplar)
        for family in families
        for s in family.samples
        if s.exemplar is not None
    ]


def test_the_bucket_of_a_kept_call_names_its_trace() -> None:
    metrics = Metrics()
    metrics.answered_warm(target(1), 200, exec_s=0.03, queued_s=0.0)
    metrics.exemplify(target(1), exec_s=0.03, queued_s=0.0, trace_id=TRACE, at=1_800_000_000.5)
    found = {name: (bound, exemplar) for name, bound, exemplar in exemplars(metrics)}
    bound, exemplar = found["pilotlight_execution_seconds_bucket"]
    assert (bound, exemplar.labels, exemplar.value, float(exemplar.timestamp)) == (
        "0.05",
        {"trace_id": TRACE},
        0.03,
        1_800_000_000.5,
    )
    assert found["pilotlight_queue_wait_seconds_bucket"][0] == "0.001"


def test_the_last_one_of_a_bucket_stays() -> None:
    metrics = Metrics()
    for trace_id in ("a" * 32, "b" * 32):
        metrics.exemplify(target(1), exec_s=9999.0, queued_s=0.0, trace_id=trace_id, at=1.0)
    assert [
        (bound, e.labels["trace_id"])
        for name, bound, e in exemplars(metrics)
        if "execution" in name
    ] == [("+Inf", "b" * 32)]


def test_the_plain_text_has_none() -> None:
    metrics = Metrics()
    metrics.exemplify(target(1), exec_s=0.03, queued_s=0.0, trace_id=TRACE, at=1.0)
    assert TRACE not in generate_latest(metrics.registry).decode()
