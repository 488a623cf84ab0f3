"""A language model on a whole platform, with the real vLLM: deployed, called, at zero, and back
from a snapshot of the server itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.protocol import HEADER_START
from tests.conftest import ROOT, RequireOrSkip
from tests.e2e.frozen import environ, why_no_criu
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.vllm, pytest.mark.timeout(900)]

PATIENCE_S = 300.0
MODEL = "llm/assistant"
ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is a pilot light?"}],
    "max_tokens": 8,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def llm(
    require_or_skip: RequireOrSkip, vllm_env: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlatformUnderTest]:
    """A platform with examples/llm.py deployed on it; deploying makes a snapshot of the server and
    proves it."""
    if (why := why_no_criu()) is not None:
        require_or_skip(why)
    cache = tmp_path_factory.mktemp("cache")
    with (
        platform_up(snapshotter={"engines": {"vllm": str(vllm_env)}}) as platform,
        environ(XDG_CACHE_HOME=str(cache)),
    ):
        print(platform.cli("deploy", str(ROOT / "examples/llm.py")).stdout)
        yield platform


def chat(platform: PlatformUnderTest, **more: Any) -> httpx.Response:
    """One question."""
    return httpx.post(
        f"{platform.url}/v1/chat/completions",
        headers=platform.headers,
        json={**ASKED, **more},
        timeout=PATIENCE_S,
    )


def first_token_s(platform: PlatformUnderTest) -> tuple[str, float, str]:
    """By which rung the stream came, after how many seconds its first token, and all that was
    said."""
    began, first, said = time.monotonic(), 0.0, ""
    asked = {**ASKED, "stream": True}
    with httpx.stream(
        "POST",
        f"{platform.url}/v1/chat/completions",
        headers=platform.headers,
        json=asked,
        timeout=PATIENCE_S,
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {") or not (
                choices := json.loads(line[6:]).get("choices")
            ):
                continue
            if piece := choices[0]["delta"].get("content"):
                first, said = first or time.monotonic() - began, said + piece
        return answer.headers.get(HEADER_START, ""), first, said


def to_zero(platform: PlatformUnderTest) -> None:
    """Until nothing of it runs."""
    with platform.client() as client:
        wait_for(lambda: not client.instances(app="llm"), "no instance", timeout_s=PATIENCE_S)


def test_it_comes_back_from_zero_and_says_what_it_said(llm: PlatformUnderTest) -> None:
    answer = chat(llm)
    assert answer.status_code == 200, answer.text
    before = answer.json()["choices"][0]["message"]["content"]
    with llm.client() as client:
        (snapshot,) = client.snapshots()

    for _ in range(2):
        to_zero(llm)
        kind, seconds, said = first_token_s(llm)
        print(
            f"{kind or 'in the stream'}: first token after {seconds:.2f} s; the stock start takes "
            f"{snapshot['cold_ms'] / 1000:.1f} s"
        )
        assert said == before

    with llm.client() as client:
        (snapshot,) = client.snapshots()
    assert snapshot["restores"] >= 2
