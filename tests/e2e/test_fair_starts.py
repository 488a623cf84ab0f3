"""Tenants on one node: a storm of one's cold starts leaves another's start alone, and its idle
instances make room."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight import profile
from pilotlight.profile import Profile
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for

# 32 cold starts, which a busy machine makes one after another
pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(300)]

MIB = 1024**2
STORM = 30
NODE_MIB = 6144
BIG_MIB = 2816
"""With the small tenant's other instance less than half of the node: within its share. The storm's
instances have more than half."""
HEAD = """
import time

import pilotlight

app = pilotlight.App("{app}")
time.sleep(0.4)  # what a boot does here: it holds its place, and no processor
"""
FUNCTION = """

@app.function(cpu=0.05, memory="{mib}MiB", scaledown_window=600)
def {name}() -> str:
    return "{name}"
"""


def app_of(directory: Path, app: str, **mib: int) -> Path:
    """A file with an app whose functions have so much memory each."""
    file = directory / f"{app}.py"
    file.write_text(
        HEAD.format(app=app)
        + "".join(FUNCTION.format(name=name, mib=size) for name, size in mib.items())
    )
    return file


def tenant_of(platform: PlatformUnderTest, directory: Path, name: str) -> PlatformUnderTest:
    """The platform as an admin of a new tenant sees it."""
    with platform.client() as client:
        created = client.create_tenant(name, plan="standard", overrides={"instances": 100})
    mine = Profile(url=platform.url, api_key=created["key"]["secret"])
    return replace(
        platform, profile=mine, profile_file=profile.save(mine, path=directory / f"{name}.toml")
    )


@pytest.fixture(name="tenants", scope="module")
def _tenants(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[PlatformUnderTest, PlatformUnderTest]]:
    node: dict[str, object] = {
        "snapshots": False,
        "memory_bytes": NODE_MIB * MIB,
        "parked_per_template": 0,
    }
    with platform_up(snapshotter=node) as platform:
        directory = tmp_path_factory.mktemp("tenants")
        storm, small = (tenant_of(platform, directory, name) for name in ("storm", "small"))
        storm.cli(
            "deploy",
            str(app_of(directory, "gale", **{f"f{n}": 128 for n in range(STORM)})),
            "--no-wait",
        )
        small.cli("deploy", str(app_of(directory, "calm", one=128, big=BIG_MIB)), "--no-wait")
        yield storm, small


def test_a_storm_of_cold_starts_leaves_another_tenants_start_alone_and_makes_room(
    tenants: tuple[PlatformUnderTest, PlatformUnderTest],
) -> None:
    storm, small = tenants
    order: list[str] = []
    lock = threading.Lock()

    def call(platform: PlatformUnderTest, function: str) -> httpx.Response:
        answer = platform.post(function, timeout=150.0)
        with lock:
            order.append(function)
        return answer

    with ThreadPoolExecutor(STORM + 1) as pool:
        gale: list[Future[httpx.Response]] = [
            pool.submit(call, storm, f"gale/f{n}") for n in range(STORM)
        ]
        wait_for(lambda: len(order) >= 1, "the storm's first starts", timeout_s=60)
        asked = len(order)
        mine = pool.submit(call, small, "calm/one")
        assert mine.result().json() == "one"
        assert [answer.result().status_code for answer in gale] == [200] * STORM
    position = order.index("calm/one") - asked
    assert position < STORM * 2 // 3, (
        f"{position} of {STORM} starts of the storm went before it, after {asked} that were there "
        f"when it was asked for"
    )

    assert len(running(storm)) == STORM, (
        "all of them are idle now, and claim more than half of the node"
    )
    assert small.result("calm/big") == "big"
    assert len(running(storm)) < STORM
    assert len(running(small)) == 2, "what is within its share stays"


def running(platform: PlatformUnderTest) -> list[dict[str, Any]]:
    with platform.client() as client:
        return [instance for instance in client.instances() if instance["state"] == "READY"]


def test_more_than_the_node_has_is_503_with_the_reason_at_once(
    tenants: tuple[PlatformUnderTest, PlatformUnderTest], tmp_path: Path
) -> None:
    _, small = tenants
    small.cli("deploy", str(app_of(tmp_path, "vast", all=2 * NODE_MIB)), "--no-wait")
    answer = small.post("vast/all")
    assert (answer.status_code, answer.json()["resource"]) == (503, "memory")
    assert f"{2 * NODE_MIB} MiB wanted" in answer.json()["detail"]
    assert int(answer.headers["retry-after"]) >= 1
