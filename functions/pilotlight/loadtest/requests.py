"""What is sent: one request of the test, made ahead of its time, and how its answer is read."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pilotlight.loadtest.distributions import LengthDistribution

FIRST_TOKEN_ID, LAST_TOKEN_ID = 16, 255
"""Token ids that every vocabulary has, and that are letters or parts of words in most: what is
drawn for prompts by ids."""
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that is ready to go. `is_stream`: its answer comes in pieces, whose times count."""

    path: str
    body: bytes
    is_stream: bool
    content_type: str = "application/json"

    @property
    def headers(self) -> dict[str, str]:
        """What goes with it."""
        return {
            "content-type": self.content_type,
            **({"accept": "text/event-stream"} if self.is_stream else {}),
        }


class RequestFactory(Protocol):
    """Makes the requests of a test."""

    def make(self, source: random.Random) -> PreparedRequest:
        """The next one."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it makes, for the report."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCalls:
    """Calls of one function with given arguments, in turn at random."""

    path: str
    arguments: Sequence[Any]
    is_stream: bool = False

    def make(self, source: random.Random) -> PreparedRequest:
        """One of the given ones."""
        body = json.dumps(source.choice(self.arguments), ensure_ascii=False).encode()
        return PreparedRequest(path=self.path, body=body, is_stream=self.is_stream)

    def describe(self) -> dict[str, Any]:
        """The path, and how many different arguments there are."""
        return {"path": self.path, "arguments": len(self.arguments), "stream": self.is_stream}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """Calls of a language model, with prompts and answers of drawn lengths.

    Attributes:
        by_ids: prompts are token ids of exactly that length (`/v1/completions`); otherwise a chat
        of as many short words. shared: tokens at the begin of each prompt that are the same for a
        group; `groups`: how many groups there are. ignore_eos: answers run to their drawn length
        (an argument of vLLM's; others refuse it).
    """

    model: str
    prompt: LengthDistribution
    output: LengthDistribution
    by_ids: bool = True
    is_stream: bool = True
    shared: int = 0
    groups: int = 1
    ignore_eos: bool = True
    prefix: str = ""

    def make(self, source: random.Random) -> PreparedRequest:
        """A prompt that nobody had, but for its shared begin."""
        length, answer = self.prompt.draw(source), self.output.draw(source)
        common = random.Random(f"group {source.randrange(self.groups)}")
        begin = min(self.shared, length)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": answer,
            "temperature": 0,
            "stream": self.is_stream,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.is_stream:
            body["stream_options"] = {"include_usage": True}
        if self.by_ids:
            ids = [common.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(begin)]
            body["prompt"] = ids + [
                source.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(length - begin)
            ]
        else:
            words = [common.choice(_SYLLABLES) for _ in range(begin)] + [
                source.choice(_SYLLABLES) for _ in range(length - begin)
            ]
            body["messages"] = [{"role": "user", "content": " ".join(words)}]
        path = f"{self.prefix}/v1/{'completions' if self.by_ids else 'chat/completions'}"
        return PreparedRequest(path=path, body=json.dumps(body).encode(), is_stream=self.is_stream)

    def describe(self) -> dict[str, Any]:
        """Lengths and what is shared."""
        return {
            "model": self.model,
            "prompt": self.prompt.text,
            "output": self.output.text,
            "by_token_ids": self.by_ids,
            "stream": self.is_stream,
            "shared_prefix": self.shared,
            "groups": self.groups,
        }


class StreamReader:
    """Reads server-sent events as they come: counts pieces, and keeps what the last ones say of
    tokens and cost (WHATWG HTML §9.2)."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = b""
        self.usage: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.error = ""

    def feed(self, data: bytes) -> int:
        """The next bytes; returns how many pieces of an answer ended in them. Comments and closing
        events are no pieces."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        pieces = 0
        for line in lines:
            text = line.rstrip(b"\r")
            if text.startswith(b"event:"):
                self._event = text[6:].strip()
            elif text.startswith(b"data:"):
                pieces += self._data(text[5:].strip())
            elif not text:
                self._event = b""
        return pieces

    def _data(self, data: bytes) -> int:
        if data == b"[DONE]":
            return 0
        try:
            body = json.loads(data)
        except ValueError:
            return 1
        if self._event in (b"end", b"usage"):
            self.end = body if isinstance(body, dict) else {}
            return 0
        if self._event == b"error" or (isinstance(body, dict) and body.get("error")):
            self.error = "broken"
            return 0
        if isinstance(body, dict) and isinstance(body.get("usage"), dict):
            self.usage = body["usage"]
        return 1 if not isinstance(body, dict) or _holds_tokens(body.get("choices")) else 0


def _holds_tokens(choices: Any) -> bool:
    """Whether a piece is one of the answer: not the usage alone, and not the word on who speaks,
    with which chats begin."""
    if not isinstance(choices, list):
        return True
    deltas = [choice.get("delta") if isinstance(choice, dict) else None for choice in choices]
    return any(
        not isinstance(d, dict) or "role" not in d or any(v for k, v in d.items() if k != "role")
        for d in deltas
    )
