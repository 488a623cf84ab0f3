"""CPU outside calls: what pauses use is charged once, what calls use never, and a journal that is
cut off says nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from activator.billing.budgets.budgets import Budgets
from activator.billing.cpu import GRACE_S, PauseCpuMeter
from activator.billing.instance_account import InstanceAccount, OpenRecord
from activator.billing.instance_time import BillingTerms
from activator.billing.journal import Journal
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import Rates
from tests.activator.billing_world import (
    FOOTPRINT,
    RATES,
    SECOND,
    Wall,
    account,
    budget,
    open_attempt,
    records_on_disk,
    subject,
)
from tests.fakes.reference_prices import price_usage

MS = SECOND // 1000
START_S = 1000


class Machine:
    """A clock, timers, and an instance whose CPU time is turned on by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.used_ns: int | None = 0
        self.reads = 0
        self.is_closed = False
        self._due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now_s

    def read_ns(self) -> int | None:
        self.reads += 1
        return self.used_ns

    def close(self) -> None:
        self.is_closed = True

    def cancel(self) -> None:
        self._due.clear()

    def later(self, seconds: float, function: Callable[[], None]) -> Machine:
        self._due.append((self.now_s + seconds, function))
        return self

    def run(self, seconds: float, *, cores: float = 0.0) -> None:
        """Time passes, and the instance uses so many cores."""
        until = self.now_s + seconds
        while due := sorted((at, n) for n, (at, _) in enumerate(self._due) if at <= until):
            at, n = due[0]
            self._pass(at, cores)
            self._due.pop(n)[1]()
        self._pass(until, cores)

    def _pass(self, until_s: float, cores: float) -> None:
        if self.used_ns is not None:
            self.used_ns += round((until_s - self.now_s) * cores * SECOND)
        self.now_s = until_s

    def meter(self, from_ns: int | None = None) -> PauseCpuMeter:
        return PauseCpuMeter(self, from_ns=from_ns, later=self.later, clock=self)


def test_pauses_count_and_calls_do_not() -> None:
    machine = Machine()
    meter = machine.meter()
    machine.run(2, cores=1)
    meter.calls_begin()
    machine.run(5, cores=3)
    meter.calls_ended()
    machine.run(GRACE_S)
    machine.run(4, cores=0.5)
    assert meter.consume() == 4 * SECOND
    assert meter.consume() == 0


def test_the_start_counts_from_where_the_agent_says() -> None:
    machine = Machine()
    machine.used_ns = 7 * SECOND
    assert machine.meter(from_ns=5 * SECOND).consume() == 2 * SECOND
    assert machine.meter(from_ns=-3 * SECOND).consume() == 10 * SECOND, (
        "with the boot of its Template"
    )
    assert machine.meter(from_ns=None).consume() == 0, (
        "adopted: what came before is not its business"
    )


def test_calls_that_follow_each_other_closely_are_never_read() -> None:
    machine = Machine()
    meter = machine.meter()
    meter.calls_begin()
    before = machine.reads
    for _ in range(100):
        machine.run(0.003, cores=1)
        meter.calls_ended()
        machine.run(GRACE_S / 2, cores=1)
        meter.calls_begin()
    assert (machine.reads, meter.consume()) == (before, 0)


def test_the_grace_begins_with_the_last_end() -> None:
    machine = Machine()
    meter = machine.meter()
    meter.calls_begin()
    meter.calls_ended()
    machine.run(GRACE_S * 0.6, cores=1)
    meter.calls_begin()
    machine.run(GRACE_S * 0.2, cores=1)
    meter.calls_ended()
    machine.run(GRACE_S * 0.9, cores=1)
    assert meter.consume() == 0
    machine.run(GRACE_S, cores=1)
    assert meter.consume() == round(0.9 * GRACE_S * SECOND)


