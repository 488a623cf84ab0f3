"""A language model's stream that outlives its caller's connection."""

from __future__ import annotations

import json

from tests.activator.conftest import KEY
from tests.activator.llm.openai.conftest import Shop, chat
from tests.activator.streams.test_call_streams import following
from tests.fakes.fake_controller import FakeController

AUTHORIZED = {"authorization": f"Bearer {KEY}"}


def text_of(items: list[tuple[str, str]]) -> str:
    """What the model said, from the chunks of a stream."""
    chunks = [json.loads(data) for _, data in items if data != "[DONE]"]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


async def test_a_submitted_chat_is_read_again_from_where_its_reader_was(
    shop: Shop, controller: FakeController
) -> None:
    whole = (await shop.post(chat("say it", max_tokens=12))).json()["choices"][0]["message"][
        "content"
    ]
    body = {
        "path": "/v1/chat/completions",
        "body": {**chat("say it", max_tokens=12), "stream": True},
    }
    accepted = await shop.edge.call("shop/assistant:submit", json=body)
    assert accepted.status_code == 202
    call_id = accepted.json()["id"]
    async with following(shop.edge, call_id) as reader:
        while len(reader.items) < 4:
            await reader.next()
    async with following(shop.edge, call_id, after=reader.items[3][0]) as again:
        end = await again.end()

    assert [name for name, _ in again.items[:1]] == ["1-5"]
    assert again.items[-1][1] == "[DONE]"
    assert text_of(reader.items[:4] + again.items) == whole
    assert (end["finish_reason"], end["state"]) == ("stop", "SUCCEEDED")
    records = await shop.edge.settle()
    assert records[f"{call_id}/1"].tokens_out == 12
