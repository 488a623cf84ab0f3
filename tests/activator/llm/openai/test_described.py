"""The paths of language models against their description in the OpenAPI document."""

from __future__ import annotations

from typing import Any

import pytest

from tests.activator.llm.openai.conftest import Shop, chat
from tests.activator.test_openapi import described


@pytest.mark.parametrize(
    "path, body, status, content_type",
    [
        ("/v1/chat/completions", chat(max_tokens=1), 200, "application/json"),
        ("/v1/chat/completions", chat(max_tokens=1, stream=True), 200, "text/event-stream"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}, 200, "application/json"),
        (
            "/v1/completions",
            {"prompt": "x", "max_tokens": 1, "stream": True},
            200,
            "text/event-stream",
        ),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "application/json"),
        ("/v1/embeddings", {"input": "x"}, 400, "application/json"),
        ("/v1/models", None, 200, "application/json"),
        ("/v1/models/shop/assistant", None, 200, "application/json"),
    ],
)
async def test_answers_of_language_models_have_a_described_type(
    shop: Shop, path: str, body: dict[str, Any] | None, status: int, content_type: str
) -> None:
    answer = await (
        shop.get(path)
        if body is None
        else shop.post({"model": "shop/assistant", **body}, path=path)
    )
    given = answer.headers["content-type"].partition(";")[0]
    assert (answer.status_code, given) == (status, content_type)
    template = path.replace("shop/assistant", "{app}/{function}")
    operation = described()[template]["get" if body is None else "post"]
    responses = operation["responses"]
    content = responses.get(str(status), responses.get(f"{status // 100}XX"))["content"]
    assert given in content
    if status >= 400:
        assert set(answer.json()) == set(content[given]["schema"]["properties"])
