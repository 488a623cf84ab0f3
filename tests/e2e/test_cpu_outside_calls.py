"""The CPU time that nobody called for, on a real platform: after an answer, in an `enter()` that
fails, in a command beside an instance, in the build of an image; and no more of it on the bill when
the activator is killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from pilotlight.protocol import UsageRecord
from pilotlight.spec.pricing import PriceSettings
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for
from tests.fakes.plain_http import NO_TLS
from tests.fakes.reference_prices import price_usage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups"),
]

BURST_S = 0.5
PRICES = {"version": "cpu-1", "cpu_factor": "0.5"}


@pytest.fixture(name="platform", scope="module")
def _platform() -> Iterator[PlatformUnderTest]:
    with platform_up(prices=dict(PRICES), snapshotter={"snapshots": False}) as running:
        running.deploy("background.py")
        yield running


def cpu_records(platform: PlatformUnderTest, function: str) -> list[dict[str, Any]]:
    """CPU records of a function in the ledger."""
    return platform.usage("kind = 'CPU' AND function = ?", function)


def charged_s(platform: PlatformUnderTest, function: str) -> float:
    """What they come to."""
    return sum(int(record["billed_ns"]) for record in cpu_records(platform, function)) / 1e9


def is_gone(platform: PlatformUnderTest, function: str) -> bool:
    """Whether it has no instance."""
    return not platform.instances("background", function)


def test_what_an_instance_computes_after_its_answer_is_billed_and_its_calls_are_not_billed_twice(
    platform: PlatformUnderTest,
) -> None:
    wait_for(lambda: is_gone(platform, "Worker"), "the instance of the deploy to end")
    before_s = charged_s(platform, "Worker")
    platform.result("background/Worker.later", {"seconds": BURST_S})
    wait_for(lambda: is_gone(platform, "Worker"), "its end")
    wait_for(
        lambda: charged_s(platform, "Worker") - before_s >= 0.9 * BURST_S,
        "what it used after its answer",
    )
    middle_s = charged_s(platform, "Worker")
    platform.result("background/Worker.now", {"seconds": 2 * BURST_S})
    wait_for(lambda: is_gone(platform, "Worker"), "its end")
    wait_for(
        lambda: len(platform.usage("kind = 'CALL' AND function = 'Worker'")) >= 2, "both calls"
    )
    wait_for(lambda: charged_s(platform, "Worker") > middle_s, "its start")
    assert charged_s(platform, "Worker") - middle_s < 1.5 * BURST_S, (
        "its start and its end, and not the second that its call took"
    )
    rates = PriceSettings(version="cpu-1", cpu_factor="0.5").rates()
    for row in cpu_records(platform, "Worker"):
        record = UsageRecord.from_json({key: row[key] for key in UsageRecord.__dataclass_fields__})
        assert Decimal(record.cost) == price_usage(record, rates)


def test_an_enter_that_fails_is_billed(platform: PlatformUnderTest) -> None:
    before_s = charged_s(platform, "Failing")
    assert platform.post("background/Failing.call").status_code >= 500
    wait_for(
        lambda: charged_s(platform, "Failing") - before_s >= 0.9 * BURST_S,
        "the CPU time of the start",
    )
    assert "cpu_ns" not in platform.post("background/Failing.call").text, "no caller's business"


def test_a_killed_activator_charges_nothing_twice(platform: PlatformUnderTest) -> None:
    wait_for(lambda: is_gone(platform, "Worker"), "no instance")
    before_s = charged_s(platform, "Worker")
    platform.result("background/Worker.later", {"seconds": BURST_S})
    platform.wait_restarted("activator", platform.kill("activator"))
    platform.result("background/Worker.later", {"seconds": BURST_S})
    wait_for(lambda: is_gone(platform, "Worker"), "its end")
    wait_for(
        lambda: charged_s(platform, "Worker") - before_s >= 0.9 * BURST_S,
        "what it used after the second answer",
    )
    ids = [record["id"] for record in cpu_records(platform, "Worker")]
    assert len(set(ids)) == len(ids)


def test_a_build_that_fails_is_billed(platform: PlatformUnderTest) -> None:
    burn = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; exit 7"
    image = {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "steps": [{"op": "run", "commands": [burn]}],
    }
    answer = httpx.post(
        f"{platform.url}/v1/images",
        json=image,
        headers=platform.headers,
        timeout=120,
        verify=NO_TLS,
    )
    assert "status 7" in answer.text, answer.text
    assert "cpu_ns" not in answer.text
    [record] = wait_for(lambda: platform.usage("kind = 'BUILD'"), "its record")
    assert record["billed_ns"] > 50_000_000
    assert Decimal(record["cost"]) > 0
    assert record["key"]
    assert '"BUILD"' in platform.cli("billing", "report", "--json").stdout


def test_the_bill_shows_it(platform: PlatformUnderTest) -> None:
    wait_for(lambda: bool(cpu_records(platform, "Worker")), "a record")
    shown = platform.cli("billing", "report", "--json").stdout
    assert '"CPU"' in shown
    assert "cpu_factor" in platform.cli("billing", "rates").stdout
