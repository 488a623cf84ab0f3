"""kill -9 of every process under load: nothing that was accepted is lost, nothing is billed twice,
and everything comes back by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.cli.supervisor import local_platform
from pilotlight.client import sessions
from pilotlight.errors import StorageFull
from pilotlight.spec.pricing import NOT_RUN
from tests.e2e.harness import APPS, PlatformUnderTest, platform_up, wait_for
from tests.e2e.load import Load

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
SUBMITTED = 40
AT_ONCE_S = 20.0
"""For a connection that is closed, on a busy machine; a caller's own clock is a minute."""


@pytest.fixture(scope="module")
def battered() -> Iterator[PlatformUnderTest]:
    """A platform whose processes are killed by one test after the other: each has to leave it
    whole."""
    with platform_up() as running:
        running.deploy("work.py")
        wait_for(
            lambda: len(running.instances("work", "nap")) == 3, "the instances that are kept warm"
        )
        yield running


@contextlib.contextmanager
def without_supervisor(platform: PlatformUnderTest) -> Iterator[None]:
    """Nothing that is killed in the block comes back before its end."""
    supervisor = local_platform.find_running(platform.local)
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)


def warm_ids(platform: PlatformUnderTest) -> set[str]:
    """Instances of the function that the load is on: always three, by its min_instances and
    max_instances."""
    return {i["id"] for i in platform.instances("work", "nap")}


def check_books(
    platform: PlatformUnderTest,
    load: Load,
    *,
    began: float,
    may_lose: bool = False,
    failed: int = 0,
) -> None:
    """Each answered call and each submitted one is in the ledger once; attempts without an answer
    are known as such.

    `may_lose`: the activator was killed; `failed`: submitted calls that ended with an error.
    """
    answered = {a.id: a.status for a in load.answered}
    known = {*answered, *load.submitted}

    def records() -> dict[str, list[dict[str, Any]]]:
        by_call: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in platform.usage("app = 'work' AND kind = 'CALL' AND started_at >= ?", began):
            by_call[record["call"]].append(record)
        return by_call

    wait_for(lambda: records().keys() >= known, "all records to be in the ledger")
    by_call = records()
    for call, status in answered.items():
        final = [r for r in by_call[call] if r["outcome"] not in NOT_RUN | {"lost"}]
        assert [r["status"] for r in final if r["status"] == status] == [status], by_call[call]
        assert len({r["attempt"] for r in by_call[call]}) == len(by_call[call])
    ended = Counter(
        tuple(r["status"] for r in by_call[call] if r["outcome"] == "ok") for call in load.submitted
    )
    # killed between a call's end and its result's, it is made again: at least once
    whole = {(200,), (200, 200)} if may_lose else {(200,)}
    assert sum(ended[statuses] for statuses in whole) == len(load.submitted) - failed, ended
    nameless = by_call.keys() - known
    assert len(nameless) <= len(load.broken)
    lost = [call for call, found in by_call.items() if any(r["outcome"] == "lost" for r in found)]
    assert not (set(lost) & answered.keys())
    assert may_lose or not lost


# -- the four processes ----------------------------------------------------------------------------
@pytest.mark.parametrize("process", ["controller", "snapshotter", "weight_cache"])
async def test_a_killed_process_that_no_call_needs_is_noticed_by_nobody(
    battered: PlatformUnderTest, process: str
) -> None:
    before, began = warm_ids(battered), time.time()
    async with Load(battered) as load:
        await load.submit(SUBMITTED, seconds=0.1)
        pid = battered.kill(process)
        await load.wait_answers(300)
        await asyncio.to_thread(battered.wait_restarted, process, pid)
        back = time.monotonic()
        await load.wait_answers(100)
        assert await load.results() == ["SUCCEEDED"] * SUBMITTED
    assert load.statuses().keys() == {200}, load
    assert (load.broken, load.refused) == ([], 0)
    assert before == await asyncio.to_thread(warm_ids, battered)
    assert load.instances(since=back) == before
    check_books(battered, load, began=began)


