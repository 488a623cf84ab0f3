"""What an admitted call holds of its quotas: one of the concurrent calls, and its reserved tokens.

An admission is acquired once per call and released once, however the call ends. Each retry of the
call counts as another request, because it costs as much as a call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

from activator.quotas.rules import OPERATION_BYTES
from activator.quotas.store_protocol import QuotaCheck
from pilotlight import errors


class Admission:
    """The quota of one call, created by `admit`, or on the fast path by `FastPath`. Owner: the
    call.

    Attributes:
        head: returns the response header lines with the remaining quota, each ending in CRLF."""

    __slots__ = ("_holds", "_requests", "_tokens", "head", "quota_check")

    def __init__(
        self, quota_check: QuotaCheck, *, requests: int = 1, holds: int = 1, tokens: int = 0
    ) -> None:
        """The amounts were acquired from `quota_check` before."""
        self.quota_check = quota_check
        self.head: Callable[[], bytes] = quota_check.head
        self._requests = requests
        self._holds = holds
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"<Admission {self._requests} requests, {self._holds} held, {self._tokens} tokens>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    async def count_retry(self) -> None:
        """Count one more attempt. Raises OverQuota, Unavailable."""
        await self._acquire(1, 0)
        self._requests += 1

    async def acquire_slot(self) -> None:
        """Count as a concurrent call from now on, after an admission that did not. Raises
        OverQuota, Unavailable."""
        if not self._holds:
            await self._acquire(0, 1)
            self._holds = 1

    async def _acquire(self, requests: int, holds: int) -> None:
        refusal = await self.quota_check.try_acquire(requests, holds, 0)
        if refusal is not None:
            raise refusal.error()

    def settle_tokens(self, used: int) -> None:
        """Settle the reserved tokens with those used, in and out. Call once, at the end."""
        self.quota_check.settle(self._tokens, used)
        self._tokens = 0

    def release(self) -> None:
        """Release the concurrent call that has ended. Idempotent."""
        if self._holds:
            self._holds = 0
            self.quota_check.release()

    def withdraw(self) -> None:
        """Refund everything, because the call is not made."""
        self.quota_check.refund(self._requests, self._holds, self._tokens)
        self._requests = self._holds = self._tokens = 0


class _Uncounted(Admission):
    """The admission of a call that no quota counts: all operations do nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        self.head = bytes

    def __repr__(self) -> str:
        return "<Admission, nothing is counted>"

    async def count_retry(self) -> None:
        """Do nothing."""

    async def acquire_slot(self) -> None:
        """Do nothing."""

    def settle_tokens(self, used: int) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def withdraw(self) -> None:
        """Do nothing."""


UNCOUNTED = _Uncounted()


async def admit(quota_check: QuotaCheck | None, *, holds: int = 1, tokens: int = 0) -> Admission:
    """Admit one call; UNCOUNTED where no quota applies. Raises OverQuota with the time to wait,
    Unavailable."""
    if quota_check is None:
        return UNCOUNTED
    refusal = (
        quota_check.try_acquire_nowait(1, holds, tokens)
        if quota_check.is_immediate
        else await quota_check.try_acquire(1, holds, tokens)
    )
    if refusal is not None:
        raise refusal.error()
    return Admission(quota_check, requests=1, holds=holds, tokens=tokens)


@asynccontextmanager
async def counted(quota_check: QuotaCheck | None, *, holds: int = 1) -> AsyncIterator[None]:
    """Count a request while its body is read, then refund it, because the request is admitted again
    once its kind is known.

    A request that is refused because it is invalid stays counted. Raises OverQuota with the time to
    wait, Unavailable."""
    admission = await admit(quota_check, holds=holds)
    try:
        yield
    except errors.PilotlightError as e:
        if is_callers_own(e):
            admission.release()
        else:
            admission.withdraw()
        raise
    except BaseException:
        admission.withdraw()
        raise
    admission.withdraw()


class Operation:
    """A request to a sandbox, or about a submitted call: counted when it comes, then by the bytes
    of its body and answer (`rules.OPERATION_BYTES`), which are owed. Owner: its task."""

    __slots__ = ("_bytes", "_quota_check")

    def __init__(self, quota_check: QuotaCheck) -> None:
        self._quota_check = quota_check
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Operation {self._quota_check!r}>"

    def count_bytes(self, size: int) -> None:
        """Count bytes that the request moves."""
        count, self._bytes = divmod(self._bytes + size, OPERATION_BYTES)
        if count:
            self._quota_check.charge(count)


def is_callers_own(error: errors.PilotlightError) -> bool:
    """Whether a failed request counts against the quota: it was invalid, and reading it cost work.
    True for 4xx except 429 and 499."""
    return 400 <= error.status < 500 and error.status not in (429, 499)
