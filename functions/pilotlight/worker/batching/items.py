"""The calls of a batch: a single call, its share of the result, and the context that the body sees
of all of them."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from pilotlight.current_call.context import CURRENT_CALL as RUNNING
from pilotlight.current_call.context import Context
from pilotlight.current_call.spans import CURRENT_RECORDER
from pilotlight.protocol import HEADER_BATCH
from pilotlight.worker.batching.batch_key import BatchKey
from pilotlight.worker.batching.release_policy import ReleaseReason
from pilotlight.worker.user_code import output
from pilotlight.worker.user_code.spans import BatchSpans, CallSpans

MAX_MARKED = 16
"""Maximum number of members' ids in the mark of an output line: each has 36 characters."""
_LINE = (
    HEADER_BATCH.encode()
    + b": size=%d;wait_ms=%.3f;held_ms=%.3f;compute_ms=%.3f;reason=%b;first=%d\r\n"
)


class Asking(Protocol):
    """The call of a member: `worker.http.calls.Call`."""

    id: str
    spans: CallSpans
    stopped: str | None
    seconds: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """A member's share of a batch: its result, or the error that it raised.

    Attributes:
        line: a header line that describes its batch, with CRLF.
    """

    ok: bool
    value: Any
    line: bytes = b""


@dataclass(slots=True, kw_only=True, eq=False)
class BatchItem:
    """One call that waits for a batch or belongs to a running one. Owned by the event loop.

    Attributes:
        values: one per parameter of the body.
        came_at: monotonic seconds at which it arrived.
        free_s: reading of the lanes' clock at that time.
        context: the context variables of its request, in which it is retried alone.
    """

    call: Asking
    kind: BatchKey
    values: tuple[Any, ...]
    came_at: float
    free_s: float
    context: contextvars.Context
    future: asyncio.Future[BatchShare]

    @property
    def is_there(self) -> bool:
        """Whether its caller still waits for it."""
        return self.call.stopped is None and not self.future.done()

    @property
    def ends_at(self) -> float:
        """The deadline of its execution clock, in the loop's time, which has the same origin as
        ours; infinite without a deadline."""
        return self.call.expires_at if self.call.seconds > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedBatch:
    """A released batch: when (monotonic seconds), why, and the reading of the lanes' clock."""

    members: tuple[BatchItem, ...]
    at: float
    reason: ReleaseReason
    free_s: float

    def line(
        self,
        member: BatchItem,
        *,
        size: int,
        compute_s: float,
        reason: ReleaseReason,
        is_first: bool,
    ) -> bytes:
        """The header line of one member's response. One member per batch is marked as the first, by
        which batches are counted."""
        waited_s, held_s = self.at - member.came_at, self.free_s - member.free_s
        return _LINE % (
            size,
            waited_s * 1000,
            min(waited_s, held_s) * 1000,
            compute_s * 1000,
            reason.encode(),
            is_first,
        )


class RunningBatch:
    """The running batch that `pilotlight.context()` describes; a
    `current_call.context.ContextProvider`."""

    def __init__(self, members: Sequence[BatchItem], spans: BatchSpans) -> None:
        self._members = members
        self._spans = spans
        self._context: Context | None = None

    def __repr__(self) -> str:
        return f"<RunningBatch of {len(self._members)}>"

    def context(self) -> Context:
        """The batch's context; the same object each time."""
        if self._context is None:
            known = [
                running.context()
                for member in self._members
                if (running := member.context.get(RUNNING)) is not None
            ]
            self._context = _of_all(known, self._spans)
        return self._context


def enter(members: Sequence[BatchItem], spans: BatchSpans) -> None:
    """Make the batch of these members the current call of this context: for output, spans and
    `pilotlight.context()`."""
    output.CALL.set(mark_of([member.call.id for member in members]))
    CURRENT_RECORDER.set(spans)
    RUNNING.set(RunningBatch(members, spans))
    spans.make_current()


def mark_of(ids: Sequence[str]) -> str:
    """The mark of output lines: the ids, at most MAX_MARKED."""
    return ",".join(ids[:MAX_MARKED])


def _of_all(known: Sequence[Context], spans: BatchSpans) -> Context:
    ends_at = min(one._ends_at for one in known)
    arms = {one.arm for one in known}
    return replace(
        known[0],
        attempt=max(one.attempt for one in known),
        deadline=None
        if ends_at == math.inf
        else datetime.now(UTC) + timedelta(seconds=ends_at - time.monotonic()),
        arm=arms.pop() if len(arms) == 1 else "",
        traceparent=spans.outgoing,
        members=tuple(one.call_id for one in known),
        _ends_at=ends_at,
    )
