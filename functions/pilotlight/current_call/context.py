"""`pilotlight.context()`: information about the current call, for user code.

It uses a context variable, so it works in `async` code and its tasks, in call threads, in
`asyncio.to_thread`, across the items of a generator and in a web application. Before Python 3.14, a
thread that user code starts has an empty context: run it in `contextvars.copy_context()`, or pass
the values it needs."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from pilotlight.current_call.spans import current_span_id
from pilotlight.errors import InvalidInput
from pilotlight.protocol import HEADER_PARENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The current call.

    Attributes:
        call_id: id of the call, which the caller gets as `X-Request-Id`; "" for the example call of
            a warm-up.
        attempt: number of this attempt, from 1. Above 1, an earlier attempt may have done all or
            part of its work.
        deadline: end of the execution timeout in UTC, or the deadline of the caller if that is
            earlier; None without a limit.
        arm: arm of the experiment that the caller is assigned to; "" for none.
        revision: revision of the running function, such as `v7-3f2a91`.
        function: name of the function.
        traceparent: W3C header for outgoing requests, which makes their spans children of this
            call.
        members: in the body of a `@batched` function, the ids of the calls in this batch, in the
            order of its lists. `call_id` and `traceparent` are then those of one member, `attempt`
            is the highest, `deadline` the earliest, and `arm` the one that all share."""

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
        """Return the seconds until the deadline, at least 0; infinite without a limit."""
        return max(0.0, self._ends_at - time.monotonic())


class ContextProvider(Protocol):
    """A running call that provides its context."""

    def context(self) -> Context:
        """Return the context, always the same."""


CURRENT_CALL: ContextVar[ContextProvider | None] = ContextVar(
    "pilotlight running call", default=None
)
"""Set by the worker for each call."""


def remaining_s() -> float:
    """Return the seconds until the deadline of the current call, at least 0; infinite without a
    limit, and outside a call."""
    running = CURRENT_CALL.get()
    return float("inf") if running is None else running.context().remaining_s()


def calling_headers() -> dict[str, str]:
    """Return the headers of a call that is made inside a call: which call makes it, and its span.
    None outside a call, and in the example call of a warm-up."""
    running = CURRENT_CALL.get()
    current = running.context() if running is not None else None
    if current is None or not current.call_id:
        return {}
    version, trace, parent, flags = current.traceparent.split("-")
    span_id = current_span_id() or parent
    return {
        HEADER_PARENT: ",".join(current.members or (current.call_id,)),
        "traceparent": f"{version}-{trace}-{span_id}-{flags}",
    }


def current_function_call_id() -> str | None:
    """Return the id of the call that runs, also that of its `FunctionCall`; None outside a call."""
    running = CURRENT_CALL.get()
    return (running.context().call_id or None) if running is not None else None


current_input_id = current_function_call_id
"""Modal's other name: here each input of a map is a call of its own."""


def context() -> Context:
    """Return the context of the current call: its id, attempt, deadline, arm and revision. Raises
    InvalidInput outside a call."""
    running = CURRENT_CALL.get()
    if running is None:
        raise InvalidInput(
            "pilotlight.context() was called outside a call of a deployed function; in a thread of "
            "your own, use contextvars.copy_context().run(…)"
        )
    return running.context()
