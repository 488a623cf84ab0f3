"""What a quota store promises, held to by the one in the process and by a real Redis alike."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from activator.coordination import redis_client
from activator.quotas.admission import UNCOUNTED, Admission, admit
from activator.quotas.process_store import ProcessQuotas
from activator.quotas.redis_store import RedisQuotas
from activator.quotas.rules import Of, Rule
from activator.quotas.store_protocol import QuotaCheck, QuotaStore, Refused
from pilotlight import errors
from pilotlight.spec.quotas import Quotas
from tests.fakes.clock import ManualClock
from tests.fakes.redis_server import MortalRedis, RedisLink, scripts_run
from tests.hypothesis_profiles import examples


def rule(of: Of = "tenant", subject: str = "t-1", **quotas: Any) -> Rule:
    """A rule with these quotas."""
    return Rule(of=of, subject=subject, quotas=Quotas(**quotas), tenant="t-1")


class Stores:
    """Members of one platform that count together; a process has only one."""

    def __init__(self, make: Callable[[str], QuotaStore], clock: ManualClock) -> None:
        self._make = make
        self._members: dict[str, QuotaStore] = {}
        self.clock = clock

    def member(self, name: str = "a-0") -> QuotaStore:
        """The store as that activator sees it."""
        if name not in self._members:
            self._members[name] = self._make(name)
        return self._members[name]

    def quota_check(self, *rules: Rule, member: str = "a-0") -> QuotaCheck:
        """A quota_check that counts something."""
        quota_check = self.member(member).quota_check(rules)
        assert quota_check is not None
        return quota_check

    async def tell(self) -> None:
        """Everybody has said what it holds."""
        for member in self._members.values():
            if isinstance(member, RedisQuotas):
                await member.flush()


@asynccontextmanager
async def opened(kind: str, url: str | None) -> AsyncIterator[Stores]:
    """Stores of a fresh platform, on a clock in the test's hand."""
    clock = ManualClock(1_000_000.0)
    async with AsyncExitStack() as closing:
        platform, alone = uuid.uuid4().hex[:8], ProcessQuotas(clock)

        def make(name: str) -> QuotaStore:
            if kind == "process":
                return alone
            assert url is not None
            store = RedisQuotas(
                url,
                platform=platform,
                member=name,
                is_open=lambda _: True,
                clock=clock,
                server_clock=clock,
            )
            closing.push_async_callback(store.aclose)
            return store

        yield Stores(make, clock)


@pytest.fixture(name="stores", params=["process", "redis"])
async def _stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    async with opened(request.param, url) as stores:
        yield stores


async def enter(quota_check: QuotaCheck, **more: int) -> Admission:
    """Admitted, or the error that the caller sees."""
    admission = await admit(quota_check, **more)
    assert admission is not None
    return admission


async def refused(quota_check: QuotaCheck, **more: int) -> errors.OverQuota:
    """The error of a call that must not be admitted."""
    with pytest.raises(errors.OverQuota) as caught:
        await admit(quota_check, **more)
    return caught.value


async def test_without_a_quota_nothing_is_counted(stores: Stores) -> None:
    assert stores.member().quota_check((rule(body_bytes=10, queued=3),)) is None
    assert await admit(None) is UNCOUNTED


async def test_a_burst_passes_and_then_the_rate_does(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=2, burst=3))
    for _ in range(3):
        await enter(quota_check)
    assert (await refused(quota_check)).retry_after_s == pytest.approx(0.5)

    stores.clock.advance(0.4)
    assert (await refused(quota_check)).retry_after_s == pytest.approx(0.1, abs=1e-4)
    stores.clock.advance(0.1)
    await enter(quota_check)
    stores.clock.advance(60)
    for _ in range(3):
        await enter(quota_check)
    await refused(quota_check)


