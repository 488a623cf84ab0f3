"""Prepaid credit at activators, with the controller's real ledger of credit behind them: who is
refused and what is answered, top-ups, expiry, `kill -9`, and two activators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa

from activator.billing.budgets.applicable import borrow_and_retry
from activator.billing.budgets.leases import BudgetLeaser
from activator.billing.errors import LedgerUnavailable
from activator.billing.instance_account import OpenRecord
from activator.billing.usage_pricing import PICO, to_picos
from pilotlight import errors
from pilotlight.controller.billing.credits import accounts, grants
from pilotlight.controller.billing.credits.definition import GrantDefinition
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.protocol import CREDIT_PERIOD, CreditRecord
from tests.activator.billing_world import SECOND, Life, Wall
from tests.activator.conftest import Edge
from tests.fakes.clock import ManualClock
from tests.fakes.databases import empty_sqlite
from tests.fakes.money_board import MoneyBoard
from tests.fakes.routes import TENANT as ROUTE_TENANT
from tests.fakes.routes import route_of, spec_of
from tests.fakes.store_ledger import StoreLedger

NOON = (1_795_219_200 + 12 * 3600) * SECOND
TENANT = "t-1"
WORST = to_picos("0.040201")
"""What a call of the instance of `billing_world` reserves."""


class World:
    """A controller's store, and activators whose ledger it is. One clock."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.wall = Wall(NOON)
        self.store = Store(
            empty_sqlite(directory / "controller.db"), clock=lambda: self.wall.now_ns / SECOND
        )
        self.ledger = StoreLedger(self.store)
        self.board: MoneyBoard | None = None
        self.lives: dict[str, Life] = {}
        with self.store.write() as write:
            row = {"id": TENANT, "name": "acme", "created_at": 1.0}
            write.sql.execute(sa.insert(tables.tenants).values(**row))

    def grant(self, amount: str, customer: str = "ana", expires_s: float | None = None) -> str:
        """Grant credit; returns its id. Activators hear of it with `hear`."""
        now = self.wall.now_ns / SECOND
        terms = GrantDefinition(
            picos=to_picos(amount),
            currency="USD",
            expires_at=None if expires_s is None else now + expires_s,
        )
        with self.store.write() as write:
            made = grants.grant(write, tenant=TENANT, customer=customer, terms=terms, actor="k")
        return made[0].id

    def hear(self, life: Life) -> None:
        """What the feed says."""
        with self.store.read() as sql:
            query = sa.select(tables.feed).where(tables.feed.c.kind == "credit")
            for row in sql.execute(query).mappings():
                body = None if row["value"] is None else record_of(row["value"])
                life.budgets.apply(row["key"], body)

    async def start(self, name: str = "a-1") -> Life:
        """A process begins in its directory."""
        life = Life(self.directory / name, self.ledger, wall=self.wall, board=self.board)  # type: ignore[arg-type]
        self.lives[name] = life
        self.hear(life)
        await life.states.load()
        if isinstance(life.budgets.lender, BudgetLeaser):
            await life.budgets.lender.state_claims()
        return life

    async def kill(self, name: str = "a-1") -> Life:
        """kill -9, and the process that comes after it."""
        self.lives[name].die()
        return await self.start(name)

    async def top_up(self, amount: str, **more: object) -> None:
        """Grant, and have all activators hear of it and read the ledger, as `BudgetStates.run`."""
        self.grant(amount, **more)  # type: ignore[arg-type]
        for life in self.lives.values():
            self.hear(life)
            await life.states.refresh()

    def balance(self, customer: str = "ana") -> Decimal:
        with self.store.read() as sql:
            account = accounts.find(sql, (TENANT, customer, "USD"))
        assert account is not None
        return Decimal(account.balance(self.wall.now_ns / SECOND)) / PICO

    def spent(self, customer: str = "ana") -> Decimal:
        """What the ledger of usage has for the customer."""
        c = tables.usage.c
        with self.store.read() as sql:
            found = sql.execute(sa.select(c.cost_picos).where(c.customer == customer)).scalars()
            return Decimal(sum(found)) / PICO


def record_of(text: str) -> CreditRecord:
    return CreditRecord.from_json(json.loads(text))


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for life in world.lives.values():
        life.die()
    world.store.close()


def close(life: Life, ticket: OpenRecord) -> int:
    at_ns = life.wall.now_ns
    return life.books.close(ticket, status=200, outcome="ok", now_ns=at_ns, at_ns=at_ns).picos


