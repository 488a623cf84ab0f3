"""A Redis that the test may stop, slow down, and start again, or cut off from one client."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Self
from urllib.parse import urlsplit

import redis


class MortalRedis:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "q.sock"
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        """Up, and empty."""
        self._server = Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(self._socket), "--save", ""],
            stdout=DEVNULL,
        )
        until = time.monotonic() + 30
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    assert time.monotonic() < until
                    time.sleep(0.01)

    def kill(self) -> None:
        """Gone."""
        self._server.kill()
        self._server.wait()

    def freeze(self) -> None:
        """It accepts what it is sent, and says nothing."""
        self._server.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It answers again."""
        self._server.send_signal(signal.SIGCONT)


class ReachableRedis:
    """A Redis at an address of the host, with a password: `url`, until the end of the block."""

    def __init__(self, host: str) -> None:
        self._host = host

    def __enter__(self) -> Self:
        with socket.create_server((self._host, 0)) as free:
            port = free.getsockname()[1]
        self._server = Popen(
            [
                *("redis-server", "--bind", self._host, "--port", str(port)),
                *("--save", "", "--requirepass", "secret"),
            ],
            stdout=DEVNULL,
        )
        self.url = f"redis://:secret@{self._host}:{port}/0"
        self.client = redis.Redis.from_url(self.url)
        until = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                return self
            except redis.RedisError:
                assert time.monotonic() < until
                time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.kill()
        self._server.wait()


class RedisLink:
    """Another path to a Redis behind a Unix socket: `url`, until `cut`."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self._redis_url = redis_url
        self._path = directory / "link.sock"
        self._path.symlink_to(urlsplit(redis_url).path)
        self.url = f"unix://{self._path}"

    def cut(self) -> None:
        """Nobody connects by it again, and those who did are disconnected, as all clients are."""
        self._path.unlink()
        with redis.Redis.from_url(self._redis_url) as client:
            client.client_kill_filter(_type="normal", skipme=True)


def scripts_run(redis_url: str) -> int:
    """How many scripts this Redis has run."""
    with redis.Redis.from_url(redis_url) as client:
        return int(client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])
