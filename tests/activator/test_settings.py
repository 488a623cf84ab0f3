"""What an activator refuses to start with, in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from activator.settings import ActivatorSettings
from pilotlight.core.crypto import ActivatorKey


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"activators": 2}, "needs redis_url"),
        (
            {"activators": 2, "redis_url": "redis://localhost", "listen": "127.0.0.1:0"},
            "share one port",
        ),
        ({"redis_url": "http://:secret@localhost"}, "redis_url = "),
        ({"activators": 0}, "at least 1"),
        ({"listen": "8700"}, "write host:port"),
        ({"metrics_listen": "here"}, "metrics_listen = 'here': write host:port"),
        ({"drain_s": -1}, "drain_s = -1: must be from 0 to 3600"),
        ({"shutdown_s": 0.5}, "shutdown_s = 0.5: must be from 1 to 86400"),
    ],
)
def test_a_wrong_value_names_its_key_and_never_a_password(
    wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        ActivatorSettings(**wrong)  # type: ignore[arg-type]
    assert "secret" not in str(refused.value)


def test_each_activator_has_a_metrics_port_of_its_own() -> None:
    settings = ActivatorSettings(metrics_listen="127.0.0.1:8701")
    assert [settings.metrics_listen_of(n) for n in range(2)] == ["127.0.0.1:8701", "127.0.0.1:8702"]
    assert ActivatorSettings(metrics_listen="127.0.0.1:0").metrics_listen_of(3) == "127.0.0.1:0"
    assert ActivatorSettings().metrics_listen_of(1) is None


@pytest.mark.parametrize(
    "index, message",
    [(0, "Redis at 127.0.0.1:1 does not answer"), (2, "--index 2: must be from 0 to 1")],
)
def test_a_process_that_cannot_share_its_state_does_not_start(
    short_tmp: Path, index: int, message: str
) -> None:
    (short_tmp / "h").mkdir()
    ActivatorKey(bytes(32)).write(short_tmp / "h/activator.key")
    config = short_tmp / "platform.yaml"
    config.write_text(
        f"platform: {{home: {short_tmp}/h}}\n"
        "activator: {listen: '127.0.0.1:45871', metrics_listen: null, activators: 2, redis_url: 'redis://:secret@127.0.0.1:1/0'}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "activator", "--config", str(config), "--index", str(index)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"sibling_url": "https://a:1", "sibling_listen": "h:1"},
            r"sibling_url = 'https://a:1': write https://…\{index\}",
        ),
        (
            {"sibling_url": "http://{index}:1", "sibling_listen": "h:1"},
            "sibling_url = 'http://{index}:1'",
        ),
        ({"sibling_url": "https://{member}:1"}, "needs sibling_listen"),
        ({"sibling_listen": "h"}, "sibling_listen = 'h': must be host:port"),
    ],
)
def test_siblings_elsewhere_are_named_by_number(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivatorSettings(**changes)
