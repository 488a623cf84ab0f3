"""Coroutines: many calls at once, on both sides."""

import asyncio

import pilotlight as modal

app = modal.App("style-async")


@app.function()
@modal.concurrent(max_inputs=20, target_inputs=10)
async def wait(n: int) -> int:
    await asyncio.sleep(0.01)
    return n + 1


@app.function()
async def total(count: int) -> int:
    return sum([n async for n in wait.map.aio(range(count))])


@app.local_entrypoint()
async def main() -> None:
    print("one:", await wait.remote.aio(1))
    print("total:", await total.remote.aio(3))
    call = await wait.spawn.aio(5)
    print("later:", await call.get.aio())
