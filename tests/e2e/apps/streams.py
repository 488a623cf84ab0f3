"""Generators that say how they ended."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator

import pilotlight

app = pilotlight.App("streams")


@app.cls(cpu=0.25, memory="256MiB", max_instances=1, snapshot=False)
@pilotlight.concurrent(max_inputs=4)
class Counter:
    """Counts, and remembers which of its streams have ended."""

    @pilotlight.enter()
    def begin(self) -> None:
        self.ended: list[str] = []

    @pilotlight.method()
    def threaded(self, upto: int = 0) -> Iterator[int]:
        try:
            for n in itertools.count() if not upto else range(upto):
                time.sleep(0.01)
                yield n
        finally:
            self.ended.append("threaded")

    @pilotlight.method()
    async def awaited(self, fail_at: int = -1) -> AsyncIterator[int]:
        try:
            for n in itertools.count():
                if n == fail_at:
                    raise ValueError(f"no {n}")
                yield n
                await asyncio.sleep(0.01)
        finally:
            self.ended.append("awaited")

    @pilotlight.method()
    def which(self) -> list[str]:
        return list(self.ended)
