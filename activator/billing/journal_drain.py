"""Brings the journal of a permanently removed activator to the controller: `python -m activator
--drain-journal`.

Opening the journal closes open attempts at their last proof of life. Then usage records go to the
ledger, results of submitted calls to their records, and unfinished submitted calls to the next
activator that requests due calls. Each entry is deleted here only once the controller has it, and
the controller recognizes duplicates, so this may be killed at any point and run again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from activator.async_calls.result_shipper import MAX_BATCH_BYTES, SHIP_BATCH
from activator.billing.errors import LedgerUnavailable
from activator.billing.journal import Journal, Recovered
from activator.billing.service import ControllerLedger
from activator.billing.shipping import REFUSED_NAME, Shipper
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import CALLS_PATH, DUE_PATH

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long to retry a controller that does not answer. It restarts in less; otherwise run the
command again."""
FIRST_RETRY_S, MAX_RETRY_S = 0.2, 5.0
ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainResult:
    """The result of draining a journal.

    Attributes:
        lost: open attempts, closed as lost.
        records: usage records that the ledger accepted.
        results: results of submitted calls that were delivered.
        handed_on: unfinished submitted calls that other activators run now.
        left: description of what remains; "" = nothing."""

    lost: int
    records: int
    results: int
    handed_on: int
    left: str

    def __str__(self) -> str:
        done = (
            f"{self.records} usage records shipped ({self.lost} closed as lost), "
            f"{self.results} results delivered"
        )
        return f"{done}, {self.handed_on} unfinished calls handed on"


async def drain_journal(
    directory: Path,
    *,
    activator: str,
    controller: Endpoint,
    token: str,
    patience_s: float = PATIENCE_S,
) -> DrainResult:
    """Drain the journal in `directory`, which belonged to `activator`. Raises JournalInUse,
    JournalFull."""
    journal, found = Journal.open(directory, activator=activator)
    try:
        async with (
            _running(journal),
            _JournalDrain(journal, found, activator, controller, token) as drain,
        ):
            return await drain.drain(patience_s)
    finally:
        journal.close()


@asynccontextmanager
async def _running(journal: Journal) -> AsyncIterator[None]:
    running = asyncio.create_task(journal.run(), name="journal")
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class _JournalDrain:
    """One drain of a journal. Owner: the event loop."""

    def __init__(
        self, journal: Journal, found: Recovered, activator: str, controller: Endpoint, token: str
    ) -> None:
        self._journal = journal
        self._lost = len(found.lost)
        self._undelivered = [left.id for left in found.undelivered]
        self._unfinished = {left.id: left.attempts for left in found.unfinished}
        self._activator = activator
        self._ledger = ControllerLedger(controller=controller, token=token, activator=activator)
        self._shipper = Shipper(journal, self._ledger)
        self._client = controller_client(controller, token=token, timeout_s=ANSWER_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._client.aclose()
        await self._ledger.aclose()

    async def drain(self, patience_s: float) -> DrainResult:
        records, results, handed_on, failure = 0, 0, 0, ""
        try:
            async with asyncio.timeout(patience_s) as patience:
                records = await self._with_retries(self._shipper.flush)
                results = await self._with_retries(self._deliver)
                handed_on = await self._with_retries(self._hand_over)
                patience.reschedule(None)
        except TimeoutError:
            failure = f"the controller did not accept it within {patience_s:g} s"
        except httpx.HTTPStatusError as e:
            failure = (
                f"the controller answered {e.response.status_code} to {e.request.method} "
                f"{e.request.url.path}"
            )
        return DrainResult(
            lost=self._lost,
            records=records,
            results=results,
            handed_on=handed_on,
            left=self._left(failure),
        )

    def _left(self, failure: str) -> str:
        held = self._journal.statistics()
        parts = [f"{held.unshipped} usage records"] if held.unshipped else []
        parts += [f"{held.held_calls} submitted calls"] if held.held_calls else []
        refused = self._journal.directory / REFUSED_NAME
        if refused.exists() and refused.stat().st_size:
            parts.append(f"records that the ledger refused permanently, in {refused}")
        if failure and not parts:
            return failure
        return ", ".join(parts) + (f": {failure}" if failure else "") if parts else ""

    async def _with_retries(self, step: Callable[[], Awaitable[int]]) -> int:
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            try:
                return await step()
            except (LedgerUnavailable, httpx.TransportError, _ControllerBusy) as e:
                log.warning("controller does not answer, retrying error=%s", e)
                await backoff.pause()

    async def _deliver(self) -> int:
        """Deliver results that the controller does not have yet."""
        ended = {call_id: self._journal.payload(call_id) for call_id in self._undelivered}
        delivered = 0
        async for ids in self._batches(ended, CALLS_PATH, "POST", {}):
            self._delete_calls(ids)
            delivered += len(ids)
        return delivered

    async def _hand_over(self) -> int:
        """Hand unfinished calls over to other activators. Skip calls that the control plane started
        and has since assigned to another activator."""
        kept = {
            call_id: self._attempted(call_id, attempts)
            for call_id, attempts in self._unfinished.items()
        }
        asked = {call["due"]: call_id for call_id, call in kept.items() if "due" in call}
        if asked:
            answer = await self._send(
                "POST", DUE_PATH, {"activator": self._activator, "ids": list(asked)}
            )
            others = [
                call_id for due, call_id in asked.items() if due not in frozenset(answer["yours"])
            ]
            self._delete_calls(others)
            kept = {call_id: call for call_id, call in kept.items() if call_id not in others}
        handed_on = 0
        async for ids in self._batches(kept, DUE_PATH, "PUT", {"activator": self._activator}):
            self._delete_calls(ids)
            handed_on += len(ids)
        return handed_on

    def _attempted(self, call_id: str, attempts: int) -> dict[str, Any]:
        kept = dict(self._journal.payload(call_id))
        record = kept["record"]
        return {
            **kept,
            "record": {**record, "attempt": max(int(record.get("attempt", 0)), attempts)},
        }

    def _delete_calls(self, ids: Sequence[str]) -> None:
        for call_id in ids:
            self._journal.delete_call(call_id)
            self._unfinished.pop(call_id, None)
        self._undelivered = [
            call_id for call_id in self._undelivered if call_id not in frozenset(ids)
        ]

    async def _batches(
        self, calls: dict[str, dict[str, Any]], path: str, verb: str, more: dict[str, Any]
    ) -> AsyncIterator[list[str]]:
        """Ids of those that the controller has now."""
        batch: list[str] = []
        size = 0
        for call_id, body in calls.items():
            weight = len(body.get("body", "")) + len(body.get("result", ""))
            if batch and (size + weight > MAX_BATCH_BYTES or len(batch) == SHIP_BATCH):
                await self._send(verb, path, {**more, "calls": [calls[one] for one in batch]})
                yield batch
                batch, size = [], 0
            batch.append(call_id)
            size += weight
        if batch:
            await self._send(verb, path, {**more, "calls": [calls[one] for one in batch]})
            yield batch

    async def _send(self, verb: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.request(verb, path, json=body)
        if response.status_code >= 500 or response.status_code == 429:
            raise _ControllerBusy(f"{verb} {path}: {response.status_code}")
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


class _ControllerBusy(Exception):
    """Raised when the controller cannot accept a request at the moment."""
