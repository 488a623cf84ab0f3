"""`QuotaStore` counts usage; `QuotaCheck` applies one set of rules to it.

A check is created once per caller and function, and used by each of its calls. Checks of the same
subject share its counters. Two stores satisfy the contract of
`tests/contracts/test_quota_store.py`: one in the process, which answers at once, and one in
Redis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from activator.quotas.rules import Rules
from activator.quotas.token_bucket import Refusal


class Refused(NamedTuple):
    """The key by which refusals are counted."""

    tenant: str
    of: str
    quota: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatistics:
    """Statistics for metrics: number of counted subjects, refusals so far, and whether the store is
    reachable."""

    subjects: int
    refused: Mapping[Refused, int] = field(default_factory=dict)
    is_reachable: bool = True


class QuotaCheck(Protocol):
    """The quotas that calls of one caller to one function must pass."""

    @property
    def is_immediate(self) -> bool:
        """Whether `try_acquire_nowait` is supported."""

    def try_acquire_nowait(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Acquire all amounts, or nothing and return why. Only where `is_immediate`."""

    async def try_acquire(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """The same, with a round trip where needed. Raises Unavailable. If cancelled, it has
        acquired nothing."""

    def refund(self, requests: int, holds: int, tokens: int) -> None:
        """Refund what was acquired. Never waits."""

    def charge(self, requests: int) -> None:
        """Acquire requests that were made already, whatever is left: what is missing is owed. Never
        waits."""

    def release(self) -> None:
        """Release one concurrent call that has ended. Faster than `refund`."""

    def settle(self, reserved: int, used: int) -> None:
        """Settle reserved tokens with those used. Never waits."""

    @property
    def head(self) -> Callable[[], bytes]:
        """Returns the response header lines with the remaining quota, each ending in CRLF."""


class QuotaStore(Protocol):
    """Counts usage. Owner: the event loop."""

    def quota_check(self, rules: Rules) -> QuotaCheck | None:
        """Return the check of these rules. None when they require no counting. The limits of a
        subject's newest check apply."""

    def held(self, rule_id: str) -> int:
        """Number of running calls of a subject in this activator."""

    def statistics(self) -> QuotaStatistics:
        """Statistics for metrics."""

    async def aclose(self) -> None:
        """Release everything and close the connections."""
