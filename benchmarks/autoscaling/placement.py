"""Which start gets a GPU where there are too few: in turn, as Kubernetes places pods; starts that nobody needs any more leave the line."""

from __future__ import annotations

from benchmarks.autoscaling.world import Pod, Scaled


class InTurn:
    """First come, first served, of those whose calls still wait: pilotlight withdraws the others (`fairness.asks.give_up_needless`)."""

    def choose(self, waiting: list[tuple[Scaled, Pod]]) -> tuple[Scaled, Pod] | None:
        """See Placement."""
        while waiting:
            scaled, pod = waiting[0]
            if len(scaled.line) > (scaled.starting - 1) * scaled.function.max_inputs:
                return waiting[0]
            scaled.withdraw(pod)
        return None

    def make_room(self, waiting: list[tuple[Scaled, Pod]]) -> None:
        """Nobody is asked to leave."""
