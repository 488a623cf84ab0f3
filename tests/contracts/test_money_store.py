"""What activators may rely on when they share budgets, held to by the board of the tests and by a
real Redis alike."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import redis

from activator.billing.budgets.leases import BudgetClaim, BudgetGrant, BudgetLeaseStore
from activator.billing.budgets.redis_leases import RedisMoney
from activator.coordination.state import SharedStateUnreachable
from tests.fakes.clock import ManualClock
from tests.fakes.money_board import BoardMoney, MoneyBoard

ENDS_NS = 4_000_000_000 * 10**9


class Store:
    """Makes members of one platform, loses its memory, and lets time pass."""

    def __init__(
        self,
        make: Callable[[str], BudgetLeaseStore],
        *,
        flush: Callable[[], None],
        elapse: Callable[[float], Awaitable[None]],
        grace_s: float,
    ) -> None:
        self.member = make
        self.flush = flush
        self._elapse = elapse
        self.grace_s = grace_s

    async def pass_grace(self) -> None:
        await self._elapse(self.grace_s + 0.01)


@pytest.fixture(name="store", params=["board", "redis"])
async def _store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    async with AsyncExitStack() as closing:
        if request.param == "board":
            clock = ManualClock()
            board = MoneyBoard(clock)

            async def advance(seconds: float) -> None:
                clock.advance(seconds)

            yield Store(
                lambda name: BoardMoney(board, member=name),
                flush=board.flush,
                elapse=advance,
                grace_s=board.grace_s,
            )
        else:
            url, platform, grace_s = (
                request.getfixturevalue("redis_url"),
                uuid.uuid4().hex[:8],
                0.05,
            )

            def make(name: str) -> BudgetLeaseStore:
                money = RedisMoney(url, platform=platform, member=name, grace_s=grace_s)
                closing.push_async_callback(money.aclose)
                return money

            def flush() -> None:
                with redis.Redis.from_url(url) as client:
                    client.flushall()

            yield Store(make, flush=flush, elapse=asyncio.sleep, grace_s=grace_s)


def claim(
    *,
    held: int = 0,
    need: int = 0,
    want: int | None = None,
    base: int = 0,
    amount: int = 1000,
    period: str = "2026-11",
    ends_ns: int = ENDS_NS,
) -> BudgetClaim:
    return BudgetClaim(
        budget="b-1",
        period=period,
        amount=amount,
        base=base,
        held=held,
        need=need,
        want=need if want is None else want,
        ends_ns=ends_ns,
    )


async def ready(store: Store, *names: str) -> list[BudgetLeaseStore]:
    """Members of a store that has its memory for long enough."""
    members = [store.member(name) for name in names]
    await members[0].claim(claim())
    await store.pass_grace()
    return members


async def test_a_grant_is_what_is_needed_and_an_eighth_of_the_room_at_most_beyond(
    store: Store,
) -> None:
    one, two = await ready(store, "a-0", "a-1")
    assert (await one.claim(claim(need=10, want=640))).granted == 125
    assert (await two.claim(claim(need=10, want=50))).granted == 50
    assert (await two.claim(claim(held=50, need=700, want=800))).granted == 700


async def test_all_members_together_never_hold_more_than_the_amount(store: Store) -> None:
    members = await ready(store, *(f"a-{n}" for n in range(4)))
    held = [0] * len(members)

    async def borrow(n: int) -> None:
        while (grant := await members[n].claim(claim(held=held[n], need=7))).granted:
            held[n] += grant.granted

    await asyncio.gather(*map(borrow, range(len(members))))
    assert sum(held) == 994, "142 times 7: what is left is not enough for another"


async def test_what_the_ledger_has_counts_once_and_the_highest_word_wins(store: Store) -> None:
    one, two = await ready(store, "a-0", "a-1")
    await one.claim(claim(held=600))
    assert (await two.claim(claim(need=500))).granted == 0
    await one.claim(claim(held=100, base=500))  # 500 of the 600 have reached the ledger
    assert await two.claim(claim(need=401)) == BudgetGrant(
        granted=0, base=500, wait_s=0.0, epoch=(await two.claim(claim())).epoch
    )
    assert (await two.claim(claim(base=300, need=400))).granted == 400


async def test_a_claim_does_not_lapse_and_the_next_life_of_its_member_replaces_it(
    store: Store,
) -> None:
    one, two = await ready(store, "a-0", "a-1")
    await one.claim(claim(held=900))
    again = store.member("a-0")
    assert (await two.claim(claim(need=500))).granted == 0
    await again.claim(claim(held=20))
    assert (await two.claim(claim(need=500))).granted == 500


async def test_each_period_has_numbers_of_its_own(store: Store) -> None:
    one, two = await ready(store, "a-0", "a-1")
    await one.claim(claim(held=1000))
    assert (await two.claim(claim(need=1000, period="2026-12"))).granted == 1000


async def test_a_store_without_memory_grants_nothing_until_all_had_time_to_state_their_claims(
    store: Store,
) -> None:
    one, two = await ready(store, "a-0", "a-1")
    before = await one.claim(claim(held=900))
    store.flush()
    refused = await two.claim(claim(need=500))
    assert refused.granted == 0
    assert 0 < refused.wait_s <= store.grace_s
    assert refused.epoch != before.epoch
    await one.claim(claim(held=900))
    await store.pass_grace()
    late = await two.claim(claim(need=500))
    assert (late.granted, late.wait_s) == (0, 0.0)


async def test_a_larger_amount_is_room_at_once_and_a_smaller_one_only_stops_grants(
    store: Store,
) -> None:
    one, two = await ready(store, "a-0", "a-1")
    await one.claim(claim(held=1000))
    assert (await two.claim(claim(need=100, amount=2000))).granted == 100
    assert (await two.claim(claim(held=100, need=100, amount=500))).granted == 0


async def test_money_of_real_budgets_is_counted_to_the_last_micro_unit(store: Store) -> None:
    [one] = await ready(store, "a-0")
    amount = 10**15 - 1  # a billion units
    assert (await one.claim(claim(held=amount - 3, need=4, amount=amount))).granted == 0
    assert (await one.claim(claim(held=amount - 3, need=3, amount=amount))).granted == 3


async def test_a_word_that_was_delayed_does_not_undo_a_later_one(redis_url: str) -> None:
    one, two = (RedisMoney(redis_url, platform="d", member=m, grace_s=0) for m in ("a-0", "a-1"))
    await one.claim(claim(held=10))
    await one.claim(claim(held=900))
    one._claims_sent = 0  # the first word again, late
    assert (await one.claim(claim(held=900))).granted == 0
    assert one._claims_sent == 3, "heard already twice, then said anew"
    assert (await two.claim(claim(need=200))).granted == 0
    await one.aclose()
    await two.aclose()


async def test_a_redis_that_is_away_is_said_without_its_password() -> None:
    money = RedisMoney("redis://user:secret@127.0.0.1:1/0", platform="d", member="a-0")
    with pytest.raises(SharedStateUnreachable, match=r"127\.0\.0\.1:1 does not answer") as away:
        await money.claim(claim())
    assert "secret" not in str(away.value)
    await money.aclose()


async def test_a_claim_counts_although_the_clock_of_its_member_is_years_behind(
    store: Store,
) -> None:
    one, two = await ready(store, "a-0", "a-1")
    await one.claim(claim(held=990, ends_ns=1))
    assert (await two.claim(claim(need=20, ends_ns=1))).granted == 0
