"""`pilotlight down --keep-instances`: instances go on, and the next `pilotlight up` adopts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotlight.cli.supervisor import run_platform
from tests.e2e.harness import platform_up, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


def test_instances_go_on_while_the_platform_is_down_and_serve_when_it_is_up_again() -> None:
    with platform_up() as served:
        served.deploy("pair.py")
        served.result("pair/greet", {"n": 1})
        (instance,) = served.instances("pair", "greet")
        assert "stopped" in served.cli("down", "--keep-instances").stdout
        assert Path(f"/proc/{instance['pid']}").exists()
        for _ in run_platform.detach(served.local):
            pass
        wait_for(lambda: served.instances("pair", "greet"), "the instance to be adopted")
        assert served.result("pair/greet", {"n": 2})[0] == 2
        assert [one["pid"] for one in served.instances("pair", "greet")] == [instance["pid"]]
        served.cli("down")
        assert not Path(f"/proc/{instance['pid']}").exists()
