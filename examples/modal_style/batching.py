"""Single calls, answered in batches."""

import asyncio

import pilotlight as modal

app = modal.App("style-batching")


@app.function()
@modal.batched(max_batch_size=4, wait_ms=50)
async def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


@app.cls()
class Embedder:
    @modal.enter()
    def load(self) -> None:
        self.size = 3

    @modal.batched(max_batch_size=8, wait_ms=50)
    def embed(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) for letter in text[: self.size]] for text in texts]


@app.local_entrypoint()
async def main() -> None:
    print("doubled:", [n async for n in double.map.aio(range(5))])
    embedder = Embedder()
    one, other = await asyncio.gather(
        embedder.embed.remote.aio("abc"), embedder.embed.remote.aio("xyz")
    )
    print("embedded:", one, other)
