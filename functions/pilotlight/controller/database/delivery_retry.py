"""Deliveries to webhooks as rows: claiming due ones, recording attempts, and when to try again or
give up. Budget alerts and deliveries to named webhooks have the same columns for this."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Protocol, TypeVar

import sqlalchemy as sa

from pilotlight.controller.database.store import Write

GIVE_UP_AFTER_S = 3 * 86_400.0
"""A weekend and a working day. After it the undelivered messages are listed for the receiver's
owner."""
FIRST_DELAY_S, GROWTH, LONGEST_DELAY_S = 5.0, 4.0, 6 * 3600.0
JITTER = 0.2
"""Spreads retries, so that a receiver that failed for many messages does not get them all at
once."""
CLAIM_S = 60.0
"""For how long a delivery worker owns a message: longer than an attempt can take."""
AT_ONCE_OF_ONE = 8
"""Messages of one tenant per round: a tenant with slow receivers delays only its own messages,
however many it has."""
MAX_ERROR = 500


class PendingMessage(Protocol):
    """A row of either table, as a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def id(self) -> str:
        """Its id, and the webhook-id of every attempt."""

    @property
    def at(self) -> float:
        """When it was recorded, seconds since the epoch."""

    @property
    def attempts(self) -> int:
        """Number of attempts so far."""


Message = TypeVar("Message", bound=PendingMessage)


def claim(write: Write, table: sa.Table, due: Iterable[Message]) -> list[Message]:
    """Claim due messages of `table` for CLAIM_S. The attempt is counted before it is made."""
    claimed = [dataclasses.replace(one, attempts=one.attempts + 1) for one in due]
    for one in claimed:
        values = {"next_attempt_at": write.now + CLAIM_S, "attempts": one.attempts}
        write.sql.execute(sa.update(table).where(table.c.id == one.id).values(**values))
    return claimed


def record_attempt(
    write: Write,
    table: sa.Table,
    message: PendingMessage,
    *,
    error: str | None,
    retry_in_s: float | None = None,
) -> None:
    """Record the result of an attempt. `error` None: delivered. `retry_in_s` None: no further
    attempt."""
    done = {
        "delivered_at": write.now if error is None else None,
        "next_attempt_at": None if error is None or retry_in_s is None else write.now + retry_in_s,
        "error": None if error is None else error[:MAX_ERROR],
    }
    write.sql.execute(sa.update(table).where(table.c.id == message.id).values(**done))


def next_at(sql: sa.Connection, table: sa.Table) -> float | None:
    """Return when the next attempt is due (seconds since the epoch); None: nothing is pending."""
    due = table.c.next_attempt_at
    at = sql.execute(sa.select(sa.func.min(due)).where(due.is_not(None))).scalar_one()
    return None if at is None else float(at)


def retry_in_s(
    message: PendingMessage, *, now: float, chance: float, asked_s: float = 0.0
) -> float | None:
    """Return how long to wait after attempt number `message.attempts` failed; None: give up,
    GIVE_UP_AFTER_S after it was recorded.

    Args:
        chance: uniform in [0, 1), for the jitter.
        asked_s: the delay that the receiver requested (Retry-After), in seconds.
    """
    # Bounded before it becomes an exponent: three days of attempts stay far below, but the count of
    # a corrupt row may not.
    plain_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * GROWTH ** min(message.attempts - 1, 20))
    delay_s = max(plain_s * (1 - JITTER + 2 * JITTER * chance), min(asked_s, LONGEST_DELAY_S))
    return delay_s if now + delay_s <= message.at + GIVE_UP_AFTER_S else None
