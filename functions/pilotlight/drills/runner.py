"""Runs a drill: calls a function steadily, lets something fail, waits until it is back, and looks
for what was lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pilotlight.drills.calls import call_json
from pilotlight.drills.faults import Fault, FaultFailed
from pilotlight.drills.verdict import (
    DrillReport,
    Submitted,
    ledger_of,
    outage_of,
    problems_of,
)
from pilotlight.errors import PilotlightError
from pilotlight.loadtest import runner as load
from pilotlight.loadtest.results import Result

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from pilotlight.loadtest.requests import FunctionCalls

POLL_S = 0.05
RECORDS_S = 90.0
"""How long records may take to arrive after the last answer: activators send them again and again
while the controller or its database is away."""
SUBMITTED_S = 120.0
SUBMITTED = 10
"""Background calls that are accepted before the fault."""
CALL_S = 60.0
"""Timeout of one call: longer than what a caller waits for a process that starts again."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """How a drill is run.

    Attributes:
        target: app and function.
        calls: what is called.
        rate_per_s: calls a second.
        before_s, hold_s, after_s: how long calls are made before the fault, how long a fault lasts
            that does not end by itself, and how long calls are made after it is over.
        timeout_s: how long to wait for the end of the fault.
        max_outage_s: longest time of failing calls for a good verdict.
    """

    target: tuple[str, str]
    calls: FunctionCalls
    rate_per_s: float
    before_s: float
    hold_s: float
    after_s: float
    timeout_s: float
    max_outage_s: float


async def run_drill(
    client: Client, name: str, fault: Fault, plan: DrillPlan, *, say: Say
) -> DrillReport:
    """Run one drill. Cancellation ends the fault. Raises FaultFailed, PilotlightError."""
    began_at = time.time()
    submitted = await asyncio.to_thread(_submit, client, plan)
    longest_s = plan.before_s + plan.hold_s + plan.timeout_s + plan.after_s
    due = [n / plan.rate_per_s for n in range(int(longest_s * plan.rate_per_s))]
    calling = asyncio.create_task(
        load.run(client.profile, plan.calls, due, timeout_s=CALL_S), name="drill's calls"
    )
    begin = time.perf_counter()
    try:
        await asyncio.sleep(plan.before_s)
        say(f"now: {fault.summary}")
        fault_s = time.perf_counter() - begin
        recovered_s = await _fail(client, fault, plan)
        if recovered_s is not None:
            say(f"back after {recovered_s:.2f} s")
            await asyncio.sleep(plan.after_s)
    finally:
        calling.cancel()
        results, _ = await calling
    say("looking for the records and results of all calls")
    records = await _records(client, results, since=began_at - 60.0)
    ledger = ledger_of(results, records, fault_s=fault_s)
    found = await asyncio.to_thread(_ends, client, submitted)
    outage = outage_of(results, fault_s=fault_s)
    return DrillReport(
        fault=name,
        summary=fault.summary,
        target="/".join(plan.target),
        recovered_s=recovered_s,
        outage=outage,
        ledger=ledger,
        submitted=found,
        problems=problems_of(
            recovered_s=recovered_s,
            timeout_s=plan.timeout_s,
            outage=outage,
            max_outage_s=plan.max_outage_s,
            ledger=ledger,
            submitted=found,
            findings=fault.findings(),
        ),
    )


async def _fail(client: Client, fault: Fault, plan: DrillPlan) -> float | None:
    """Make the fault, end it, and return how long it took until all was back; None = it is not."""
    since = time.perf_counter()
    try:
        await asyncio.to_thread(fault.begin)
        if fault.holds:
            await asyncio.sleep(plan.hold_s)
    finally:
        if fault.holds:
            since = time.perf_counter()
        await asyncio.shield(asyncio.to_thread(fault.end))
    until = time.perf_counter() + plan.timeout_s
    while time.perf_counter() < until:
        if fault.is_over() and await asyncio.to_thread(_answers, client, plan):
            return time.perf_counter() - since
        await asyncio.sleep(POLL_S)
    return None


def _answers(client: Client, plan: DrillPlan) -> bool:
    """Whether the controller reads its database, and the function answers."""
    try:
        client.revisions(plan.target[0], function=plan.target[1])
        call_json(client, *plan.target, plan.calls.arguments[0])
    except PilotlightError:
        return False
    return True


def _submit(client: Client, plan: DrillPlan) -> list[str]:
    return [client.submit_json(*plan.target, plan.calls.arguments[0]) for _ in range(SUBMITTED)]


def _ends(client: Client, submitted: Sequence[str]) -> Submitted:
    """What became of background calls."""
    until = time.monotonic() + SUBMITTED_S
    left, failed = list(submitted), list[str]()
    while left and time.monotonic() < until:
        try:
            call = client.call(left[0], wait_s=5.0)
        except PilotlightError:
            time.sleep(1.0)
            continue
        if call.finished_at is not None:
            left.pop(0)
            if call.state != "SUCCEEDED":
                failed.append(call.id)
    return Submitted(accepted=len(submitted), failed=tuple(failed), lost=tuple(left))


async def _records(client: Client, results: Sequence[Result], *, since: float) -> Counter[str]:
    """The number of usage records of each request, once all have one or time is up."""
    wanted = {r.id for r in results if r.is_good and r.id}
    until = time.monotonic() + RECORDS_S
    found = Counter[str]()
    while time.monotonic() < until:
        with contextlib.suppress(PilotlightError):
            found = await asyncio.to_thread(_count, client, since)
            if wanted <= found.keys():
                return found
        await asyncio.sleep(1.0)
    if not found:
        raise FaultFailed("usage records cannot be read", hint="Use a key that may read bills.")
    return found


def _count(client: Client, since: float) -> Counter[str]:
    pieces = b"".join(client.export_records(format="ndjson", since=since))
    rows = (json.loads(line) for line in pieces.splitlines() if line)
    return Counter(row["call"] for row in rows if row["kind"] == "CALL" and row["outcome"] == "ok")
