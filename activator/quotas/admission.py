"""What an admitted call holds of its quotas: a place among those that run at once, and the tokens
that it reserved.

An admission is taken once for a call and released once, by whatever path it ends; a further attempt
of the same call takes another request, so that a retry costs what a call costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from activator.quotas.store import QuotaCheck
from pilotlight import errors


class Admission:
    """Made by `admit`, or for the warm path by `FastPath`. Owner: the call.

    Attributes:
        head: makes the header lines that tell the caller what is left, each ending in CRLF.
    """

    __slots__ = ("_holds", "_requests", "_tokens", "gate", "head")

    def __init__(
        self, gate: QuotaCheck, *, requests: int = 1, holds: int = 1, tokens: int = 0
    ) -> None:
        """What was taken from `gate` already."""
        self.gate = gate
        self.head: Callable[[], bytes] = gate.head
        self._requests = requests
        self._holds = holds
        self._tokens = tokens

    def __repr__(self) -> str:
        return f"<Admission {self._requests} requests, {self._holds} held, {self._tokens} tokens>"

    async def again(self) -> None:
        """One more attempt. Raises OverQuota, Unavailable."""
        await self._take(1, 0)
        self._requests += 1

    async def hold(self) -> None:
        """Begin to count among those that run at once, after an admission that did not. Raises
        OverQuota, Unavailable."""
        if not self._holds:
            await self._take(0, 1)
            self._holds = 1

    async def _take(self, requests: int, holds: int) -> None:
        refusal = await self.gate.take(requests, holds, 0)
        if refusal is not None:
            raise refusal.error()

    def settle_tokens(self, used: int) -> None:
        """Tokens that the call really used, in and out; once, at its end."""
        self.gate.settle(self._tokens, used)
        self._tokens = 0

    def release(self) -> None:
        """The call has ended. Again: nothing."""
        if self._holds:
            self._holds = 0
            self.gate.leave()

    def withdraw(self) -> None:
        """The call is not made after all: everything goes back."""
        self.gate.give_back(self._requests, self._holds, self._tokens)
        self._requests = self._holds = self._tokens = 0


async def admit(gate: QuotaCheck | None, *, holds: int = 1, tokens: int = 0) -> Admission | None:
    """Let one call in; None where nothing is counted. Raises OverQuota with the time to wait,
    Unavailable."""
    if gate is None:
        return None
    refusal = (
        gate.take_nowait(1, holds, tokens)
        if gate.is_immediate
        else await gate.take(1, holds, tokens)
    )
    if refusal is not None:
        raise refusal.error()
    return Admission(gate, requests=1, holds=holds, tokens=tokens)


@asynccontextmanager
async def counted(gate: QuotaCheck | None, *, holds: int = 1) -> AsyncIterator[None]:
    """Count a request while its body is read; afterwards everything goes back, and the request is
    admitted as what it turned out to be.

    A request that is refused for what it is stays counted. Raises OverQuota with the time to wait,
    Unavailable."""
    admission = await admit(gate, holds=holds)
    if admission is None:
        yield
        return
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


def is_callers_own(error: errors.PilotlightError) -> bool:
    """Whether a request that ended so costs what a request costs: it was wrong, and reading it was
    work. 429 and 499 say otherwise."""
    return 400 <= error.status < 500 and error.status not in (429, 499)