def test_what_cannot_be_read_now_is_made_up_later_and_what_ended_is_not_read() -> None:
    machine = Machine()
    meter = machine.meter()
    machine.run(1, cores=1)
    machine.used_ns, kept = None, machine.used_ns
    assert meter.consume() == 0
    machine.used_ns = kept
    assert meter.consume() == SECOND
    assert meter.end(3 * SECOND) == 2 * SECOND
    assert machine.is_closed
    reads = machine.reads
    meter.calls_ended()
    assert (meter.consume(), meter.end(9 * SECOND), machine.reads) == (0, 0, reads)


def test_an_instance_that_ends_in_a_call_owes_no_more_than_the_call() -> None:
    machine = Machine()
    meter = machine.meter()
    meter.calls_begin()
    assert meter.end(5 * SECOND) == 0


class Metered:
    """An account with a meter on a machine, and a journal on the disk."""

    def __init__(
        self,
        directory: Path,
        machine: Machine,
        *,
        from_ns: int | None = 0,
        rates: Rates = RATES,
        budgets: Budgets | None = None,
    ) -> None:
        self.directory = directory
        self.machine = machine
        self.journal = Journal.open(directory, activator="a-1", sync_s=0.0, wall_ns=Wall())[0]
        self.account = account(self.journal, budgets=budgets)
        if rates is not RATES:
            self.account = InstanceAccount(
                self.journal,
                subject=subject(),
                terms=BillingTerms(footprint=FOOTPRINT, rates=rates, free_ns=60 * SECOND),
                started_ns=0,
            )
        self.account.meter_cpu(machine.meter(from_ns), at_ns=self.at_ns)

    @property
    def now_ns(self) -> int:
        return round(self.machine.now_s * SECOND)

    @property
    def at_ns(self) -> int:
        return START_S * SECOND + self.now_ns

    def open(self, call: str = "c") -> OpenRecord:
        return open_attempt(self.account, call=call, now_ns=self.now_ns, at_ns=self.at_ns)

    def close(self, ticket: OpenRecord) -> None:
        self.account.close(ticket, status=200, outcome="ok", now_ns=self.now_ns, at_ns=self.at_ns)

    def settle(self) -> int:
        return self.account.settle_idle(now_ns=self.now_ns, at_ns=self.at_ns)

    def end(self) -> None:
        self.account.end(cpu_ns=self.machine.used_ns, now_ns=self.now_ns, at_ns=self.at_ns)

    def records(self) -> list[tuple[str, int]]:
        return [(record["kind"], record["billed_ns"]) for record in records_on_disk(self.directory)]


def test_an_idle_instance_that_computes_is_billed_from_its_first_second(tmp_path: Path) -> None:
    world = Metered(tmp_path, Machine())
    world.machine.run(30, cores=1)
    assert world.settle() == 1
    [body] = records_on_disk(tmp_path)
    record = UsageRecord.from_json(body)
    assert (record.kind, record.billed_ns, record.started_at, record.cpu, record.memory_bytes) == (
        "CPU",
        30 * SECOND,
        START_S,
        1.0,
        0,
    )
    assert record.outcome == "span"
    assert Decimal(record.cost) == price_usage(record, RATES) == Decimal("0.03"), (
        "30 s of a core at 0.001"
    )


def test_a_call_is_charged_its_time_and_not_its_cpu_time(tmp_path: Path) -> None:
    world = Metered(tmp_path, Machine())
    ticket = world.open()
    world.machine.run(2, cores=4)
    world.close(ticket)
    world.machine.run(GRACE_S)
    world.end()
    assert world.records() == [("CALL", 2 * SECOND)]


def test_idle_time_that_is_charged_pays_for_its_cores(tmp_path: Path) -> None:
    world = Metered(tmp_path, Machine())
    world.account.reserve(is_reserved=True, now_ns=0)
    world.machine.run(10, cores=2.5)
    world.settle()
    assert world.records() == [("RESERVED", 10 * SECOND), ("CPU", 5 * SECOND)], (
        "two of the cores are the instance's own"
    )


