"""The same API in front of the real engine: what vLLM says is what the fake one says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from examples.tiny_llama import make
from pilotlight.spec.function import MIB
from pilotlight.worker.engine import arguments
from tests.activator.llm.openai.conftest import Shop, chat, events_of, llm
from tests.activator.test_gateway import until
from tests.fakes.routes import route_of

START_S = 300.0
SPEC = llm(engine={"max_model_len": 256, "kv_bytes": 64 * MIB})

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@contextlib.asynccontextmanager
async def engine(python: Path, directory: Path) -> AsyncIterator[Path]:
    """vLLM's own server on a Unix socket, with the tiny model; its whole tree ends with the
    block."""
    path, model = directory / "engine.sock", make(directory / "model")
    command = arguments.command(
        SPEC, python=str(python), weights={"model": str(model)}, socket=str(path)
    )
    process = await asyncio.create_subprocess_exec(
        "nice",
        *command,
        env=arguments.environment(SPEC, os.environ, site=(), chosen=()),
        start_new_session=True,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with (
            asyncio.timeout(START_S),
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=5
            ) as client,
        ):
            while not await _is_up(client):
                assert process.returncode is None
                await asyncio.sleep(0.2)
        yield path
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _is_up(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("http://engine/health")).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(name="real")
async def _real(shop: Shop, vllm_env: Path) -> AsyncIterator[Shop]:
    shop.edge.add(route_of(SPEC))
    with tempfile.TemporaryDirectory(prefix="pl") as directory:
        async with engine(vllm_env / "bin/python", Path(directory)) as path:
            shop.edge.fleet.sockets["assistant"] = path
            shop.client = shop.client.with_options(timeout=START_S)
            shop.edge.client.timeout = httpx.Timeout(START_S)
            yield shop


async def test_all_of_it(real: Shop) -> None:
    """One test, because its engine takes half a minute to start."""
    await _whole_and_streamed(real)
    await _refused(real)
    await _texts_and_choices(real)
    await _left(real)


async def _whole_and_streamed(real: Shop) -> None:
    whole = await real.client.chat.completions.create(**chat(max_tokens=8, temperature=0))
    again = await real.client.chat.completions.create(
        **chat(max_tokens=8, temperature=0), stream=True
    )
    words = [piece.choices[0].delta.content or "" async for piece in again]
    answer = await real.post(chat(max_tokens=8, temperature=0, stream=True))

    assert "".join(words) == whole.choices[0].message.content
    assert whole.model == "shop/assistant"
    events = events_of(answer.text)
    assert events[-2] == "data: [DONE]"
    told = json.loads(events[-1].partition("data: ")[2])
    assert whole.usage is not None
    assert (told["finish_reason"], told["tokens_in"], told["tokens_out"]) == (
        "length",
        whole.usage.prompt_tokens,
        8,
    )
    assert '"usage"' not in answer.text
    records = (await real.edge.settle()).values()
    assert [(one.tokens_out, one.finish, one.tokens_in) for one in records] == [
        (8, "length", whole.usage.prompt_tokens)
    ] * 3


async def _refused(real: Shop) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await real.client.chat.completions.create(**chat("hello there " * 100, **more))
    with pytest.raises(openai.BadRequestError):
        await real.client.chat.completions.create(**chat(temperature=-5))
    refused = [one for one in (await real.edge.settle()).values() if one.status == 400]
    assert {(one.tokens_in, one.tokens_out) for one in refused} == {(0, 0)}


async def _texts_and_choices(real: Shop) -> None:
    text = await real.client.completions.create(
        model="assistant", prompt=[5, 6, 7], max_tokens=3, temperature=0, logprobs=1
    )
    choices = await real.client.chat.completions.create(
        **chat(n=2, max_tokens=4, seed=3), stream=True, stream_options={"include_usage": True}
    )
    *_, last = [piece async for piece in choices]
    tokens = await real.post({"prompt": "hello there"}, path="/fn/shop/assistant/tokenize")

    assert text.usage is not None
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 3)
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert tokens.json()["count"] > 0
    newest = max((await real.edge.settle()).values(), key=lambda one: one.started_at)
    assert newest.tokens_out == 0
    assert 8 in {one.tokens_out for one in (await real.edge.settle()).values()}


async def _left(real: Shop) -> None:
    """A caller that leaves frees its place in the engine: its own metrics say so."""
    stream = await real.client.chat.completions.create(**chat(max_tokens=200), stream=True)
    async for _ in stream:
        break
    await stream.close()

    async def running() -> float:
        text = (await real.get("/fn/shop/assistant/metrics")).text
        line = next(
            line for line in text.splitlines() if line.startswith("vllm:num_requests_running")
        )
        return float(line.rpartition(" ")[2])

    async with asyncio.timeout(60):
        while await running():
            await asyncio.sleep(0.2)
    await until(lambda: any(one.finish == "cancelled" for one in real.edge.ledger.records.values()))