async def test_a_refusal_says_which_quota_of_whom_and_when_to_come_back(stores: Stores) -> None:
    quota_check = stores.quota_check(
        rule(requests_per_s=0.5, burst=1), rule("key", "k-1", concurrent=9)
    )
    await enter(quota_check)
    error = await refused(quota_check)

    assert (error.status, error.type) == (429, "over-quota")
    assert error.retry_after_s == pytest.approx(2.0)
    assert error.detail == {"quota": "requests_per_s", "of": "tenant", "limit": 0.5}
    assert stores.member().statistics().refused == {Refused("t-1", "tenant", "requests_per_s"): 1}


async def test_the_longest_wait_of_all_that_refuse_is_told(stores: Stores) -> None:
    quota_check = stores.quota_check(
        rule(requests_per_s=1, burst=1),
        rule("function", "f", requests_per_s=0.1, burst=1),
        rule("key", "k", concurrent=1),
    )
    await enter(quota_check)
    error = await refused(quota_check)
    assert error.detail["of"] == "function"
    assert error.retry_after_s == pytest.approx(10.0)


async def test_so_many_run_at_once_and_each_end_lets_one_in(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(concurrent=2))
    first, second = await enter(quota_check), await enter(quota_check)
    assert (await refused(quota_check)).detail["quota"] == "concurrent"

    first.release()
    first.release()  # ends once
    third = await enter(quota_check)
    await refused(quota_check)
    for held in (second, third):
        held.release()
    assert stores.member().held("tenant:t-1") == 0


async def test_all_or_nothing_whichever_rule_refuses(stores: Stores) -> None:
    tight = rule("key", "k-1", requests_per_s=0.001, burst=1)
    wide = rule(requests_per_s=1, burst=5, concurrent=5, tokens_per_min=60)
    both, alone = stores.quota_check(wide, tight), stores.quota_check(wide)
    (await enter(both)).release()
    for _ in range(7):
        await refused(both, tokens=50)

    for _ in range(4):
        (await enter(alone)).release()
    await refused(alone)
    stores.clock.advance(1)
    await enter(alone, tokens=60)


async def test_a_quota_of_zero_lets_nobody_in(stores: Stores) -> None:
    await refused(stores.quota_check(rule(concurrent=0)))


async def test_each_further_attempt_is_one_more_request(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=1, burst=2, concurrent=1))
    admission = await enter(quota_check)
    await admission.count_retry()
    with pytest.raises(errors.OverQuota):
        await admission.count_retry()
    admission.release()
    assert stores.member().held("tenant:t-1") == 0


async def test_a_call_that_waits_counts_as_a_request_and_holds_when_it_runs(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=1, burst=2, concurrent=1))
    one, two = await enter(quota_check, holds=0), await enter(quota_check, holds=0)
    assert stores.member().held("tenant:t-1") == 0

    await one.acquire_slot()
    with pytest.raises(errors.OverQuota):
        await two.acquire_slot()
    one.release()
    await two.acquire_slot()
    two.release()


async def test_what_was_withdrawn_was_never_taken(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=0.001, burst=1, concurrent=1))
    for _ in range(3):
        (await enter(quota_check)).withdraw()
    await enter(quota_check)
    await refused(quota_check)


async def test_tokens_are_reserved_and_settled(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(tokens_per_min=600))
    call = await enter(quota_check, tokens=500)
    assert (await refused(quota_check, tokens=200)).detail["quota"] == "tokens_per_min"
    call.settle_tokens(100)  # 400 come back
    (await enter(quota_check, tokens=500)).settle_tokens(800)  # 300 more than there were: owed
    error = await refused(quota_check, tokens=10)
    assert error.retry_after_s == pytest.approx(31.0, abs=0.01)
    stores.clock.advance(31.0)
    await enter(quota_check, tokens=10)


async def test_a_call_larger_than_a_minutes_worth_takes_all_of_it(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(tokens_per_min=60))
    await enter(quota_check, tokens=5000)
    assert (await refused(quota_check, tokens=1)).retry_after_s == pytest.approx(1.0, abs=0.01)


