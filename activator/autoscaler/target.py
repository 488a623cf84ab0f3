"""Derives numbers from the settings of a revision: target per instance, panic window.

Source: knative/serving pkg/reconciler/autoscaling/{resources,kpa} and pkg/autoscaler/scaling
(Apache-2.0), restated."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

MIN_TARGET = 0.01
UNLIMITED_BURST = -1
"""Target burst capacity that always keeps the activator in the request path, as on this
platform."""
MIN_ACTIVATORS = 2


class Metric(enum.StrEnum):
    """What the target counts: concurrent calls, or requests per second."""

    CONCURRENCY = "concurrency"
    RPS = "rps"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDefaults:
    """Defaults of revisions.

    Attributes:
        concurrency: target of an instance without a limit of its own.
        concurrency_utilisation, rps_utilisation: desired share of the capacity.
        rps: desired requests per second."""

    concurrency: float = 100.0
    concurrency_utilisation: float = 0.7
    rps: float = 200.0
    rps_utilisation: float = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`total`: the whole capacity of an instance; `target`: the part of it that the autoscaler aims
    at."""

    target: float
    total: float


def resolve_target(
    *,
    concurrency_limit: int = 0,
    metric: Metric = Metric.CONCURRENCY,
    target: float | None = None,
    utilisation: float | None = None,
    defaults: TargetDefaults = TargetDefaults(),
) -> Target:
    """The target of one instance. A concurrency limit of 0 means "none"; a concurrency target never
    exceeds the limit."""
    if metric is Metric.RPS:
        total, share = defaults.rps, defaults.rps_utilisation
    else:
        total, share = (
            float(concurrency_limit) or defaults.concurrency,
            defaults.concurrency_utilisation,
        )
    if target is not None:
        limited = metric is Metric.CONCURRENCY and concurrency_limit > 0
        total = min(target, float(concurrency_limit)) if limited else target
    share = share if utilisation is None else utilisation
    return Target(target=max(MIN_TARGET, total * share), total=total)


def panic_window_s(stable_window_s: float, percentage: float) -> int:
    """Length of the panic window: a share of the stable one, rounded half up to whole seconds, at
    least 1."""
    return max(1, math.floor(stable_window_s * percentage / 100 + 0.5))
