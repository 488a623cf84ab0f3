"""Calls a revision with the arguments of rows, and compares the answers.

Calls have priority `batch` and are marked as replays (`protocol.HEADER_REPLAY`). A call that a
quota refuses waits as long as the answer says. None is made twice: a call whose connection was lost
may have run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, Final

from pilotlight.client.async_client import AsyncClient
from pilotlight.client.responses import JSON_BODY, CallResponse
from pilotlight.client.server_timing import parse_server_timing
from pilotlight.errors import (
    Forbidden,
    OverBudget,
    PilotlightError,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from pilotlight.protocol import (
    CONTENT_JSON,
    HEADER_ARM,
    HEADER_COST,
    HEADER_DEGRADED,
    HEADER_PRIORITY,
    HEADER_REPLAY,
    HEADER_SERVER_TIMING,
    HEADER_TAG,
)
from pilotlight.replay.rows import ReplayRow, Row, SkippedRow
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.observations import REPLAY_ARM
from pilotlight.spec.prediction_log import SCRUBBED
from pilotlight.validation.json_compare import (
    IGNORED,
    TOLERANCE,
    Change,
    Difference,
    differences,
)
from pilotlight.validation.json_documents import parse_document, replace_values
from pilotlight.validation.json_paths import Segment

MAX_QUOTA_WAIT_S: Final = 600.0
"""Longest that one call waits for quotas, a full queue or a reserved budget, in all."""
MAX_FAILURES: Final = 20
"""Calls that fail in a row before the replay stops: more say nothing new, and are billed."""
MAX_DIFFERENCES: Final = 100
"""Differences of one answer that are kept."""
INTERRUPTED: Final = "interrupted"
"""Why a cancelled replay stopped."""
_FIRST_WAIT_S: Final = 1.0
_STAGES: Final = ("queue", "start", "exec")
_FINAL: Final = (Forbidden, OverBudget, Unauthenticated)
"""Errors that all further calls would get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How answers are compared: the relative tolerance of numbers, and paths that are left out."""

    tolerance: float = TOLERANCE
    ignored: tuple[tuple[Segment, ...], ...] = ()

    def differences(self, old: Any, new: Any) -> list[Difference]:
        """Return how an answer differs from the logged one, the first MAX_DIFFERENCES. What is
        scrubbed there equals any value, but is not missing. May change both in place."""
        old, new = (replace_values(each, self.ignored, IGNORED) for each in (old, new))
        found = (
            one
            for one in differences(old, new, tolerance=self.tolerance)
            if one.change is not Change.CHANGED or one.old != SCRUBBED
        )
        return list(islice(found, MAX_DIFFERENCES))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedCall:
    """An answered call.

    Attributes:
        request_id: of the new call.
        latency_ms, exec_ms: with waiting and start, and without; None where the answer has none.
    """

    row: ReplayRow
    request_id: str
    differences: list[Difference]
    latency_ms: float | None
    exec_ms: float | None
    cost: Decimal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call without an answer that can be compared. `reason`: type of the problem."""

    row: ReplayRow
    reason: str
    message: str


Outcome = ReplayedCall | FailedCall | SkippedRow


class _NotMarked(PilotlightError):
    """Raised when the platform does not mark replays: it would log them as predictions."""


