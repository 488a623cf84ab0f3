"""What callers get wrong: told in OpenAI's shape, by name, before anything is started or billed."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from activator.http.request import MAX_ACCEPT_BYTES
from activator.llm.openai.api import MAX_VALUES
from activator.settings import ActivatorSettings
from pilotlight.spec.engines import Task, TokenLimits
from pilotlight.spec.function import FunctionKind, MethodSpec
from tests.activator.llm.openai.conftest import Shop, chat, llm
from tests.fakes.routes import route_of, spec_of


def error_in(answer: httpx.Response) -> dict[str, Any]:
    """The error's object; OpenAI's clients look for exactly these."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body: dict[str, Any] = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body,param",
    [
        (b"{", None),
        (b"[1]", None),
        (b"\xff\xfe", None),
        ({"messages": [{"role": "user", "content": "x"}]}, "model"),
        (chat(messages=[]), "messages"),
        (chat(model=["shop/assistant"]), "model"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=-3), "max_tokens"),
        (chat(max_tokens=10**30), "max_tokens"),
        (chat(max_tokens=513), "max_tokens"),
        (chat(max_completion_tokens=0), "max_completion_tokens"),
        (chat(max_tokens="many"), "max_tokens"),
        (chat(max_tokens=1.5), "max_tokens"),
        (chat(max_tokens=True), "max_tokens"),
        (chat(n=0), "n"),
        (chat(n=1000), "n"),
        (chat(temperature="hot"), "temperature"),
        (
            chat(
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objekt"}},
                }
            ),
            "response_format",
        ),
        (chat("\ud83d"), None),
    ],
)
async def test_what_is_wrong_is_told_by_name_and_starts_nothing(
    shop: Shop, body: Any, param: str | None
) -> None:
    answer = await shop.post(body)

    assert answer.status_code == 400
    error = error_in(answer)
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        param,
        "invalid-input",
    )
    assert shop.edge.fleet.started == []
    assert await shop.edge.settle() == {}


@pytest.mark.parametrize(
    "model",
    [
        "shop/asistant",
        "asistant",
        "shop/assistant:pirat",
        "shop/assistant@nothing",
        "shop",
        "/",
        "x" * 2000,
    ],
)
async def test_a_model_that_there_is_not_is_answered_with_those_that_there_are(
    shop: Shop, model: str
) -> None:
    answer = await shop.post(chat(model=model))

    assert answer.status_code == 404
    error = error_in(answer)
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    if "@" not in model:
        assert error["code"] == "model_not_found"
    if "sist" in model and "@" not in model:
        assert "assistant" in error["message"]
    assert shop.edge.fleet.started == []


async def test_a_function_that_is_no_model_is_none(shop: Shop) -> None:
    shop.edge.add(route_of(spec_of("plain")))
    error = error_in(await shop.post(chat(model="shop/plain")))

    assert (error["code"], "/v1/functions/shop/plain:invoke" in error["message"]) == (
        "model_not_found",
        True,
    )


async def test_a_model_is_asked_for_what_it_does(shop: Shop) -> None:
    shop.edge.add(route_of(llm("embedder", task=Task.EMBED)))
    talks = await shop.post(chat(model="shop/embedder"))
    embeds = await shop.post({"model": "shop/assistant", "input": "x"}, path="/v1/embeddings")

    assert "call it at /v1/embeddings" in error_in(talks)["message"]
    assert "call it at /v1/chat/completions" in error_in(embeds)["message"]
    assert (talks.status_code, embeds.status_code) == (400, 400)


async def test_a_prompt_that_is_longer_than_the_model_is_refused_by_its_engine_and_no_tokens_are_billed(
    shop: Shop,
) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as refused:
        await shop.client.chat.completions.create(**chat("a b " * 300))

    assert refused.value.param == "input_tokens"
    (record,) = (await shop.edge.settle()).values()
    assert (record.status, record.outcome, record.tokens_in, record.tokens_out) == (
        400,
        "error",
        0,
        0,
    )


async def test_a_refusal_is_one_to_who_wanted_a_stream_too(shop: Shop) -> None:
    answer = await shop.post(chat("a b " * 300, stream=True))

    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]


async def test_a_prompt_that_is_surely_too_long_starts_nothing(shop: Shop) -> None:
    shop.edge.add(route_of(llm("tiny", engine={"max_model_len": 16})))
    answer = await shop.post(
        chat("".join(f"{n} unlike any other; " for n in range(700)), model="shop/tiny")
    )

    assert answer.status_code == 400
    assert "max_model_len" in error_in(answer)["message"]
    assert shop.edge.fleet.started == []


async def test_limits_of_the_function_are_told(shop: Shop) -> None:
    shop.edge.add(route_of(llm("short", limits=TokenLimits(max_output_tokens=8))))
    error = error_in(await shop.post(chat(model="shop/short", max_tokens=9)))

    assert (error["param"], "max_output_tokens" in error["message"]) == ("max_tokens", True)


async def test_a_body_over_its_bound_is_refused(shop: Shop) -> None:
    answer = await shop.post(chat("x" * 20_000))
    assert (answer.status_code, error_in(answer)["code"]) == (413, "too-large")

    shop.edge.add_key("small", quotas={"body_bytes": 100})
    bounded = await shop.post(chat("x" * 200), key="small")
    assert (bounded.status_code, error_in(bounded)["code"]) == (413, "too-large")


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/xml",
        "",
    ],
)
async def test_a_content_that_is_no_json_is_refused(shop: Shop, kind: str) -> None:
    answer = await shop.post(chat(), **{"content-type": kind})

    assert (answer.status_code, error_in(answer)["param"]) == (400, "content-type")


