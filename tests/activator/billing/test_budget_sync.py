"""Budgets and ledger agree, whatever is lost, late, dead or broken between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activator.billing.budgets.balance import picos_under
from activator.billing.budgets.sync import STATES_NAME, load_states, parse_states
from activator.billing.errors import LedgerUnavailable
from activator.billing.usage_pricing import to_picos
from pilotlight.protocol import BudgetState
from pilotlight.spec.record_json import canonical_json
from tests.activator.billing_world import SECOND, Life, Wall, budget, open_attempt, records_on_disk
from tests.fakes.ledger import FakeLedger
from tests.hypothesis_profiles import examples

MIDNIGHT = 1_795_219_200 * SECOND
NOON = MIDNIGHT + 12 * 3600 * SECOND


@pytest.fixture(name="wall")
def _wall() -> Wall:
    return Wall(NOON)


@pytest.fixture(name="ledger")
def _ledger() -> FakeLedger:
    ledger = FakeLedger(now_ns=NOON)
    ledger.known["b-1"] = budget(amount="100")
    return ledger


@pytest.fixture(name="life")
def _life(tmp_path: Path, ledger: FakeLedger, wall: Wall) -> Life:
    return Life(tmp_path, ledger, wall=wall)


async def test_shipping_moves_money_from_here_to_the_ledger_and_changes_no_sum(life: Life) -> None:
    purse = await life.start(budget(amount="100"))
    cost = life.call() + life.call(3)
    assert (purse.ledger, purse.own) == (0, cost)
    await life.shipper.flush()
    assert (purse.ledger, purse.own, purse.left) == (cost, 0, 100 * 10**12 - cost)
    life.die()


async def test_a_new_life_knows_what_the_last_one_spent_shipped_or_not(
    life: Life, tmp_path: Path
) -> None:
    await life.start(budget(amount="100"))
    shipped = life.call(2)
    await life.shipper.flush()
    kept = life.call(5)
    open_attempt(life.books, call="lost", now_ns=life.wall.now_ns, at_ns=life.wall.now_ns)
    life.wall.pass_s(1)
    life.journal.heartbeat()
    life.die()
    again = Life(tmp_path, life.ledger, wall=life.wall)
    purse = await again.start(budget(amount="100"))
    lost = to_picos(records_on_disk(tmp_path)[-1]["cost"])
    assert lost == 4_001_000_000
    assert (purse.ledger, purse.own, purse.reserved) == (shipped, kept + lost, 0)
    again.die()


async def test_a_start_without_a_controller_goes_on_from_the_last_word_and_asks_again(
    life: Life, tmp_path: Path
) -> None:
    await life.start(budget(amount="100"))
    shipped = life.call(2)
    await life.shipper.flush()
    kept = life.call()
    life.die()
    assert load_states(tmp_path / STATES_NAME)["b-1"].period == "2026-11-21"
    again = Life(tmp_path, life.ledger, wall=life.wall)
    life.ledger.away = 1
    purse = await again.start(budget(amount="100"))
    assert (purse.ledger, purse.own, purse.is_stale) == (shipped, kept, True)
    assert repr(again.states) == "<BudgetStates 1 budgets, 1 stale>"
    assert await again.states.refresh()
    assert (purse.ledger, purse.own, purse.is_stale) == (shipped, kept, False)
    again.die()


@pytest.mark.parametrize(
    "text", ["", "{torn", "[]", '{"b-1": 7}', '{"b-1": {"period": 1, "spent": "NaN"}}']
)
async def test_a_broken_last_word_is_no_word(
    tmp_path: Path, ledger: FakeLedger, wall: Wall, text: str
) -> None:
    (tmp_path / STATES_NAME).write_text(text)
    ledger.away = 1
    life = Life(tmp_path, ledger, wall=wall)
    purse = await life.start(budget(amount="100"))
    assert (purse.ledger, purse.is_stale) == (0, True)
    life.die()


async def test_an_answer_that_was_lost_counts_twice_until_it_comes_again_and_never_less(
    life: Life,
) -> None:
    purse = await life.start(budget(amount="100"))
    cost = life.call()
    life.ledger.mute = 1
    with pytest.raises(LedgerUnavailable):
        await life.shipper.flush()
    await life.states.refresh()
    assert purse.spent == 2 * cost
    await life.shipper.flush()
    assert (purse.ledger, purse.own) == (cost, 0)
    life.die()


async def test_a_budget_that_is_made_in_the_middle_counts_what_its_period_had_before(
    life: Life,
) -> None:
    await life.start(budget(amount="100"))
    shipped = life.call()
    await life.shipper.flush()
    waiting = life.call(2)
    life.ledger.known["b-2"] = budget("b-2", amount="50", app="search")
    life.budgets.apply("b-2", life.ledger.known["b-2"])
    after = life.call(3)
    purse = life.budgets.balances["b-2"]
    assert purse.own == after
    await life.shipper.flush()
    assert (purse.ledger, purse.own) == (shipped + waiting + after, 0)
    life.die()


async def test_a_batch_that_was_on_its_way_when_a_budget_was_made_is_counted_once(
    life: Life,
) -> None:
    await life.start(budget(amount="100"))
    sent = life.call()
    batch = [canonical_json(r) for r in records_on_disk(life.journal.directory)]
    life.ledger.known["b-2"] = budget("b-2", amount="50")
    life.budgets.apply("b-2", life.ledger.known["b-2"])
    after = life.call()
    purse = life.budgets.balances["b-2"]
    life.budgets.apply_answer(await life.ledger.accept(batch), batch)
    assert (purse.ledger, purse.own) == (sent, after)
    life.die()


@pytest.mark.parametrize("names_all", [True, False])
@pytest.mark.parametrize("controller_s", [-3600, 3600])
async def test_clocks_on_different_sides_of_midnight_lose_nothing(
    life: Life, controller_s: int, names_all: bool
) -> None:
    life.ledger.names_all = names_all
    life.wall.now_ns = MIDNIGHT + 10 * SECOND if controller_s < 0 else MIDNIGHT - 600 * SECOND
    life.ledger.now_ns = life.wall.now_ns + controller_s * SECOND
    purse = await life.start(budget(amount="100"))
    first = life.call()
    await life.shipper.flush()
    second = life.call()
    assert (purse.spent, purse.own) == (first + second, second)
    life.ledger.now_ns = life.wall.now_ns
    await life.shipper.flush()
    assert (purse.ledger, purse.own) == (first + second, 0)
    life.die()


async def test_an_answer_without_a_budget_moves_what_was_sent_of_it_and_nothing_else(
    life: Life,
) -> None:
    purse = await life.start(budget(amount="100"))
    sent = life.call()
    batch = [canonical_json(r) for r in records_on_disk(life.journal.directory)]
    kept = life.call(2)
    foreign = [record.replace(b'"t-1"', b'"t-2"') for record in batch]
    life.budgets.apply_answer({}, foreign)
    assert (purse.ledger, purse.own) == (0, sent + kept)
    life.budgets.apply_answer({}, batch)
    assert (purse.ledger, purse.own) == (sent, kept)
    life.die()


async def test_a_correction_in_the_ledger_is_heard_of_without_a_record_of_ours(life: Life) -> None:
    purse = await life.start(budget(amount="100"))
    cost = life.call()
    await life.shipper.flush()
    record = next(iter(life.ledger.records.values()))
    life.ledger.records["adjusted"] = {
        **record,
        "id": "adjusted",
        "kind": "ADJUSTMENT",
        "cost": "-0.001",
    }
    await life.states.refresh()
    assert purse.spent == cost - 10**9
    life.die()


@pytest.mark.parametrize(
    "state",
    [
        {"period": "2026-11-21", "spent": "NaN"},
        {"period": "2026-11-21", "spent": "1e400"},
        {"period": "2026-11-21", "spent": "x"},
        {"period": "2026-11-21", "spent": "1", "batch": "Infinity"},
        {"spent": "1"},
        5,
        None,
        {"period": "tomorrow", "spent": "-"},
    ],
)
async def test_a_poisoned_answer_is_left_aside_and_the_numbers_stay(
    life: Life, state: object
) -> None:
    purse = await life.start(budget(amount="100"))
    cost = life.call()
    batch = [canonical_json(r) for r in records_on_disk(life.journal.directory)]
    life.budgets.apply_states(parse_states({"b-1": state}))
    assert (purse.ledger, purse.own) == (0, cost)
    life.budgets.apply_answer(
        parse_states({"b-1": state, "unknown": {"period": "2026-11-21", "spent": "5"}}), batch
    )
    assert (purse.ledger, purse.own) == (cost, 0), "the records were taken, that much is sure"
    life.die()


async def test_a_batch_larger_than_all_we_had_does_not_make_what_we_owe_negative(
    life: Life,
) -> None:
    purse = await life.start(budget(amount="100"))
    life.call()
    life.budgets.apply_answer({"b-1": BudgetState(period="2026-11-21", spent="7", batch="7")}, [])
    assert (purse.ledger, purse.own, purse.left) == (7 * 10**12, 0, 93 * 10**12)
    life.die()


async def test_new_budgets_are_asked_about_at_once(life: Life) -> None:
    await life.start(budget(amount="100"))
    life.ledger.known["b-2"] = budget("b-2", amount="50")
    cost = life.call()
    await life.shipper.flush()
    task = asyncio.create_task(life.states.run())
    life.budgets.apply("b-2", life.ledger.known["b-2"])
    purse = life.budgets.balances["b-2"]
    async with asyncio.timeout(20):
        while purse.is_stale:
            await asyncio.sleep(0)
    assert purse.ledger == cost
    task.cancel()
    await asyncio.wait([task])
    life.die()


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ("call", "call", "call", "ship", "lost", "away", "die", "budget", "refresh")
        ),
        st.integers(1, 5000),
    ),
    max_size=30,
)


@settings(
    deadline=None,
    max_examples=examples(50),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(diary=steps)
def test_whatever_happens_in_between_everything_is_counted_once_when_all_has_arrived(
    tmp_path_factory: pytest.TempPathFactory, diary: list[tuple[str, int]]
) -> None:
    asyncio.run(_live(tmp_path_factory.mktemp("j"), diary))


async def _live(directory: Path, diary: list[tuple[str, int]]) -> None:
    wall, ledger = Wall(NOON), FakeLedger(now_ns=NOON)
    known = [budget(amount="1000")]
    ledger.known["b-1"] = known[0]
    life = Life(directory, ledger, wall=wall, segment_bytes=4000)
    await life.start(*known)
    for what, n in diary:
        wall.pass_s(0.001)
        if what == "call":
            life.call(n / 1000)
        elif what == "die":
            life.die()
            life = Life(directory, ledger, wall=wall, segment_bytes=4000)
            await life.start(*known)
        elif what == "budget" and len(known) < 4:
            known.append(budget(f"b-{len(known) + 1}", amount="1000", app="search"))
            ledger.known[known[-1].id] = known[-1]
            life.budgets.apply(known[-1].id, known[-1])
        elif what == "refresh":
            await life.states.refresh()
        elif what in ("ship", "lost", "away"):
            ledger.mute, ledger.away = what == "lost", what == "away"
            try:
                await life.shipper.flush()
            except LedgerUnavailable:
                assert what != "ship"
            ledger.mute = ledger.away = 0
            await life.journal.sync()
        told = life.budgets.balances["b-1"]
        truth = {r["id"]: r for r in [*ledger.records.values(), *records_on_disk(directory)]}
        assert told.spent >= sum(picos_under(told, canonical_json(r)) for r in truth.values()), (
            "never less than what was spent"
        )
    await life.shipper.flush()
    await life.states.refresh()
    for record in known:
        purse = life.budgets.balances[record.id]
        assert (purse.own, purse.reserved) == (0, 0)
        assert purse.ledger == sum(
            picos_under(purse, canonical_json(r)) for r in ledger.records.values()
        )
    life.die()