async def test_a_killed_activator_breaks_only_what_was_in_flight_and_loses_no_submitted_call(
    battered: PlatformUnderTest,
) -> None:
    before, began = warm_ids(battered), time.time()
    async with Load(battered) as load:
        (victim, *_) = await asyncio.to_thread(battered.instances, "work", "nap")
        # calls that come to it stay: some have been sent to a worker when the activator dies
        os.kill(victim["pid"], signal.SIGSTOP)
        await load.submit(SUBMITTED, seconds=0.3)
        await load.wait_answers(60)
        # and nobody is answered any more: every caller waits
        os.kill(battered.pid("activator"), signal.SIGSTOP)
        await load.wait_all_in_flight()
        killed = time.monotonic()
        pid = battered.kill("activator")
        os.kill(victim["pid"], signal.SIGCONT)
        await asyncio.to_thread(battered.wait_restarted, "activator", pid)
        back = time.monotonic()
        await load.wait_answers(100)
        assert await load.results() == ["SUCCEEDED"] * SUBMITTED
    assert load.statuses().keys() == {200}, load
    assert 0 < len(load.broken) <= 30
    assert load.refused == 0  # connections made meanwhile waited for the next activator
    # a closed connection, and no clock of the caller
    assert max(b.at for b in load.broken) - killed < AT_ONCE_S
    assert before == await asyncio.to_thread(warm_ids, battered)
    assert load.instances(since=back) == before
    check_books(battered, load, began=began, may_lose=True)
    lost = battered.usage("outcome = 'lost' AND started_at >= ?", began)
    assert 0 < len(lost) <= len(load.broken) + SUBMITTED


async def test_all_four_killed_together_come_back_together(battered: PlatformUnderTest) -> None:
    began = time.time()
    async with Load(battered) as load:
        await load.submit(SUBMITTED, seconds=0.1)
        pids = {
            process: battered.kill(process)
            for process in ("weight_cache", "snapshotter", "controller", "activator")
        }
        for process, pid in pids.items():
            await asyncio.to_thread(battered.wait_restarted, process, pid)
        await load.wait_answers(100)
        assert await load.results() == ["SUCCEEDED"] * SUBMITTED
    assert load.statuses().keys() == {200}, load
    assert load.refused == 0
    check_books(battered, load, began=began, may_lose=True)


# -- Templates and instances -----------------------------------------------------------------------
async def test_a_killed_template_is_noticed_by_nobody(battered: PlatformUnderTest) -> None:
    before, began = warm_ids(battered), time.time()
    look = partial(
        wait_for,
        lambda: [t for t in battered.templates() if t["labels"]["function"] == "nap"],
        "the Template of the function",
    )
    (template,) = await asyncio.to_thread(look)
    async with Load(battered) as load:
        os.kill(template["pid"], signal.SIGKILL)
        await load.wait_answers(300)
    assert load.statuses().keys() == {200}, load
    assert before == await asyncio.to_thread(warm_ids, battered)
    check_books(battered, load, began=began)


async def test_a_killed_instance_fails_only_the_calls_in_it_and_is_replaced(
    battered: PlatformUnderTest,
) -> None:
    began = time.time()
    async with Load(battered) as load:
        await load.submit(SUBMITTED, seconds=0.1)
        (victim, *_) = await asyncio.to_thread(battered.instances, "work", "nap")
        # calls that come to it stay: one that is killed between two calls fails nobody
        os.kill(victim["pid"], signal.SIGSTOP)
        await load.wait_answers(60)
        os.kill(victim["pid"], signal.SIGKILL)
        await load.wait_answers(200)
        states = Counter(await load.results())
    crashed = [a for a in load.answered if a.status != 200]
    assert {a.status for a in crashed} <= {502}, load
    assert {(a.body["reason"], a.body["worker"]) for a in crashed} <= {("killed", victim["id"])}
    assert states.keys() <= {"SUCCEEDED", "FAILED"}
    assert 0 < len(crashed) + states["FAILED"] <= 10  # its max_inputs
    wait_for(lambda: len(warm_ids(battered) - {victim["id"]}) == 3, "its replacement")
    check_books(battered, load, began=began, failed=states["FAILED"])


async def test_a_killed_instance_of_an_idempotent_function_is_noticed_by_nobody(
    battered: PlatformUnderTest,
) -> None:
    began = time.time()
    async with Load(battered, "work/again") as load:
        await load.submit(SUBMITTED, seconds=0.1)
        (victim, *_) = await asyncio.to_thread(battered.instances, "work", "again")
        os.kill(victim["pid"], signal.SIGKILL)
        await load.wait_answers(200)
        assert await load.results() == ["SUCCEEDED"] * SUBMITTED
    assert load.statuses().keys() == {200}, load
    check_books(battered, load, began=began)


