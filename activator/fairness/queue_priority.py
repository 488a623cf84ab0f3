"""A call's priority in the queue: its priority class, its tenant, and the limits on waiting calls
that apply to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pilotlight.spec.identifiers import Priority


class QueueBound(NamedTuple):
    """A `queued` quota: at most `limit` calls of `subject` wait.

    Attributes:
        of: `tenant`, `key` or `function`: whose quota it is, for the caller's error.
        subject: id of the tenant, key or function; unique together with `of`.
        limit: calls, 0 or more."""

    of: str
    subject: str
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePriority:
    """Determines when a call is served, and whether it is shed for another.

    Attributes:
        priority: the call's priority, already limited by its tenant's plan.
        tenant: id of the calling tenant; calls of one tenant share one turn.
        weight: the tenant's share under contention, 1 or more (`Plan.weight`).
        queued: every `queued` quota that counts the call; empty where there is none.
        cost: what it needs: 1 for a call, and for a language model's call the tokens that it
            reserved. Calls that wait for the same slots have costs of one kind."""

    priority: Priority
    tenant: str
    weight: int
    queued: tuple[QueueBound, ...] = ()
    cost: float = 1.0


DEFAULT_RANK = QueuePriority(priority=Priority.STANDARD, tenant="", weight=1)
"""Priority of calls without any settings, such as the platform's own warm-ups."""
