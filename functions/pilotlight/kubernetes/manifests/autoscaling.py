"""A revision's annotations for the autoscaler, from what the function says of its scaling. Keys:
knative/serving pkg/apis/autoscaling.

`kpa.autoscaling.knative.dev` counts what queue-proxies report. Its target burst capacity is 0: with
-1 only Knative's own activators would be counted, and calls do not pass them. Its utilisation is
100 %: activators never give an instance more than `max_inputs`, and 70 % of 1 would keep two
instances for one call; the calls that wait show as wakes, which Knative's activator counts
(activator/knative).

A last instance ends after the stable window and the retention period, others after the window and
the scale-down delay: what exceeds the window of `scaledown_window_s` is put into both, as far as
Knative's bounds go (one hour each). It knows nothing of pauses: what is "auto" elsewhere is
Knative's own minute here."""

from __future__ import annotations

import math

from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import FunctionSpec, Scaling

KPA = "kpa.autoscaling.knative.dev"
PILOTLIGHT = "pilotlight.dev"
_AUTOSCALING = "autoscaling.knative.dev"
_MIN_WINDOW_S, _WINDOW_S, _MAX_DELAY_S = 6, 60, 3600
MAX_CONCURRENCY = 1000
"""config-defaults, container-concurrency-max-limit: a function that takes more has no bound there;
activators keep to `max_inputs`."""
_PROGRESS_MARGIN_S = 60
"""For pulling the image, which the start's own clock does not count."""


def annotations_of(spec: FunctionSpec, settings: ClusterSettings) -> dict[str, str]:
    """Of a revision's template."""
    scaling = spec.scaling
    common = {
        "min-scale": str(scaling.min_instances),
        "max-scale": str(scaling.max_instances),
        "initial-scale": "0",
    }
    of_class = (
        {"class": KPA, **_kpa(scaling)} if settings.autoscaler == "kpa" else {"class": PILOTLIGHT}
    )
    deadline_s = math.ceil(spec.clocks.startup_s) + _PROGRESS_MARGIN_S
    return {
        **{f"{_AUTOSCALING}/{key}": value for key, value in {**of_class, **common}.items()},
        "serving.knative.dev/progress-deadline": f"{deadline_s}s",
        "queue.sidecar.serving.knative.dev/cpu-resource-request": "100m",
        "queue.sidecar.serving.knative.dev/memory-resource-request": "128Mi",
    }


def concurrency(spec: FunctionSpec) -> int:
    """`containerConcurrency`: the queue-proxy's own bound, 0 for none."""
    return spec.scaling.max_inputs if spec.scaling.max_inputs <= MAX_CONCURRENCY else 0


def _kpa(scaling: Scaling) -> dict[str, str]:
    idle_s = (
        _WINDOW_S if scaling.waiting_cost is not None else math.ceil(scaling.scaledown_window_s)
    )
    window_s = min(_WINDOW_S, max(_MIN_WINDOW_S, idle_s))
    more_s = min(_MAX_DELAY_S, max(0, idle_s - window_s))
    return {
        "metric": "concurrency",
        "target": str(scaling.target_inputs or scaling.max_inputs),
        "target-utilization-percentage": "100",
        "target-burst-capacity": "0",
        "window": f"{window_s}s",
        "panic-window-percentage": "10",
        "panic-threshold-percentage": "400",
        "scale-down-delay": f"{more_s}s",
        "scale-to-zero-pod-retention-period": f"{more_s}s",
    }