async def test_an_instance_that_the_operator_stops_costs_no_caller_an_error(
    battered: PlatformUnderTest,
) -> None:
    began = time.time()
    async with (
        Load(battered) as load,
        httpx.AsyncClient(base_url=battered.url, headers=battered.headers, timeout=60) as operator,
    ):
        for _ in range(3):
            instance = min(await asyncio.to_thread(warm_ids, battered))
            answer = await operator.post(f"/v1/instances/{instance}:stop")
            assert answer.status_code == 204, answer.text
            assert instance not in await asyncio.to_thread(warm_ids, battered)
            await asyncio.to_thread(
                wait_for, lambda: len(warm_ids(battered)) == 3, "its replacement"
            )
    assert load.statuses().keys() == {200}, load
    check_books(battered, load, began=began)


# -- what goes on meanwhile ------------------------------------------------------------------------
@pytest.fixture
async def caller(battered: PlatformUnderTest) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"{battered.url}/v1", headers=battered.headers, timeout=60
    ) as client:
        yield client


async def test_a_call_to_a_cold_function_waits_for_the_agent_to_come_back(
    battered: PlatformUnderTest, caller: httpx.AsyncClient
) -> None:
    assert battered.instances("work", "cold") == []
    with without_supervisor(battered):
        pid = battered.kill("snapshotter")
        calls = [
            asyncio.create_task(caller.post("/functions/work/cold:invoke", json={"n": n}))
            for n in range(3)
        ]
        assert (
            await caller.post("/functions/work/nap:invoke", json={"n": 1, "seconds": 0.3})
        ).status_code == 200
        assert not any(call.done() for call in calls)
    answers = await asyncio.gather(*calls)
    assert [(a.status_code, a.json()) for a in answers] == [(200, n) for n in range(3)]
    await asyncio.to_thread(battered.wait_restarted, "snapshotter", pid)


async def test_warm_functions_go_on_and_deploys_say_when_to_come_again_while_controller_and_agent_are_down(
    battered: PlatformUnderTest, caller: httpx.AsyncClient
) -> None:
    with without_supervisor(battered):
        pids = {process: battered.kill(process) for process in ("controller", "snapshotter")}
        async with Load(battered) as load:
            await load.wait_answers(200)
            deploy = await caller.post("/apps/work/deploy", json={"functions": [], "message": ""})
            submitted = await caller.post("/functions/work/nap:submit", json={"n": 1})
        assert load.statuses().keys() == {200}, load
        assert deploy.status_code == 503, deploy.text
        assert int(deploy.headers["retry-after"]) >= 1
        assert deploy.headers["content-type"] == "application/problem+json"
        assert submitted.status_code == 202
    for process, pid in pids.items():
        await asyncio.to_thread(battered.wait_restarted, process, pid)
    load.submitted.append(submitted.json()["id"])
    wait_for(lambda: battered.usage("call = ?", load.submitted[0]), "the submitted call's record")


# -- a full disk -----------------------------------------------------------------------------------
@pytest.fixture
def small_disk(short_tmp: Path) -> Iterator[Path]:
    """48 MiB of disk."""
    mount = short_tmp / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=755", "tmpfs", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.mark.root
def test_a_full_disk_refuses_the_deploy_and_leaves_everything_else_as_it_was(
    small_disk: Path, short_tmp: Path
) -> None:
    with (
        platform_up(
            platform={"home": str(small_disk / "h"), "run": str(short_tmp / "r")}
        ) as platform,
        sessions.use_profile(platform.profile),
    ):
        platform.deploy("work.py")
        assert platform.result("work/cold", {"n": 1}) == 1
        heavy = short_tmp / "heavy"
        heavy.mkdir()
        (heavy / "app.py").write_text((APPS / "work.py").read_text())
        (heavy / "noise.bin").write_bytes(os.urandom(60 * 1024 * 1024))
        refused = platform.cli("deploy", str(heavy / "app.py"), "--no-wait", check=False)
        assert refused.returncode != 0
        assert (
            "no room" in refused.stderr + refused.stdout
            or "full" in refused.stderr + refused.stdout
        )
        with platform.client() as client, pytest.raises(StorageFull):
            client.put_blob("0" * 64, os.urandom(50 * 1024 * 1024))
        assert platform.result("work/cold", {"n": 2}) == 2
        (heavy / "noise.bin").unlink()
        platform.cli("deploy", str(heavy / "app.py"), "--no-wait")
        assert platform.result("work/cold", {"n": 3}) == 3
        assert Counter(r["status"] for r in platform.usage("kind = 'CALL'")).keys() <= {200}
