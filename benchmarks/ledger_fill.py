"""A ledger of a million records in a minute, for measuring what reads it.

The records go the way that an activator's go (`ledger.add_rows`, in batches of a thousand, rollups
included), only with SQLite's fsync switched off. They look like a platform's month: a few functions
have most of the calls, some calls wait for a start, some fail."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pilotlight.controller.billing import ledger
from pilotlight.controller.database.store import Store
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import Footprint, Rates, price_duration, rate_per_s

BATCH = 1000
GIB = 1024**3
_FOOTPRINT = Footprint(cpu=1.0, memory_bytes=GIB)
_RATES = Rates(version="2026-11", request=Decimal("0.0000002"))
_STARTS = {"WARM": 960, "FORK": 25, "RESTORE": 10, "COLD": 5}
_START_MS = {"WARM": 0, "FORK": 30, "RESTORE": 150, "COLD": 5000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """What to fill in.

    Attributes:
        begin_at, days: when it was used (seconds since the epoch); records spread evenly, so most
        come in the order of time. tenants: ids, which share evenly; functions, keys: how many each
        has, the n-th function with 1/n of the first one's calls.
    """

    begin_at: float
    days: int = 30
    tenants: tuple[str, ...] = ("t-1",)
    functions: int = 40
    keys: int = 3
    seed: int = 1


def fill(store: Store, records: int, month: Month) -> int:
    """Add so many records; returns how many were new. The store must be migrated, and be a file
    that may be lost."""
    if store.engine.dialect.name == "sqlite":
        with store.engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA synchronous=OFF")  # type: ignore[union-attr]
    new, rows = 0, generate(records, month)
    while batch := list(itertools.islice(rows, BATCH)):
        with store.write() as write:
            new += ledger.add_rows(write, batch).new
    return new


def generate(records: int, month: Month) -> Iterator[dict[str, Any]]:
    """Records as JSON values, priced as an activator would; the same ones for the same
    arguments."""
    draw = random.Random(month.seed)
    per_s = rate_per_s(_FOOTPRINT, _RATES)
    shares = [1 / n for n in range(1, month.functions + 1)]
    step_s = month.days * 86_400 / records
    chosen = draw.choices(range(month.functions), shares, k=records)
    starts = draw.choices(list(_STARTS), list(_STARTS.values()), k=records)
    for n, (function, start_kind) in enumerate(zip(chosen, starts, strict=True)):
        exec_ms = int(draw.lognormvariate(3, 1))
        billed_ns = exec_ms * 10**6
        record = UsageRecord(
            id=f"req-{n:012x}{draw.getrandbits(80):020x}/1",
            kind="CALL",
            call=f"req-{n:012x}",
            attempt=1,
            tenant=month.tenants[n % len(month.tenants)],
            environment="main",
            app=f"app-{function % 5}",
            function=f"function-{function}",
            function_id=f"f-{function}",
            method="",
            revision="v1-abcdef",
            instance=f"i-{function}",
            key=f"k-{n % month.keys}",
            start_kind=start_kind,
            started_at=month.begin_at + n * step_s,
            queued_ms=0,
            start_ms=_START_MS[start_kind],
            exec_ms=exec_ms,
            billed_ns=billed_ns,
            cpu=_FOOTPRINT.cpu,
            memory_bytes=_FOOTPRINT.memory_bytes,
            gpu=None,
            gpu_count=0,
            status=500 if n % 199 == 0 else 200,
            price_version=_RATES.version,
            rate_per_s=str(per_s),
            cost=format(price_duration(billed_ns, per_s, _RATES.request), "f"),
        )
        yield record.to_json()