def test_idle_time_at_half_the_rate_pays_for_half_of_its_cores(tmp_path: Path) -> None:
    world = Metered(tmp_path, Machine())
    world.machine.run(60)
    world.settle()
    world.machine.run(10, cores=2)
    world.settle()
    assert world.records() == [("IDLE", 10 * SECOND), ("CPU", 10 * SECOND)]


def test_a_start_that_is_charged_pays_for_its_cores(tmp_path: Path) -> None:
    rates = Rates(version="2", start_factor=Decimal(1))
    world = Metered(tmp_path, Machine(), from_ns=-3 * SECOND, rates=rates)
    world.account.started(start_kind="COLD", billed_ns=SECOND, at_ns=world.at_ns)
    world.settle()
    assert world.records() == [("START", SECOND), ("CPU", SECOND)]


def test_a_start_that_failed_owes_what_it_used(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, activator="a-1", sync_s=0.0, wall_ns=Wall())[0]
    account(journal).start_failed(cpu_ns=4 * SECOND, at_ns=START_S * SECOND)
    [record] = records_on_disk(tmp_path)
    assert (record["id"], record["kind"], record["billed_ns"]) == (
        f"i-1/CPU/{(START_S - 4) * 10**6}",
        "CPU",
        4 * SECOND,
    )


def test_little_waits_for_more_or_for_the_end(tmp_path: Path) -> None:
    world = Metered(tmp_path, Machine())
    world.machine.run(0.0004, cores=1)
    assert world.settle() == 0
    world.machine.run(0.0007, cores=1)
    assert world.settle() == 1
    world.machine.run(0.0002, cores=1)
    world.end()
    assert [ns for _, ns in world.records()] == [1_100_000, 200_000]


def test_what_is_used_after_the_stop_is_owed_and_no_idle_time(tmp_path: Path) -> None:
    world = Metered(tmp_path, Machine())
    world.account.reserve(is_reserved=True, now_ns=0)
    world.machine.run(1)
    world.settle()
    world.machine.run(5, cores=1)
    for _ in range(2):
        world.account.finish(cpu_ns=world.machine.used_ns, now_ns=world.now_ns, at_ns=world.at_ns)
    assert world.records() == [("RESERVED", SECOND), ("CPU", 5 * SECOND)]
    assert world.machine.is_closed


def test_what_is_cut_off_is_neither_charged_twice_nor_beyond_the_last_record(
    tmp_path: Path,
) -> None:
    machine = Machine()
    first = Metered(tmp_path, machine)
    machine.run(20, cores=1)
    first.settle()
    machine.run(5, cores=1)  # not written down yet
    first.journal.abandon()
    machine.run(5, cores=1)  # while nobody was there
    second = Metered(tmp_path, machine, from_ns=None)
    machine.run(20, cores=1)
    second.settle()
    records = records_on_disk(tmp_path)
    assert [record["billed_ns"] for record in records] == [20 * SECOND, 20 * SECOND]
    assert len({record["id"] for record in records}) == 2


def test_budgets_pay_for_it(tmp_path: Path) -> None:
    budgets = Budgets(wall_ns=lambda: START_S * SECOND)
    budgets.apply("b-1", budget("b-1", amount="1"))
    world = Metered(tmp_path, Machine(), budgets=budgets)
    world.machine.run(50, cores=2)
    world.settle()
    [purse] = budgets.balances.values()
    assert purse.spent == 10**11, "100 s of a core at 0.001"


@pytest.mark.parametrize("factor, cost", [("0", "0"), ("2", "0.06")])
def test_its_price_is_a_part_of_a_core(tmp_path: Path, factor: str, cost: str) -> None:
    rates = Rates(version="2", cpu_core_s=Decimal("0.001"), cpu_factor=Decimal(factor))
    world = Metered(tmp_path, Machine(), rates=rates)
    world.machine.run(30, cores=1)
    world.settle()
    [body] = records_on_disk(tmp_path)
    assert Decimal(body["cost"]) == Decimal(cost) == price_usage(UsageRecord.from_json(body), rates)
