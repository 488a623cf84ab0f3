"""Generators: items arrive as they are yielded."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pilotlight as modal

app = modal.App("style-generators")


@app.function()
def words(text: str) -> Iterator[str]:
    yield from text.split()


@app.function()
async def ticks(count: int) -> AsyncIterator[int]:
    for n in range(count):
        yield n
        await asyncio.sleep(0)


@app.local_entrypoint()
def main() -> None:
    print("words:", list(words.remote_gen("one two three")))
    print("ticks:", list(ticks.remote_gen(3)))
