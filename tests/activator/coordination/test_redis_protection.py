"""A Redis that workers can use is refused, with the way out and without its password."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from activator.coordination.redis_protection import require_protected
from pilotlight.core.settings import SettingsInvalid
from tests.fakes.ports import free_port

ROOT = Path(__file__).parents[3]


@pytest.fixture(name="bound")
def _bound(short_tmp: Path) -> Iterator[Path]:
    """A Unix socket in a directory that everybody may enter."""
    folder = short_tmp
    while (
        folder != folder.parent and folder.stat().st_uid == os.getuid() and folder != Path("/tmp")
    ):
        folder.chmod(0o755)
        folder = folder.parent
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_tmp / "redis.sock"))
        yield short_tmp / "redis.sock"


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "redis://localhost",
        "redis://[::1]:6379",
        "redis://someone@127.0.0.1",
        "rediss://cache.internal:6380",
    ],
)
def test_redis_over_tcp_needs_a_password(url: str) -> None:
    with pytest.raises(
        SettingsInvalid,
        match=r"activator\.redis_url = .*has no password.*requirepass.*redis_url_file",
    ):
        require_protected(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pw@127.0.0.1:6379/0",
        "rediss://user:pw@cache.internal",
        "redis://localhost?password=pw",
    ],
)
def test_redis_over_tcp_with_a_password_is_accepted(url: str) -> None:
    require_protected(url)


def test_a_socket_that_everybody_may_connect_to_needs_a_password(bound: Path) -> None:
    bound.chmod(0o777)
    with pytest.raises(
        SettingsInvalid, match=r"every user may connect to this socket.*unixsocketperm 770"
    ):
        require_protected(f"unix://{bound}")
    require_protected(f"unix://:pw@{bound}")


@pytest.mark.parametrize(
    "mode, folder", [(0o700, 0o755), (0o770, 0o755), (0o755, 0o755), (0o777, 0o700)]
)
def test_a_socket_that_others_cannot_connect_to_is_accepted(
    bound: Path, mode: int, folder: int
) -> None:
    bound.chmod(mode)
    bound.parent.chmod(folder)
    require_protected(f"unix://{bound}?db=0")


@pytest.mark.root
def test_an_activator_of_tenants_with_uids_of_their_own_does_not_start_with_an_open_redis(
    short_tmp: Path,
) -> None:
    config = short_tmp / "platform.yaml"
    url = f"redis://127.0.0.1:{free_port()}/0"
    config.write_text(
        f"platform: {{home: {short_tmp}/h}}\nactivator: {{listen: '127.0.0.1:{free_port()}', "
        f"redis_url: '{url}'}}\n"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'functions'}:{ROOT}"}
    command = [sys.executable, "-m", "activator", "--config", str(config)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "activator.redis_url = ***: has no password" in done.stderr
