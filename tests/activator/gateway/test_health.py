"""`/healthz` and `/readyz`: what they say, and that they mean it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from activator.billing.errors import JournalFull
from activator.billing.journal import Journal
from activator.gateway.health import Health
from activator.settings import ActivatorSettings
from pilotlight import errors
from tests.activator.conftest import Edge, served
from tests.activator.test_money_at_the_edge import full_disk
from tests.fakes.fake_worker import echo
from tests.fakes.plain_http import NO_TLS


@pytest.fixture(name="journal")
async def _journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal, _ = Journal.open(tmp_path, activator="a-0", sync_s=0.01)
    running = asyncio.create_task(journal.run())
    yield journal
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal.abandon()


async def test_ready_once_nothing_is_missing(journal: Journal) -> None:
    health, missing = Health(journal=journal), ["routes", "instances"]
    for what in missing:
        health.needs(lambda what=what: what if what in missing else "")  # type: ignore[misc]
    with pytest.raises(errors.Unavailable, match="routes; instances") as refused:
        await health.require_ready()
    assert refused.value.detail["missing"] == ["routes", "instances"]
    await health.require_alive()
    missing.remove("routes")
    assert health.missing() == ["instances"]
    missing.clear()
    await health.require_ready()


async def test_what_goes_away_later_takes_no_activator_out() -> None:
    health, missing = Health(), [""]
    health.needs(lambda: missing[0])
    await health.require_ready()
    missing[0] = "Redis"
    await health.require_ready()


async def test_on_its_way_out_it_is_alive_and_not_ready(journal: Journal) -> None:
    health = Health(journal=journal)
    health.is_draining = True
    await health.require_alive()
    with pytest.raises(errors.Unavailable, match="shutting down"):
        await health.require_ready()


async def test_a_journal_that_takes_no_lines_is_no_life(journal: Journal) -> None:
    health = Health(journal=journal)
    with full_disk(journal):
        journal.append_record(b"no room for this", at_ns=0)
        with pytest.raises(errors.Unavailable, match="its disk is full") as refused:
            await health.require_alive()
        assert refused.value.detail["missing"] == ["journal"]
        await Health(journal=journal, is_served_unbilled=True).require_alive()
    journal.append_record(b"there is room again", at_ns=0)
    await health.require_alive()


async def test_a_disk_that_fails_is_no_life(tmp_path: Path) -> None:
    class Failing(Journal):
        async def wait_synced(self) -> None:
            raise JournalFull("the disk failed", retry_after_s=5) from OSError(
                errno.EIO, "I/O error"
            )

    journal, _ = Failing.open(tmp_path, activator="a-0")
    with pytest.raises(errors.Unavailable, match="the disk failed"):
        await Health(journal=journal).require_ready()
    journal.abandon()


async def test_probes_need_no_key_and_are_told_in_a_problem_document(short_tmp: Path) -> None:
    health = Health()
    health.needs(lambda: "instances that are its own are still looked for" if not passed else "")
    passed: list[bool] = []
    edge = Edge(short_tmp, ActivatorSettings(), echo, health=health)
    async with served(edge), httpx.AsyncClient(verify=NO_TLS) as probe:
        early = await probe.get(f"{edge.url}/readyz")
        assert (early.status_code, early.headers["content-type"]) == (
            503,
            "application/problem+json",
        )
        assert early.json()["missing"] == ["instances that are its own are still looked for"]
        assert (await probe.get(f"{edge.url}/healthz")).json()["status"] == "ok"
        passed.append(True)
        assert (await probe.get(f"{edge.url}/readyz")).json()["status"] == "ready"
        health.is_draining = True
        assert (await probe.get(f"{edge.url}/readyz")).status_code == 503
        assert (await probe.get(f"{edge.url}/healthz")).status_code == 200
