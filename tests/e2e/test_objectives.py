"""What callers saw arrives as what is left of the error budget; a page goes out, and nothing is
released until it recovers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def slo(platform: PlatformUnderTest) -> dict[str, Any]:
    done = platform.cli("slo", "show", "promised/answer", "--json", check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def test_failures_spend_a_budget_page_somebody_and_freeze_releases(
    platform: PlatformUnderTest,
) -> None:
    platform.deploy("promised.py")
    statuses = [
        platform.post("promised/answer", {"ok": number % 2 == 0}).status_code
        for number in range(30)
    ]
    statuses += [platform.post("promised/answer", {"nothing": 1}).status_code for _ in range(5)]
    assert (statuses.count(200), statuses.count(500), statuses.count(400)) == (15, 15, 5)

    def counted() -> dict[str, Any] | None:
        body = slo(platform)
        return body if body and body["slis"][0]["total"] >= 30 else None

    body = wait_for(counted, "the calls to arrive")
    availability = body["slis"][0]
    assert (availability["bad"], availability["total"], availability["burn_rates"]["5m"]) == (
        15,
        30,
        50.0,
    )
    assert sum(stage["calls"] for stage in body["stages"]) == 5 * 15
    assert body["frozen"] is True
    paged = wait_for(
        lambda: [alarm for alarm in slo(platform)["alarms"] if alarm["severity"] == "page"],
        "a page",
    )
    assert (paged[0]["sli"], paged[0]["window"]) == ("availability", "1h/5m")
