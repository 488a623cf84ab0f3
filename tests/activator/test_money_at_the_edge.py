"""Budgets, price rules and a full journal, as callers see them over HTTP."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from decimal import Decimal

import httpx
import pytest

from activator.billing.journal import Journal
from activator.settings import ActivatorSettings
from pilotlight.protocol import FeedChange
from pilotlight.spec.function import Clocks, FunctionKind
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.billing_world import budget
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import problem_of, until
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.reference_prices import price_usage
from tests.fakes.routes import TENANT, route_of, spec_of


def set_budget(edge: Edge, amount: str, id: str = "b-1", **scope: str) -> None:
    """As the feed would."""
    record = budget(id, amount=amount, period="month", tenant=TENANT, **scope)
    edge.table.apply(
        FeedChange(seq=edge.table.version + 1, kind="budget", key=id, value=record.to_json())
    )


async def test_a_call_over_its_budget_is_402_and_starts_nothing(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    set_budget(edge, "0.000001")
    answer = await edge.call(json={"x": 1})
    body = problem_of(answer)
    assert (answer.status_code, str(body["type"]).rsplit("/", 1)[1]) == (402, "over-budget")
    assert (body["budget"], body["amount"], body["spent"]) == ("b-1", "0.000001", "0.000000000000")
    assert "raise the budget" in str(body["detail"])
    assert edge.fleet.started == []
    assert await edge.settle() == {}


async def test_a_budget_that_is_spent_stops_warm_calls_and_a_larger_one_lets_them_run_again(
    edge: Edge,
) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call(json={"x": 1})).status_code == 200
    set_budget(edge, "0")
    assert (await edge.call(json={"x": 1})).status_code == 402
    set_budget(edge, "100")
    assert (await edge.call(json={"x": 1})).status_code == 200
    edge.table.apply(FeedChange(seq=edge.table.version + 1, kind="budget", key="b-1", value=None))
    assert (await edge.call(json={"x": 1})).status_code == 200
    assert [r.status for r in (await edge.settle()).values() if r.kind == "CALL"] == [200] * 3


async def test_a_web_application_over_its_budget_is_402_and_starts_nothing(edge: Edge) -> None:
    edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI)))
    set_budget(edge, "0", app="shop", function="site")
    answer = await edge.client.get(
        f"{edge.url}/fn/shop/site/page", headers={"authorization": f"Bearer {KEY}"}
    )
    assert answer.status_code == 402
    assert edge.fleet.started == []


async def test_a_submitted_call_over_its_budget_fails_with_402(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    set_budget(edge, "0")
    accepted = await edge.call("shop/hello:submit", json={"x": 1})
    assert accepted.status_code == 202
    url = f"{edge.url}{accepted.json()['url']}?wait_s=20"
    state = (
        await edge.client.get(url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
    ).json()
    assert (state["state"], state["status"]) == ("FAILED", 402)
    assert edge.fleet.started == []


class TestWhileACallRuns:
    """The budget pays for one and a half worst cases."""

    @pytest.fixture(name="behaviour")
    def _behaviour(self) -> Behaviour:
        self.may_end = asyncio.Event()

        async def wait(request: WorkerRequest) -> WorkerAnswer:
            await self.may_end.wait()
            return WorkerAnswer(body=b"1")

        return wait

    async def test_the_next_is_429_with_the_time_to_wait_and_runs_when_it_has_settled(
        self, edge: Edge
    ) -> None:
        edge.add(route_of(spec_of(scaling=Scaling(max_inputs=4), clocks=Clocks(execution_s=60.0))))
        set_budget(edge, "0.00123")  # 60 s of a core and a quarter of a GiB are some 0.0008
        first = asyncio.create_task(edge.call(json={"x": 1}))
        await until(lambda: edge.books.journal.statistics().open_calls == 1)
        refused = await edge.call(json={"x": 2})
        assert refused.status_code == 429, refused.text
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert str(problem_of(refused)["type"]).endswith("budget-reserved")
        short = asyncio.create_task(edge.call(json={"x": 3}, headers={"pilotlight-timeout": "20"}))
        await until(lambda: edge.books.journal.statistics().open_calls == 2)
        self.may_end.set()
        assert [(await call).status_code for call in (first, short)] == [200, 200]
        assert (await edge.call(json={"x": 4})).status_code == 200
        records = [r for r in (await edge.settle()).values() if r.kind == "CALL"]
        purse = edge.books.budgets.balances["b-1"]
        assert purse.reserved == 0
        assert Decimal(purse.spent) / 10**12 == sum(Decimal(r.cost) for r in records)


class TestAStreamThatDoesNotEnd:
    """A generator that outlives its execution clock."""

    @pytest.fixture(name="behaviour")
    def _behaviour(self) -> Behaviour:
        async def for_ever() -> AsyncIterator[bytes]:
            yield b"1\n"
            await asyncio.Event().wait()

        async def stream(request: WorkerRequest) -> WorkerAnswer:
            return WorkerAnswer(chunks=for_ever(), content_type="application/x-ndjson")

        return stream

    async def test_is_cut_off_billed_and_its_instance_replaced(self, edge: Edge) -> None:
        edge.add(route_of(spec_of(clocks=Clocks(execution_s=1.0))))  # its first item is part of it
        with pytest.raises(httpx.RemoteProtocolError):
            await edge.call(json={"x": 1})
        [record] = [r for r in (await edge.settle()).values() if r.kind == "CALL"]
        assert (record.status, record.outcome) == (504, "error")
        assert record.exec_ms >= 1000
        await until(lambda: len(edge.fleet.stopped) == 1)


async def test_every_record_costs_what_its_price_list_says(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    for n in range(3):
        await edge.call(json={"x": n})
    await edge.settle()
    records = edge.ledger.records
    rates = edge.table.targets_of(f"{TENANT}/main/shop/hello")[0].rates
    assert {r.kind for r in records.values()} == {"CALL", "START"}
    for record in records.values():
        assert Decimal(record.cost) == price_usage(record, rates)


@contextmanager
def full_disk(journal: Journal) -> Iterator[None]:
    """No file of this process may grow beyond what the journal has."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.end.offset, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_journal_refuses_with_503_and_the_reason_and_nothing_runs(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call(json={"x": 1})).status_code == 200
    with full_disk(edge.books.journal):
        refused = await edge.call(json={"x": 2})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "journal" in str(problem_of(refused)["detail"])
    assert (await edge.call(json={"x": 3})).status_code == 200
    assert sum(len(worker.requests) for worker in edge.fleet.workers.values()) == 2


class TestWithJournalFullServe:
    """`activator.journal_full: serve`."""

    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings(journal_full="serve")

    async def test_calls_run_unbilled_and_are_counted(
        self, edge: Edge, caplog: pytest.LogCaptureFixture
    ) -> None:
        edge.add(route_of(spec_of()))
        set_budget(edge, "1")
        assert (await edge.call(json={"x": 1})).status_code == 200
        spent = edge.books.budgets.balances["b-1"].spent
        with full_disk(edge.books.journal):
            answers = [await edge.call(json={"x": n}) for n in range(3)]
        assert [(a.status_code, a.headers["pilotlight-cost"]) for a in answers] == [(200, "0")] * 3
        assert (
            edge.books.unbilled,
            edge.books.budgets.balances["b-1"].spent,
            edge.books.budgets.balances["b-1"].reserved,
        ) == (3, spent, 0)
        assert len([r for r in caplog.records if "unbilled" in r.message]) == 1
        assert len([r for r in (await edge.settle()).values() if r.kind == "CALL"]) == 1
