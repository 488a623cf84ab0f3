"""What a guard reads of a request: everything but images and sounds."""

from __future__ import annotations

from typing import Any

import pytest

from activator.guards.texts import SEPARATOR, request_text

MEDIUM = "data:image/png;base64,iVBORw0KGgo="


def texts_of(content: Any) -> list[str]:
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return request_text(body).split(SEPARATOR)


@pytest.mark.parametrize("member", ["image_url", "video_url", "audio_url"])
def test_an_image_or_a_sound_is_no_text(member: str) -> None:
    parts = [{"type": "text", "text": "what is it?"}, {"type": member, member: {"url": MEDIUM}}]
    assert "what is it?" in texts_of(parts)
    assert MEDIUM not in texts_of(parts)
    assert MEDIUM not in texts_of([{"type": member, member: MEDIUM}])


def test_a_text_that_begins_like_an_image_is_read() -> None:
    said = f"{MEDIUM} my address is ada@example.com"
    assert said in texts_of(said)
    assert said in texts_of([{"type": "text", "text": said}])
    assert said in request_text({"prompt": [said, "b"]}).split(SEPARATOR)


def test_an_address_of_an_image_is_read() -> None:
    assert "https://a.example/x?q=1" in texts_of(
        [{"image_url": {"url": "https://a.example/x?q=1"}}]
    )
