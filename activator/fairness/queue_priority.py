"""A call's place in the order: its priority, whose it is, and whose bounds on waiting calls it
counts towards. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pilotlight.types import Priority


class QueueBound(NamedTuple):
    """A `queued` quota: at most `limit` calls of `subject` wait.

    Attributes:
        of: `tenant`, `key` or `function`: whose quota it is, for the caller's error.
        subject: the tenant's, key's or function's id, told apart from others by `of`.
        limit: calls, 0 or more.
    """

    of: str
    subject: str
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePriority:
    """What decides when a call's turn comes, and whether it gives its place to another.

    Attributes:
        priority: the call's, already bounded by the plan of its tenant. tenant: id of the tenant
        that calls; calls of one tenant share one turn. weight: the tenant's share of what several
        want at once, 1 or more (`Plan.weight`). queued: every `queued` quota that the call counts
        towards; empty where none bounds it. cost: what it takes of what is handed out: 1 of a call,
        and of a language model's the tokens that it reserved. Calls that wait for
            the same slots have costs of one kind.
    """

    priority: Priority
    tenant: str
    weight: int
    queued: tuple[QueueBound, ...] = ()
    cost: float = 1.0


DEFAULT_RANK = QueuePriority(priority=Priority.STANDARD, tenant="", weight=1)
"""Of calls that nobody told anything about, the platform's own among them: a warm-up for
example."""
