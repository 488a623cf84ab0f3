"""A call's place in the order: its priority, and whose it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.types import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What decides when a call's turn comes, and whether it gives its place to another.

    Attributes:
        priority: the call's, already bounded by the plan of its tenant.
        tenant: id of the tenant that calls; calls of one tenant share one turn.
        weight: the tenant's share of what several want at once, 1 or more (`Plan.weight`).
    """

    priority: Priority
    tenant: str
    weight: int


DEFAULT_RANK = Rank(priority=Priority.STANDARD, tenant="", weight=1)
"""Of calls that nobody told anything about, the platform's own among them: a warm-up for example."""
