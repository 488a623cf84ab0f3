"""GPUs on the bill: the granted kind is the price, and every second of a granted GPU is in a record
of one state, whatever happens to the instance and to the process that meters it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.billing.budgets.applicable import Subject
from activator.billing.budgets.budgets import Budgets
from activator.billing.instance_account import InstanceAccount, OpenRecord
from activator.billing.instance_meter import IdleKind, InstanceMeter
from activator.billing.instance_time import BillingTerms
from activator.billing.journal import Journal
from activator.billing.segments import segment_path
from activator.billing.usage_pricing import UsageSubject
from activator.metrics.metrics import Metrics
from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import (
    GPU_STATES,
    Footprint,
    GpuState,
    Rates,
    acceptable_gpus,
    dearest_gpu,
    price_name_of,
)
from tests.activator.billing_world import SECOND, Wall, budget, records_on_disk, subject
from tests.fakes.reference_prices import price_usage

MIG = "H100-MIG-3g.40gb"
RATES = Rates(
    version="gpu-1",
    cpu_core_s=Decimal("0.001"),
    memory_gib_s=Decimal(0),
    gpu_s={
        "H100": Decimal("0.1"),
        "A100": Decimal("0.03"),
        "L4": Decimal("0.007"),
        MIG: Decimal("0.04"),
    },
    start_factor=Decimal("0.5"),
    idle_factor=Decimal("0.25"),
)
FREE_S = 60


def footprint(kind: str | None, count: int = 1) -> Footprint:
    return Footprint(cpu=1.0, memory_bytes=0, gpu=kind, gpu_count=count if kind else 0)


class Bills:
    """Accounts over one journal, which may be cut off and opened again. Time is in seconds."""

    def __init__(self, directory: Path, *, budgets: Budgets | None = None) -> None:
        self.directory = directory
        self.wall = Wall(1_000 * SECOND)
        self.journal = self._opened()
        self.budgets = budgets
        self.now_ns = 0
        self.seconds: defaultdict[tuple[str, GpuState], float] = defaultdict(float)

    def _opened(self) -> Journal:
        return Journal.open(self.directory, activator="a-1", sync_s=0.0, wall_ns=self.wall)[0]

    @property
    def at_ns(self) -> int:
        return self.wall.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)
        self.wall.pass_s(seconds)

    def killed(self) -> None:
        """kill -9, and another process."""
        self.journal.heartbeat()
        self.journal.abandon()
        self.journal = self._opened()

    def account(
        self, kind: str | None, count: int = 1, *, instance: str = "i-1", **more: Any
    ) -> InstanceAccount:
        return InstanceAccount(
            self.journal,
            subject=subject(instance),
            terms=BillingTerms(
                footprint=footprint(kind, count),
                rates=RATES,
                free_ns=FREE_S * SECOND,
                limit_ns=10 * SECOND,
                **more,
            ),
            started_ns=self.now_ns,
            budgets=self.budgets,
            on_gpu_time=self._on_gpu_time,
        )

    def _on_gpu_time(
        self, subject: UsageSubject, gpu: str, state: GpuState, seconds: float
    ) -> None:
        assert subject.function == "Embedder"
        self.seconds[gpu, state] += seconds

    def open(self, account: InstanceAccount, call: str, **more: Any) -> OpenRecord:
        return account.open(
            call=call,
            attempt=1,
            key="k",
            method="",
            start_kind="WARM",
            queued_ms=0,
            start_ms=0,
            now_ns=self.now_ns,
            at_ns=self.at_ns,
            **more,
        )

    def close(self, account: InstanceAccount, ticket: OpenRecord) -> None:
        account.close(ticket, status=200, outcome="ok", now_ns=self.now_ns, at_ns=self.at_ns)

    def settle(self, account: InstanceAccount) -> None:
        account.settle_idle(now_ns=self.now_ns, at_ns=self.at_ns)

    def records(self) -> list[UsageRecord]:
        return [UsageRecord(**record) for record in records_on_disk(self.directory)]

    def spans(self) -> list[tuple[str, float]]:
        return [(record.kind, record.billed_ns / SECOND) for record in self.records()]


@pytest.fixture(name="bills")
def _bills(tmp_path: Path) -> Bills:
    return Bills(tmp_path)


# -- the price -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, count", [("A100", 1), ("H100", 2), (MIG, 1)])
def test_a_call_costs_what_its_granted_gpus_cost(bills: Bills, kind: str, count: int) -> None:
    account = bills.account(kind, count, worst=footprint("H100", count))
    account.started(start_kind="COLD", billed_ns=4 * SECOND, at_ns=bills.at_ns)
    ticket = bills.open(account, "c")
    bills.pass_s(3)
    bills.close(account, ticket)
    start, call = bills.records()
    assert (call.gpu, call.gpu_count) == (kind, count)
    assert Decimal(call.cost) == 3 * (RATES.gpu_s[kind] * count + Decimal("0.001"))
    assert Decimal(start.cost) == 2 * (RATES.gpu_s[kind] * count + Decimal("0.001"))
    assert bills.seconds == {
        (kind, GpuState.START): 4.0 * count,
        (kind, GpuState.BUSY): 3.0 * count,
    }


@pytest.mark.parametrize(
    "outcome, seconds, cost",
    [
        ("busy", 0.1, "0"),
        ("busy", 0.9, "0.0279"),
        ("busy", 5, "0.155"),
        ("unsent", 5, "0"),
        ("ok", 5, "0.155"),
    ],
)
def test_a_worker_that_computes_and_then_says_busy_pays(
    bills: Bills, outcome: str, seconds: float, cost: str
) -> None:
    account = bills.account("A100")
    ticket = bills.open(account, "c")
    bills.pass_s(seconds)
    account.close(ticket, status=503, outcome=outcome, now_ns=bills.now_ns, at_ns=bills.at_ns)
    (record,) = [one for one in bills.records() if one.kind == "CALL"]
    assert (record.outcome, Decimal(record.cost)) == (outcome, Decimal(cost))
    assert price_usage(record, RATES) == Decimal(cost)


def test_busy_answers_of_one_instance_are_free_for_a_tenth_of_a_second_together(
    bills: Bills,
) -> None:
    account, costs = bills.account("A100"), []
    for call in "abcd":
        ticket = bills.open(account, call)
        bills.pass_s(0.04)
        account.close(ticket, status=503, outcome="busy", now_ns=bills.now_ns, at_ns=bills.at_ns)
        costs.append(Decimal(bills.records()[-1].cost))
    assert costs == [0, 0, Decimal("0.00124"), Decimal("0.00124")]


def test_a_budget_reserves_the_dearest_kind_and_settles_the_granted_one(tmp_path: Path) -> None:
    budgets = Budgets(wall_ns=lambda: 1_000 * SECOND)
    budgets.apply("b-1", budget(amount="10"))
    bills = Bills(tmp_path, budgets=budgets)
    account = bills.account("A100", worst=footprint("H100"))
    [balance] = budgets.cover(Subject("t-1", "main", "search", "Embedder", RATES.currency)).balances
    whole = balance.left
    ticket = bills.open(account, "c")
    worst_s = Decimal("10.05")  # the execution clock, and the step of clocks
    assert whole - balance.left == int(worst_s * Decimal("0.101") * 10**12)
    bills.pass_s(2)
    bills.close(account, ticket)
    assert whole - balance.left == int(2 * Decimal("0.031") * 10**12)


@pytest.mark.parametrize(
    "requested, dearest, acceptable",
    [
        ((), None, ()),
        (("A100", "H100"), "H100", ("A100", "H100")),
        (("L4", MIG), MIG, ("L4", MIG)),
        (("any",), "H100", ("A100", "H100", MIG, "L4")),
        (("L4", "ANY"), "H100", ("L4", "A100", "H100", MIG)),
    ],
)
def test_the_worst_case_is_the_dearest_acceptable_kind(
    requested: tuple[str, ...], dearest: str | None, acceptable: tuple[str, ...]
) -> None:
    assert dearest_gpu(requested, RATES) == dearest
    assert acceptable_gpus(requested, RATES) == acceptable


def test_a_kind_without_a_price_is_named() -> None:
    for requested in (("H100", "B200"), ("H100-MIG-1g.10gb",)):
        with pytest.raises(KeyError, match=requested[-1]):
            dearest_gpu(requested, RATES)
    with pytest.raises(KeyError, match="any"):
        dearest_gpu(("any",), Rates(version="none"))
    with pytest.raises(KeyError, match="B200"):
        price_name_of("B200", ("any",), RATES)
    others = Rates(version="others", gpu_s={**RATES.gpu_s, "any": Decimal(1)})
    assert price_name_of("B200", ("any",), others) == "any"
    assert price_name_of("L4", ("any",), others) == "L4"
    with pytest.raises(KeyError, match="B200"):
        price_name_of("B200", ("L4",), others)


# -- the states ------------------------------------------------------------------------------------


def test_a_life_on_a_gpu_is_recorded_whole(bills: Bills) -> None:
    account = bills.account("H100", 2)
    account.started(start_kind="COLD", billed_ns=7 * SECOND, at_ns=bills.at_ns)
    bills.pass_s(5)
    ticket = bills.open(account, "c")
    bills.pass_s(10)
    bills.close(account, ticket)
    bills.pass_s(FREE_S + 30)
    bills.settle(account)
    account.suspend(now_ns=bills.now_ns)
    bills.pass_s(40)
    account.settle_gpus(now_ns=bills.now_ns, at_ns=bills.at_ns)
    bills.pass_s(2)
    account.stop(now_ns=bills.now_ns)
    bills.pass_s(3)
    for _ in range(2):
        account.finish(cpu_ns=None, now_ns=bills.now_ns, at_ns=bills.at_ns)
    assert bills.spans() == [
        ("START", 7.0),
        ("CALL", 10.0),
        ("FREE_IDLE", 5.0 + FREE_S),
        ("IDLE", 30.0),
        ("ASLEEP", 40.0),
        ("ASLEEP", 2.0),
        ("FREE_IDLE", 3.0),
    ]
    assert bills.seconds == {
        ("H100", GpuState.START): 14.0,
        ("H100", GpuState.BUSY): 20.0,
        ("H100", GpuState.IDLE_FREE): 2 * (5.0 + FREE_S + 3.0),
        ("H100", GpuState.IDLE_PAID): 60.0,
        ("H100", GpuState.ASLEEP): 84.0,
    }
    unpaid = [r for r in bills.records() if r.kind in ("FREE_IDLE", "ASLEEP")]
    assert {Decimal(record.cost) for record in unpaid} == {Decimal(0)}
    assert {(record.gpu, record.gpu_count) for record in unpaid} == {("H100", 2)}


def test_a_resumed_instance_sleeps_until_its_next_start_begins(bills: Bills) -> None:
    account = bills.account("L4")
    account.suspend(now_ns=bills.now_ns)
    bills.pass_s(20)
    account.resume(now_ns=bills.now_ns)
    bills.pass_s(2)  # its start as WAKE has these
    account.finish(cpu_ns=None, now_ns=bills.now_ns, at_ns=bills.at_ns)
    assert bills.spans() == [("ASLEEP", 20.0)]


def test_an_instance_without_a_gpu_has_no_records_of_unpaid_time(bills: Bills) -> None:
    account = bills.account(None)
    bills.pass_s(30)
    bills.settle(account)
    account.suspend(now_ns=bills.now_ns)
    bills.pass_s(30)
    account.finish(cpu_ns=None, now_ns=bills.now_ns, at_ns=bills.at_ns)
    assert (bills.spans(), bills.seconds) == ([], {})


def test_copies_of_calls_hold_a_gpu_that_nobody_pays_for(bills: Bills) -> None:
    account = bills.account("A100", is_free=True)
    account.started(start_kind="COLD", billed_ns=4 * SECOND, at_ns=bills.at_ns)
    bills.pass_s(1)
    ticket = bills.open(account, "copy", is_shadow=True)
    bills.pass_s(2)
    bills.close(account, ticket)
    bills.pass_s(FREE_S + 8)
    bills.close(account, bills.open(account, "call"))
    assert sorted(bills.spans()) == [
        ("CALL", 0.0),
        ("FREE_IDLE", 8.0),
        ("FREE_IDLE", 1.0 + FREE_S),
        ("FREE_START", 4.0),
        ("SHADOW", 2.0),
    ]
    assert sum(Decimal(record.cost) for record in bills.records()) == 0
    assert bills.seconds["A100", GpuState.START] == 4.0
    assert bills.seconds["A100", GpuState.IDLE_FREE] == 9.0 + FREE_S


def test_gpu_seconds_are_a_metric_by_function_kind_and_state() -> None:
    metrics = Metrics(series=1)
    for n in range(3):
        who = UsageSubject(
            tenant="t",
            environment="main",
            app="a",
            function=f"f-{n}",
            function_id="f",
            revision="v1",
            instance="i",
        )
        metrics.gpu_time(who, "L4", GpuState.BUSY, 2.0)
        metrics.gpu_time(who, "L4", GpuState.IDLE_FREE, 0.5)

    def value(function: str, state: str) -> float | None:
        names = dict.fromkeys(("tenant", "app", "function"), "other")
        if function != "other":
            names = {"tenant": "t", "app": "a", "function": function}
        return metrics.registry.get_sample_value(
            "pilotlight_gpu_seconds_total", {**names, "gpu": "L4", "state": state}
        )

    assert (value("f-0", "busy"), value("f-0", "idle_free")) == (2.0, 0.5)
    assert (value("f-1", "busy"), value("other", "busy")) == (None, 4.0)
    metrics.delete_removed(frozenset(), frozenset({("t", "a", "f-0")}))
    assert value("f-0", "busy") is None


# -- upgrades --------------------------------------------------------------------------------------

BEFORE = """\
{"t":"J","version":1,"activator":"a-1","life":"l-1","segment":1,"at":1000000000000}
{"t":"T","n":1,"request":"0","minimum":0,"step":0,"u":{"kind":"CALL","tenant":"t-1","environment":\
"main","app":"search","function":"Embedder","function_id":"f-1","method":"","revision":"v1",\
"instance":"i-1","key":"k","caller":"","cpu":1.0,"memory_bytes":0,"gpu":"H100","gpu_count":2,\
"price_version":"gpu-1","currency":"USD","rate_per_s":"0.201"}}
{"t":"O","n":1,"c":"c","a":1,"k":"WARM","at":1001000000000,"q":0,"s":0,"v":0}
{"t":"H","at":1004000000000}
"""
"""What a version without grants wrote down before it was killed."""


def test_a_journal_of_before_the_upgrade_is_closed_by_its_own_prices(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).write_text(BEFORE)
    journal, recovered = Journal.open(tmp_path, activator="a-1", sync_s=0.0)
    [lost] = recovered.lost
    assert (lost.gpu, lost.gpu_count, lost.billed_ns) == ("H100", 2, 3 * SECOND)
    assert Decimal(lost.cost) == 3 * Decimal("0.201") == price_usage(lost, RATES)
    journal.abandon()


# -- properties ------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "settle", "hold", "free", "suspend", "stop", "wait"]),
        st.integers(0, 100),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_states_of_a_gpu_add_up_to_the_life_of_its_meter(
    story: list[tuple[str, int]],
) -> None:
    meter, now, idle, calls = InstanceMeter(0, free_ns=60, counts_all=True), 0, [], []
    charged = 0
    for n, (what, length) in enumerate(story):
        now += length
        match what:
            case "open" if meter.is_serving:
                meter.begin(str(n), now)
                calls.append(str(n))
            case "close" if calls:
                charged += meter.end(calls.pop(), now)
            case "settle":
                idle += meter.consume_idle(now)
            case "hold" | "free":
                meter.reserve(now, is_reserved=what == "hold")
            case "suspend" | "stop" if not calls:
                meter.end_service(now, IdleKind.ASLEEP if what == "suspend" else IdleKind.FREE)
    while calls:
        charged += meter.end(calls.pop(), now)
    idle += meter.consume_idle(now)
    assert meter.busy_ns + sum(span.billed_ns for span in idle) == now
    assert 0 <= meter.busy_ns - charged <= len(story), "what does not divide stays below a call"
    assert {span.kind for span in idle} <= set(IdleKind)


KINDS = st.tuples(st.sampled_from([*RATES.gpu_s, None]), st.integers(1, 8))
STORY = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "close", "settle", "suspend", "stop", "wait", "kill"]),
        st.integers(0, 90),
    ),
    max_size=25,
)


@given(granted=KINDS, story=STORY)
def test_bills_with_grants_stay_exact_when_the_process_is_killed_at_any_moment(
    granted: tuple[str | None, int], story: list[tuple[str, int]]
) -> None:
    kind, count = granted
    with TemporaryDirectory() as directory:
        bills = Bills(Path(directory))
        account = bills.account(kind, count, worst=footprint("H100", count) if kind else None)
        account.started(start_kind="COLD", billed_ns=5 * SECOND, at_ns=bills.at_ns)
        tickets: list[OpenRecord] = []
        opened = 0
        for n, (what, length_s) in enumerate(story):
            bills.pass_s(length_s)
            match what:
                case "open" if account.meter.is_serving:
                    tickets.append(bills.open(account, f"c-{n}"))
                    opened += 1
                case "close" if tickets:
                    bills.close(account, tickets.pop(0))
                case "settle":
                    bills.settle(account)
                case "suspend" | "stop" if not tickets:
                    bills.settle(account)
                    _leave(account, what)(now_ns=bills.now_ns)
                case "kill":
                    bills.killed()
                    tickets.clear()
                    account = bills.account(kind, count)  # adopted
        bills.killed()
        _check(bills, kind, count, opened)


def _leave(account: InstanceAccount, what: str) -> Callable[..., None]:
    return account.suspend if what == "suspend" else account.stop


def _check(bills: Bills, kind: str | None, count: int, opened: int) -> None:
    records = bills.records()
    assert len({record.id for record in records}) == len(records)
    assert sum(record.kind == "CALL" for record in records) == opened, "each call once"
    for record in records:
        assert (record.gpu, record.gpu_count) == (kind, count if kind else 0)
        assert Decimal(record.cost) == price_usage(record, RATES), record
    states = [r.billed_ns for r in records if r.kind in GPU_STATES and r.kind != "START"]
    assert sum(states) <= bills.now_ns, "no second of a GPU is in two records"
