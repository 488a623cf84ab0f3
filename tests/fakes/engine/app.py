"""The fake engine's HTTP API, in the shapes of vLLM 0.32: `make_app(EngineFake(...))` is an ASGI
application."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.engine.asked import (
    Asked,
    Refused,
    known_model,
    prompt_tokens,
    read_body,
    understand,
)
from tests.fakes.engine.engine import EngineDead, EngineFake, Said
from tests.fakes.engine.metrics import exposition

T = TypeVar("T")
VERSION = "0.32.0"
FINGERPRINT = "vllm-0.32.0-fake"
Handler = Callable[[Request], Awaitable[Response]]


def make_app(engine: EngineFake) -> Starlette:
    """The engine's API."""
    api = Api(engine)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.guarded(api.chat), methods=["POST"]),
            Route("/v1/completions", api.guarded(api.complete), methods=["POST"]),
            Route("/v1/embeddings", api.guarded(api.embed), methods=["POST"]),
            Route("/tokenize", api.guarded(api.tokenize), methods=["POST"]),
            Route("/detokenize", api.guarded(api.detokenize), methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/health", api.health),
            Route("/version", api.version),
            Route("/metrics", api.metrics),
            Route("/sleep", api.sleep, methods=["POST"]),
            Route("/wake_up", api.wake_up, methods=["POST"]),
            Route("/is_sleeping", api.is_sleeping),
            Route("/sleeps", api.sleeps),
            Route("/collective_rpc", api.guarded(api.collective_rpc), methods=["POST"]),
        ]
    )


