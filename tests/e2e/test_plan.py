"""A plan from calls of a whole platform: what was measured is what `loadtest` saw."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

RATE = "40"


def planned(platform: PlatformUnderTest) -> dict[str, Any]:
    words = ("plan", "work/nap", "--rate", RATE, "--p99", "1s", "--since", "5m", "--json")
    done = platform.cli(*words, check=False)
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


@pytest.mark.slow  # calls for some seconds
def test_a_plan_follows_from_a_load_test(platform: PlatformUnderTest) -> None:
    platform.deploy("work.py")
    seen = json.loads(
        platform.cli(
            *("loadtest", "work/nap", "--rate", RATE, "--duration", "4s"),
            *("--data", '{"n": 1}', "--json"),
        ).stdout
    )

    def counted() -> dict[str, Any] | None:
        found = planned(platform)
        return found if found and found["measured"]["calls"] >= 0.9 * seen["good"] else None

    found = wait_for(counted, "the calls to be in the ledger")
    assert found["measured"]["calls"] + found["measured"]["cold"] >= seen["good"]
    # a nap takes 50 ms, however many there are at once
    assert 50 <= found["measured"]["exec_ms"]["p50"] <= seen["ms"]["latency"]["p50"] + 5
    assert found["plan"]["p99_ms"] <= 1_000
    assert 1 <= found["plan"]["serving"] <= 3
    assert found["plan"]["room"] > 0
    assert float(found["cost_per_day"]["total"]) > 0
