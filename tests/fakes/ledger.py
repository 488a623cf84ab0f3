"""A ledger in memory that can be away, lose its answers, and refuse records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from activator.billing.errors import LedgerRefused, LedgerUnavailable


class FakeLedger:
    """Accepts each id once, as the real one does.

    Attributes:
        away: answers to come that are `LedgerUnavailable`, nothing taken.
        mute: answers to come that are lost although everything was taken.
        wrong: ids it refuses for good.
        has_taken: set once records were taken.
    """

    def __init__(self, *, away: int = 0, mute: int = 0, wrong: frozenset[str] = frozenset()) -> None:
        self.away = away
        self.mute = mute
        self.wrong = wrong
        self.records: dict[str, dict[str, Any]] = {}
        self.received = 0
        self.batches: list[int] = []
        self.has_taken = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FakeLedger {len(self.records)} records of {self.received} received>"

    async def accept(self, records: Sequence[bytes]) -> None:
        """Take all or none."""
        if self.away:
            self.away -= 1
            raise LedgerUnavailable("the controller is down")
        bodies = [json.loads(record) for record in records]
        if any(body["id"] in self.wrong for body in bodies):
            raise LedgerRefused("a record is wrong")
        self.batches.append(len(bodies))
        self.received += len(bodies)
        for body in bodies:
            self.records.setdefault(body["id"], body)
        self.has_taken.set()
        if self.mute:
            self.mute -= 1
            raise LedgerUnavailable("the answer was lost")