async def test_of_a_call_larger_than_a_minutes_worth_what_it_did_not_use_comes_back(
    stores: Stores,
) -> None:
    quota_check = stores.quota_check(rule(tokens_per_min=60))
    (await enter(quota_check, tokens=5000)).settle_tokens(20)
    await enter(quota_check, tokens=40)
    await refused(quota_check, tokens=1)


async def test_what_is_owed_is_one_minutes_worth_at_most(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(tokens_per_min=60))
    (await enter(quota_check, tokens=10)).settle_tokens(1_000_000)
    assert (await refused(quota_check, tokens=1)).retry_after_s == pytest.approx(61.0, abs=0.01)


async def test_requests_that_were_made_already_are_owed(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=2, burst=3))
    await enter(quota_check)
    quota_check.charge(9)
    assert (await refused(quota_check)).retry_after_s == pytest.approx(4.0, abs=0.01)
    assert b'"tenant";r=0;' in quota_check.head()
    stores.clock.advance(4.0)
    await enter(quota_check)
    await refused(quota_check)


async def test_who_left_before_it_was_let_in_reserved_no_tokens(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(tokens_per_min=60))
    leaving = asyncio.create_task(quota_check.try_acquire(0, 0, 60))
    await asyncio.sleep(0)
    if leaving.done():  # it never waits in a process
        quota_check.refund(0, 0, 60)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await stores.tell()
    await enter(quota_check, tokens=60)


async def test_a_tenants_streams_are_refused_by_their_own_name(stores: Stores) -> None:
    quota_check = stores.quota_check(rule("streams", "t-1/main/shop/hello@t-2", concurrent=1))
    stream = await enter(quota_check)
    error = await refused(quota_check)
    assert error.detail == {"quota": "max_streams_per_tenant", "of": "streams", "limit": 1}
    assert "max_streams_per_tenant" in str(error)
    stream.release()
    await enter(quota_check)


async def test_a_clock_that_steps_back_neither_gives_nor_takes(stores: Stores) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=1, burst=2))
    await enter(quota_check)
    stores.clock.advance(-3600)
    await enter(quota_check)
    assert (await refused(quota_check)).retry_after_s == pytest.approx(1.0)
    stores.clock.advance(1.0)
    await enter(quota_check)  # it goes on from where the clock is now
    await refused(quota_check)


async def test_bounds_that_change_hold_at_once_and_what_was_used_stays_used(stores: Stores) -> None:
    wide, key = rule(requests_per_s=1, burst=10, concurrent=2), rule("key", "k-1", concurrent=5)
    first = await enter(stores.quota_check(wide, key))
    for _ in range(8):
        (await enter(stores.quota_check(wide))).release()

    narrow = stores.quota_check(rule(requests_per_s=1, burst=2, concurrent=1), key)
    await refused(narrow)  # one runs
    first.release()
    await enter(narrow)
    await refused(narrow)


async def test_subjects_of_different_kinds_and_the_owner_as_its_tenant(stores: Stores) -> None:
    tenant, key = (
        stores.quota_check(rule("tenant", "x", concurrent=1)),
        stores.quota_check(rule("key", "x", concurrent=1)),
    )
    await enter(tenant)
    await enter(key)
    error = await refused(
        stores.quota_check(
            Rule(of="owner", subject="x", quotas=Quotas(concurrent=1), tenant="x", is_shown=False)
        )
    )
    assert error.detail == {"quota": "concurrent", "of": "owner"}
    assert "1" not in str(error)


async def test_what_is_left_is_told_in_standard_headers(stores: Stores) -> None:
    quota_check = stores.quota_check(
        rule(requests_per_s=100, burst=400, concurrent=200),
        rule("key", "k-1", requests_per_s=0.5, burst=2, tokens_per_min=60),
        Rule(of="owner", subject="t-2", quotas=Quotas(concurrent=7), tenant="t-2", is_shown=False),
    )
    await enter(quota_check, tokens=30)
    assert quota_check.head().decode().split("\r\n") == [
        (
            'ratelimit-policy: "tenant";q=400;w=4, '
            '"tenant-concurrent";q=200;qu="concurrent-requests", "key";q=2;w=4, '
            '"key-tokens";q=60;w=60;qu="tokens"'
        ),
        (
            'ratelimit: "tenant";r=399;t=1, "tenant-concurrent";r=199, "key";r=1;t=2, '
            '"key-tokens";r=30;t=30'
        ),
        "",
    ]


