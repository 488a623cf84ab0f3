"""Releases on a whole platform: a bad one is taken back within its first step, a good one takes
over although the controller is killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
APP = """
import pilotlight

app = pilotlight.App("canary")


@app.function(cpu=0.25, memory="128MiB", min_instances=1, max_instances=3)
@pilotlight.concurrent(max_inputs=8)
async def rate(word: str) -> str:
    {body}
"""
CANARY = ("--canary", "50,100", "--every", "2s", "--min-samples", "20", "--gate", "error_ratio")
PATIENCE_S = 60.0
SETTLED = 40
"""Of two versions with half of the calls each, one does not answer so many in a row."""


@dataclass(slots=True)
class Callers:
    """Calls one after the other. Owner: its thread; tests read `answers`, (when it was sent,
    status, text) each, which only grows."""

    platform: PlatformUnderTest
    answers: list[tuple[float, int, str]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Call until told to stop."""
        with httpx.Client(headers=self.platform.headers, timeout=60) as http:
            while not self.stop.wait(0.03):
                sent_at = time.monotonic()
                answer = http.post(
                    f"{self.platform.url}/v1/functions/canary/rate:invoke", json={"word": "x"}
                )
                self.answers.append((sent_at, answer.status_code, answer.text))

    def settled(self, status: int, text: str) -> float:
        """When a call was sent of which on all are answered so: SETTLED in a row were. The
        activator hears of a change in moments."""

        def look() -> float:
            last = list(self.answers)[-SETTLED:]
            return (
                max(at for at, *_ in last)
                if len(last) == SETTLED and {tuple(said) for _, *said in last} == {(status, text)}
                else 0.0
            )

        return wait_for(look, f"nothing but {status} {text}")


@contextlib.contextmanager
def calling(platform: PlatformUnderTest) -> Iterator[Callers]:
    """Callers, as long as the block lasts."""
    callers = Callers(platform)
    threads = [threading.Thread(target=callers.run, name=f"caller {n}") for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield callers
    finally:
        callers.stop.set()
        for thread in threads:
            thread.join()


def release(platform: PlatformUnderTest, directory: Path, body: str, *options: str) -> None:
    """Deploy a version that does `body`."""
    file = directory / "canary.py"
    file.write_text(APP.format(body=body))
    platform.cli("deploy", str(file), "--no-wait", *options)


def newest(platform: PlatformUnderTest) -> dict[str, Any]:
    """The function's newest rollout."""
    with platform.client() as client:
        return dict(client.rollouts(app="canary", limit=1)[0])


def test_a_bad_release_is_taken_back_and_a_good_one_survives_the_controller(
    mortal_platform: PlatformUnderTest, tmp_path: Path
) -> None:
    platform = mortal_platform  # its controller is killed
    release(platform, tmp_path, 'return "one"')
    wait_for(
        lambda: platform.post("canary/rate", {"word": "x"}).status_code == 200,
        "the first version to answer",
        timeout_s=PATIENCE_S,
        poll_s=0.2,
    )
    with calling(platform) as callers:
        release(platform, tmp_path, 'raise ValueError("worse")', *CANARY)
        wait_for(
            lambda: newest(platform)["state"] == "rolled_back",
            "the bad version to be taken back",
            timeout_s=PATIENCE_S,
            poll_s=0.2,
        )
        back_at = callers.settled(200, '"one"')
        wait_for(lambda: callers.answers[-1][0] > back_at + 1, "calls after it")
        assert newest(platform)["step"] == 0
        assert {(status, text) for at, status, text in list(callers.answers) if at > back_at} == {
            (200, '"one"')
        }

        release(platform, tmp_path, 'return "two"', *CANARY)
        wait_for(
            lambda: newest(platform)["step"] == 1, "its last step", timeout_s=PATIENCE_S, poll_s=0.2
        )
        pid = platform.kill("controller")
        platform.wait_restarted("controller", pid)
        wait_for(
            lambda: newest(platform)["state"] == "done",
            "the good version to take over",
            timeout_s=PATIENCE_S,
            poll_s=0.2,
        )
        done_at = callers.settled(200, '"two"')
        wait_for(lambda: callers.answers[-1][0] > done_at + 1, "calls after it")
    assert {(status, text) for at, status, text in callers.answers if at > done_at} == {
        (200, '"two"')
    }
    assert {status for at, status, _ in callers.answers if at > back_at} == {200}
    watched = platform.cli("rollout", "watch", "canary/rate")
    assert "every step" in platform.cli("rollout", "show", "canary/rate").stdout
    assert "done" in watched.stdout
    platform.cli("app", "delete", "canary", "--yes")
