"""All checks, in the order in which one would repair."""

from __future__ import annotations

from pilotlight.cluster.api import Cluster
from pilotlight.cluster.doctor import config, gpus, knative, platform
from pilotlight.cluster.doctor.facts import Facts, gather
from pilotlight.cluster.doctor.findings import BROKEN, Finding
from pilotlight.cluster.errors import ClusterError
from pilotlight.cluster.rights import Role
from pilotlight.cluster.settings import ClusterSettings


def judge(facts: Facts, settings: ClusterSettings) -> list[Finding]:
    """What the facts mean. Pure."""
    found = [Finding(what="API server", state="ok", detail=facts.host)]
    for check in (knative.check, config.check, gpus.check, platform.check):
        found += check(facts, settings)
    return found


async def examine(settings: ClusterSettings, *, role: Role) -> list[Finding]:
    """Look at a cluster. One that cannot be asked is a finding, too."""
    try:
        async with await Cluster.connect(settings) as cluster:
            return judge(await gather(cluster, role=role), settings)
    except ClusterError as error:
        return [
            Finding(
                what="API server",
                state=BROKEN,
                detail=str(error),
                way_out="Check cluster.kubeconfig and cluster.context.",
            )
        ]
