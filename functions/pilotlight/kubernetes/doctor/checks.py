"""Runs all checks, in the order of repair."""

from __future__ import annotations

from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.doctor import gpus, knative, knative_config, platform
from pilotlight.kubernetes.doctor.facts import Facts, gather
from pilotlight.kubernetes.doctor.findings import BROKEN, Finding
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.rbac import Role
from pilotlight.kubernetes.settings import ClusterSettings


def run_checks(facts: Facts, settings: ClusterSettings) -> list[Finding]:
    """Evaluate the facts. Pure."""
    found = [Finding(what="API server", state="ok", detail=facts.host)]
    for check in (knative.check, knative_config.check, gpus.check, platform.check):
        found += check(facts, settings)
    return found


async def examine_cluster(settings: ClusterSettings, *, role: Role) -> list[Finding]:
    """Check a cluster. An unreachable one is a finding, too."""
    try:
        async with await Cluster.connect(settings) as cluster:
            return run_checks(await gather(cluster, role=role), settings)
    except ClusterError as error:
        return [
            Finding(
                what="API server",
                state=BROKEN,
                detail=str(error),
                way_out="Check cluster.kubeconfig and cluster.context.",
            )
        ]
