"""`QuotaStore`: where what was used is kept; and `Gate`, one set of rules in it.

A gate is made once for a way (a caller at a function) and passed by each of its calls. Gates of the
same subject count together, whatever else they look at. Two stores keep the contract of
`tests/contracts/test_quota_store.py`: in the process, which answers at once, and Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from activator.quotas.decision import Refusal
from activator.quotas.rules import Rules


class Refused(NamedTuple):
    """What refusals are counted by."""

    tenant: str
    of: str
    quota: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatistics:
    """For metrics: subjects that are counted now, refusals so far, and whether the store
    answers."""

    subjects: int
    refused: Mapping[Refused, int] = field(default_factory=dict)
    is_reachable: bool = True


class QuotaCheck(Protocol):
    """What calls of one way have to pass."""

    @property
    def is_immediate(self) -> bool:
        """Whether `take_nowait` may be used."""
        ...

    def take_nowait(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Take all of it, or nothing and say why. Only where `is_immediate`."""
        ...

    async def take(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """The same, also where it takes a round trip. Raises Unavailable. Cancelled, it has taken
        nothing."""
        ...

    def give_back(self, requests: int, holds: int, tokens: int) -> None:
        """Put back what was taken. Never waits."""
        ...

    def leave(self) -> None:
        """One call that was held has ended: `give_back` of that, quickly."""
        ...

    def settle(self, reserved: int, used: int) -> None:
        """Correct tokens that were reserved to those that were used. Never waits."""
        ...

    @property
    def head(self) -> Callable[[], bytes]:
        """Makes the header lines that tell the caller what is left, each ending in CRLF."""
        ...


class QuotaStore(Protocol):
    """Keeps what was used. Owner: the event loop."""

    def gate(self, rules: Rules) -> QuotaCheck | None:
        """The gate of these rules; None where they leave nothing to count. The bounds of the newest
        gate of a subject are in force."""
        ...

    def held(self, rule_id: str) -> int:
        """Calls of a subject that run in this activator."""
        ...

    def statistics(self) -> QuotaStatistics:
        """For metrics."""
        ...

    async def aclose(self) -> None:
        """Give back what is held, and close connections."""
        ...
