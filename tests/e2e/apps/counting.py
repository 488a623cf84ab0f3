"""Remembers every call that it ran, by the id under which the platform bills it."""

import asyncio
import os

import pilotlight
from pilotlight.worker.user_code.output import CALL

app = pilotlight.App("counting")


class Remembering:
    """What both classes do: one instance each, for ever, so that what it saw is all that was
    seen."""

    @pilotlight.enter(snap=False)
    def begin(self) -> None:
        """A fork begins with nothing seen."""
        self.ran: list[str] = []

    @pilotlight.method()
    async def count(self, seconds: float = 0.0) -> str:
        """Remember this call."""
        call = CALL.get()
        self.ran.append(call)
        await asyncio.sleep(seconds)
        return call

    @pilotlight.method()
    async def seen(self) -> list[str]:
        """Who was asked, then every call that `count` ran, in order."""
        return [os.environ["PILOTLIGHT_INSTANCE"], *self.ran]


@app.cls(cpu=0.5, memory="256MiB", min_instances=1, max_instances=1)
@pilotlight.concurrent(max_inputs=64)
class Left(Remembering):
    """One of two."""


@app.cls(cpu=0.25, memory="384MiB", min_instances=1, max_instances=1)
@pilotlight.concurrent(max_inputs=64)
class Right(Remembering):
    """The other, with another price."""
