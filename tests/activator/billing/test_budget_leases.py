"""Several activators, one budget: they borrow before they spend, and together never spend more than
there is."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal
from pathlib import Path

import pytest
import redis

from activator.billing.budgets.applicable import AllowanceNeeded, Subject
from activator.billing.budgets.budgets import Budgets
from activator.billing.budgets.leases import (
    PICOS_PER_MICRO,
    UNREACHABLE_PAUSE_S,
    BudgetClaim,
    BudgetGrant,
    BudgetLeaser,
    BudgetLeaseStore,
    granted,
)
from activator.billing.budgets.redis_leases import RedisMoney
from activator.billing.budgets.sync import BudgetStates
from activator.billing.instance_account import InstanceAccount, OpenRecord
from activator.billing.journal import Journal
from activator.billing.shipping import Shipper
from activator.billing.usage_pricing import PICO, to_picos
from pilotlight import errors
from pilotlight.protocol import BudgetRecord
from tests.activator.billing_world import SECOND, Wall, account, budget, open_attempt
from tests.fakes.clock import ManualClock
from tests.fakes.ledger import FakeLedger
from tests.fakes.money_board import BoardMoney, MoneyBoard
from tests.fakes.redis_server import MortalRedis

NOON = 1_795_262_400 * SECOND
WORST = to_picos("0.040201")


class Member:
    """One activator's money: its journal, its budgets and its borrowing; the clocks are
    everybody's."""

    def __init__(
        self,
        directory: Path,
        store: BudgetLeaseStore,
        *,
        wall: Wall,
        clock: ManualClock,
        ledger: FakeLedger,
        is_open: bool,
    ) -> None:
        self.wall = wall
        self.clock = clock
        self.budgets = Budgets(is_shared=True, wall_ns=wall)
        self.journal = Journal.open(directory, activator=directory.name, sync_s=0.0, wall_ns=wall)[
            0
        ]
        self.shipper = Shipper(
            self.journal,
            ledger,
            before_batch=self._before,
            on_accepted=self._accepted,
            wall_ns=wall,
        )
        self.states = BudgetStates(
            self.budgets, journal=self.journal, source=ledger, lock=self.shipper.lock
        )
        self.borrower = BudgetLeaser(
            store, budgets=self.budgets, is_open=is_open, clock=clock, wall_ns=wall
        )
        self.budgets.lender = self.borrower
        self.books: InstanceAccount = account(
            self.journal, f"i-{directory.name}", budgets=self.budgets
        )
        self.calls = 0
        self.cost = 0

    async def _before(self) -> None:
        await self.states.count_own()

    async def _accepted(self, states: object, records: object) -> None:
        await self.states.accepted(states, records)  # type: ignore[arg-type]

    async def start(self, record: BudgetRecord) -> None:
        """As the process does: what is spent is known, and stated, before the first call."""
        self.budgets.apply(record.id, record)
        await self.states.load()
        await self.borrower.state_claims()

    async def open(self) -> OpenRecord:
        """A call, which borrows where it must. Raises OverBudget, BudgetReserved, Unavailable."""
        self.calls += 1
        while True:
            try:
                return open_attempt(
                    self.books,
                    call=f"{self.books!r}{self.calls}",
                    now_ns=int(self.clock() * SECOND),
                    at_ns=self.wall.now_ns,
                )
            except AllowanceNeeded as e:
                await e.cover.borrow(e.worst)

    def close(self, ticket: OpenRecord) -> None:
        bill = self.books.close(
            ticket,
            status=200,
            outcome="ok",
            now_ns=int(self.clock() * SECOND),
            at_ns=self.wall.now_ns,
        )
        self.cost += bill.picos

    @property
    def purse(self):  # type: ignore[no-untyped-def]
        return next(iter(self.budgets.balances.values()))


