"""`activator.freeze_idle_s` on a real platform: an idle instance uses no processor, and its next
caller does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.protocol import HEADER_START
from snapshotter.linux import proc
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

IDLE_S = 1.0


@pytest.fixture(name="platform", scope="module")
def _platform() -> Iterator[PlatformUnderTest]:
    with platform_up(
        activator={"freeze_idle_s": IDLE_S}, snapshotter={"snapshots": False}
    ) as running:
        running.deploy("restless.py")
        yield running


def instance(platform: PlatformUnderTest) -> dict[str, Any]:
    """The only one; it is ASLEEP for the node agent while it is frozen."""
    with platform.client() as client:
        (found,) = [
            one for one in client.instances(app="restless") if one["state"] in ("READY", "ASLEEP")
        ]
    return found


def is_still(pid: int) -> bool:
    """Whether a signal stopped it (proc(5): state T), with each of its threads: on a busy machine
    they stop when they next run."""
    return {
        stat.read_text().rpartition(")")[2].split()[0]
        for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    } == {"T"}


def frozen_pid(platform: PlatformUnderTest) -> int:
    pid = int(instance(platform)["pid"])
    wait_for(lambda: is_still(pid), "the instance to stand still")
    return pid


def test_an_idle_instance_uses_no_processor_and_the_next_call_is_warm(
    platform: PlatformUnderTest,
) -> None:
    platform.result("restless/begin", {"after_s": 1.0})
    pid = frozen_pid(platform)
    before_ns = proc.cpu_ns(pid)
    time.sleep(0.5)
    assert proc.cpu_ns(pid) == before_ns
    answer = platform.post("restless/begin", {})
    assert (answer.status_code, answer.headers[HEADER_START]) == (200, "WARM"), answer.text
    assert answer.json() >= 2, "its thread goes on, too"
    assert int(instance(platform)["pid"]) == pid


def test_a_restarted_activator_and_a_restarted_agent_find_it_and_it_answers(
    platform: PlatformUnderTest,
) -> None:
    for process in ("activator", "snapshotter"):
        platform.result("restless/begin", {})
        pid = frozen_pid(platform)
        platform.wait_restarted(process, platform.kill(process))
        wait_for(lambda: platform.post("restless/begin", {}).status_code == 200, "an answer")
        assert int(instance(platform)["pid"]) == pid


def test_one_that_is_frozen_is_stopped_in_good_order(platform: PlatformUnderTest) -> None:
    platform.result("restless/begin", {})
    pid = frozen_pid(platform)
    with platform.client() as client:
        client.stop_instance(str(instance(platform)["id"]))
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "its end")
    assert platform.result("restless/begin", {}) >= 1