async def test_what_has_changed_while_a_call_ran_is_not_told_in_the_old_words(
    stores: Stores,
) -> None:
    quota_check = stores.quota_check(rule(requests_per_s=1, burst=5))
    admission = await enter(quota_check)
    stores.quota_check(rule(concurrent=3))
    assert admission.head() == b""
    admission.release()


@pytest.mark.slow  # ten thousand keys, in two stores
async def test_ten_thousand_keys_are_counted_each_alone(stores: Stores) -> None:
    tenant = rule(concurrent=100_000)
    gates = [
        stores.quota_check(tenant, rule("key", f"k-{n}", requests_per_s=0.001, burst=1))
        for n in range(10_000)
    ]
    began = time.process_time()
    for start in range(0, len(gates), 500):
        await asyncio.gather(*(enter(quota_check) for quota_check in gates[start : start + 500]))
    outcomes = await asyncio.gather(
        *(admit(quota_check) for quota_check in gates[::97]), return_exceptions=True
    )

    assert all(isinstance(o, errors.OverQuota) and o.detail["of"] == "key" for o in outcomes)
    assert stores.member().held("tenant:t-1") == 10_000
    assert stores.member().statistics().subjects == 10_001
    assert time.process_time() - began < 60


async def test_subjects_that_say_nothing_any_more_are_forgotten(stores: Stores) -> None:
    kept = stores.quota_check(rule("key", "kept", concurrent=1))
    await enter(kept)
    for n in range(20_000):
        stores.quota_check(rule("address", f"10.0.{n >> 8}.{n & 255}", requests_per_s=1))
    assert stores.member().statistics().subjects < 10_000
    await refused(stores.quota_check(rule("key", "kept", concurrent=1)))


STEP = st.one_of(
    st.tuples(st.just("enter"), st.integers(0, 2), st.integers(0, 40)),
    st.tuples(st.just("release"), st.integers(0, 8)),
    st.tuples(st.just("settle"), st.integers(0, 8), st.integers(0, 60)),
    st.tuples(st.just("again"), st.integers(0, 8)),
    st.tuples(st.just("pass"), st.sampled_from([0.01, 0.3, 1.0, 7.0, -2.0])),
)