async def test_json_says_so_in_many_ways(shop: Shop) -> None:
    answer = await shop.post(
        chat(max_tokens=1), **{"content-type": "Application/JSON; charset=utf-8"}
    )

    assert answer.status_code == 200


async def test_who_asks_is_known_first(shop: Shop) -> None:
    nobody = await shop.post(chat(), key=None)
    guessing = await shop.post(chat(), key="pl_wrong")
    listing = await shop.get("/v1/models", key=None)

    for answer in (nobody, guessing, listing):
        assert (answer.status_code, error_in(answer)["type"]) == (401, "authentication_error")
    assert nobody.headers["www-authenticate"].startswith("Bearer")


async def test_what_a_stranger_sends_to_nothing_is_not_read(shop: Shop) -> None:
    shop.edge.add_tenant("acme")
    for path in ("/t/acme/v1/chat/completions", "/t/nobody/v1/chat/completions"):
        answer = await shop.post(b"{", path=path, key=None)
        assert (answer.status_code, error_in(answer)["code"]) == (401, "unauthenticated")


async def test_a_key_without_the_scope_may_not_call(shop: Shop) -> None:
    shop.edge.add_key("accountant", scope="read-billing")

    for answer in (
        await shop.post(chat(), key="accountant"),
        await shop.get("/v1/models", key="accountant"),
    ):
        assert (answer.status_code, error_in(answer)["type"]) == (403, "permission_error")


async def test_a_priority_or_a_timeout_that_is_none_is_told_in_its_shape(shop: Shop) -> None:
    for header in ({"pilotlight-priority": "first"}, {"pilotlight-timeout": "soon"}):
        answer = await shop.post(chat(), **header)
        assert (answer.status_code, error_in(answer)["code"]) == (400, "invalid-input")


async def test_an_ordinary_web_application_is_none_of_this(shop: Shop) -> None:
    shop.edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))))
    answer = await shop.post({"x": 1}, path="/fn/shop/site/v1/chat/completions")

    assert answer.status_code == 200
    assert answer.json() == {"x": 1}


@pytest.mark.parametrize(
    "path, body",
    [
        pytest.param("/v1/chat/completions", chat(model="no/such"), id="no such model"),
        pytest.param("/v1/chat/completions", b"{", id="no JSON"),
        pytest.param("/v1/chat/completions", chat(messages=[]), id="no messages"),
        pytest.param("/v1/chat/completions", chat(max_tokens=0), id="no tokens"),
        pytest.param("/v1/chat/completions", chat("x" * 20_000), id="a long body"),
        pytest.param(
            "/v1/embeddings", {"model": "shop/assistant", "input": "x"}, id="another task"
        ),
        pytest.param(
            "/fn/shop/assistant/v1/chat/completions", chat(model="none"), id="no such adapter"
        ),
        pytest.param(
            "/v1/functions/shop/assistant:invoke",
            {"path": "/v1/none", "body": {}},
            id="no such path",
        ),
    ],
)
async def test_a_request_that_is_wrong_counts_as_one(shop: Shop, path: str, body: Any) -> None:
    shop.edge.add_key("tight", quotas={"requests_per_s": 0.001, "burst": 1})
    first, second = (
        await shop.post(body, path=path, key="tight"),
        await shop.post(body, path=path, key="tight"),
    )

    assert first.status_code in (400, 404, 413), first.text
    assert second.status_code == 429


async def test_a_request_that_is_right_counts_once(shop: Shop) -> None:
    shop.edge.add_key("tight", quotas={"requests_per_s": 0.001, "burst": 2})
    answers = [await shop.post(chat(max_tokens=1), key="tight") for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]


class TestManyValues:
    """Bodies as large as they may be by default."""

    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings()

    @pytest.mark.parametrize(
        "path", ["/v1/chat/completions", "/v1/functions/shop/assistant:invoke"]
    )
    async def test_a_body_of_many_values_is_refused_before_it_is_read(
        self, shop: Shop, path: str
    ) -> None:
        row = b"[" + b",".join([b"[]"] * 2000) + b"]"
        body = (
            b'{"model":"shop/assistant","messages":[{"role":"user","content":['
            + b",".join([row] * 200)
            + b"]}]}"
        )

        answer = await shop.post(body, path=path)

        assert answer.status_code == 413
        assert f"more than {MAX_VALUES} values" in answer.text
        assert shop.edge.fleet.started == []

    async def test_a_prompt_of_very_many_token_ids_is_refused(self, shop: Shop) -> None:
        body = b'{"model":"no/such","prompt":[' + b"1," * 990_000 + b"1]}"
        assert (await shop.post(body, path="/v1/completions")).status_code == 413

    async def test_a_long_text_is_one_value(self, shop: Shop) -> None:
        """Whatever it has in it: a model's length is its own bound."""
        answer = await shop.post(chat('{"a": ["b", {}]}, ' * 200_000))

        assert answer.status_code == 400
        assert "tokens" in error_in(answer)["message"]


async def test_an_accept_header_over_its_bound_is_refused(shop: Shop) -> None:
    answer = await shop.post(chat(), accept="x" * (MAX_ACCEPT_BYTES + 1))

    assert (answer.status_code, error_in(answer)["param"]) == (400, "accept")
    assert shop.edge.fleet.started == []
