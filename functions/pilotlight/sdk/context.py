"""`pilotlight.context()`: what user code may know of the call that it runs in.

It follows context variables, so it is right in `async` code and its tasks, in call threads, in
`asyncio.to_thread`, across the items of a generator and in a web application. A thread that user
code starts itself has a context of its own (before Python 3.14): run it in
`contextvars.copy_context()`, or pass what it needs."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from pilotlight.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One call.

    Attributes:
        call_id: as the caller has it in `X-Request-Id`; "" in a warm-up's example. attempt: which
        attempt of the call this is, from 1. Above 1 an earlier one may have done part of its work,
        or all of it. deadline: when the execution clock runs out, in UTC; None without a bound. Cut
        to the caller's own deadline. arm: of the experiment that the caller is in; "" for none.
        revision: of the function that runs, such as `v7-3f2a91`. function: its name. traceparent:
        W3C header for requests that this call makes, so that their spans hang below it. members: in
        the body of a `@batched` function, the ids of the calls in this batch, in the order of its
        lists; then `call_id`,
            `traceparent` are those of one of them, `attempt` is the highest, `deadline` the
            earliest, and `arm` the one that all share.
    """

    call_id: str
    attempt: int
    deadline: datetime | None
    arm: str
    revision: str
    function: str
    traceparent: str
    members: tuple[str, ...] = ()
    _ends_at: float = float("inf")

    def remaining_s(self) -> float:
        """Seconds left, 0 when none are; infinite without a bound."""
        return max(0.0, self._ends_at - time.monotonic())


class ContextProvider(Protocol):
    """A call that knows itself."""

    def context(self) -> Context:
        """What there is to know; the same each time."""
        ...


CURRENT_CALL: ContextVar[ContextProvider | None] = ContextVar(
    "pilotlight running call", default=None
)
"""Set by the worker for each call."""


def context() -> Context:
    """The call that this code runs in: its id, attempt, deadline, arm, revision. Raises
    InvalidInput outside of calls."""
    running = CURRENT_CALL.get()
    if running is None:
        raise InvalidInput(
            "pilotlight.context() is for code that runs in a call of a deployed function: there "
            "is none here. A thread of your own "
            "needs contextvars.copy_context().run(…)"
        )
    return running.context()
