"""Ships states and results of submitted calls to the controller; a final one stays in the journal
until the controller has stored it.

A dead letter is shipped with its arguments, so that the controller can send it again to any
activator."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx

from activator.async_calls.pending import PendingCalls
from activator.async_calls.result_stream import FINAL
from activator.billing.journal import Journal
from activator.billing.journal_drain import MAX_BATCH_BYTES, SHIP_BATCH
from pilotlight.core.backoff import Backoff
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import CALLS_PATH, CallRecord

log = logging.getLogger(__name__)

SHIP_GATHER_S = 0.05
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 5.0


class ResultShipper:
    """Ships call records in batches. Owner: the event loop."""

    def __init__(
        self, held: PendingCalls, *, journal: Journal, controller: Endpoint, token: str
    ) -> None:
        self._held = held
        self._journal = journal
        self._client = controller_client(controller, token=token, timeout_s=30.0)

    def __repr__(self) -> str:
        return f"<ResultShipper of {self._held!r}>"

    async def run(self) -> None:
        """Ship until cancelled."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            await self._held.news.wait()
            await asyncio.sleep(SHIP_GATHER_S)
            batch = self._batch()
            try:
                response = await self._client.post(
                    CALLS_PATH, json={"calls": [body for _, body in batch]}
                )
                response.raise_for_status()
            except httpx.HTTPError as e:
                if not backoff.failures:
                    log.warning(
                        "cannot ship call states to the controller; retrying count=%d error=%r",
                        len(batch),
                        e,
                    )
                await backoff.pause()
                continue
            backoff.reset()
            self._shipped([record for record, _ in batch])

    def _batch(self) -> list[tuple[CallRecord, dict[str, Any]]]:
        batch: list[tuple[CallRecord, dict[str, Any]]] = []
        size = 0
        for record in self._held.unsent.values():
            body = record.to_json()
            if record.is_dead and record.id in self._held:
                kept = self._journal.payload(record.id)
                # if its end could not be journalled, the journal still has the original call
                body["payload"] = kept.get("payload", kept)
            size += len(record.result) + len(body.get("payload", {}).get("body", ""))
            if batch and (size > MAX_BATCH_BYTES or len(batch) == SHIP_BATCH):
                break
            batch.append((record, body))
        return batch

    def _shipped(self, batch: list[CallRecord]) -> None:
        for record in batch:
            if self._held.unsent.get(record.id) is record:
                del self._held.unsent[record.id]
                if record.state in FINAL:
                    self._held.drop(record.id)
                    self._journal.delete_call(record.id)
        if not self._held.unsent:
            self._held.news.clear()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._client.aclose()
