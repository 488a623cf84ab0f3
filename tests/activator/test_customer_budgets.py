"""Hard budgets of customers: whose calls they refuse, what a caller reads, what `kill -9` leaves, and
what a customer that is new costs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from activator.billing.budgets.applicable import CustomerUnknown, Subject, borrow_and_retry
from activator.billing.budgets.balance import RecordCosts
from activator.control_plane.customer_budgets import BURST, PER_S, ControllerRegistrar
from activator.customers.scopes import CustomerScopes
from pilotlight import errors
from pilotlight.spec.identifiers import ANY_CUSTOMER
from tests.activator.billing_world import SECOND, Life, Wall, budget, records_on_disk
from tests.activator.conftest import Edge
from tests.fakes.clock import ManualClock
from tests.fakes.ledger import FakeLedger
from tests.fakes.money_board import MoneyBoard
from tests.fakes.routes import TENANT, route_of, spec_of

NOON = (1_795_219_200 + 12 * 3600) * SECOND
HEADER = "pilotlight-customer"
HERE = Subject("t-1", "main", "search", "Embedder", "USD")


# -- at one instance -------------------------------------------------------------------------------
@pytest.fixture(name="wall")
def _wall() -> Wall:
    return Wall(NOON)


@pytest.fixture(name="ledger")
def _ledger() -> FakeLedger:
    return FakeLedger(now_ns=NOON)


def test_a_spent_budget_refuses_its_customer_alone(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    life = Life(tmp_path, ledger, wall=wall)
    life.budgets.apply("b-1", budget(amount="0.05", customer="ana"))
    life.budgets.apply("b-2", budget("b-2", amount="0.13"))
    life.call(5, "ana")
    with pytest.raises(errors.OverBudget, match=r"of customer 'ana' has 0\.0299") as refused:
        life.open("ana")
    assert refused.value.detail["customer"] == "ana"
    assert refused.value.retry_after_s
    for customer in ("ben", ""):
        assert life.open(customer).customer == customer
    with pytest.raises(errors.BudgetReserved) as reserved:
        life.open("ben")
    assert "customer" not in reserved.value.detail, "it is the tenant's own budget"
    life.journal.abandon()


async def test_what_a_customer_spent_is_known_after_a_kill(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    records = [budget(amount="9", customer="ana"), budget("b-2", amount="9", customer="ben")]
    ledger.known = {one.id: one for one in records}
    life = Life(tmp_path, ledger, wall=wall)
    for one in records:
        life.budgets.apply(one.id, one)
    await life.states.load()
    shipped = life.call(2, "ana")
    await life.shipper.flush()
    kept = life.call(3, "ana")
    life.call(1, "ben")
    life.call(7, "")
    life.open("ana")
    wall.pass_s(1)
    life.journal.heartbeat()
    life.journal.abandon()  # kill -9
    again = Life(tmp_path, ledger, wall=wall)
    for one in records:
        again.budgets.apply(one.id, one)
    await again.states.load()
    (lost,) = [one for one in records_on_disk(tmp_path) if one["outcome"] == "lost"]
    assert lost["customer"] == "ana"
    balance = again.budgets.balances["b-1"]
    lost_picos = int(float(lost["cost"]) * 10**12)
    assert (balance.ledger, balance.own, balance.reserved) == (shipped, kept + lost_picos, 0)
    again.journal.abandon()


async def test_activators_together_admit_no_more_than_a_customer_has(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    one = budget(amount="0.5", customer="ana")  # 12 calls at most 0.040201 each
    ledger.known = {one.id: one}
    board = MoneyBoard(ManualClock(), grace_s=0.0)
    lives = [Life(tmp_path / name, ledger, wall=wall, board=board) for name in ("a-0", "a-1")]
    admitted = dict.fromkeys(("ana", "ben"), 0)
    for life in lives:
        life.budgets.apply(one.id, one)
        await life.states.load()
    for n in range(40):
        for customer in admitted:
            with contextlib.suppress(errors.BudgetReserved, errors.OverBudget):
                await borrow_and_retry(partial(lives[n % 2].open, customer))
                admitted[customer] += 1
    assert admitted == {"ana": 12, "ben": 40}
    for life in lives:
        life.journal.abandon()


def test_a_budget_that_comes_while_a_call_runs_is_charged_at_its_end(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    life = Life(tmp_path, ledger, wall=wall)
    ticket = life.open("ana")
    life.budgets.apply("b-1", budget(amount="9", customer="ana"))
    life.budgets.apply("b-2", budget("b-2", amount="9", customer="ben"))
    at_ns = wall.pass_s(1)
    cost = life.books.close(ticket, status=200, outcome="ok", now_ns=at_ns, at_ns=at_ns).picos
    assert [one.own for one in life.budgets.balances.values()] == [cost, 0]
    life.journal.abandon()


def test_only_customers_with_budgets_are_kept(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    life = Life(tmp_path, ledger, wall=wall)
    life.budgets.apply("b-1", budget(amount="9", customer="ana"))
    base = life.budgets.cover(HERE)
    for n in range(100):
        assert life.budgets.cover_customer(base, f"c-{n}") is base
    mine = life.budgets.cover_customer(base, "ana")
    assert [one.record.id for one in mine.balances] == ["b-1"]
    assert life.budgets.cover_customer(base, "ana") is mine
    life.budgets.apply("b-1", None)
    base = life.budgets.cover(HERE)
    assert life.budgets.cover_customer(base, "ana") is base
    life.journal.abandon()


def test_costs_are_found_by_the_customer_of_a_record(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    life = Life(tmp_path, ledger, wall=wall)
    life.budgets.apply("b-1", budget(amount="9"))
    for n, tenant in enumerate(("t-1", "t-1", "t-2"), 2):
        more = {"customer": "ana" if n != 3 else "ben", "tenant": tenant}
        life.budgets.apply(f"b-{n}", budget(f"b-{n}", amount="9", **more))
    sums = RecordCosts(life.budgets.balances.values())
    costs = [life.call(customer="ana"), life.call(2, "ben"), life.call()]
    for path in sorted((tmp_path).glob("*")):
        if path.is_file():
            for line in path.read_bytes().split(b"\n"):
                if line.startswith(b'{"t":"C"'):
                    sums.add(line[line.index(b'"u":') + 4 : -1])
    assert sums.picos == {"b-1": sum(costs), "b-2": costs[0], "b-3": costs[1], "b-4": 0}
    life.journal.abandon()


# -- customers that are new ------------------------------------------------------------------------
def test_a_customer_lacks_what_each_customer_gets_until_it_has_its_own() -> None:
    scopes = CustomerScopes()
    assert not scopes.lacks(HERE, "ana")
    scopes.apply("d", budget("d", customer=ANY_CUSTOMER, app="search"))
    assert scopes.lacks(HERE, "ana")
    assert not scopes.lacks(Subject("t-1", "main", "other", "f", "USD"), "ana")
    assert not scopes.lacks(Subject("t-2", "main", "search", "f", "USD"), "ana")
    scopes.apply("b", budget("b", customer="ana", app="search", hard=False))
    assert not scopes.lacks(HERE, "ana")
    scopes.apply("b", budget("b", customer="ana", app="search", period="month"))
    assert scopes.lacks(HERE, "ana"), "another period"
    scopes.apply("b", None)
    scopes.apply("d", None)
    assert not scopes.has("t-1")
    assert repr(scopes) == "<CustomerScopes 0 budgets, 0 customers>"


class Registrar:
    """Makes a budget for each customer, as the controller does, or fails."""

    def __init__(self, edge: Edge, amount: str) -> None:
        self.asked: list[str] = []
        self.error: errors.PilotlightError | None = None
        self._edge = edge
        self._amount = amount

    async def register(self, tenant: str, customer: str) -> None:
        """See CustomerRegistrar."""
        self.asked.append(customer)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        limit(self._edge, f"b-{customer}", customer, self._amount)


def limit(edge: Edge, id: str, customer: str, amount: str = "1") -> None:
    edge.tell("budget", id, budget(id, amount=amount, customer=customer, tenant=TENANT).to_json())


@pytest.fixture(name="shop")
def _shop(edge: Edge) -> Edge:
    edge.add(route_of(spec_of()))
    return edge


async def call(edge: Edge, customer: str = "") -> httpx.Response:
    return await edge.call(json={"x": 1}, headers={HEADER: customer} if customer else {})


async def test_a_caller_reads_whose_budget_is_spent(shop: Edge) -> None:
    for customer in ("", "ana"):
        assert (await call(shop, customer)).status_code == 200
    limit(shop, "b-1", "ana", "0.0000000001")
    for _ in range(2):
        answer = await call(shop, "ana")
        problem = answer.json()
        assert (answer.status_code, problem["customer"]) == (402, "ana")
        assert "of customer 'ana'" in problem["detail"]
        assert int(answer.headers["retry-after"]) >= 1
        assert (await call(shop, "ben")).status_code == 200
        assert (await call(shop)).status_code == 200


async def test_a_new_customer_is_registered_once_and_falls_under_its_budget(shop: Edge) -> None:
    registrar = shop.books.budgets.registrar = Registrar(shop, "1000")
    limit(shop, "d", ANY_CUSTOMER)
    for _ in range(3):
        assert (await call(shop)).status_code == 200
        assert (await call(shop, "ana")).status_code == 200
    assert registrar.asked == ["ana"]
    registrar = shop.books.budgets.registrar = Registrar(shop, "0.0000000001")
    assert [(await call(shop, name)).status_code for name in ("ben", "ben", "ana")] == [
        402,
        402,
        200,
    ]
    assert registrar.asked == ["ben"]


async def test_a_new_customer_is_refused_while_it_cannot_be_registered(shop: Edge) -> None:
    registrar = shop.books.budgets.registrar = Registrar(shop, "1000")
    limit(shop, "d", ANY_CUSTOMER)
    assert (await call(shop, "ana")).status_code == 200
    registrar.error = errors.Unavailable("the control plane does not answer", retry_after_s=2)
    answer = await call(shop, "ben")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert (await call(shop, "ana")).status_code == 200
    assert shop.books.journal.statistics().open_calls == 0


def test_nothing_is_reserved_for_a_customer_that_is_not_registered(
    tmp_path: Path, ledger: FakeLedger, wall: Wall
) -> None:
    life = Life(tmp_path, ledger, wall=wall)
    life.budgets.registrar = ControllerRegistrar(Control(), token="t")  # type: ignore[arg-type]
    life.budgets.apply("b-1", budget(amount="9"))
    life.budgets.apply("d", budget("d", customer=ANY_CUSTOMER))
    with pytest.raises(CustomerUnknown):
        life.open("ana")
    assert (life.budgets.balances["b-1"].reserved, life.books.meter.in_flight) == (0, 0)
    life.journal.abandon()


class Control:
    """A control plane that answers when told."""

    def __init__(self) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.go = asyncio.Event()
        self.status = 200

    async def post_json(
        self, path: str, caller: object, proof: object, body: Mapping[str, Any]
    ) -> httpx.Response:
        """See ControlPlaneProxy."""
        self.bodies.append(body)
        await self.go.wait()
        return httpx.Response(self.status, json={"title": "no", "detail": "no more"})


async def test_calls_for_one_new_customer_share_a_request_and_a_tenants_have_a_rate() -> None:
    control, now = Control(), [0.0]
    registrar = ControllerRegistrar(control, token="t", clock=lambda: now[0])  # type: ignore[arg-type]
    waiting = [asyncio.create_task(registrar.register("t-1", "ana")) for _ in range(5)]
    await asyncio.sleep(0)
    control.go.set()
    await asyncio.gather(*waiting)
    assert control.bodies == [{"tenant": "t-1", "customer": "ana"}]
    for n in range(BURST - 1):
        await registrar.register("t-1", f"c-{n}")
    with pytest.raises(errors.TooManyRequests) as refused:
        await registrar.register("t-1", "ben")
    assert refused.value.retry_after_s == pytest.approx(1 / PER_S)
    await registrar.register("t-2", "ben")
    now[0] += 1 / PER_S
    await registrar.register("t-1", "ben")
    control.status = 429
    with pytest.raises(errors.PilotlightError, match="no more"):
        await registrar.register("t-2", "eve")
