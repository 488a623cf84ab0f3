"""Autoscaling annotations of a revision, from the function's scaling settings. Keys:
knative/serving pkg/apis/autoscaling.

`kpa.autoscaling.knative.dev` uses the queue-proxies' reports. Its target burst capacity is 0: with
-1 only Knative's own activators would be counted, which calls do not pass. Its target utilization
is 100 %: activators never send an instance more than `max_inputs`, and 70 % of 1 would keep two
instances for one call; waiting calls appear as wakes, which Knative's activator counts
(activator/knative).

The last instance ends after the stable window and the retention period, others after the window and
the scale-down delay: the part of `scaledown_window_s` that exceeds the window is added to both, up
to Knative's limits (one hour each). Spare instances (`buffer_instances`) are a `min-scale` that the
controller raises while there is traffic (controller/kubernetes/buffer_floors.py). Knative has no
idle-time prediction, so that a deploy with `waiting_cost` is refused; revisions from before are
kept for Knative's default of one minute."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling

KPA = "kpa.autoscaling.knative.dev"
PILOTLIGHT = "pilotlight.dev"
_AUTOSCALING = "autoscaling.knative.dev"
CLASS = f"{_AUTOSCALING}/class"
MIN_SCALE = f"{_AUTOSCALING}/min-scale"
_MIN_WINDOW_S, _WINDOW_S, _MAX_DELAY_S = 6, 60, 3600
MAX_CONCURRENCY = 1000
"""config-defaults, container-concurrency-max-limit: a function with more has no limit in Knative;
activators enforce `max_inputs`."""
_PROGRESS_MARGIN_S = 60
"""Time to pull the image, which the startup clock does not include."""


def annotations_of(spec: FunctionSpec, settings: ClusterSettings) -> dict[str, str]:
    """Annotations of a revision's template."""
    scaling = spec.scaling
    common = {
        "min-scale": str(scaling.min_instances),
        "max-scale": str(scaling.max_instances),
        "initial-scale": "0",
    }
    of_class = _of_class(scaling, settings)
    deadline_s = math.ceil(spec.clocks.startup_s) + _PROGRESS_MARGIN_S
    return {
        **{f"{_AUTOSCALING}/{key}": value for key, value in {**of_class, **common}.items()},
        "serving.knative.dev/progress-deadline": f"{deadline_s}s",
        "queue.sidecar.serving.knative.dev/cpu-resource-request": "100m",
        "queue.sidecar.serving.knative.dev/memory-resource-request": "128Mi",
    }


def class_change(
    spec: FunctionSpec, settings: ClusterSettings, live: Mapping[str, str]
) -> dict[str, str | None]:
    """Annotations of an existing revision to set, or to remove (None), so that the autoscaler of
    the settings scales it; none if it does already. `live`: the revision's annotations. Floors and
    bounds are the same under both autoscalers."""
    wanted = {
        f"{_AUTOSCALING}/{key}": value for key, value in _of_class(spec.scaling, settings).items()
    }
    if live.get(CLASS) == wanted[CLASS]:
        return {}
    kpa = {f"{_AUTOSCALING}/{key}" for key in _kpa(spec.scaling)}
    if not settings.uses_kpa and not spec.scaling.schedules:
        wanted[MIN_SCALE] = str(spec.scaling.min_instances)  # without spare instances
    return {**dict.fromkeys(sorted(kpa & live.keys() - wanted.keys())), **wanted}


def concurrency(spec: FunctionSpec) -> int:
    """`containerConcurrency`, the queue-proxy's limit; 0 for none."""
    return spec.scaling.max_inputs if spec.scaling.max_inputs <= MAX_CONCURRENCY else 0


def _of_class(scaling: Scaling, settings: ClusterSettings) -> dict[str, str]:
    return {"class": KPA, **_kpa(scaling)} if settings.uses_kpa else {"class": PILOTLIGHT}


def _kpa(scaling: Scaling) -> dict[str, str]:
    idle_s = _WINDOW_S if scaling.waiting_cost is not None else math.ceil(scaling.window_s)
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
