"""What the gateway relies on for idempotency keys, held to by the process and by a real Redis
alike."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import pytest
from redis.asyncio import Redis

from activator.idempotency.process_store import ProcessIdempotency
from activator.idempotency.redis_store import RedisIdempotency
from activator.idempotency.store_protocol import LEASE_S, Claim, IdempotencyStore, Known
from pilotlight import errors
from tests.fakes.clock import ManualClock
from tests.fakes.routes import TEST_KEY

TTL_S = 20.0
"""Of answers that a test lets run out; others are kept for a minute."""
TENANT_BYTES = 20_000
TOTAL_BYTES = 60_000


def claim_of(name: str, tenant: str = "t") -> Claim:
    return Claim(name=name, tenant=tenant, fingerprint="print")


class Desk:
    """A store, and time that passes for it: until a lease has lapsed, or a TTL of TTL_S."""

    def __init__(
        self, store: IdempotencyStore, advance: Callable[[float], Awaitable[None]]
    ) -> None:
        self.store = store
        self._advance = advance

    async def lapse(self) -> None:
        await self._advance(LEASE_S + 1)

    async def run_out(self) -> None:
        await self._advance(TTL_S + 1)


@pytest.fixture(name="desk", params=["process", "redis"])
async def _desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    if request.param == "process":
        clock = ManualClock()

        async def advance(seconds: float) -> None:
            clock.advance(seconds)

        yield Desk(
            ProcessIdempotency(clock=clock, tenant_bytes=TENANT_BYTES, max_bytes=TOTAL_BYTES),
            advance,
        )
        return
    url, platform = request.getfixturevalue("redis_url"), uuid.uuid4().hex[:8]
    store = RedisIdempotency(
        url,
        platform=platform,
        sealer=TEST_KEY.replies,
        tenant_bytes=TENANT_BYTES,
        total_bytes=TOTAL_BYTES,
    )
    async with Redis.from_url(url, decode_responses=True) as raw:
        yield Desk(
            store,
            lambda seconds: _passed(raw, f"pilotlight:{{{platform}}}:once", int(seconds * 1000)),
        )
    await store.aclose()


async def _passed(raw: Redis, prefix: str, ms: int) -> None:
    """Redis keeps the time itself: every end that is noted there comes nearer by so much."""
    for key in [key async for key in raw.scan_iter(f"{prefix}*")]:
        if key.startswith(f"{prefix}-of:") or key == f"{prefix}-ends":
            ends = cast("list[tuple[str, float]]", await raw.zrange(key, 0, -1, withscores=True))
            await raw.zadd(key, {member: end - ms for member, end in ends})
        left = await raw.pttl(key)
        assert left > 0, f"{key} would stay for ever"
        await raw.pexpire(key, left - ms)


async def test_of_many_who_claim_at_once_one_runs(desk: Desk) -> None:
    found = await asyncio.gather(*(desk.store.claim("n", f"print-{i}") for i in range(20)))
    winner = next(i for i, known in enumerate(found) if known is None)
    assert found.count(None) == 1
    assert all(
        known == Known(fingerprint=f"print-{winner}", answer=None)
        for known in found
        if known is not None
    )


async def test_an_answer_is_the_same_for_everybody_until_it_runs_out(desk: Desk) -> None:
    answer = bytes(range(256)) * 10
    await desk.store.claim("n", "print")
    await desk.store.store(claim_of("n"), answer, ttl_s=TTL_S)
    assert await desk.store.claim("n", "other") == Known(fingerprint="print", answer=answer)
    await desk.run_out()
    assert await desk.store.claim("n", "other") is None


async def test_a_claim_that_is_given_up_is_the_next_ones_and_an_answer_is_not_given_up(
    desk: Desk,
) -> None:
    await desk.store.claim("n", "print")
    await desk.store.release("n")
    assert await desk.store.claim("n", "print") is None
    await desk.store.store(claim_of("n"), b"done", ttl_s=60.0)
    await desk.store.release("n")
    assert await desk.store.claim("n", "print") == Known(fingerprint="print", answer=b"done")
    await desk.store.release("never claimed")


async def test_the_claim_of_one_who_died_lapses(desk: Desk) -> None:
    await desk.store.claim("n", "print")
    await desk.lapse()
    assert await desk.store.claim("n", "print") is None


async def test_holding_a_claim_keeps_it_and_changes_no_answer(desk: Desk) -> None:
    await desk.store.claim("n", "print")
    await desk.store.renew("n")
    assert await desk.store.claim("n", "print") == Known(fingerprint="print", answer=None)
    await desk.store.store(claim_of("n"), b"done", ttl_s=60.0)
    await desk.store.renew("n")
    await desk.lapse()
    assert await desk.store.claim("n", "print") == Known(fingerprint="print", answer=b"done")


async def test_an_answer_is_kept_though_its_claim_was_lost(desk: Desk) -> None:
    await desk.store.store(claim_of("n"), b"", ttl_s=60.0)
    assert await desk.store.claim("n", "print") == Known(fingerprint="print", answer=b"")


async def test_names_do_not_meet(desk: Desk) -> None:
    assert await desk.store.claim("n", "print") is None
    assert await desk.store.claim("m", "print") is None


async def _kept(desk: Desk, *names: str) -> list[str]:
    """Of these the names whose answers are there."""
    found = [(name, await desk.store.claim(name, "print")) for name in names]
    return [name for name, known in found if known is not None and known.answer is not None]


async def test_a_tenants_oldest_answers_make_room_for_its_newer_ones_and_no_other_tenants_do(
    desk: Desk,
) -> None:
    await desk.store.store(claim_of("theirs", "other"), b"theirs", ttl_s=60.0)
    for number in range(8):
        await desk.store.store(claim_of(str(number)), b"x" * 3000, ttl_s=60.0)

    kept = await _kept(desk, *map(str, range(8)))
    assert kept == [str(number) for number in range(8 - len(kept), 8)]
    assert 2 <= len(kept) <= 6
    assert await _kept(desk, "theirs") == ["theirs"]


async def test_small_answers_are_not_free(desk: Desk) -> None:
    names = [f"n{number}" for number in range(TENANT_BYTES // 256 + 1)]
    for name in names:
        await desk.store.store(claim_of(name), b"", ttl_s=60.0)

    assert await _kept(desk, names[0], names[-1]) == [names[-1]]


async def test_an_answer_that_is_kept_again_and_one_that_ran_out_take_no_room(desk: Desk) -> None:
    for _ in range(8):
        await desk.store.store(claim_of("again"), b"x" * 3000, ttl_s=60.0)
    await desk.store.store(claim_of("first"), b"y", ttl_s=60.0)
    for number in range(3):
        await desk.store.store(claim_of(f"short{number}", "other"), b"x" * 3000, ttl_s=TTL_S)
    await desk.run_out()
    for number in range(3):
        await desk.store.store(claim_of(f"long{number}", "other"), b"x" * 3000, ttl_s=60.0)

    assert await _kept(desk, "again", "first") == ["again", "first"]
    assert await _kept(desk, "long0", "long1", "long2") == ["long0", "long1", "long2"]


async def test_answers_of_all_tenants_have_a_bound_and_the_oldest_of_the_tenant_that_has_most_go(
    desk: Desk,
) -> None:
    await desk.store.store(claim_of("theirs", "other"), b"x" * 1000, ttl_s=60.0)
    names = [f"{number}-{tenant}" for number in range(4) for tenant in range(10)]
    for name in names:
        await desk.store.store(claim_of(name, name.partition("-")[2]), b"x" * 2000, ttl_s=60.0)

    kept = await _kept(desk, *names)
    assert TOTAL_BYTES // 5000 <= len(kept) <= TOTAL_BYTES // 2000
    assert {name.partition("-")[2] for name in kept} == {str(tenant) for tenant in range(10)}
    assert set(names[-5:]) <= set(kept)
    assert await _kept(desk, "theirs") == ["theirs"]


async def test_what_ended_takes_no_room_of_others(desk: Desk) -> None:
    for tenant in range(8):
        for number in range(3):
            await desk.store.store(
                claim_of(f"{number}-{tenant}", str(tenant)), b"x" * 2000, ttl_s=TTL_S
            )
    await desk.run_out()
    names = [f"new{number}" for number in range(4)]
    for name in names:
        await desk.store.store(claim_of(name), b"x" * 2000, ttl_s=60.0)

    assert await _kept(desk, *names) == names


async def test_the_process_forgets_its_oldest_answers_beyond_its_bound() -> None:
    store = ProcessIdempotency(max_bytes=3000, clock=ManualClock())
    for number in range(4):
        await store.claim(str(number), "print")
        await store.store(claim_of(str(number)), b"x" * 1000, ttl_s=60.0)
    assert await store.claim("0", "print") is None
    assert await store.claim("3", "print") == Known(fingerprint="print", answer=b"x" * 1000)


async def test_answers_in_redis_are_sealed(redis_url: str) -> None:
    import redis

    store = RedisIdempotency(redis_url, platform="sealed", sealer=TEST_KEY.replies)
    await store.store(claim_of("n"), b"a secret that nobody may read", ttl_s=60.0)
    await store.aclose()
    with redis.Redis.from_url(redis_url) as client:
        assert b"secret" not in (client.hget("pilotlight:{sealed}:once:n", "answer") or b"")


async def test_a_redis_that_is_away_is_said_without_its_password() -> None:
    store = RedisIdempotency(
        "redis://user:secret@127.0.0.1:1/0", platform="d", sealer=TEST_KEY.replies
    )
    with pytest.raises(errors.Unavailable, match="does not answer") as e:
        await store.claim("n", "print")
    await store.aclose()
    assert "secret" not in str(e.value)
