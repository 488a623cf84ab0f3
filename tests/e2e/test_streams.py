"""Streams of real workers: how they end, for callers and for generators."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

EVENTS = {"accept": "text/event-stream"}


def test_a_caller_who_leaves_ends_the_generator_and_one_that_raises_says_so(
    platform: PlatformUnderTest,
) -> None:
    platform.deploy("streams.py")
    headers = {**platform.headers, **EVENTS}
    for method in ("threaded", "awaited"):
        url = f"{platform.url}/v1/functions/streams/Counter.{method}:invoke"
        with httpx.stream("POST", url, json={}, headers=headers, timeout=60) as answer:
            assert (
                next(line for line in answer.iter_lines() if line.startswith("data")) == "data: 0"
            )
    wait_for(
        lambda: set(platform.result("streams/Counter.which")) == {"threaded", "awaited"},
        "both generators to be closed",
    )

    *items, error, end = (
        platform.post("streams/Counter.awaited", {"fail_at": 2}, headers=headers)
        .text.strip()
        .split("\n\n")
    )
    assert [item for item in items if item != ": waiting"] == ["data: 0", "data: 1"]
    assert json.loads(error.partition("\ndata: ")[2])["error"] == {
        "type": "ValueError",
        "message": "no 2",
    }
    assert error.startswith("event: error\n")
    told = json.loads(end.removeprefix("event: end\ndata: "))
    assert (told["finish_reason"], told["start"]) == ("error", "WARM")
    assert float(told["cost"]) > 0


def test_a_submitted_generator_is_read_as_it_runs_and_again_later(
    platform: PlatformUnderTest,
) -> None:
    platform.deploy("streams.py")
    with platform.client() as client:
        call_id = client.submit_json("streams", "Counter.threaded", {"upto": 5})
        assert list(client.call_stream(call_id)) == [0, 1, 2, 3, 4]
        assert list(client.call_stream(call_id, after="1-3")) == [3, 4]
        assert client.call(call_id).state == "SUCCEEDED"
    assert platform.cli("call", "get", call_id, "--stream").stdout.split() == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]