async def play(stores: Stores, steps: list[tuple[Any, ...]], *, members: int) -> list[str]:
    """What each step came to, in words."""
    wide, narrow = (
        rule(requests_per_s=2, burst=4, concurrent=5, tokens_per_min=120),
        rule("key", "k-1", requests_per_s=1, concurrent=3),
    )
    ways: tuple[tuple[Rule, ...], ...] = ((wide,), (narrow,), (wide, narrow))
    held: list[Admission] = []
    told = []
    for number, step in enumerate(steps):
        member = f"a-{number % members}"
        match step:
            case ("enter", way, tokens):
                try:
                    held.append(
                        await enter(stores.quota_check(*ways[way], member=member), tokens=tokens)
                    )
                    told.append("in")
                except errors.OverQuota as e:
                    told.append(f"{e.detail['of']} {e.detail['quota']} {e.retry_after_s:.3f}")
            case ("release", at) if held:
                held.pop(at % len(held)).release()
                await stores.tell()
            case ("settle", at, used) if held:
                held[at % len(held)].settle_tokens(used)
                await stores.tell()
            case ("again", at) if held:
                try:
                    await held[at % len(held)].count_retry()
                    told.append("again")
                except errors.OverQuota as e:
                    told.append(f"{e.detail['of']} {e.detail['quota']} {e.retry_after_s:.3f}")
            case ("pass", seconds):
                stores.clock.advance(seconds)
    return told


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(
    steps=[("enter", 1, 0), ("pass", 0.01), ("enter", 1, 0), ("pass", -2.0), ("enter", 1, 0)],
    members=1,
)
@given(steps=st.lists(STEP, max_size=40), members=st.integers(1, 3))
def test_both_stores_give_the_same_answers_however_many_activators_ask(
    redis_url: str, steps: list[tuple[Any, ...]], members: int
) -> None:
    async def told(kind: str) -> list[str]:
        async with opened(kind, redis_url) as stores:
            return await play(stores, steps, members=members)

    assert asyncio.run(told("process")) == asyncio.run(told("redis"))


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.sampled_from(["process", "redis"]),
    waits=st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0, -1.0]), min_size=1, max_size=12),
    crowd=st.integers(1, 6),
)
def test_no_interleaving_admits_more_than_the_bound(
    redis_url: str, kind: str, waits: list[float], crowd: int
) -> None:
    """Crowds come through three activators at once; in any stretch of time no more pass than burst
    + rate * seconds, nor run at once."""
    rate, burst, concurrent = 3.0, 4, 5

    async def run() -> None:
        async with opened(kind, redis_url) as stores:
            gates = [
                stores.quota_check(
                    rule(requests_per_s=rate, burst=burst, concurrent=concurrent), member=f"a-{n}"
                )
                for n in range(3)
            ]
            passed: list[tuple[float, int]] = []
            elapsed, running = 0.0, list[Admission]()
            for number, wait_s in enumerate(waits):
                stores.clock.advance(wait_s)
                elapsed += max(0.0, wait_s)
                outcomes = await asyncio.gather(
                    *(admit(quota_check) for quota_check in gates for _ in range(crowd)),
                    return_exceptions=True,
                )
                running += [o for o in outcomes if isinstance(o, Admission)]
                passed.append((elapsed, sum(isinstance(o, Admission) for o in outcomes)))
                assert all(isinstance(o, Admission | errors.OverQuota) for o in outcomes)
                assert len(running) <= concurrent
                if number % 2:
                    for admission in running:
                        admission.release()
                    running.clear()
                    await stores.tell()
            for first, (since, _) in enumerate(passed):
                for until, (at, _) in enumerate(passed[first:], start=first):
                    assert (
                        sum(count for _, count in passed[first : until + 1])
                        <= burst + rate * (at - since) + 1e-6
                    )

    asyncio.run(run())


# -- what only Redis has ---------------------------------------------------------------------------
def store_at(
    url: str,
    member: str = "a-0",
    *,
    is_open: Callable[[str], bool] = lambda _: True,
    platform: str = "p",
) -> RedisQuotas:
    return RedisQuotas(url, platform=platform, member=member, is_open=is_open)


def gate_of(store: QuotaStore, *rules: Rule) -> QuotaCheck:
    quota_check = store.quota_check(rules)
    assert quota_check is not None
    return quota_check


