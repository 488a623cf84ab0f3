"""A Redis that the test may stop, slow down, and start again."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from subprocess import DEVNULL, Popen

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
