"""Leases of real slots in a real cache: they end with their slots, outlive the processes between,
and a cache that died is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.errors import NotFound
from tests.e2e.harness import PlatformUnderTest, wait_for
from weight_cache.client import WeightCacheClient
from weight_cache.types import Lease

pytestmark = pytest.mark.timeout(240)

APP = """
import pilotlight

app = pilotlight.App("borrower")
weights = pilotlight.Weights("letters")

@app.function(weights=weights, memory="256MiB", max_instances=1, scaledown_window=600, snapshot=False)
def first(path: str) -> str:
    return (weights.path / path).read_text()
"""


@pytest.fixture(name="borrower")
def _borrower(mortal_platform: PlatformUnderTest, tmp_path: Path) -> Iterator[PlatformUnderTest]:
    """A platform with one instance that holds a model."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("alpha")
    (tmp_path / "borrower_app.py").write_text(APP)
    mortal_platform.cli("deploy", str(tmp_path / "borrower_app.py"), "--no-wait")
    assert mortal_platform.result("borrower/first", {"path": "a.txt"}) == "alpha"
    yield mortal_platform

    def has_none() -> bool:
        stop_all(mortal_platform)  # again: the autoscaler may have brought one back
        return not leases(mortal_platform)

    wait_for(has_none, "the last lease to end")


def leases(platform: PlatformUnderTest) -> list[Lease]:
    """What the cache says is held."""

    async def ask() -> list[Lease]:
        client = WeightCacheClient(platform.local.paths.socket("weight_cache"))
        try:
            return await client.leases()
        finally:
            await client.aclose()

    return asyncio.run(ask())


def stop_all(platform: PlatformUnderTest) -> None:
    with platform.client() as client:
        for instance in client.instances(app="borrower"):
            with contextlib.suppress(NotFound):  # it ended meanwhile
                client.stop_instance(str(instance["id"]))


def test_lease_is_the_shims_and_ends_with_it(borrower: PlatformUnderTest) -> None:
    (lease,) = leases(borrower)
    assert lease.pid is not None
    assert (borrower.local.paths.run / "slots" / lease.holder / "shim.sock").exists()
    (instance,) = borrower.instances("borrower", "first")
    assert lease.pid != instance["pid"]
    os.kill(lease.pid, signal.SIGKILL)
    wait_for(
        lambda: lease.id not in {held.id for held in leases(borrower)},
        "the lease to end with its shim",
    )
    assert borrower.result("borrower/first", {"path": "a.txt"}) == "alpha"


def test_cache_that_was_killed_finds_its_leases_again_and_starts_wait_for_it(
    borrower: PlatformUnderTest,
) -> None:
    pid = borrower.kill("weight_cache")
    stop_all(borrower)
    assert borrower.result("borrower/first", {"path": "a.txt"}) == "alpha"
    borrower.wait_restarted("weight_cache", pid)
    held = wait_for(lambda: leases(borrower), "the cache to know its leases")
    assert all((borrower.local.paths.run / "slots" / lease.holder).exists() for lease in held)


def test_agent_that_was_killed_leaves_the_leases_to_the_shims(borrower: PlatformUnderTest) -> None:
    before = leases(borrower)
    pid = borrower.kill("snapshotter")
    borrower.wait_restarted("snapshotter", pid)
    assert leases(borrower) == before
    assert borrower.result("borrower/first", {"path": "a.txt"}) == "alpha"
