"""Functions that call functions, without a key."""

import asyncio
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import pilotlight

app = pilotlight.App("calling")
small = functools.partial(app.function, cpu=0.25, memory="256MiB", snapshot=False)


@small(max_instances=2)
@pilotlight.concurrent(max_inputs=8)
def square(n: int) -> int:
    """Called by others."""
    if n < 0:
        raise ValueError(f"{n} is negative")
    return n * n


@small()
def count(upto: int) -> Iterator[int]:
    """A generator."""
    yield from range(upto)


@small()
def nap(seconds: float) -> float:
    """Long enough for a deadline."""
    time.sleep(seconds)
    return seconds


@small()
@pilotlight.concurrent(max_inputs=32)
def forever(n: int) -> int:
    """Functions that call each other without end."""
    deeper: int = forever.remote(n + 1)
    return deeper


@app.cls(cpu=0.25, memory="256MiB", scaledown_window=300)
class Caller:
    """Calls others, after every kind of start."""

    @pilotlight.enter()
    def load(self) -> None:
        self.too_early: list[str] = []
        self._try()

    @pilotlight.enter(snap=False)
    def wake(self) -> None:
        self._try()

    def _try(self) -> None:
        try:
            square.remote(1)
        except pilotlight.errors.PilotlightError as e:
            self.too_early.append(str(e))

    @pilotlight.method(example=[3])
    def offline(self, n: int) -> int:
        """Calls nothing: the example of the snapshot."""
        return n

    @pilotlight.method()
    def everything(self, n: int) -> dict[str, Any]:
        """By each of the ways of the SDK."""
        found: dict[str, Any] = {"remote": square.remote(n), "too early": self.too_early}
        found["map"] = list(square.map(range(n)))
        found["stream"] = list(count.remote_gen(n))
        found["spawn"] = square.spawn(n).get(timeout=30)
        found["instance"] = os.environ["PILOTLIGHT_INSTANCE"]
        try:
            square.remote(-1)
        except ValueError as e:
            found["raises"] = str(e)
        return found

    @pilotlight.method()
    async def aio(self, n: int) -> list[Any]:
        """The asynchronous ways."""
        streamed = [item async for item in count.remote_gen.aio(n)]
        several = await asyncio.gather(*(square.remote.aio(each) for each in range(n)))
        spawned = await square.spawn.aio(n)
        return [streamed, several, await spawned.get.aio(timeout=30)]

    @pilotlight.method()
    def late(self, seconds: float) -> str:
        """A call that takes longer than this one may."""
        try:
            return f"slept {nap.remote(seconds)}"
        except pilotlight.errors.DeadlineExceeded:
            return "too late"

    @pilotlight.method()
    def ask(self, method: str, path: str) -> list[Any]:
        """A request of its own at the socket of its instance."""
        from pilotlight.client.socket_http import SocketClient
        from pilotlight.core.transport.calls_socket import calls_socket_here

        client = SocketClient(str(calls_socket_here(os.environ)), dict)
        answer = client.send(
            client.build_request(method, path, content=b"{}" if method == "POST" else b""),
            stream=True,
        )
        return [answer.status_code, answer.read().decode()]


@app.function(cpu=0.25, memory="256MiB", snapshot=False)
@pilotlight.asgi_app()
def web() -> Any:
    """A route that starts a call in the background."""

    async def route(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        call = await square.spawn.aio(12)
        start = {"type": "http.response.start", "status": 202, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": call.id.encode()})

    return route
