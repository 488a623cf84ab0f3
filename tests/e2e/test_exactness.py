"""Ten thousand requests while activator and controller are killed at random moments: the bill has
each of them once, at its price.

Three witnesses are compared: what the workers ran, what the activators' journals say was
dispatched, and the ledger. And every record's cost is computed again from what it measured."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import pytest

from activator.billing import journal_format
from activator.billing.segments import read_segment, segment_numbers
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import PriceSettings
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for
from tests.fakes.reference_prices import price_usage

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

REQUESTS = 10_000
CONNECTIONS = 24
KILLS = 4
"""Of each of the two processes."""
REFUSED_PAUSE_S = 0.02
LINK_EVERY_S = 0.02
FUNCTIONS = ("Left", "Right")
PRICES = {
    "version": "exact-1",
    "cpu_core_s": "0.0000131",
    "memory_gib_s": "0.00000222",
    "request": "0.00000003",
    "start_factor": "0.5",
    "minimum_ms": 1,
    "rounding_ms": 3,
}
"""Everything that makes a price: its parts do not divide evenly, so that what is rounded in another
place shows."""


@pytest.fixture(name="priced")
def _priced() -> Iterator[PlatformUnderTest]:
    with platform_up(prices=dict(PRICES), snapshotter={"snapshots": False}) as running:
        running.deploy("counting.py")
        for function in FUNCTIONS:
            wait_for(
                lambda name=function: len(running.instances("counting", name)) == 1,  # type: ignore[misc]
                "the instance that is kept warm",
            )
        yield running


class KeptJournal:
    """Keeps the segments of an activator's journal by links of its own: a segment that is deleted
    once it is shipped can still be read."""

    def __init__(self, journal: Path, kept: Path) -> None:
        self._journal = journal
        self._kept = kept
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="kept journal")

    def __enter__(self) -> Self:
        self._kept.mkdir()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._is_over.wait(LINK_EVERY_S):
            for segment in self._journal.glob("journal-*.ndjson"):
                try:
                    os.link(segment, self._kept / segment.name)
                except (FileExistsError, FileNotFoundError):
                    continue

    def dispatched(self) -> set[str]:
        """Every attempt that was written down before it was sent to a worker, as call/attempt."""
        found = set()
        for number in segment_numbers(self._kept):
            for line in read_segment(self._kept, number):
                parsed = journal_format.parse(line.text)
                if parsed is not None and parsed["t"] == "O":
                    found.add(f"{parsed['c']}/{parsed['a']}")
        return found


@dataclass(kw_only=True)
class Callers:
    """CONNECTIONS connections that make REQUESTS requests between them, each once. Owner: the
    test's event loop.

    Attributes:
        answered: status by the id that the answer names.
        broken: requests that were sent, and whose connection ended before an answer.
    """

    platform: PlatformUnderTest
    answered: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    _left: int = REQUESTS

    @property
    def done(self) -> int:
        """Requests that are over, one way or the other."""
        return len(self.answered) + self.broken

    async def run(self) -> None:
        """All of them."""
        async with asyncio.TaskGroup() as group:
            for n in range(CONNECTIONS):
                group.create_task(self._call_on(FUNCTIONS[n % len(FUNCTIONS)], random.Random(n)))

    async def _call_on(self, function: str, pauses: random.Random) -> None:
        while self._left > 0:
            connection = await Connection.open(self.platform)
            if connection is None:
                await asyncio.sleep(REFUSED_PAUSE_S)
                continue
            try:
                await self._call_while_it_lasts(connection, function, pauses)
            finally:
                await connection.aclose()

    async def _call_while_it_lasts(
        self, connection: Connection, function: str, pauses: random.Random
    ) -> None:
        while self._left > 0:
            self._left -= 1
            try:
                status, call = await connection.call(
                    function, seconds=pauses.choice((0.0, 0.0, 0.001, 0.01))
                )
            except (OSError, asyncio.IncompleteReadError):
                self.broken += 1
                return
            if call in self.answered:
                raise AssertionError(f"{call} was answered twice")
            self.answered[call] = status


class Connection:
    """One kept-alive connection to the activator, as thin as HTTP allows: the test's own client is
    not what should take the time."""

    def __init__(
        self,
        platform: PlatformUnderTest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._head = (
            f"authorization: Bearer {platform.profile.api_key}\r\ncontent-type: "
            f"application/json\r\nhost: x\r\n"
        )

    @classmethod
    async def open(cls, platform: PlatformUnderTest) -> Self | None:
        """None when nobody listens."""
        host, port = platform.local.listen.rsplit(":", 1)
        try:
            return cls(platform, *await asyncio.open_connection(host, int(port)))
        except OSError:
            return None

    async def call(self, function: str, *, seconds: float) -> tuple[int, str]:
        """Status and id of one call. Raises OSError or IncompleteReadError when the connection ends
        before the answer does."""
        body = b'{"seconds":%g}' % seconds
        path = f"/v1/functions/counting/{function}.count:invoke"
        self._writer.write(
            f"POST {path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        status = int(head[0].split()[1])
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        answer = await self._reader.readexactly(int(headers["content-length"]))
        if status == 200:
            assert answer.decode() == f'"{headers["x-request-id"]}"', (
                f"the answer of another call: {answer!r} {headers}"
            )
        return status, headers["x-request-id"]

    async def aclose(self) -> None:
        """Let go of it."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def kill_at_random(
    platform: PlatformUnderTest, process: str, callers: Callers, rng: random.Random
) -> None:
    """kill -9 `process` KILLS times, each after a random number of the requests."""
    for at in sorted(rng.sample(range(REQUESTS // 20, REQUESTS * 9 // 10), KILLS)):
        while callers.done < at:
            await asyncio.sleep(0.001)
        await asyncio.sleep(rng.random() * 0.02)
        pid = platform.kill(process)
        await asyncio.to_thread(platform.wait_restarted, process, pid)


async def test_the_bill_of_ten_thousand_requests_is_exact_whoever_is_killed(
    priced: PlatformUnderTest,
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown when the test fails, as all that is printed
    home = priced.local.paths.home
    callers = Callers(platform=priced)
    with priced.client() as client:
        client.set_budget("1000", app="counting")
    with KeptJournal(home / "activator" / "a-0", home / "kept") as journal:
        async with asyncio.TaskGroup() as group:
            group.create_task(callers.run())
            for process in ("activator", "controller"):
                group.create_task(
                    kill_at_random(priced, process, callers, random.Random(f"{seed}-{process}"))
                )
        ran = await asyncio.to_thread(_ran, priced)
        await asyncio.to_thread(_wait_shipped, priced, journal)
        dispatched = journal.dispatched()
    records = [_record(row) for row in priced.usage()]
    print(
        f"{len(callers.answered)} answered, {callers.broken} broken, {len(dispatched)} dispatched"
    )
    calls = [record for record in records if record.method == "count"]

    assert set(Counter(callers.answered.values())) == {200}
    assert len(callers.answered) + callers.broken == REQUESTS
    assert {record.id for record in records if record.kind == "CALL"} == dispatched
    _check_answered(callers, calls)
    _check_ran(ran, calls)
    _check_costs(priced, records)


def _wait_shipped(platform: PlatformUnderTest, journal: KeptJournal) -> None:
    wait_for(
        lambda: {row["id"] for row in platform.usage("kind = 'CALL'")} == journal.dispatched(),
        "the ledger to have all calls",
        poll_s=0.3,
    )


def _check_answered(callers: Callers, calls: list[UsageRecord]) -> None:
    """Who was answered is billed once and as that; what was not answered is known as lost, or ended
    as its caller's connection did."""
    by_call = Counter(record.call for record in calls)
    assert max(by_call.values()) == 1
    assert callers.answered.keys() <= by_call.keys()
    silent = [record for record in calls if record.call not in callers.answered]
    assert len(silent) <= callers.broken
    assert callers.broken > 0, "nobody was hurt: this proves nothing"
    assert {record.outcome for record in silent} <= {"lost", "ok"}
    assert {
        (record.outcome, record.status) for record in calls if record.call in callers.answered
    } == {("ok", 200)}


def _ran(platform: PlatformUnderTest) -> dict[str, list[str]]:
    """Every call that each instance ran, as the instances remember them."""
    answers = [platform.result(f"counting/{function}.seen") for function in FUNCTIONS]
    return {instance: seen for instance, *seen in answers}


def _check_ran(ran: dict[str, list[str]], calls: list[UsageRecord]) -> None:
    """What workers ran, each of them once, is billed, and to the instance that ran it; what they
    did not run was lost on its way."""
    times = Counter(call for seen in ran.values() for call in seen)
    instance_of = {record.call: record.instance for record in calls}
    assert set(times.values()) == {1}
    for instance, seen in ran.items():
        assert {instance_of.get(call) for call in seen} == {instance}
    assert {record.outcome for record in calls if record.call not in times} <= {"lost"}


def _check_costs(platform: PlatformUnderTest, records: list[UsageRecord]) -> None:
    """Every cost is what its record's own measures make of the price list; reports and budgets are
    their sums, to the last digit."""
    (rates,) = PriceSettings(**PRICES).lists().values()  # type: ignore[arg-type]
    for record in records:
        assert Decimal(record.cost) == price_usage(record, rates), record
    total = sum(Decimal(record.cost) for record in records)
    assert total > 0
    with platform.client() as client:
        (budget,) = client.budgets()
        report = client.billing_report()
    assert Decimal(budget["spent"]) == total
    assert Decimal(report["totals"]["USD"]) == total


def _record(row: dict[str, Any]) -> UsageRecord:
    return UsageRecord(**{f.name: row[f.name] for f in fields(UsageRecord)})
