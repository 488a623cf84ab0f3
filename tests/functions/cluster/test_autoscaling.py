"""What the autoscaler of a cluster is told of a function's idle time."""

from __future__ import annotations

import pytest

from pilotlight.kubernetes.manifests.autoscaling import annotations_of
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.instances.scaling import Scaling
from tests.fakes.fed_platform import spec

P = "autoscaling.knative.dev/"


@pytest.mark.parametrize(
    "scaling, told",
    [
        (Scaling(scaledown_window_s=2), ("6s", "0s", "0s")),
        (Scaling(scaledown_window_s=60), ("60s", "0s", "0s")),
        (Scaling(scaledown_window_s=300), ("60s", "240s", "240s")),
        (Scaling(scaledown_window_s=3600, waiting_cost=10.0), ("60s", "0s", "0s")),
    ],
)
def test_knatives_own_keeps_pods_for_the_functions_window_and_knows_no_pauses(
    scaling: Scaling, told: tuple[str, str, str]
) -> None:
    said = annotations_of(spec("embed", scaling=scaling), ClusterSettings())
    names = ("window", "scale-down-delay", "scale-to-zero-pod-retention-period")
    assert tuple(said[P + name] for name in names) == told


def test_ours_is_told_its_bounds_only() -> None:
    said = annotations_of(
        spec("embed", scaling=Scaling(min_instances=1, max_instances=3)),
        ClusterSettings(autoscaler="pilotlight"),
    )
    assert (said[P + "class"], said[P + "min-scale"], said[P + "max-scale"]) == (
        "pilotlight.dev",
        "1",
        "3",
    )
    assert P + "window" not in said