async def test_a_customer_is_refused_when_its_credit_is_used_and_no_other_is(
    world: World,
) -> None:
    world.grant("0.06")
    life = await world.start()
    cost = life.call(5, "ana")
    with pytest.raises(errors.InsufficientCredit) as refused:
        life.open("ana")
    left = Decimal("0.06") - Decimal(cost) / PICO
    assert refused.value.status == 402
    assert refused.value.retry_after_s is None
    assert Decimal(str(refused.value.detail["balance"])) == left
    assert (refused.value.detail["customer"], refused.value.detail["currency"]) == ("ana", "USD")
    assert Decimal(str(refused.value.detail["needed"])) == Decimal(WORST) / PICO
    assert "pilotlight customer credit grant" in str(refused.value)
    for customer in ("ben", ""):
        close(life, life.open(customer))
    await life.shipper.flush()
    assert world.balance() == left


async def test_a_caller_reads_what_is_left(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    record = CreditRecord(
        id="ca-1",
        tenant=ROUTE_TENANT,
        environment="",
        app="",
        function="",
        period=CREDIT_PERIOD,
        amount="0.0000000001",
        currency="USD",
        customer="ana",
        opened_at=0.0,
        version=1,
    )
    edge.tell("credit", record.id, record.to_json())
    answer = await edge.call(json={"x": 1}, headers={"pilotlight-customer": "ana"})
    problem = answer.json()
    assert (answer.status_code, problem["customer"], problem["balance"]) == (
        402,
        "ana",
        "0.000000000100",
    )
    assert problem["type"].endswith("/insufficient-credit")
    assert "retry-after" not in answer.headers, "waiting does not help"
    for headers in ({"pilotlight-customer": "ben"}, {}):
        assert (await edge.call(json={"x": 1}, headers=headers)).status_code == 200
    edge.tell("credit", record.id, None)
    answer = await edge.call(json={"x": 1}, headers={"pilotlight-customer": "ana"})
    assert answer.status_code == 200


async def test_running_calls_reserve_credit(world: World) -> None:
    world.grant("0.05")
    life = await world.start()
    ticket = life.open("ana")
    with pytest.raises(errors.BudgetReserved, match="the prepaid credit of customer 'ana'"):
        life.open("ana")
    world.wall.pass_s(0.5)
    close(life, ticket)
    life.open("ana")


async def test_a_top_up_lets_calls_through_at_once(world: World) -> None:
    world.grant("0.01")
    life = await world.start()
    with pytest.raises(errors.InsufficientCredit):
        life.open("ana")
    await world.top_up("1")
    life.call(1, "ana")
    await life.shipper.flush()
    assert world.balance() == Decimal("1.01") - world.spent()


async def test_an_answer_older_than_a_top_up_does_not_end_the_wait_for_it(world: World) -> None:
    world.grant("0.01")
    life = await world.start()
    life.call(1, "ben")
    old = await world.ledger.budgets()
    world.grant("1")
    world.hear(life)
    life.budgets.apply_states(old)
    (balance,) = life.budgets.balances.values()
    assert balance.is_stale
    assert await life.states.refresh()
    assert not balance.is_stale
    life.open("ana")


async def test_a_top_up_is_read_apart_from_the_states_of_all_others(world: World) -> None:
    world.grant("0.01")
    world.grant("0.01", "ben")
    life = await world.start()
    task = asyncio.create_task(life.states.run())
    world.grant("1")
    world.hear(life)
    (ana,) = (one for one in life.budgets.balances.values() if one.record.customer == "ana")
    async with asyncio.timeout(10):
        while ana.is_stale:
            await asyncio.sleep(0.005)
    assert world.ledger.asked == [(), (ana.record.id,)]
    life.open("ana")
    task.cancel()
    await asyncio.wait([task])


async def test_credit_expires_at_its_time_also_while_the_controller_is_away(world: World) -> None:
    world.grant("0.07")
    await world.start()
    await world.top_up("5", expires_s=5.0)
    life = world.lives["a-1"]
    life.call(1, "ana")
    await life.shipper.flush()
    running = life.open("ana")
    world.ledger.is_away = True
    world.wall.pass_s(3.9)
    close(life, running)
    world.wall.pass_s(0.2)
    later = 0
    with contextlib.suppress(errors.InsufficientCredit):
        for _ in range(9):
            later += life.call(1, "ana")
    with pytest.raises(errors.InsufficientCredit):
        life.open("ana")
    world.ledger.is_away = False
    await life.shipper.flush()
    assert later
    assert world.balance() == Decimal("0.07") - Decimal(later) / PICO
    life.open("ana")  # what calls before the expiry used is not counted twice any longer


async def test_what_was_used_is_known_after_a_kill(world: World) -> None:
    world.grant("9")
    life = await world.start()
    shipped = life.call(2, "ana")
    world.ledger.mute = 1  # the controller dies after its commit
    with contextlib.suppress(LedgerUnavailable):
        await life.shipper.flush()
    kept = life.call(3, "ana")
    life.open("ana")
    world.wall.pass_s(1)
    life.journal.heartbeat()
    again = await world.kill()
    (balance,) = again.budgets.balances.values()
    assert balance.reserved == 0
    assert balance.spent > 2 * shipped + kept, "counted twice until it is sent again"
    await again.shipper.flush()
    assert Decimal(balance.spent) / PICO == world.spent() == Decimal(9) - world.balance()
    assert 0 < balance.spent - shipped - kept <= WORST


async def test_a_start_without_the_controller_uses_the_last_state(world: World) -> None:
    world.grant("0.3")
    await world.start()
    await world.top_up("0.1", expires_s=30.0)
    life = world.lives["a-1"]
    for _ in range(5):
        life.call(10, "ana")
    await life.shipper.flush()
    await life.states.refresh()
    left = world.balance()
    world.ledger.is_away = True
    again = await world.kill()
    (balance,) = again.budgets.balances.values()
    assert Decimal(balance.amount - balance.spent) / PICO == min(left, Decimal("0.3"))


async def test_two_activators_admit_no_more_than_there_is(world: World) -> None:
    world.board = MoneyBoard(ManualClock(), grace_s=0.0)
    world.grant("0.5")  # 12 calls at most 0.040201 each
    lives = [await world.start(name) for name in ("a-0", "a-1")]
    admitted = 0
    for n in range(40):
        with contextlib.suppress(errors.BudgetReserved, errors.OverBudget):
            await borrow_and_retry(partial(lives[n % 2].open, "ana"))
            admitted += 1
    assert admitted == 12
    await world.top_up("0.1")
    for n in range(10):
        with contextlib.suppress(errors.BudgetReserved, errors.OverBudget):
            await borrow_and_retry(partial(lives[n % 2].open, "ana"))
            admitted += 1
    assert admitted == 14


class History:
    """Calls, top-ups, expiry, lost answers and kills in any order, at one or two activators."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.running: list[tuple[str, OpenRecord]] = []

    async def step(self) -> None:
        """Anything that may happen next, at one of them."""
        world, chance = self.world, self.chance
        world.wall.pass_s(chance.random())
        name = chance.choice(list(world.lives))
        life = world.lives[name]
        match chance.choice(("open",) * 8 + ("close", "ship", "top up", "kill", "mute")):
            case "open":
                with contextlib.suppress(errors.BudgetReserved, errors.OverBudget):
                    ticket = await borrow_and_retry(partial(life.open, "ana"))
                    self.running.append((name, ticket))
            case "close" if self.running:
                self.end(self.running[0])
            case "ship":
                with contextlib.suppress(LedgerUnavailable):
                    await life.shipper.flush()
            case "top up":
                expires_s = chance.choice((None, 2.0, 4.0, 8.0))
                await world.top_up(f"{chance.random() / 10:.6f}", expires_s=expires_s)
            case "kill" if chance.random() < 0.2:
                self.running = [one for one in self.running if one[0] != name]
                await world.kill(name)
            case "mute" if chance.random() < 0.2:
                world.ledger.mute = 1
        for call in self.running[:]:
            if world.wall.now_ns - call[1].at_ns > 9 * SECOND:
                self.end(call)  # its clock ends it

    def end(self, call: tuple[str, OpenRecord]) -> None:
        """A call ends."""
        self.running.remove(call)
        name, ticket = call
        close(self.world.lives[name], ticket)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("names", [("a-0",), ("a-0", "a-1")])
async def test_credit_is_never_overdrawn(world: World, seed: int, names: tuple[str, ...]) -> None:
    if len(names) > 1:
        world.board = MoneyBoard(ManualClock(), grace_s=0.0)
    world.grant("0.05")
    for name in names:
        await world.start(name)
    history = History(world, seed)
    for _ in range(150):
        await history.step()
    for call in history.running[:]:
        history.end(call)
    world.ledger.mute = 0
    for life in world.lives.values():
        await life.shipper.flush()
    with world.store.read() as sql:
        (account,) = accounts.select(sql)
    assert account.debt == 0
    assert Decimal(account.spent) / PICO == world.spent() > Decimal("0.05")
