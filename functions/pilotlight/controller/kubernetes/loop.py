"""The controller's task in a cluster. A module of its own, so that a platform of one machine never
loads the client of Kubernetes."""

from __future__ import annotations

from pilotlight.controller.context import Context


async def run(context: Context) -> None:
    """Until cancelled; nothing to do where the fleet is local."""
    if context.config.platform.fleet == "knative":
        from pilotlight.controller.kubernetes import leader_election

        await leader_election.run_leader_election(context)