class Platform:
    """Members of one platform over one store."""

    def __init__(self, directory: Path, make_store: object) -> None:
        self.directory = directory
        self.wall, self.clock = Wall(NOON), ManualClock()
        self.ledger = FakeLedger(now_ns=NOON)
        self.make_store = make_store
        self.members: list[Member] = []
        self._lives = 0

    def pass_s(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.ledger.now_ns = self.wall.pass_s(seconds)

    def member(self, name: str = "", *, is_open: bool = False) -> Member:
        name = name or f"a-{len(self.members)}"
        store = self.make_store(name)  # type: ignore[operator]
        made = Member(
            self.directory / name,
            store,
            wall=self.wall,
            clock=self.clock,
            ledger=self.ledger,
            is_open=is_open,
        )
        self.members.append(made)
        return made

    async def start(
        self, count: int, record: BudgetRecord, *, is_open: bool = False
    ) -> list[Member]:
        self.ledger.known[record.id] = record
        members = [self.member(is_open=is_open) for _ in range(count)]
        for member in members:
            await member.start(record)
        return members

    @property
    def cost(self) -> int:
        """What all calls have cost."""
        return sum(member.cost for member in self.members)


@pytest.fixture(name="board")
def _board() -> MoneyBoard:
    return MoneyBoard(ManualClock(), grace_s=0.0)


@pytest.fixture(name="platform")
async def _platform(tmp_path: Path, board: MoneyBoard) -> AsyncIterator[Platform]:
    platform = Platform(tmp_path, lambda name: BoardMoney(board, member=name))
    yield platform
    for member in platform.members:
        member.journal.abandon()


async def test_a_member_borrows_for_many_calls_at_once(
    platform: Platform, board: MoneyBoard
) -> None:
    [one] = await platform.start(1, budget(amount="1000"))
    before = board.claims
    for _ in range(64):
        one.close(await one.open())
    assert board.claims - before == 1
    assert repr(one.borrower) == "<BudgetLeaser 1 budgets>"


async def test_what_one_has_borrowed_the_other_cannot_spend_until_it_is_given_back(
    platform: Platform,
) -> None:
    one, two = await platform.start(2, budget(amount="0.05"))
    ticket = await one.open()
    with pytest.raises(errors.BudgetReserved) as refused:
        await two.open()
    assert refused.value.retry_after_s == 1.0
    one.close(ticket)
    for _ in range(2):
        await one.borrower.state_claims()
    platform.pass_s(1)
    two.close(await two.open())


async def test_what_is_spent_anywhere_is_402_everywhere(platform: Platform) -> None:
    one, two = await platform.start(2, budget(amount="0.05"))
    ticket = await one.open()
    platform.pass_s(3)
    one.close(ticket)
    await one.shipper.flush()
    await one.borrower.state_claims()
    for member in (one, two):
        with pytest.raises(errors.OverBudget) as refused:
            await member.open()
        assert refused.value.detail["spent"] == "0.012001000000"


@pytest.mark.parametrize("seed", range(4))
async def test_members_that_spend_ship_die_and_come_back_never_spend_more_than_there_is(
    platform: Platform, seed: int
) -> None:
    draw = random.Random(seed)
    record = budget(amount="0.6")
    members = await platform.start(3, record)
    running: list[tuple[Member, OpenRecord]] = []
    refused = 0
    for _ in range(600):
        n = draw.randrange(len(members))
        member, what = members[n], draw.random()
        platform.pass_s(draw.random() / 4)
        if what < 0.55:
            try:
                running.append((member, await member.open()))
            except (errors.OverBudget, errors.BudgetReserved):
                refused += 1
        elif what < 0.85 and running:
            who, ticket = running.pop(0)
            who.close(ticket)
        elif what < 0.92:
            await member.shipper.flush()
        elif what < 0.98:
            await member.borrower.state_claims()
        else:
            # kill -9, and a new life; lost calls are charged to the last proof of life, so end them
            # now
            for who, ticket in [r for r in running if r[0] is member]:
                who.close(ticket)
            running = [r for r in running if r[0] is not member]
            member.journal.abandon()
            platform.members.remove(member)
            members[n] = again = platform.member(member.journal.directory.name)
            again.cost, again.calls = member.cost, member.calls
            await again.start(record)
        for overdue in [r for r in running if platform.wall.now_ns - r[1].at_ns > 10 * SECOND]:
            overdue[0].close(overdue[1])
            running.remove(overdue)
        assert platform.cost <= 0.6 * PICO
    assert refused
    for who, ticket in running:
        who.close(ticket)
    for member in members:
        await member.shipper.flush()
    assert (
        sum(to_picos(r["cost"]) for r in platform.ledger.records.values())
        == platform.cost
        <= 0.6 * PICO
    )
    assert platform.cost > 0.4 * PICO, "and most of it could be spent"


async def test_a_smaller_amount_holds_for_what_was_borrowed_before_it(platform: Platform) -> None:
    [one] = await platform.start(1, budget(amount="10"))
    one.close(await one.open())
    one.budgets.apply("b-1", budget(amount="0.01"))
    with pytest.raises(errors.OverBudget):
        await one.open()


async def test_what_was_borrowed_before_the_ledger_had_spoken_is_given_back_when_it_says_all_is_spent(
    platform: Platform,
) -> None:
    record = budget(amount="0.5")
    [one] = await platform.start(1, budget("b-0", amount="100"))
    for _ in range(20):
        ticket = await one.open()
        platform.pass_s(9)
        one.close(ticket)
    await one.shipper.flush()
    one.budgets.apply("b-1", record)  # 0.7 is spent already, and nobody has told
    one.close(await one.open())
    platform.ledger.known["b-1"] = record
    await one.states.refresh()
    with pytest.raises(errors.OverBudget):
        await one.open()


async def test_a_new_life_finds_what_the_last_one_spent_and_frees_what_it_had_borrowed(
    platform: Platform,
) -> None:
    record = budget(amount="0.5")
    one, two = await platform.start(2, record)
    one.close(await one.open())  # an eighth of the budget is borrowed
    one.journal.abandon()
    platform.members.remove(one)
    again = platform.member("a-0")
    await again.start(record)
    assert (again.purse.own, again.purse.left) == (one.cost, 0)
    cover = two.budgets.cover(Subject("t-1", "main", "search", "Embedder", "USD"))
    left = (500_000 - 1) * PICOS_PER_MICRO
    with pytest.raises(errors.BudgetReserved):
        await two.borrower.borrow(cover, two.purse, left + PICOS_PER_MICRO)
    await two.borrower.borrow(cover, two.purse, left)
    assert two.purse.left == left, "all but its micro-unit"


async def test_a_lost_answer_is_mended_by_the_next_statement(
    platform: Platform, board: MoneyBoard
) -> None:
    one, two = await platform.start(2, budget(amount="0.05"))
    board.mute = 1
    with pytest.raises(errors.Unavailable, match="without_redis"):
        await one.open()
    with pytest.raises(errors.BudgetReserved):
        await two.open()
    platform.pass_s(1)
    await one.borrower.state_claims()
    two.close(await two.open())


async def test_without_the_store_calls_go_on_with_what_is_left_and_then_503(
    platform: Platform, board: MoneyBoard
) -> None:
    [one] = await platform.start(1, budget(amount="1"))
    await one.open()
    board.is_down = True
    for _ in range(2):
        await one.open()  # an eighth of the amount is 0.125: three worst cases
    with pytest.raises(errors.Unavailable) as away:
        await one.open()
    assert (away.value.status, away.value.retry_after_s) == (503, 1)
    claims = board.claims
    with pytest.raises(errors.Unavailable, match="previous request"):
        await one.open()
    assert board.claims == claims
    board.is_down = False
    platform.pass_s(1)
    await one.open()


async def test_without_the_store_an_open_activator_goes_on_as_if_it_were_alone(
    platform: Platform, board: MoneyBoard
) -> None:
    [one] = await platform.start(1, budget(amount="0.09"), is_open=True)
    board.is_down = True
    tickets = [await one.open(), await one.open()]
    with pytest.raises(errors.BudgetReserved):
        await one.open()
    platform.pass_s(4)
    for ticket in tickets:
        one.close(ticket)
    for _ in range(3):
        ticket = await one.open()
        platform.pass_s(4)
        one.close(ticket)
    with pytest.raises(errors.OverBudget):
        await one.open()
    assert one.cost <= 0.09 * PICO


async def test_a_store_that_forgot_hears_all_claims_again_within_a_beat(
    platform: Platform, board: MoneyBoard
) -> None:
    one, two = await platform.start(2, budget(amount="0.05"))
    ticket = await one.open()
    await one.borrower.state_claims()
    board.flush()
    await one.borrower.state_claims()
    with pytest.raises(errors.BudgetReserved):
        await two.open()
    one.close(ticket)


async def test_a_new_day_is_borrowed_for_anew_even_in_the_middle_of_borrowing(
    platform: Platform,
) -> None:
    one, two = await platform.start(2, budget(amount="0.05"))
    yesterday = await one.open()
    platform.pass_s(12 * 3600)
    today = await two.open()
    one.close(yesterday)
    assert (one.purse.period.name, two.purse.period.name) == ("2026-11-21", "2026-11-22")
    with pytest.raises(errors.BudgetReserved):
        await one.open()
    assert (one.purse.period.name, one.purse.spent) == ("2026-11-22", 0)
    two.close(today)


async def test_a_real_redis_flushed_and_killed_in_the_middle_never_lets_two_overspend(
    tmp_path: Path, mortal_redis: MortalRedis
) -> None:
    url = mortal_redis.url
    stores: list[RedisMoney] = []

    def make(name: str) -> RedisMoney:
        stores.append(
            RedisMoney(
                url, platform=uuid.uuid5(uuid.NAMESPACE_URL, url).hex, member=name, grace_s=0.2
            )
        )
        return stores[-1]

    platform = Platform(tmp_path, make)
    members = await platform.start(2, budget(amount="1"))
    is_over = asyncio.Event()

    async def spend(member: Member) -> int:
        served = 0
        while not is_over.is_set():
            try:
                ticket = await member.open()
            except (errors.OverBudget, errors.BudgetReserved, errors.Unavailable):
                await asyncio.sleep(0.01)
                continue
            await asyncio.sleep(0)
            platform.pass_s(0.1)
            member.close(ticket)
            served += 1
        return served

    async def beat(member: Member) -> None:
        while not is_over.is_set():
            await member.borrower.state_claims()
            await asyncio.sleep(0.02)

    spenders = [asyncio.create_task(spend(member)) for member in members]
    beats = [asyncio.create_task(beat(member)) for member in members]
    with redis.Redis.from_url(url) as client:
        while platform.cost < 0.4 * PICO:
            await asyncio.sleep(0.01)
        client.flushall()
    while platform.cost < 0.7 * PICO:
        await asyncio.sleep(0.01)
    mortal_redis.kill()
    await asyncio.sleep(0.05)
    is_over.set()
    assert min(await asyncio.gather(*spenders)) > 0
    await asyncio.gather(*beats)
    assert platform.cost <= Decimal(PICO)
    for member in members:
        member.journal.abandon()
    for store in stores:
        await store.aclose()


@pytest.mark.slow  # waits for Redis's deadline
async def test_a_redis_that_does_not_answer_holds_a_call_up_for_a_moment_and_the_next_not_at_all(
    tmp_path: Path, mortal_redis: MortalRedis
) -> None:
    url = mortal_redis.url
    store = RedisMoney(url, platform="slow", member="a-0", grace_s=0.0)
    platform = Platform(tmp_path, lambda _: store)
    [one] = await platform.start(1, budget(amount="1"))
    with redis.Redis.from_url(url) as client:
        client.client_pause(60_000)
    async with asyncio.timeout(30):
        with pytest.raises(errors.Unavailable) as slow:
            await one.open()
        with pytest.raises(errors.Unavailable, match="previous request"):
            await one.open()
    assert "does not answer" in str(slow.value)
    one.journal.abandon()
    await store.aclose()


class Interrupted:
    """A store that lets something happen while its answer is on its way."""

    def __init__(self, store: BudgetLeaseStore) -> None:
        self._store = store
        self.meanwhile: list[Callable[[], Awaitable[object]]] = []

    async def claim(self, claim: BudgetClaim) -> BudgetGrant:
        """See MoneyStore."""
        answer = await self._store.claim(claim)
        for step in self.meanwhile:
            await step()
        self.meanwhile.clear()
        return answer

    async def aclose(self) -> None:
        """See MoneyStore."""
        await self._store.aclose()


async def test_what_reached_the_ledger_while_more_was_borrowed_is_claimed_no_more(
    tmp_path: Path, board: MoneyBoard
) -> None:
    stores: list[Interrupted] = []

    def make_store(name: str) -> Interrupted:
        stores.append(Interrupted(BoardMoney(board, member=name)))
        return stores[-1]

    platform = Platform(tmp_path, make_store)
    [one] = await platform.start(1, budget("b-0", amount="100"))
    platform.ledger.known["b-1"] = budget("b-1", amount="0.05")
    await one.start(platform.ledger.known["b-1"])
    one.close(await one.open())
    purse = one.budgets.balances["b-1"]
    purse.release_unused()
    stores[0].meanwhile.append(one.shipper.flush)
    ticket = await one.open()
    assert purse.own == 0
    await one.borrower.state_claims()
    assert board.held["b-1", purse.period.name]["a-0"] == -(-purse.held // 10**6)
    one.close(ticket)
    one.journal.abandon()


async def test_all_claims_are_stated_anew_whoever_finds_out_that_the_store_forgot_them(
    platform: Platform, board: MoneyBoard
) -> None:
    [one] = await platform.start(1, budget("b-0", amount="100", app="none-of-this"))
    for n in (1, 2, 3):
        platform.ledger.known[f"b-{n}"] = budget(f"b-{n}", amount="100")
        await one.start(platform.ledger.known[f"b-{n}"])
    tickets = [await one.open()]
    await one.borrower.state_claims()
    board.flush()
    board.clock = lambda: 1.0  # another memory, another epoch
    one.budgets.balances["b-2"].release_unused()
    tickets.append(await one.open())  # borrows from b-2, and finds out
    await one.borrower.state_claims()

    held = {budget: claims["a-0"] for (budget, _), claims in board.held.items() if claims["a-0"]}
    assert held == {
        name: -(-purse.held // 10**6) for name, purse in one.budgets.balances.items() if purse.held
    }
    assert set(held) == {"b-1", "b-2", "b-3"}
    for ticket in tickets:
        one.close(ticket)


async def test_who_waits_for_a_young_store_does_not_hold_up_what_is_stated(
    platform: Platform, board: MoneyBoard
) -> None:
    [one] = await platform.start(1, budget("b-1", amount="100"))
    ticket = await one.open()
    board.flush()
    board.grace_s = 3600.0
    one.purse.release_unused()
    waiting = asyncio.create_task(one.open())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    async with asyncio.timeout(30):
        await one.borrower.state_claims()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    one.close(ticket)


# -- one decision at a time ------------------------------------------------------------------------
MICROS = 10**6
"""In a unit of money, as the store counts it."""


class ScriptedStore:
    """A store with prepared answers, in order; keeps the claims."""

    def __init__(self, *grants: BudgetGrant) -> None:
        self.grants = list(grants)
        self.claims: list[BudgetClaim] = []

    async def claim(self, claim: BudgetClaim) -> BudgetGrant:
        """Answer with the next grant."""
        self.claims.append(claim)
        return self.grants.pop(0)

    async def aclose(self) -> None:
        """Nothing to close."""


def answer(amount: int = 0, *, base: int = 0, wait_s: float = 0.0) -> BudgetGrant:
    return BudgetGrant(granted=amount, base=base, wait_s=wait_s, epoch="e")


def member_in_the_middle(platform: Platform, *, is_open: bool = False) -> Member:
    """Of 10: 4 are in the ledger, 1 is on its own records, 2 are reserved, 3 nobody has."""
    member = platform.member(is_open=is_open)
    member.budgets.apply("b-1", budget(amount="10"))
    purse = member.purse
    purse.shipped(0, ledger=4 * PICO)
    purse.charge(PICO)
    purse.record_debt()
    purse.grant(2 * PICO)
    purse.left -= 2 * PICO
    assert (purse.spent, purse.reserved, purse.held, purse.left) == (
        5 * PICO,
        2 * PICO,
        3 * PICO,
        0,
    )
    return member


async def borrow(member: Member, worst: int) -> None:
    """For a function one of whose calls ends in seven seconds at most."""
    cover = member.budgets.cover(Subject("t-1", "main", "app", "f", "USD"))
    cover.open["another"] = member.wall.now_ns + 7 * SECOND
    await cover.borrow(worst)


@pytest.mark.parametrize(
    "room, need, want, grant",
    [
        (10, 11, 64, 0),  # not enough: nothing, rather than a part
        (10, 10, 64, 10),
        (800, 1, 64, 64),
        (801, 1, 640, 100),  # an eighth, in whole micro-units
        (800, 200, 640, 200),
        (800, 100, 100, 100),
        (7, 1, 64, 1),
        (0, 0, 0, 0),
        (-1, 0, 0, 0),
    ],
)
def test_a_store_grants_what_is_needed_and_at_most_an_eighth_beyond(
    room: int, need: int, want: int, grant: int
) -> None:
    assert granted(room=room, need=need, want=want) == grant


@pytest.mark.parametrize(
    "left, worst, error",
    [
        (0, 3 * PICO, None),
        (PICO, 3 * PICO, None),
        (0, 3 * PICO + 1, errors.BudgetReserved),
        (PICO, 3 * PICO + 1, errors.BudgetReserved),
        (0, 5 * PICO, errors.BudgetReserved),  # what runs now may turn out to cost nothing
        (0, 5 * PICO + 1, errors.OverBudget),
    ],
)
async def test_without_the_store_an_open_activator_takes_what_neither_the_ledger_nor_it_has(
    platform: Platform, board: MoneyBoard, left: int, worst: int, error: type[Exception] | None
) -> None:
    one = member_in_the_middle(platform, is_open=True)
    one.purse.grant(left)
    board.is_down = True
    if error is None:
        await borrow(one, worst)
        assert (one.purse.left, one.purse.held) == (worst, 3 * PICO + worst)
        assert repr(one.borrower) == "<BudgetLeaser 0 budgets, store unreachable>"
        return
    with pytest.raises(error) as refused:
        await borrow(one, worst)
    detail = refused.value.detail  # type: ignore[attr-defined]
    assert (to_picos(detail["spent"]), to_picos(detail["needed"])) == (5 * PICO, worst)
    assert error is errors.OverBudget or refused.value.retry_after_s == 7  # type: ignore[attr-defined]
    assert (one.purse.left, one.purse.held) == (left, 3 * PICO + left)


@pytest.mark.parametrize(
    "base, worst, error, spent",
    [
        (4 * MICROS, 5 * PICO, errors.BudgetReserved, 5 * PICO),
        (4 * MICROS, 5 * PICO + 1, errors.OverBudget, 5 * PICO),
        (6 * MICROS, 4 * PICO, errors.BudgetReserved, 5 * PICO),  # others have it, not the ledger
        (6 * MICROS, 4 * PICO + 1, errors.OverBudget, 6 * PICO),  # another has read more of it
    ],
)
async def test_a_refusal_of_the_store_says_whether_waiting_helps(
    platform: Platform, base: int, worst: int, error: type[errors.PilotlightError], spent: int
) -> None:
    platform.make_store = lambda _: ScriptedStore(answer(base=base))
    one = member_in_the_middle(platform)
    with pytest.raises(error) as refused:
        await borrow(one, worst)
    detail = refused.value.detail
    assert (to_picos(detail["spent"]), to_picos(detail["needed"])) == (spent, worst)
    assert error is errors.OverBudget or refused.value.retry_after_s == 7


async def test_a_claim_states_what_is_held_and_asks_for_64_calls_rounded_up(
    platform: Platform,
) -> None:
    store = ScriptedStore(answer(2 * MICROS))
    platform.make_store = lambda _: store
    one = member_in_the_middle(platform)
    one.purse.change(budget(amount="10.0000005"))
    one.purse.charge(PICO // 2)  # a debt, which is borrowed as well
    await borrow(one, PICO + 1)
    period = one.purse.period
    assert store.claims == [
        BudgetClaim(
            budget="b-1",
            period=period.name,
            amount=10 * MICROS,
            base=4 * MICROS,
            held=3_500_000,
            need=MICROS + 1,
            want=64 * MICROS + 1,
            ends_ns=period.ends_ns,
        )
    ]
    assert (one.purse.left, one.purse.held) == (2 * PICO, 5_500_000 * 10**6)


async def test_a_call_larger_than_what_64_small_ones_need_asks_for_all_that_it_lacks(
    platform: Platform,
) -> None:
    store = ScriptedStore(answer(3 * MICROS))
    platform.make_store = lambda _: store
    one = member_in_the_middle(platform)
    one.purse.grant(PICO)
    await borrow(one, 3 * PICO)
    assert (store.claims[0].need, store.claims[0].want) == (2 * MICROS, 192 * MICROS)
    assert one.purse.left == 4 * PICO


async def test_a_store_that_stays_young_is_asked_three_times_and_the_call_is_then_503(
    platform: Platform,
) -> None:
    store = ScriptedStore(*[answer(wait_s=0.001)] * 4)
    platform.make_store = lambda _: store
    one = member_in_the_middle(platform)
    with pytest.raises(errors.Unavailable, match="restoring their budget claims") as refused:
        await borrow(one, PICO)
    assert (refused.value.retry_after_s, len(store.claims)) == (1, 3)


async def test_a_store_that_did_not_answer_is_asked_again_when_its_pause_has_ended(
    platform: Platform, board: MoneyBoard, caplog: pytest.LogCaptureFixture
) -> None:
    one = member_in_the_middle(platform)
    board.is_down = True
    with pytest.raises(errors.Unavailable, match="the board is down"):
        await borrow(one, PICO)
    board.is_down = False
    platform.pass_s(UNREACHABLE_PAUSE_S / 2)
    with pytest.raises(errors.Unavailable, match="previous request"):
        await borrow(one, PICO)
    platform.pass_s(UNREACHABLE_PAUSE_S / 2)
    await borrow(one, PICO)
    assert one.borrower.is_reachable
    board.is_down = True
    for _ in range(2):
        await one.borrower.state_claims()
    assert [r.message for r in caplog.records if "budget store unreachable" in r.message] == [
        "budget store unreachable, spending only money already borrowed error=the board is down"
    ] * 2, "once for each time that it went away"


async def test_one_that_ends_returns_what_it_did_not_spend(
    platform: Platform, board: MoneyBoard
) -> None:
    one = member_in_the_middle(platform)
    await borrow(one, PICO)
    await one.borrower.aclose()
    assert list(board.held.values()) == [{"a-0": 3 * MICROS}]


async def test_a_call_that_another_ones_loan_covers_asks_for_nothing(platform: Platform) -> None:
    platform.make_store = lambda _: ScriptedStore()
    one = member_in_the_middle(platform)
    one.purse.grant(PICO)
    cover = one.budgets.cover(Subject("t-1", "main", "app", "f", "USD"))
    await one.borrower.borrow(cover, one.purse, PICO)
    assert one.purse.left == PICO


async def test_rounds_state_what_changed_and_return_what_was_not_used_since_the_last(
    platform: Platform, board: MoneyBoard
) -> None:
    [one] = await platform.start(1, budget("b-1", amount="100"))
    one.budgets.apply("b-2", budget("b-2", amount="100"))
    await one.borrower.state_claims()
    await one.open()
    rounds = []
    for _ in range(3):
        board.claims = 0
        await one.borrower.state_claims()
        rounds.append((board.claims, one.purse.left > 0))
    assert rounds == [
        (1, True),  # to find out whether the store has lost its data
        (3, False),
        (1, False),
    ]
    assert one.purse.held == one.purse.reserved == WORST


async def test_a_round_takes_nothing_from_a_call_that_is_borrowing(platform: Platform) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()
    store = ScriptedStore(answer(), answer())
    platform.make_store = lambda _: store
    one = member_in_the_middle(platform)
    one.purse.grant(PICO)
    await one.borrower.state_claims()
    assert [(claim.need, claim.want) for claim in store.claims] == [(0, 0)] * 2

    async def hold_up(claim: BudgetClaim) -> BudgetGrant:
        asked.set()
        await may_answer.wait()
        return answer(claim.need)

    store.claim = hold_up  # type: ignore[method-assign]
    call = asyncio.create_task(borrow(one, 2 * PICO))
    await asked.wait()
    beat = asyncio.create_task(one.borrower.state_claims())
    await asyncio.sleep(0)
    assert one.purse.left == PICO
    may_answer.set()
    await asyncio.gather(call, beat)
    assert one.purse.left == 2 * PICO


async def test_a_budget_that_was_deleted_is_stated_no_more(
    platform: Platform, board: MoneyBoard
) -> None:
    one = member_in_the_middle(platform)
    assert repr(one.borrower) == "<BudgetLeaser 0 budgets>"
    await one.borrower.state_claims()
    assert repr(one.borrower) == "<BudgetLeaser 1 budgets>"
    one.budgets.apply("b-1", None)
    board.claims = 0
    await one.borrower.state_claims()
    assert (repr(one.borrower), board.claims) == ("<BudgetLeaser 0 budgets>", 0)


async def test_a_budget_that_was_deleted_while_the_store_was_down_disturbs_no_round(
    platform: Platform, board: MoneyBoard
) -> None:
    one = member_in_the_middle(platform)
    board.is_down = True
    await one.borrower.state_claims()
    board.is_down = False
    one.budgets.apply("b-1", None)
    one.budgets.apply("b-2", budget("b-2", amount="10"))
    await one.borrower.state_claims()
    assert [name for name, _ in board.held] == ["b-2"]
