"""Which start gets a GPU where there are too few. Starts that nobody needs any more leave the line
in both ways (`fairness.asks.give_up_needless`)."""

from __future__ import annotations

from collections import Counter

from benchmarks.autoscaling.world import Pod, Scaled


class InTurn:
    """First come, first served: as Kubernetes places pods."""

    def choose(self, waiting: list[tuple[Scaled, Pod]]) -> tuple[Scaled, Pod] | None:
        """See Placement."""
        while waiting:
            scaled, pod = self._first(waiting)
            if scaled.policy.is_start_needed():
                return scaled, pod
            scaled.withdraw(pod)
        return None

    def _first(self, waiting: list[tuple[Scaled, Pod]]) -> tuple[Scaled, Pod]:
        return waiting[0]


class Shared(InTurn):
    """Of the tenant that holds least, of its function that holds least: what the deficit round
    robin of `fairness.capacity` comes to among tenants of one weight, on machines that the platform
    fills itself."""

    def _first(self, waiting: list[tuple[Scaled, Pod]]) -> tuple[Scaled, Pod]:
        held = {
            scaled.function.name: sum(pod.held_at is not None for pod in scaled.pods.values())
            for scaled in waiting[0][0].world.functions
        }
        tenants = Counter[str]()
        for scaled in waiting[0][0].world.functions:
            tenants[scaled.function.tenant] += held[scaled.function.name]
        return min(
            waiting, key=lambda ask: (tenants[ask[0].function.tenant], held[ask[0].function.name])
        )
