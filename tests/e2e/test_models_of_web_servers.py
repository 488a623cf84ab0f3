"""A web server of user code that speaks OpenAI's API on a whole platform: called by OpenAI's own
client, billed by the token."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.apps.model_server import EXTRA_WORDS
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

MODEL = "models/words"
TOKEN_IN, TOKEN_OUT = Decimal("0.001"), Decimal("0.01")


@pytest.fixture(name="platform", scope="module")
def _platform() -> Iterator[PlatformUnderTest]:
    prices: dict[str, object] = {
        "version": "tokens",
        "cpu_core_s": "0",
        "memory_gib_s": "0",
        "token_in": str(TOKEN_IN),
        "token_out": str(TOKEN_OUT),
    }
    with platform_up(prices=prices) as platform:
        platform.deploy("models.py")
        yield platform


def client_of(platform: PlatformUnderTest, path: str = "/v1") -> openai.OpenAI:
    key = platform.headers["authorization"].removeprefix("Bearer ")
    return openai.OpenAI(api_key=key, base_url=platform.url + path, max_retries=0, timeout=60)


def usage_of(platform: PlatformUnderTest) -> tuple[int, int, Decimal]:
    """Tokens in, tokens out and cost of its calls, as billed."""
    answer = httpx.get(f"{platform.url}/v1/engines", headers=platform.headers, timeout=60)
    (model,) = answer.json()["engines"]
    return model["tokens_in"], model["tokens_out"], Decimal(model["cost"])


def test_calls_are_answered_and_billed_by_the_servers_own_count(
    platform: PlatformUnderTest,
) -> None:
    client = client_of(platform)
    assert MODEL in {model.id for model in client.models.list()}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "one two three four"}],
    }
    whole = client.chat.completions.create(**asked, max_tokens=2)
    assert whole.choices[0].message.content == "one two"
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "one two three four"
    below = client_of(platform, "/fn/models/words/v1")
    text = below.completions.create(model="words", prompt="five six", max_tokens=8)
    assert text.choices[0].text == "five six"

    tokens_in, tokens_out = 2 * (4 + EXTRA_WORDS) + 2, 2 + 4 + 2
    cost = tokens_in * TOKEN_IN + tokens_out * TOKEN_OUT
    wait_for(
        lambda: usage_of(platform) == (tokens_in, tokens_out, cost),
        f"{tokens_in} and {tokens_out} tokens for {cost} to be billed",
        timeout_s=30,
    )
    ready = httpx.get(f"{platform.url}/fn/models/words/health", headers=platform.headers)
    assert ready.json() == {"status": "ok"}
