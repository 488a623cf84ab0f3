"""Numbers of Knative's autoscaler: knative/serving pkg/reconciler/autoscaling/{resources,kpa}
(Apache-2.0), restated."""

from __future__ import annotations

import math

UNLIMITED_BURST = -1
"""Target burst capacity that always keeps the activator in the request path, as on this
platform."""
MIN_ACTIVATORS = 2


def panic_window_s(stable_window_s: float, percentage: float) -> int:
    """Length of the panic window: a share of the stable one, rounded half up to whole seconds, at
    least 1."""
    return max(1, math.floor(stable_window_s * percentage / 100 + 0.5))
