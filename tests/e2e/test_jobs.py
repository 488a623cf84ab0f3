"""Calls that outlive a connection, on a whole platform: schedules, retries, dead letters, webhooks,
and kill -9 of everything."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from pilotlight.cli.supervisor.supervisor import PROCESSES
from tests.e2e.harness import PlatformUnderTest, wait_for
from tests.fakes.hooks import Receiver
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
LATER_S = 60.0


@pytest.fixture(scope="module")
def jobs(mortal_platform: PlatformUnderTest) -> Iterator[PlatformUnderTest]:
    mortal_platform.deploy("jobs.py")
    yield mortal_platform
    mortal_platform.cli("app", "delete", "jobs", "--yes")


class Listener:
    """A receiver of webhooks, on a thread of its own."""

    def __init__(self) -> None:
        self.receiver = Receiver()
        self._loop = asyncio.new_event_loop()
        self._up, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        async with self.receiver.serve():
            self._up.set()
            await self._end.wait()

    def __enter__(self) -> Receiver:
        self._thread.start()
        self._up.wait()
        return self.receiver

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


def submit(jobs: PlatformUnderTest, function: str, body: Any = None, **headers: str) -> str:
    answer = jobs.post(f"jobs/{function}", body, verb="submit", headers={**jobs.headers, **headers})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def ended(jobs: PlatformUnderTest, call: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        answer = httpx.get(
            f"{jobs.url}/v1/calls/{call}", headers=jobs.headers, timeout=30, verify=NO_TLS
        )
        found = answer.json() if answer.status_code == 200 else {}
        return found if found.get("state") not in (None, "QUEUED", "RUNNING") else None

    return wait_for(look, f"{call} to end", timeout_s=LATER_S, poll_s=0.1)


def value(record: dict[str, Any]) -> Any:
    assert record["result_encoding"] == "json"
    return record["result"]


def ticks(jobs: PlatformUnderTest) -> list[dict[str, Any]]:
    answer = httpx.get(
        f"{jobs.url}/v1/calls",
        params={"function": "tick", "app": "jobs", "limit": 1000},
        headers=jobs.headers,
        timeout=30,
        verify=NO_TLS,
    )
    return (
        [call for call in answer.json()["calls"] if call["schedule"]]
        if answer.status_code == 200
        else []
    )


def done(jobs: PlatformUnderTest) -> int:
    return sum(call["state"] == "SUCCEEDED" for call in ticks(jobs))


def goes_on(jobs: PlatformUnderTest, before: int) -> bool:
    return done(jobs) > before


def test_a_schedule_makes_one_call_of_each_due_time_though_controller_and_activator_are_killed(
    jobs: PlatformUnderTest,
) -> None:
    wait_for(
        lambda: done(jobs) >= 2,
        "a function at zero to be woken by its schedule",
        timeout_s=LATER_S,
        poll_s=0.1,
    )
    for process in ("controller", "activator"):
        before = done(jobs)
        jobs.wait_restarted(process, jobs.kill(process))
        wait_for(
            partial(goes_on, jobs, before),
            f"calls to go on after the end of the {process}",
            timeout_s=LATER_S,
            poll_s=0.1,
        )
    jobs.cli("schedule", "pause", "jobs/tick")
    wait_for(
        lambda: all(call["state"] == "SUCCEEDED" for call in ticks(jobs)),
        "the last ones to end",
        timeout_s=LATER_S,
        poll_s=0.1,
    )
    due = sorted(call["submitted_at"] for call in ticks(jobs))
    assert {round(later - earlier, 3) for earlier, later in itertools.pairwise(due)} == {1.0}
    good = [
        record["call"]
        for record in jobs.usage("function = 'tick' AND kind = 'CALL' AND outcome = 'ok'")
    ]
    assert len(good) == len(set(good))


def test_a_call_that_fails_is_made_again_and_its_end_told_to_its_webhook(
    jobs: PlatformUnderTest,
) -> None:
    with Listener() as receiver:
        secret = json.loads(jobs.cli("webhook", "set", "ops", receiver.url, "--json").stdout)[
            "secret"
        ]
        call = submit(jobs, "third_time", **{"pilotlight-webhook": "ops", "idempotency-key": "k-1"})
        assert (
            submit(jobs, "third_time", **{"pilotlight-webhook": "ops", "idempotency-key": "k-1"})
            == call
        )
        record = ended(jobs, call)
        assert (record["state"], value(record), record["attempt"]) == ("SUCCEEDED", 3, 3)
        wait_for(lambda: receiver.received, "the webhook to be told", timeout_s=LATER_S)
        told = receiver.received[0]
    assert told.is_signed_with(secret)
    assert json.loads(told.body)["data"]["id"] == call


def test_a_dead_letter_is_sent_again_with_its_attempts_counting_on(jobs: PlatformUnderTest) -> None:
    call = submit(jobs, "fourth_time")
    record = ended(jobs, call)
    assert (record["state"], record["attempt"]) == ("FAILED", 2)
    wait_for(
        lambda: call in jobs.cli("call", "list", "--state", "dead").stdout,
        "the dead letter to be listed",
    )
    shown = jobs.cli("call", "get", call).stdout
    assert shown.startswith("FAILED · jobs/fourth_time · attempt 2 (dead letter) · ")
    waited = jobs.cli("call", "get", call, "--wait", check=False)
    assert (waited.returncode, waited.stdout) == (1, shown)
    jobs.cli("call", "redrive", call)
    again = wait_for(
        lambda: (r := ended(jobs, call))["state"] == "SUCCEEDED" and r,
        "the second life",
        timeout_s=LATER_S,
    )
    assert (value(again), again["attempt"]) == (4, 4)


def test_queued_calls_survive_the_end_of_everything(jobs: PlatformUnderTest) -> None:
    calls = [submit(jobs, "slow", {"seconds": 0.2}) for _ in range(4)]
    wait_for(lambda: jobs.instances("jobs", "slow"), "the first of them to run", timeout_s=LATER_S)
    pids = {process: jobs.kill(process) for process in PROCESSES}
    for process, pid in pids.items():
        jobs.wait_restarted(process, pid)
    assert {ended(jobs, call)["state"] for call in calls} == {"SUCCEEDED"}
