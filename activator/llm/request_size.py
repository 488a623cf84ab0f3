"""Measures a request in OpenAI's format: length of its prompts, maximum length and number of its
answers. Pure.

Unknown content counts as nothing: the engine validates requests. Only numbers that are needed for
accounting are checked here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pilotlight import errors

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
COMPLETIONS_DEFAULT = 16
"""Default tokens of a text completion (OpenAI's API reference, `completions.max_tokens`; the same
in vLLM)."""
MAX_CHOICES = 128
"""Maximum `n`, as in OpenAI's API reference: each is a sequence of the engine."""
MAX_PROMPTS = 2048
"""Maximum prompts times answers of one request; OpenAI's limit of `embeddings.input`."""
_IN_CHAT = "max_completion_tokens"
_IN_BOTH = "max_tokens"


class PromptSize(NamedTuple):
    """The length of one prompt.

    Attributes:
        text_bytes: bytes of UTF-8.
        packed_bytes: the same without runs of white space, of which one token may contain a
            hundred.
        tokens: prompt tokens given as ids."""

    text_bytes: int
    packed_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDemand:
    """The token demand of one request.

    Attributes:
        prompts: sizes of its prompts; a chat is one.
        max_tokens: requested limit of each answer; None = none.
        default_tokens: the engine's limit for None; None = the rest of the model's length.
        answers: total number of answers; 0 for embeddings.
        is_text: its prompts are only text, so their bytes can be compared with their tokens."""

    prompts: tuple[PromptSize, ...]
    max_tokens: int | None = None
    default_tokens: int | None = None
    answers: int = 1
    is_text: bool = True

    @property
    def text_bytes(self) -> int:
        """Total bytes of all prompts."""
        return sum(size.text_bytes for size in self.prompts)


def token_demand_of(path: str, body: Mapping[str, Any]) -> TokenDemand:
    """The demand of a request to `path` with this body. Raises InvalidInput naming key, value and
    limit."""
    if path == EMBEDDINGS:
        prompts, is_text = _prompts(body.get("input", body.get("messages")))
        _check_few("input", len(prompts))
        return TokenDemand(prompts=prompts, answers=0, is_text=is_text)
    if path == CHAT:
        size, is_text = _chat(body)
        return TokenDemand(
            prompts=(size,),
            max_tokens=_max_tokens(body, _IN_CHAT, _IN_BOTH),
            answers=_choices(body),
            is_text=is_text,
        )
    prompts, is_text = _prompts(body.get("prompt"))
    answers = _choices(body) * len(prompts)
    _check_few("prompt", answers)
    return TokenDemand(
        prompts=prompts,
        max_tokens=_max_tokens(body, _IN_BOTH),
        default_tokens=COMPLETIONS_DEFAULT,
        answers=answers,
        is_text=is_text,
    )


def write_cap(
    path: str, body: MutableMapping[str, Any], cap: int | None, *, is_engine: bool = True
) -> None:
    """Limit each answer to `cap` tokens; None leaves the request unchanged. `is_engine`: it is for
    vLLM: of other servers some know the older name only."""
    if cap is None or path == EMBEDDINGS:
        return
    if path == CHAT:
        body.pop(_IN_BOTH, None)
        body.pop(_IN_CHAT, None)
    body[_IN_CHAT if path == CHAT and is_engine else _IN_BOTH] = cap


def _check_few(name: str, count: int) -> None:
    if count > MAX_PROMPTS:
        raise errors.InvalidInput(
            f"{name}: {count} prompts and answers in one request, at most {MAX_PROMPTS}",
            parameter=name,
        )


def _max_tokens(body: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise errors.InvalidInput(
                f"{name} = {_format(value)}: write a whole number", parameter=name
            )
        least = 0 if body.get("echo") is True else 1
        if value < least:
            raise errors.InvalidInput(
                f"{name} = {_format(value)}: must be at least {least}", parameter=name
            )
        return value
    return None


def _choices(body: Mapping[str, Any]) -> int:
    most = 1
    for name in ("n", "best_of"):
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CHOICES:
            raise errors.InvalidInput(
                f"{name} = {_format(value)}: must be between 1 and {MAX_CHOICES}", parameter=name
            )
        most = max(most, value)
    return most


def _chat(body: Mapping[str, Any]) -> tuple[PromptSize, bool]:
    texts: list[str] = []
    is_text = True
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
            is_text = is_text and all(isinstance(part, str) for part in parts)
            texts += (part for part in parts if isinstance(part, str))
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls))
    if tools := body.get("tools"):
        texts.append(json.dumps(tools))
    return _size(texts), is_text


def _prompts(given: Any) -> tuple[tuple[PromptSize, ...], bool]:
    """Sizes of a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(given, str):
        return (_size((given,)),), True
    if not isinstance(given, list) or not given:
        return (PromptSize(0, 0, 0),), False
    if isinstance(given[0], int):
        return (PromptSize(0, 0, len(given)),), False
    sizes = tuple(
        _size((one,))
        if isinstance(one, str)
        else PromptSize(0, 0, len(one) if isinstance(one, list) else 0)
        for one in given
    )
    return sizes, all(isinstance(one, str) for one in given)


def _size(texts: Iterable[str]) -> PromptSize:
    whole = packed = 0
    for text in texts:
        length = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        whole += length
        packed += length - 2 * (text.count("  ") + text.count("\n\n") + text.count("\t\t"))
    return PromptSize(whole, max(0, packed), 0)


def _format(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
