"""What one activator says of the revisions that it has something to do with: all of them in one
statement, in absolute numbers.

A revision that is missing in a statement has nothing to do there. A statement that is missing says
nothing: no data is never zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class StatementInvalid(ValueError):
    """Raised when a text is no statement, such as one of another version of the platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One revision at one activator.

    Attributes:
        concurrency: calls at once, waiting ones too, averaged over the last second.
        in_flight, waiting: calls with a slot, and without.
        asked: pods that it wants beyond those that it has.
        held: calls in flight in each pod that it has claimed, by the pod's uid.
        oldest_wait_s: age of its oldest waiting call.
        start_s, call_s: what its next start and its calls take; None = unknown.
    """

    concurrency: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    asked: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    oldest_wait_s: float = 0.0
    start_s: float | None = None
    call_s: float | None = None


Statement = Mapping[str, Load]
"""By revision key, `<function id>@<revision>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """A statement as it was found: `age_s` by the clock of whoever keeps it, so that no two
    machines' clocks are compared."""

    statement: Statement
    age_s: float


def to_text(statement: Statement) -> str:
    """As it is kept."""
    return json.dumps({key: asdict(load) for key, load in statement.items()}, separators=(",", ":"))


def from_text(text: str) -> Statement:
    """As it was meant. Raises StatementInvalid."""
    try:
        body: Any = json.loads(text)
        return {
            str(key): Load(
                **{**load, "held": {str(uid): int(n) for uid, n in load["held"].items()}}
            )
            for key, load in body.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise StatementInvalid(f"no statement of an activator: {e}") from e