class ReplayRunner:
    """Replays rows on one revision. For one event loop.

    Attributes:
        stopped: why it ended before the last row; "" = it did not.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        app: str,
        function: str,
        revision: str,
        comparison: Comparison,
        on_outcome: Callable[[Outcome], None],
        on_wait: Callable[[TooManyRequests, float], None] | None = None,
    ) -> None:
        """`on_outcome` gets what became of each row; `on_wait` the refusal of a call that waits,
        and the seconds."""
        self._client = client
        self._app, self._function = app, function
        self._comparison = comparison
        self._on_outcome = on_outcome
        self._on_wait = on_wait
        self._headers = {
            **JSON_BODY,
            "accept": CONTENT_JSON,
            HEADER_TAG: revision,
            HEADER_REPLAY: "1",
            HEADER_PRIORITY: Priority.BATCH.value,
        }
        self._failures = self._lost = 0
        self._most_lost = 0
        self.stopped = ""

    async def run(self, rows: Iterator[Row], *, concurrency: int) -> None:
        """Replay rows, at most `concurrency` at once. On cancellation, and when rows cannot be read
        or outcomes not be written, calls in flight are abandoned, and it returns."""
        self._most_lost = concurrency
        try:
            await self._run(rows, concurrency)
        except asyncio.CancelledError:
            self.stopped = INTERRUPTED
            if (task := asyncio.current_task()) is not None:
                task.uncancel()

    async def _run(self, rows: Iterator[Row], concurrency: int) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(concurrency):
                    group.create_task(self._work(rows), name=f"replay {number}")
        except* (PilotlightError, OSError) as failed:
            self.stopped = str(failed.exceptions[0])

    async def _work(self, rows: Iterator[Row]) -> None:
        while not self.stopped and (row := next(rows, None)) is not None:
            if isinstance(row, SkippedRow):
                self._on_outcome(row)
                await asyncio.sleep(0)  # thousands may follow each other
                continue
            outcome = await self._replay(row)
            if outcome is not None:
                self._on_outcome(outcome)

    async def _replay(self, row: ReplayRow) -> Outcome | None:
        """Make a call; None = its failure is not the call's, and stops the replay."""
        try:
            response = await self._call(row)
            outcome = self._compare(row, response)
        except (*_FINAL, _NotMarked) as e:
            self.stopped = str(e)
            return None
        except PilotlightError as e:
            self._count_failure(e)
            return FailedCall(row=row, reason=e.type, message=str(e))
        self._failures = self._lost = 0
        return outcome

    def _count_failure(self, error: PilotlightError) -> None:
        is_lost = isinstance(error, Unavailable) and error.detail.get("reason") == "connection"
        self._lost = self._lost + 1 if is_lost else 0
        self._failures += 1
        if self._lost > self._most_lost:  # more than were in flight when it went
            self.stopped = str(error)
        elif self._failures >= MAX_FAILURES:
            self.stopped = f"the last {self._failures} calls failed: {error}"

    async def _call(self, row: ReplayRow) -> CallResponse:
        """Make a call, as soon as quotas allow it. Raises PilotlightError for an answer that is an
        error."""
        name = f"{self._function}.{row.method}" if row.method else self._function
        waited_s = 0.0
        while True:
            try:
                response = await self._client.invoke(
                    self._app, name, row.arguments, headers=self._headers
                )
            except TooManyRequests as e:
                delay_s = _FIRST_WAIT_S if e.retry_after_s is None else e.retry_after_s
                waited_s += delay_s
                if waited_s > MAX_QUOTA_WAIT_S:
                    raise
                if self._on_wait is not None:
                    self._on_wait(e, delay_s)
                await asyncio.sleep(delay_s)
                continue
            if response.status >= 400:
                response.value()  # raises the error
            return response

    def _compare(self, row: ReplayRow, response: CallResponse) -> Outcome:
        """Compare an answer. Raises _NotMarked."""
        headers = response.headers
        if headers.get(HEADER_ARM) != REPLAY_ARM:
            raise _NotMarked("the platform is older than this command, and logs replays: update it")
        if degraded := headers.get(HEADER_DEGRADED):
            return FailedCall(row=row, reason="degraded", message=degraded)
        try:
            is_json = headers.get("content-type", "").partition(";")[0].strip() == CONTENT_JSON
            new = parse_document(response.body) if is_json else response.body
        except (ValueError, RecursionError):
            new = response.body
        timing = parse_server_timing(headers.get(HEADER_SERVER_TIMING, ""))
        return ReplayedCall(
            row=row,
            request_id=response.request_id,
            differences=self._comparison.differences(row.output, new),
            latency_ms=sum(timing.get(stage, 0.0) for stage in _STAGES) if timing else None,
            exec_ms=timing.get("exec"),
            cost=_decimal(headers.get(HEADER_COST, "")),
        )


def _decimal(text: str) -> Decimal | None:
    with contextlib.suppress(InvalidOperation):
        return Decimal(text)
    return None
