"""One activator's report of its revisions: all of them in one statement, in absolute numbers.

A revision that is missing in a statement has no load there. A missing statement contains no
information: no data is not zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


class StatementInvalid(ValueError):
    """Raised for a text that is not a statement, such as one of another version of the platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of one revision at one activator.

    Attributes:
        concurrency: concurrent calls including waiting ones, averaged over the last second.
        in_flight, waiting: calls with a slot, and without.
        asked: pods requested in addition to the claimed ones.
        held: calls in flight in each claimed pod of the revision's own, by the pod's uid.
        promoted: the same, in each instance in a promoted pod, by the instance's id.
        promised: starts that wait for a promoted pod or a fork in one, and for no own pod.
        oldest_wait_s: age of its oldest waiting call.
        start_s, call_s: expected duration of its next start and of its calls; None = unknown."""

    concurrency: float = 0.0
    in_flight: int = 0
    waiting: int = 0
    asked: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    promoted: Mapping[str, int] = field(default_factory=dict)
    promised: int = 0
    oldest_wait_s: float = 0.0
    start_s: float | None = None
    call_s: float | None = None


Statement = Mapping[str, Load]
"""Loads by revision key, `<function id>@<revision>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredReport:
    """A statement as it was read. `age_s` is by the store's clock, so that no two machines' clocks
    are compared."""

    statement: Statement
    age_s: float


def to_text(statement: Statement) -> str:
    """Format a statement."""
    return json.dumps({key: asdict(load) for key, load in statement.items()}, separators=(",", ":"))


def from_text(text: str) -> Statement:
    """Parse a statement. Raises StatementInvalid."""
    try:
        body: Any = json.loads(text)
        return {
            str(key): Load(
                **{
                    **load,
                    "held": _counts(load["held"]),
                    "promoted": _counts(load.get("promoted", {})),
                }
            )
            for key, load in body.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise StatementInvalid(f"not a statement of an activator: {e}") from e


def _counts(counted: Mapping[str, Any]) -> dict[str, int]:
    return {str(uid): int(number) for uid, number in counted.items()}
