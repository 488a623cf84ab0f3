"""The controller's task in a cluster. A separate module, so that a platform on one machine does not
load the Kubernetes client."""

from __future__ import annotations

from pilotlight.controller.context import Context


async def run(context: Context) -> None:
    """Run until cancelled; return at once if the fleet is local."""
    if context.config.platform.fleet == "knative":
        from pilotlight.controller.kubernetes import leader_election

        await leader_election.run_leader_election(context)
