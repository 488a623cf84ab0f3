"""A web server of user code that speaks OpenAI's API, as a language model: a real one over TCP, behind
the proxy of its worker, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from pilotlight.spec.engines import MAX_TOKENS, TokenLimits
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.web_servers import OpenAIServerSpec, WebServerSpec
from pilotlight.worker.engine.one_request import OneRequest
from pilotlight.worker.engine.tcp_proxy import ProxyPair
from tests.activator.conftest import KEY, Edge
from tests.activator.llm.openai.conftest import Shop, chat
from tests.e2e.apps.model_server import EXTRA_WORDS, ModelServer
from tests.fakes.routes import route_of, spec_of

BASE = "/fn/shop/words"
TEXT = "one two three four"
TOKENS_IN = 4 + EXTRA_WORDS


def words(
    *, models: tuple[str, ...] = ("words-1",), limits: TokenLimits | None = None, **more: Any
) -> FunctionSpec:
    """A function that starts a ModelServer."""
    return spec_of(
        "words",
        kind=FunctionKind.ASGI,
        methods=(MethodSpec(),),
        web_server=WebServerSpec(
            port=8000, openai=OpenAIServerSpec(models=models, max_model_len=512)
        ),
        limits=limits,
        scaling=Scaling(max_inputs=4),
        **more,
    )


@pytest.fixture
def server() -> Iterator[ModelServer]:
    server = ModelServer()
    server.start()
    yield server
    server.end()


@pytest.fixture
async def models(edge: Edge, server: ModelServer, short_tmp: Path) -> AsyncIterator[Shop]:
    """Models of which "words" is served by `server`, through the proxy of its worker."""
    loop, path = asyncio.get_running_loop(), short_tmp / "words"
    address = ("127.0.0.1", server.port)
    listening = await loop.create_unix_server(
        lambda: ProxyPair(address, loop, lambda _: None, edits=OneRequest()).caller, path
    )
    edge.fleet.sockets["words"] = path
    shop = Shop(edge)
    edge.add(route_of(words()))
    yield shop
    await shop.aclose()
    listening.close()


def asked(**more: Any) -> dict[str, Any]:
    return {**chat(TEXT), "model": "shop/words", **more}


async def counted(shop: Shop) -> tuple[int, int]:
    """Tokens in and out of the only record."""
    (record,) = (await shop.edge.settle()).values()
    return record.tokens_in, record.tokens_out


async def test_a_chat_is_counted_by_the_servers_usage(models: Shop, server: ModelServer) -> None:
    answer = await models.client.chat.completions.create(**asked(max_tokens=3))

    assert answer.choices[0].message.content == "one two three"
    assert (answer.model, server.bodies[-1]["model"]) == ("shop/words", "words-1")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    ((key, record),) = (await models.edge.settle()).items()
    assert (record.tokens_in, record.tokens_out, record.finish) == (TOKENS_IN, 3, "length")
    assert "authorization" not in server.headers[-1]
    assert server.headers[-1]["pilotlight-call"] in key
    assert "x-request-id" not in server.headers[-1]  # llama-cpp-python wants a UUID


async def test_texts_and_embeddings_are_counted(models: Shop) -> None:
    text = await models.client.completions.create(model="words", prompt=TEXT, max_tokens=2)
    vectors = await models.client.embeddings.create(
        model="shop/words", input=["a b", "c"], encoding_format="float"
    )

    assert text.choices[0].text == "one two"
    assert [row.embedding[0] for row in vectors.data] == [3.0, 1.0]
    records = (await models.edge.settle()).values()
    assert sorted((one.tokens_in, one.tokens_out) for one in records) == [(3, 0), (4, 2)]


@pytest.mark.parametrize("usage", ["last", "piece", "null"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
async def test_the_usage_of_a_stream_is_asked_for_and_withheld(
    models: Shop, server: ModelServer, usage: str, newline: str
) -> None:
    server.usage, server.newline = usage, newline
    stream = await models.client.chat.completions.create(**asked(stream=True))
    pieces = [piece async for piece in stream]

    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == TEXT
    assert [piece.usage for piece in pieces] == [None] * len(pieces)
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}
    assert await counted(models) == (TOKENS_IN, 4)


@pytest.mark.parametrize("usage", ["last", "piece", "null"])
async def test_the_usage_is_left_where_the_caller_asked_for_it(
    models: Shop, server: ModelServer, usage: str
) -> None:
    server.usage = usage
    stream = await models.client.chat.completions.create(
        **asked(stream=True, stream_options={"include_usage": True})
    )
    found = [piece.usage for piece in [piece async for piece in stream] if piece.usage is not None]

    assert [(one.prompt_tokens, one.completion_tokens) for one in found] == [(TOKENS_IN, 4)]
    assert await counted(models) == (TOKENS_IN, 4)


async def test_a_server_without_usage_is_counted_by_pieces(
    models: Shop, server: ModelServer
) -> None:
    server.usage = "never"
    stream = await models.client.chat.completions.create(**asked(stream=True))
    assert len([piece async for piece in stream]) == 6

    tokens_in, tokens_out = await counted(models)
    assert (tokens_out, tokens_in > 0) == (4, True)  # the prompt as it was estimated


async def test_calls_by_the_address_of_the_function_are_counted_alike(
    models: Shop, server: ModelServer
) -> None:
    client = models.openai(path=f"{BASE}/v1")
    answer = await client.chat.completions.create(**asked(model="words", max_tokens=2))
    assert answer.model == "words"
    assert await counted(models) == (TOKENS_IN, 2)
    assert [model.id async for model in client.models.list()] == ["words"]


async def test_it_is_listed_among_the_models(models: Shop) -> None:
    found = {model.id for model in [model async for model in models.client.models.list()]}

    assert "shop/words" in found
    assert models.edge.fleet.started == []


async def test_a_server_of_several_models_is_asked_for_each(
    models: Shop, server: ModelServer
) -> None:
    models.edge.add(route_of(words(models=("first", "org/words:2"))))
    server.model = "org/words:2"
    answer = await models.client.chat.completions.create(**asked(model="shop/words:org/words:2"))
    assert answer.model == "shop/words:org/words:2"
    with pytest.raises(openai.NotFoundError, match="model first does not exist"):
        await models.client.chat.completions.create(**asked())
    with pytest.raises(openai.NotFoundError, match="no model 'third'; its models are org/words:2"):
        await models.client.chat.completions.create(**asked(model="shop/words:third"))


@pytest.mark.parametrize("said", [10**18, MAX_TOKENS + 1, -5, "many"])
async def test_a_server_that_lies_is_believed_within_bounds(
    models: Shop, server: ModelServer, said: Any
) -> None:
    server.said = said
    await models.client.chat.completions.create(**asked(max_tokens=3))
    tokens_in, tokens_out = await counted(models)

    # the model's length, and what the caller allowed
    expected = (512, 3) if type(said) is int and said > 0 else (0, 0)
    assert (tokens_in, tokens_out) == expected


async def test_a_stream_that_lies_is_believed_within_bounds(
    models: Shop, server: ModelServer
) -> None:
    server.said = 10**18
    stream = await models.client.chat.completions.create(**asked(stream=True, max_tokens=2))
    async for _ in stream:
        pass
    assert await counted(models) == (512, 2)


async def test_a_stream_that_breaks_is_an_error_and_counts_what_came(
    models: Shop, server: ModelServer
) -> None:
    server.dies_after = 2
    stream = await models.client.chat.completions.create(**asked(stream=True))
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    (record,) = (await models.edge.settle()).values()
    assert (record.tokens_out, record.finish, record.outcome) == (2, "error", "error")


async def test_its_refusals_have_openais_shape(models: Shop, server: ModelServer) -> None:
    server.model = "another"
    with pytest.raises(openai.NotFoundError, match="words-1 does not exist"):
        await models.client.chat.completions.create(**asked())
    with pytest.raises(openai.NotFoundError, match="words-1 does not exist"):
        await models.client.chat.completions.create(**asked(stream=True))
    assert {one.tokens_in for one in (await models.edge.settle()).values()} == {0}


@pytest.mark.parametrize(
    "body, parameter",
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 513}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "prompt"),
    ],
)
async def test_what_no_model_could_answer_starts_nothing(
    models: Shop, body: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await models.client.chat.completions.create(**asked(**body))
    assert refused.value.param == parameter
    assert models.edge.fleet.started == []


async def test_its_limits_hold(models: Shop, server: ModelServer) -> None:
    models.edge.add(route_of(words(limits=TokenLimits(default_output_tokens=2))))
    answer = await models.client.chat.completions.create(**asked())
    assert answer.choices[0].message.content == "one two"
    assert server.bodies[-1]["max_tokens"] == 2


async def test_other_paths_are_its_own_tenants_and_count_no_tokens(
    models: Shop, server: ModelServer
) -> None:
    for path, body in (("/rerank", {"model": "words-1"}), ("/v1/chat/completion", asked())):
        answer = await models.post(body, path=f"{BASE}{path}")
        assert answer.status_code == (200 if path == "/rerank" else 404)
    assert (await models.get(f"{BASE}/slots")).status_code == 200
    assert {one.tokens_in for one in (await models.edge.settle()).values()} == {0}


async def test_other_paths_are_refused_where_tokens_are_limited(models: Shop) -> None:
    models.edge.add(route_of(words(limits=TokenLimits(max_output_tokens=8))))
    answer = await models.post({}, path=f"{BASE}/rerank")

    assert answer.status_code == 404
    assert "counts no tokens, which limits= limits for this call" in answer.json()["detail"]
    assert models.edge.fleet.started == []


async def test_strangers_see_none_of_its_other_paths(models: Shop) -> None:
    models.edge.add_tenant("acme")
    models.edge.add(route_of(words(access=("*",))))
    base = f"/t/acme{BASE}"
    for path in ("/slots", "/rerank", "/"):
        answer = await models.get(f"{base}{path}", key=None)
        assert (answer.status_code, "for the tenant of this function" in answer.text) == (404, True)
    assert (await models.get(f"{base}/health", key=None)).json() == {"status": "ok"}
    counted_there = await models.post(asked(), path=f"{base}/v1/chat/completions", key=None)
    assert counted_there.status_code == 200


async def test_it_is_called_by_name_too(models: Shop) -> None:
    answer = await models.post(
        {"path": "/v1/chat/completions", "body": asked(max_tokens=1)},
        path="/v1/functions/shop/words:invoke",
    )
    assert answer.json()["choices"][0]["message"]["content"] == "one"
    tokenize = await models.post(
        {"path": "/tokenize", "body": {"prompt": "x"}}, path="/v1/functions/shop/words:invoke"
    )
    assert tokenize.status_code == 404
    assert "is a web server" in tokenize.text


async def test_a_websocket_counts_no_tokens_either(models: Shop) -> None:
    models.edge.add(route_of(words(limits=TokenLimits(max_output_tokens=8))))
    url = models.edge.url.replace("http", "ws") + f"{BASE}/socket"
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}):
            pass
    assert refused.value.response.status_code == 404
    assert models.edge.fleet.started == []


async def test_what_arrives_in_pieces_is_read_and_counted(
    models: Shop, server: ModelServer
) -> None:
    """A body without a length, as HTTP/1.0 has."""
    server.has_lengths = False
    answer = await models.client.chat.completions.create(**asked(max_tokens=3))
    assert answer.choices[0].message.content == "one two three"
    assert await counted(models) == (TOKENS_IN, 3)
    server.model = "another"
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="words-1 does not exist"):
            await models.client.chat.completions.create(**asked(stream=stream))
