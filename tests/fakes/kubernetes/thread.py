"""The API server in a thread of its own, for tests with synchronous clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.fakes.kubernetes.server import ApiServer

T = TypeVar("T")


class ThreadedApiServer:
    """A server and the loop that owns it; `server`'s faults and counts may be used from the test's
    thread."""

    def __init__(self, **options: Any) -> None:
        self.server = ApiServer(**options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api-server")

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        self.run(self.server.start)

    def run(self, work: Callable[[], Awaitable[T]], timeout_s: float = 30.0) -> T:
        """Do something in the server's loop: `threaded.run(threaded.server.stop)`."""

        async def done() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(timeout_s)

    def call(self, work: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Do something synchronous in the server's loop: `threaded.call(lambda:
        threaded.server.put({…}))`."""

        async def done() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(timeout_s)

    def close(self) -> None:
        """Stop, and end the thread."""
        self.run(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@contextmanager
def running_api_server(**options: Any) -> Iterator[ThreadedApiServer]:
    """A server for the time of a `with` block."""
    threaded = ThreadedApiServer(**options)
    threaded.start()
    try:
        yield threaded
    finally:
        threaded.close()
