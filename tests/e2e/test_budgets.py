"""A hard budget, and the prepaid credit of a customer, against two activators, a Redis and a
controller that are real, and killed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SPEND = "purse/spend"
CALLERS = 8
CALL_S = 0.2
"""A call costs some 0.005: a quarter of a core at 0.1 a second."""
AMOUNT = Decimal("0.5")
LONGEST_S = 60.0


@pytest.fixture(name="platform", scope="module")
def _platform(redis_server: str) -> Iterator[PlatformUnderTest]:
    activator = {
        "activators": 2,
        "redis_url": redis_server,
        "listen": f"127.0.0.1:{free_port()}",
        "metrics_listen": None,
    }
    with platform_up(
        activator=activator,
        prices={"version": "dear", "cpu_core_s": "0.1", "memory_gib_s": "0", "cpu_factor": "0"},
    ) as platform:
        platform.deploy("purse.py")
        yield platform


def set_budget(platform: PlatformUnderTest, amount: Decimal | str, **more: Any) -> dict[str, Any]:
    """Make or change the budget of the app's month."""
    body = {"app": "purse", "amount": str(amount), **more}
    answer = httpx.put(
        f"{platform.url}/v1/budgets", json=body, headers=platform.headers, timeout=60
    )
    assert answer.status_code in (200, 201), answer.text
    budget: dict[str, Any] = answer.json()
    return budget


def shown(platform: PlatformUnderTest, budget: str) -> dict[str, Any]:
    """The budget as its owner sees it."""
    found: dict[str, Any] = httpx.get(
        f"{platform.url}/v1/budgets/{budget}", headers=platform.headers, timeout=60
    ).json()
    return found


async def call(platform: PlatformUnderTest, seconds: float = CALL_S, customer: str = "") -> int:
    """The status of one call, over a connection of its own; 0 when it broke."""
    named = {"pilotlight-customer": customer} if customer else {}
    try:
        async with httpx.AsyncClient(timeout=60, verify=NO_TLS) as client:
            answer = await client.post(
                f"{platform.url}/v1/functions/{SPEND}:invoke",
                json={"seconds": seconds},
                headers={**platform.headers, **named},
            )
    except httpx.TransportError:
        return 0
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code


async def spend_all(platform: PlatformUnderTest, customer: str = "") -> Counter[int]:
    """Call until every caller was told twice in a row that the budget is spent, or for
    LONGEST_S."""
    seen: Counter[int] = Counter()
    until = time.monotonic() + LONGEST_S

    async def caller() -> None:
        refused = 0
        while refused < 2 and time.monotonic() < until:
            status = await call(platform, customer=customer)
            seen[status] += 1
            refused = refused + 1 if status == 402 else 0
            if status != 200:
                await asyncio.sleep(0.1)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return seen


async def wait_until_both_refuse(platform: PlatformUnderTest, customer: str = "") -> None:
    """Until six calls in turn are answered 402.

    An activator answers 429 while money is claimed by the other one and not yet in the ledger: the
    other's records are still on their way to a controller that has just been started again."""
    until = time.monotonic() + LONGEST_S
    in_turn = 0
    while in_turn < 6:
        status = await call(platform, customer=customer)
        assert status in {402, 429}, status
        in_turn = in_turn + 1 if status == 402 else 0
        assert time.monotonic() < until, f"still {status} after {LONGEST_S} s"
        if status == 429:
            await asyncio.sleep(0.1)


def spent(platform: PlatformUnderTest, where: str = "1") -> Decimal:
    """What the ledger has of it."""
    return sum(
        (Decimal(r["cost"]) for r in platform.usage(f"app = 'purse' AND {where}")), Decimal(0)
    )


async def test_two_activators_never_spend_more_than_the_budget_though_one_is_killed_and_the_controller_too(
    platform: PlatformUnderTest,
) -> None:
    budget = set_budget(platform, AMOUNT)
    load = asyncio.create_task(spend_all(platform))
    await asyncio.sleep(2.0)
    pid = platform.kill("activator-1")
    platform.kill("controller")
    seen = await load
    platform.wait_restarted("activator-1", pid)
    assert seen[402] >= 2 * CALLERS, seen
    # 504: its clock is 2 s, and a busy machine may stall a worker for that
    assert seen.keys() <= {0, 200, 402, 429, 502, 503, 504}, seen
    await wait_until_both_refuse(platform)
    wait_for(lambda: spent(platform) > AMOUNT * 3 / 4, "the records to arrive")
    wait_for(
        lambda: spent(platform, "status = 200") > AMOUNT / 2,
        "most of it to have been spent on answers",
    )
    await asyncio.sleep(1.0)  # whatever else is on its way
    assert spent(platform) <= AMOUNT

    wait_for(
        lambda: Decimal(shown(platform, budget["id"])["spent"]) == spent(platform),
        "the sum to be that of the ledger",
    )
    set_budget(platform, AMOUNT * 2)
    assert await call(platform) == 200
    set_budget(platform, AMOUNT / 2)
    assert {await call(platform) for _ in range(4)} == {402}
    set_budget(platform, AMOUNT / 2, hard=False)
    assert {await call(platform, 0.0) for _ in range(4)} == {200}


def grant(platform: PlatformUnderTest, amount: Decimal) -> None:
    """Grant credit to ana."""
    answer = httpx.post(
        f"{platform.url}/v1/credits/ana/grants",
        json={"amount": str(amount)},
        headers=platform.headers,
        timeout=60,
    )
    assert answer.status_code == 201, answer.text


def balance(platform: PlatformUnderTest) -> Decimal:
    """What ana has left."""
    answer = httpx.get(f"{platform.url}/v1/credits/ana", headers=platform.headers, timeout=60)
    return Decimal(answer.json()["credits"][0]["balance"])


async def test_two_activators_never_use_more_than_a_customers_credit_though_both_sides_are_killed(
    platform: PlatformUnderTest,
) -> None:
    mine = "customer = 'ana'"
    grant(platform, AMOUNT)
    load = asyncio.create_task(spend_all(platform, "ana"))
    await asyncio.sleep(2.0)
    pid = platform.kill("activator-1")
    platform.kill("controller")
    seen = await load
    platform.wait_restarted("activator-1", pid)
    assert seen[402] >= 2 * CALLERS, seen
    assert seen.keys() <= {0, 200, 402, 429, 502, 503, 504}, seen
    await wait_until_both_refuse(platform, "ana")
    wait_for(lambda: spent(platform, mine) > AMOUNT * 3 / 4, "the records to arrive")
    await asyncio.sleep(1.0)  # whatever else is on its way
    assert spent(platform, mine) <= AMOUNT
    assert balance(platform) == AMOUNT - spent(platform, mine)
    assert await call(platform, 0.0, "ben") == 200
    grant(platform, AMOUNT)
    until = time.monotonic() + 5.0
    while await call(platform, 0.0, "ana") != 200:
        assert time.monotonic() < until, "a top-up lets calls through"
    assert {await call(platform, 0.0, "ana") for _ in range(8)} == {200}
