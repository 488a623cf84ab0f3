"""What tests of rollouts say was seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pilotlight.controller.rollouts.records import RevisionEvidence
from pilotlight.controller.statistics.sequential_tests import Sample
from pilotlight.spec.observations import Observation, latency_bucket

CENT_PICOS = 10_000_000_000


def observed(
    calls: int,
    *,
    failed: int = 0,
    ms: float = 20.0,
    slow: int = 0,
    slow_ms: float = 60.0,
    cost: float = 1.0,
    **more: Any,
) -> Observation:
    """So many calls of a revision; `slow` of them took `slow_ms`; each cost so many cents."""
    answered = calls - failed
    warm = {
        bucket: n
        for bucket, n in ((latency_bucket(ms), answered - slow), (latency_bucket(slow_ms), slow))
        if n
    }
    values: dict[str, Any] = {
        "answered": answered,
        "failed": failed,
        "calls_billed": calls,
        "cost_picos": round(cost * CENT_PICOS) * calls,
        "latency": {"warm": warm, "exec": {latency_bucket(ms): answered}} if answered else {},
    }
    return Observation(
        tenant="t-1", function_id="f-1", revision="v1", minute=0, **{**values, **more}
    )


def evidence(
    calls: int,
    *,
    told: Mapping[str, Sample] | None = None,
    recent: Observation | None = None,
    **more: Any,
) -> RevisionEvidence:
    """The same in the step, the last minutes and the hour."""
    seen = observed(calls, **more)
    return RevisionEvidence(
        step=seen, recent=recent or seen, hour=recent or seen, feedback=told or {}
    )