@pytest.mark.parametrize("fault", ["killed", "slow"])
async def test_without_redis_each_activator_counts_for_itself_where_that_is_allowed(
    mortal_redis: MortalRedis, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = store_at(mortal_redis.url), store_at(mortal_redis.url, "a-1")
    gates = [gate_of(store, rule(concurrent=1)) for store in (one, two)]
    first = await enter(gates[0])
    await refused(gates[1])

    mortal_redis.kill() if fault == "killed" else mortal_redis.freeze()
    with monkeypatch.context() as hasty:
        hasty.setattr(redis_client, "ANSWER_S", 0.1)
        second = await enter(gates[1])  # the whole quota for each
        await refused(gates[1])
        await refused(gates[0])
    assert not one.statistics().is_reachable

    mortal_redis.start() if fault == "killed" else mortal_redis.thaw()
    for store in (one, two):
        await store.heartbeat()
    assert one.statistics().is_reachable
    first.release()
    await one.flush()
    await refused(gates[0])  # what the other admitted meanwhile counts again
    second.release()
    await two.flush()
    await enter(gates[0])
    for store in (one, two):
        await store.aclose()


async def test_without_redis_what_is_closed_is_answered_503_with_a_time_and_the_rest_goes_on(
    mortal_redis: MortalRedis,
) -> None:
    store = store_at(mortal_redis.url, is_open=lambda kind: kind != "tokens")
    rated, worded = (
        gate_of(store, rule(requests_per_s=5)),
        gate_of(store, rule("key", "k-1", tokens_per_min=60)),
    )
    mortal_redis.kill()

    with pytest.raises(errors.Unavailable) as closed:
        await admit(worded, tokens=5)
    assert (closed.value.status, closed.value.retry_after_s) == (503, 2)
    await enter(worded)  # takes no tokens
    await enter(rated)
    await store.aclose()


async def test_a_redis_that_lost_its_memory_hears_again_what_is_held(redis_url: str) -> None:
    one, two = store_at(redis_url), store_at(redis_url, "a-1")
    gates = [gate_of(store, rule(concurrent=2)) for store in (one, two)]
    held = [await enter(gates[0]), await enter(gates[0])]
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        client.script_flush()
    await one.heartbeat()

    await refused(gates[1])
    held[0].release()
    await one.flush()
    await enter(gates[1])
    for store in (one, two):
        await store.aclose()


async def test_what_a_dead_activator_held_lapses_with_it(redis_url: str) -> None:
    dead = RedisQuotas(redis_url, platform="p", member="a-0", is_open=lambda _: True, ttl_s=0.05)
    living = store_at(redis_url, "a-1")
    await enter(gate_of(dead, rule(concurrent=1)))
    await asyncio.sleep(0.1)  # Redis keeps the time here
    await enter(gate_of(living, rule(concurrent=1)))
    for store in (dead, living):
        await store.aclose()


async def test_what_an_earlier_life_held_is_forgotten_with_the_first_word_of_the_next(
    redis_url: str, short_tmp: Path
) -> None:
    link = RedisLink(short_tmp, redis_url)
    before = store_at(link.url)
    await enter(gate_of(before, rule(concurrent=1)))
    link.cut()  # dies without a word
    again = store_at(redis_url)
    await again.heartbeat()
    await enter(gate_of(again, rule(concurrent=1)))
    for store in (before, again):
        await store.aclose()


async def test_who_leaves_while_redis_is_asked_holds_nothing(mortal_redis: MortalRedis) -> None:
    store = store_at(mortal_redis.url)
    quota_check = gate_of(store, rule(concurrent=1))
    await store.flush()
    mortal_redis.freeze()
    waiting = asyncio.create_task(enter(quota_check))
    while not store._is_pumping:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    mortal_redis.thaw()
    await store.flush()

    assert store.held("tenant:t-1") == 0
    await enter(quota_check)
    await store.aclose()


async def test_a_decision_is_one_round_trip_and_many_at_once_share_it(redis_url: str) -> None:
    store = store_at(redis_url)
    quota_check = gate_of(
        store,
        rule(requests_per_s=1000, concurrent=1000),
        rule("key", "k", requests_per_s=1000),
        rule("function", "f", concurrent=99),
    )
    await store.flush()

    before = scripts_run(redis_url)
    await asyncio.gather(*(enter(quota_check) for _ in range(50)))
    assert scripts_run(redis_url) - before <= 2
    await enter(quota_check)
    assert scripts_run(redis_url) - before <= 3
    await store.aclose()


async def test_a_store_shows_itself_in_one_line_without_its_password() -> None:
    store = store_at("redis://:secret@127.0.0.1:1/0")
    assert repr(store) == "<RedisQuotas 127.0.0.1:1 a-0: 0 subjects, 0 refused>"
    await enter(gate_of(store, rule(concurrent=1)))
    assert repr(store) == "<RedisQuotas 127.0.0.1:1 a-0: 1 subjects, 0 refused, away>"
    assert (
        repr(gate_of(ProcessQuotas(), rule(concurrent=1)))
        == "<ProcessQuotaCheck tenant:t-1 <Meter inf/inf requests, 0+0/1 held>>"
    )
    await store.aclose()