class Api:
    """The handlers. Stateless but for the engine."""

    def __init__(self, engine: EngineFake) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<Api {self._engine!r}>"

    def guarded(self, handler: Handler) -> Handler:
        """A handler whose refusals and deaths become answers."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except Refused as e:
                return JSONResponse(e.body, e.status)
            except (EngineDead, RuntimeError) as e:
                return JSONResponse(_internal(e), 500)

        return answer

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, chat=True)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, chat=False)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        asked = understand(self._engine, await read_body(request), request, chat=chat)
        if asked.stream:
            return StreamingResponse(self._stream(asked), media_type="text/event-stream")
        choices = await _while_there(request, self._collect(asked))
        return JSONResponse(self._whole(asked, choices))

    async def _collect(self, asked: Asked) -> list[list[Said]]:
        return [
            [said async for said in self._engine.generate(asked.prompt)] for _ in range(asked.count)
        ]

    # --- answers

    def _whole(self, asked: Asked, choices: list[list[Said]]) -> dict[str, Any]:
        cached = self._engine.cached(asked.prompt)
        spoken = sum(len(choice) for choice in choices)
        return {
            "id": asked.id,
            "object": asked.object,
            "created": int(time.time()),
            "model": asked.prompt.model,
            "choices": [self._choice(asked, i, choice) for i, choice in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **_usage(asked, spoken),
                "prompt_tokens_details": {
                    "cached_tokens": cached,
                    "created_cache_tokens": 0,
                    "multimodal_tokens": None,
                },
                "completion_tokens_details": None,
            },
        }

    def _choice(self, asked: Asked, index: int, said: list[Said]) -> dict[str, Any]:
        text = '{"answer": "ba"}' if asked.document else "".join(one.text for one in said)
        ids = {
            "token_ids": [one.token for one in said] if asked.token_ids else None,
            "prompt_token_ids": list(asked.prompt.tokens) if asked.token_ids else None,
        }
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": said[-1].finish,
            "stop_reason": None,
            **ids,
        }
        if not asked.chat:
            return {**choice, "text": text}
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "tool_calls": [],
        }
        if asked.tool is not None:
            call = {
                "id": f"call-{asked.id}",
                "type": "function",
                "function": {"name": asked.tool, "arguments": "{}"},
            }
            message |= {"content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        return {**choice, "message": message}

    async def _stream(self, asked: Asked) -> AsyncIterator[bytes]:
        """The head goes out before the first token; errors come inside the stream."""
        spoken, generator = 0, self._engine.generate(asked.prompt)
        try:
            if asked.chat:
                yield self._piece(
                    asked, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, 0
                )
            async for said in generator:
                spoken += 1
                words = {"delta": {"content": said.text}} if asked.chat else {"text": said.text}
                ids = {"token_ids": [said.token]} if asked.token_ids else {}
                yield self._piece(
                    asked,
                    {**words, **ids, "finish_reason": said.finish, "stop_reason": None},
                    spoken,
                )
        except (EngineDead, RuntimeError) as e:
            yield _event(_internal(e))
        else:
            if asked.usage:
                yield self._last(asked, spoken)
        finally:
            await generator.aclose()
        yield b"data: [DONE]\n\n"

    def _piece(self, asked: Asked, choice: dict[str, Any], spoken: int) -> bytes:
        body = self._frame(asked, [{"index": 0, "logprobs": None, **choice}])
        if asked.usage_always:
            body["usage"] = _usage(asked, spoken)
        return _event(body)

    def _last(self, asked: Asked, spoken: int) -> bytes:
        details = {"cached_tokens": self._engine.cached(asked.prompt), "created_cache_tokens": 0}
        usage = {**_usage(asked, spoken), "prompt_tokens_details": details}
        return _event({**self._frame(asked, []), "usage": usage, "system_fingerprint": FINGERPRINT})

    def _frame(self, asked: Asked, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        return {
            "id": asked.id,
            "object": kind,
            "created": int(time.time()),
            "model": asked.prompt.model,
            "choices": choices,
        }

    # --- the small endpoints

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings: eight numbers of length one for each input."""
        body = await read_body(request)
        model = known_model(self._engine, body)
        inputs = body.get("input")
        if isinstance(inputs, list) and inputs and all(isinstance(t, int) for t in inputs):
            inputs = self._engine.tokenizer.decode(inputs)
        texts = [inputs] if isinstance(inputs, str) else inputs
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise Refused("input must be a string or a list of strings", parameter="input")
        tokens = sum(len(self._engine.tokenizer.encode(t)) for t in texts)
        self._engine.counts.prompt_tokens += tokens
        data = [
            {"object": "embedding", "index": i, "embedding": _embedding(t)}
            for i, t in enumerate(texts)
        ]
        usage = {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        return JSONResponse(
            {
                "id": "embd-1",
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": data,
                "usage": usage,
            }
        )

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize of a prompt or of messages."""
        body = await read_body(request)
        known_model(self._engine, body)
        _, tokens = prompt_tokens(self._engine, body, chat="messages" in body)
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._engine.max_model_len,
                "tokens": list(tokens),
                "token_strs": None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await read_body(request)
        return JSONResponse({"prompt": self._engine.tokenizer.decode(body.get("tokens") or ())})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": name,
                "parent": None if name == self._engine.model else self._engine.model,
                "max_model_len": self._engine.max_model_len if name == self._engine.model else None,
            }
            for name in self._engine.names()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        """GET /health: 503 once the core is dead."""
        return Response(status_code=503 if self._engine.dead else 200)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return JSONResponse({"version": VERSION})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return PlainTextResponse(
            exposition(self._engine), media_type="text/plain; version=1.0.0; charset=utf-8"
        )

    async def sleep(self, request: Request) -> Response:
        """POST /sleep?level=1."""
        self._engine.sleep(int(request.query_params.get("level", "1")))
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """POST /wake_up?tags=weights&tags=kv_cache."""
        self._engine.wake(tuple(request.query_params.getlist("tags")))
        return Response(status_code=200)

    async def is_sleeping(self, request: Request) -> Response:
        """GET /is_sleeping."""
        return JSONResponse({"is_sleeping": self._engine.asleep > 0})

    async def sleeps(self, request: Request) -> Response:
        """GET /sleeps, which the real one has not: what was asked of its sleep mode, in order."""
        return JSONResponse(self._engine.sleeps)

    async def collective_rpc(self, request: Request) -> Response:
        """POST /collective_rpc: `reload_weights`, which brings weights back that level 2
        dropped."""
        body = await read_body(request)
        if body.get("method") != "reload_weights":
            raise Refused(f"unknown method {body.get('method')!r}")
        self._engine.sleeps.append("reload_weights")
        return JSONResponse({"results": [None]})


def _usage(asked: Asked, spoken: int) -> dict[str, Any]:
    prompt = len(asked.prompt.tokens)
    return {"prompt_tokens": prompt, "total_tokens": prompt + spoken, "completion_tokens": spoken}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _internal(e: Exception) -> dict[str, Any]:
    return {"error": {"message": str(e), "type": "InternalServerError", "param": None, "code": 500}}


def _embedding(text: str) -> list[float]:
    raw = [b - 128 for b in hashlib.blake2b(text.encode(), digest_size=8).digest()]
    length = sum(v * v for v in raw) ** 0.5 or 1.0
    return [v / length for v in raw]


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's answer; the work is given up when its caller leaves."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for one in (task, leaving):
            one.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
