"""Guards of web servers of user code that speak OpenAI's API: no other way leads to them."""

from __future__ import annotations

import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from pilotlight.spec.engines import GuardSpec
from tests.activator.conftest import KEY
from tests.activator.llm.openai.conftest import Shop, events_of
from tests.activator.llm.openai.test_web_server import (  # noqa: F401  # fixtures
    BASE,
    asked,
    models,
    server,
    words,
)
from tests.e2e.apps.model_server import ModelServer
from tests.fakes.routes import route_of

GUARD = GuardSpec(patterns=("credit_card", "email"), input=False)
CARD = "4111 1111 1111 1111"


@pytest.mark.parametrize("usage", ["last", "piece", "null", "never"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
async def test_nothing_of_a_number_that_is_split_over_pieces_is_sent(
    models: Shop,  # noqa: F811
    server: ModelServer,  # noqa: F811
    usage: str,
    newline: str,
) -> None:
    server.usage, server.newline = usage, newline
    models.edge.add(route_of(words(guard=GUARD)))
    text = f"hello you {CARD} and more"
    body = {**asked(stream=True), "messages": [{"role": "user", "content": text}]}
    answer = await models.post(body)

    pieces = [
        json.loads(one.removeprefix("data: "))
        for one in events_of(answer.text)
        if one.startswith("data: {")
    ]
    sent = "".join(
        choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"]
    )
    assert sent == "hello you"
    assert pieces[-1]["choices"][0]["finish_reason"] == "content_filter"
    (record,) = (await models.edge.settle()).values()
    assert (record.finish, record.status) == ("content_filter", 200)
    assert record.tokens_out >= 6, "the pieces that came, sent or not"
    assert record.tokens_in > 0


async def test_a_whole_text_completion_is_emptied(models: Shop) -> None:  # noqa: F811
    models.edge.add(route_of(words(guard=GUARD)))
    answer = await models.client.completions.create(
        model="words", prompt="to a@b.com", max_tokens=9
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "content_filter")


async def test_raw_requests_and_web_sockets_are_refused(models: Shop) -> None:  # noqa: F811
    models.edge.add(route_of(words(guard=GUARD)))
    for path in ("/rerank", "/v1/responses", "/slots"):
        answer = await models.post({"prompt": "x"}, path=BASE + path)
        assert (answer.status_code, "passes no guard" in answer.text) == (404, True)
    assert (await models.get(f"{BASE}/slots")).status_code == 404
    assert (await models.get(f"{BASE}/health")).status_code == 200
    url = models.edge.url.replace("http", "ws")
    with pytest.raises(InvalidStatus) as refused:
        async with connect(
            f"{url}{BASE}/live", additional_headers={"authorization": f"Bearer {KEY}"}
        ):
            pass
    assert refused.value.response.status_code == 404
