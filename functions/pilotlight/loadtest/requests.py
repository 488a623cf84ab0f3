"""Builds the requests of a test in advance, and parses streamed responses."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pilotlight.loadtest.distributions import LengthDistribution

FIRST_TOKEN_ID, LAST_TOKEN_ID = 16, 255
"""Range of token ids for prompts by ids: every vocabulary has them, and in most they are letters or
parts of words."""
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "te")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that is ready to send. `is_stream`: the response is a stream whose chunks are
    timed."""

    path: str
    body: bytes
    is_stream: bool
    content_type: str = "application/json"

    @property
    def headers(self) -> dict[str, str]:
        """The request headers."""
        return {
            "content-type": self.content_type,
            **({"accept": "text/event-stream"} if self.is_stream else {}),
        }


class RequestFactory(Protocol):
    """Creates the requests of a test."""

    def make(self, source: random.Random) -> PreparedRequest:
        """Create the next request."""

    def describe(self) -> dict[str, Any]:
        """Describe the requests for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCalls:
    """Creates calls of one function with randomly chosen arguments."""

    path: str
    arguments: Sequence[Any]
    is_stream: bool = False

    def make(self, source: random.Random) -> PreparedRequest:
        """Create a call with one of the given arguments."""
        body = json.dumps(source.choice(self.arguments), ensure_ascii=False).encode()
        return PreparedRequest(path=self.path, body=body, is_stream=self.is_stream)

    def describe(self) -> dict[str, Any]:
        """The path, and the number of given arguments."""
        return {"path": self.path, "arguments": len(self.arguments), "stream": self.is_stream}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCalls:
    """Creates calls of a language model with random prompt and output lengths.

    Attributes:
        by_ids: prompts are exactly that many token ids (`/v1/completions`); otherwise a chat of as
        many short words. shared: number of leading prompt tokens that are equal within a group.
        groups: number of groups. ignore_eos: outputs have exactly the drawn length (a parameter of
        vLLM; other servers refuse it).
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
        """Create a call with a new prompt, which shares only its prefix with others."""
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
        """The model, the length distributions and the shared prefix."""
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
    """Parses server-sent events incrementally (WHATWG HTML §9.2): counts chunks, and keeps the
    token counts and cost of the final events."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = b""
        self.usage: Mapping[str, Any] = {}
        self.end: Mapping[str, Any] = {}
        self.error = ""

    def feed(self, data: bytes) -> int:
        """Parse the next bytes; return how many chunks of the output ended in them. Comments and
        final events do not count as chunks."""
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
    """Whether a chunk contains output, and not only the usage or the role with which a chat
    begins."""
    if not isinstance(choices, list):
        return True
    deltas = [choice.get("delta") if isinstance(choice, dict) else None for choice in choices]
    return any(
        not isinstance(d, dict) or "role" not in d or any(v for k, v in d.items() if k != "role")
        for d in deltas
    )
