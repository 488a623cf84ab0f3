"""Two activators on one port, over a real Redis: together they keep to what one would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for
from tests.fakes.plain_http import NO_TLS
from tests.fakes.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CALLS = 50
CLIENTS = 12
LOAD_S = 8.0
KILL_AFTER_S = 2.0
GREET = "pair/greet"


class Pair:
    """The platform, and the metrics of its two activators."""

    def __init__(self, platform: PlatformUnderTest) -> None:
        self.platform = platform
        self._sockets = [
            platform.local.paths.run / f"metrics-{name}.sock"
            for name in ("activator", "activator-1")
        ]

    def served(self) -> list[int]:
        """Calls that each activator has answered."""
        return [int(self._sum(path, "pilotlight_requests_total")) for path in self._sockets]

    def members(self) -> list[int]:
        """How many activators each sees."""
        return [int(self._sum(path, "pilotlight_activator_members")) for path in self._sockets]

    async def connections(
        self, count: int, stack: contextlib.AsyncExitStack
    ) -> list[list[httpx.AsyncClient]]:
        """Clients with one open connection each: so many to the one activator, and to the other.
        The kernel chooses which takes one."""
        found: dict[int, list[httpx.AsyncClient]] = {pid: [] for pid in self._activators()}
        while min(map(len, found.values())) < count:
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=1))
            )
            found[self.owner(await client.get(f"{self.platform.url}/healthz"))].append(client)
        return [clients[:count] for clients in found.values()]

    def owner(self, answer: httpx.Response) -> int:
        """Pid of the activator that holds the other end of the connection over which an answer
        came."""
        _, port = answer.extensions["network_stream"].get_extra_info("client_addr")
        for pid in self._activators():
            if any(
                one.raddr and one.raddr.port == port
                for one in psutil.Process(pid).net_connections("tcp")
            ):
                return pid
        raise AssertionError(f"no activator holds the connection from port {port}")

    def _activators(self) -> list[int]:
        return [self.platform.pid(name) for name in ("activator", "activator-1")]

    def _sum(self, path: Path, name: str) -> float:
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path), verify=NO_TLS), timeout=60
            ) as client:
                text = client.get("http://local/metrics").text
        except httpx.HTTPError:
            return 0.0
        return sum(
            float(value)
            for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        )


@pytest.fixture(name="pair", scope="module")
def _pair(redis_server: str) -> Iterator[Pair]:
    activator = {"activators": 2, "redis_url": redis_server, "listen": f"127.0.0.1:{free_port()}"}
    with platform_up(activator=activator) as platform:
        platform.deploy("pair.py")
        pair = Pair(platform)
        wait_for(lambda: pair.members() == [2, 2], "both activators to know each other")
        yield pair


@contextlib.contextmanager
def most_instances(platform: PlatformUnderTest) -> Iterator[list[int]]:
    """Counts the function's instances all the while; the last number of the list is the most that
    there were at once."""
    seen, stop = [0], threading.Event()

    def watch() -> None:
        is_over = False
        with platform.client() as client:
            while not is_over:
                # it looks once more then: what was called last is still there
                is_over = stop.wait(0.02)
                seen.append(
                    max(
                        seen[-1],
                        sum(
                            i["labels"]["function"] == "greet" for i in client.instances(app="pair")
                        ),
                    )
                )

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


async def one_call(platform: PlatformUnderTest, n: int) -> httpx.Response:
    """Over a connection of its own."""
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(
            f"{platform.url}/v1/functions/{GREET}:invoke", json={"n": n}, headers=platform.headers
        )


async def test_both_serve_and_never_hold_more_instances_together_than_the_function_may_have(
    pair: Pair,
) -> None:
    platform, before = pair.platform, pair.served()
    with most_instances(platform) as seen:
        answers = await asyncio.gather(*(one_call(platform, n) for n in range(CALLS)))

    assert [a.status_code for a in answers] == [200] * CALLS, Counter(
        a.text for a in answers if a.status_code != 200
    )
    assert sorted(a.json()[0] for a in answers) == list(range(CALLS))
    assert 0 < seen[-1] <= 2
    wait_for(lambda: sum(pair.served()) >= sum(before) + CALLS, "all calls to be counted")
    assert sum(pair.served()) == sum(before) + CALLS
    assert all(now > then for now, then in zip(pair.served(), before, strict=True)), before
    ids = {a.headers["x-request-id"] for a in answers}
    wait_for(
        lambda: Counter(r["call"] for r in platform.usage() if r["call"] in ids) == Counter(ids),
        "each record, once",
    )


def test_a_function_calls_and_submits_under_a_key_whichever_activator_holds_the_call(
    pair: Pair,
) -> None:
    for n in range(6):  # the hash of its key gives each to one of the two
        assert pair.platform.result("pair/relay", {"n": n}) == [n, 1, n]
    made = wait_for(
        lambda: pair.platform.usage("parent <> '' and function = 'greet'"), "records of these calls"
    )
    assert {row["key"].partition("/")[2] for row in made} == {"main/pair/relay"}


def test_a_submitted_call_is_found_and_cancelled_through_either(pair: Pair) -> None:
    platform = pair.platform
    accepted = [platform.post(GREET, {"n": n}, verb="submit") for n in range(10)]
    assert [a.status_code for a in accepted] == [202] * 10
    for answer in accepted:
        for _ in range(4):  # each over a connection of its own, so to whichever activator
            state = httpx.get(
                f"{platform.url}/v1/calls/{answer.json()['id']}",
                headers=platform.headers,
                timeout=60,
            )
            assert state.status_code == 200, state.text
    done = [
        httpx.get(
            f"{platform.url}/v1/calls/{a.json()['id']}?wait_s=20",
            headers=platform.headers,
            timeout=60,
        ).json()
        for a in accepted
    ]
    assert [d["state"] for d in done] == ["SUCCEEDED"] * 10

    held = [
        platform.post("pair/nap", {"seconds": 30}, verb="submit").json()["id"] for _ in range(4)
    ]
    ends = [
        httpx.post(f"{platform.url}/v1/calls/{call}:cancel", headers=platform.headers, timeout=60)
        for call in held
    ]
    assert [(end.status_code, end.json()["state"]) for end in ends] == [(200, "CANCELLED")] * 4, [
        end.text for end in ends
    ]

    again = [
        httpx.put(
            f"{platform.url}/v1/calls/mine?function={GREET}",
            json={"n": 1},
            headers=platform.headers,
            timeout=60,
        ).status_code
        for _ in range(6)
    ]
    assert sorted(again) == [200] * 5 + [202]


def test_a_revoked_key_is_refused_by_both_with_the_very_next_request(pair: Pair) -> None:
    platform = pair.platform
    for _ in range(3):
        made = json.loads(platform.cli("token", "create", "--scope", "invoke", "--json").stdout)
        headers = {"authorization": f"Bearer {made['secret']}"}
        before = [
            httpx.post(
                f"{platform.url}/v1/functions/{GREET}:invoke",
                json={"n": 1},
                headers=headers,
                timeout=60,
            )
            for _ in range(8)
        ]
        assert [a.status_code for a in before] == [200] * 8

        platform.cli("token", "revoke", made["id"], "--yes")

        after = [
            httpx.post(
                f"{platform.url}/v1/functions/{GREET}:invoke",
                json={"n": 1},
                headers=headers,
                timeout=60,
            )
            for _ in range(8)
        ]
        # each over a connection of its own, so to whichever activator
        assert [a.status_code for a in after] == [401] * 8


async def test_both_together_grant_a_key_its_quota_once(pair: Pair) -> None:
    platform = pair.platform
    quotas = ("--quota", "requests_per_s=0.001", "--quota", "burst=24")
    made = json.loads(
        platform.cli("token", "create", "--scope", "invoke", *quotas, "--json").stdout
    )

    async def call(n: int, client: httpx.AsyncClient) -> httpx.Response:
        url = f"{platform.url}/v1/functions/{GREET}:invoke"
        return await client.post(
            url, json={"n": n}, headers={"authorization": f"Bearer {made['secret']}"}
        )

    async with contextlib.AsyncExitStack() as stack:
        clients = await pair.connections(5, stack)
        answers = await asyncio.gather(
            *(call(n, each[n % 5]) for each in clients for n in range(30))
        )
        askers = Counter(pair.owner(answer) for answer in answers)

    assert sorted(askers.values()) == [30, 30]
    assert Counter(a.status_code for a in answers) == {200: 24, 429: 36}
    assert {
        a.headers["ratelimit-policy"] for a in answers if '"key"' in a.headers["ratelimit-policy"]
    }
    assert all(int(a.headers["retry-after"]) > 1 for a in answers if a.status_code == 429)


def test_status_shows_each_activator(pair: Pair) -> None:
    assert "activator-1" in pair.platform.cli("status").stdout


async def test_the_death_of_one_is_seen_by_its_callers_alone_and_its_instances_are_not_lost(
    pair: Pair,
) -> None:
    platform = pair.platform
    answered: list[httpx.Response] = []
    broken: list[tuple[int, float, httpx.TransportError]] = []
    until = time.monotonic() + LOAD_S

    async def caller(number: int) -> None:
        client = httpx.AsyncClient(timeout=60)
        while time.monotonic() < until:
            try:
                url = f"{platform.url}/v1/functions/{GREET}:invoke"
                answered.append(
                    await client.post(url, json={"n": number}, headers=platform.headers)
                )
            except httpx.TransportError as e:
                broken.append((number, time.monotonic(), e))
                await client.aclose()
                client = httpx.AsyncClient(timeout=60)
        await client.aclose()

    with most_instances(platform) as seen:
        async with asyncio.TaskGroup() as load:
            for n in range(CLIENTS):
                load.create_task(caller(n))
            await asyncio.sleep(KILL_AFTER_S)
            killed_at, pid = time.monotonic(), platform.kill("activator-1")

    assert {a.status_code for a in answered} == {200}, Counter(
        a.text for a in answered if a.status_code != 200
    )
    assert not [e for _, _, e in broken if isinstance(e, httpx.TimeoutException)]
    assert all(at >= killed_at for _, at, _ in broken), broken
    # the connection that it had, and no other
    assert max(Counter(number for number, _, _ in broken).values(), default=0) <= 1, broken
    assert seen[-1] <= 2
    platform.wait_restarted("activator-1", pid)
    wait_for(lambda: pair.members() == [2, 2], "both activators to know each other again")
    assert (await one_call(platform, 0)).status_code == 200
    ids = {a.headers["x-request-id"] for a in answered}
    wait_for(lambda: ids <= {r["call"] for r in platform.usage()}, "a record of each answered call")
    twice = [
        call
        for call, n in Counter(
            (r["call"], r["attempt"]) for r in platform.usage() if r["kind"] == "CALL"
        ).items()
        if n > 1
    ]
    assert twice == []
