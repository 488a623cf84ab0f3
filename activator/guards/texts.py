"""The text in requests and answers of OpenAI's API: all of it, wherever it is, so that
no field is a way around a guard.

Templates of models use many fields of a request (tools, documents, reasoning of earlier answers),
and servers have more than OpenAI's API. So every string counts except those that a model neither
gets nor writes. Images and sounds are not text; token ids are text that cannot be read here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pilotlight import errors

SEPARATOR: Final = "\0"
"""Between texts that are checked together: no pattern continues over it by accident."""
_NOT_MODEL_INPUT: Final = frozenset(
    {"model", "cache_salt", "stream_options", "user", "encoding_format"}
)
"""Members of a request that a model does not get."""
_NO_TEXT: Final = ("prompt_embeds", "prompt_token_ids", "token_ids")
_TOKENS: Final = ("prompt", "input")
_COMMON_NAMES: Final = frozenset(
    {"arguments", "content", "function", "id", "name", "parameters", "role", "text", "type"}
    | {"description", "image_url", "messages", "properties", "required", "tool_calls", "url"}
)
"""Names of members that every request has; others may be a text: of a tool's parameter, say."""
_TAGS: Final = frozenset({"role", "type"})
_COMMON_TAGS: Final = ("assistant", "developer", "function", "system", "text", "tool", "user")
"""Values of those members that are no text; others may be."""
_MEDIA: Final = ("data:image/", "data:audio/", "data:video/")
_MEDIA_MEMBERS: Final = frozenset({"url", "image_url", "audio_url", "video_url"})
"""Members whose value is no text where it begins with one of these."""
_DIGITS_OF_TEXT: Final = 10**8
"""Numbers from here on are text, too: those of cards and accounts are."""
_NOT_GENERATED: Final = frozenset(
    {"created", "finish_reason", "id", "logprobs", "model", "object", "role", "service_tier"}
    | {"system_fingerprint", "type", "usage"}
)
"""Members of an answer that a model does not write. `logprobs` repeat the text of their own
piece, which is passed on with it or not at all."""

Path = tuple[str | int, ...]


def request_text(body: Mapping[str, Any]) -> str:
    """All text of a request. Raises InvalidInput for token ids, which cannot be checked."""
    for name in _TOKENS:
        value = body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], str | dict):
            raise _unreadable(name)
    for name in _NO_TEXT:
        if body.get(name) is not None:
            raise _unreadable(name)
    texts: list[str] = []
    pending: list[Any] = [value for name, value in body.items() if name not in _NOT_MODEL_INPUT]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            texts.append(node)
        elif isinstance(node, dict):
            texts += [name for name in node if name not in _COMMON_NAMES]
            pending += [
                value
                for name, value in node.items()
                if (name not in _TAGS or value not in _COMMON_TAGS)
                and not (name in _MEDIA_MEMBERS and _is_medium(value))
            ]
        elif isinstance(node, list):
            texts += _joined(node)
            pending += [one for one in node if isinstance(one, str | int | dict | list)]
        elif type(node) is int and abs(node) >= _DIGITS_OF_TEXT:
            texts.append(str(node))
    texts.reverse()
    return SEPARATOR.join(texts)


def _is_medium(value: Any) -> bool:
    """Whether it is an image or a sound in place of its address."""
    return isinstance(value, str) and value.startswith(_MEDIA)


def _joined(parts: Sequence[Any]) -> Iterator[str]:
    """The parts of one message, as templates join them: a text may be split over them."""
    texts = [
        text
        for part in parts
        if isinstance(part, dict) and isinstance(text := part.get("text"), str)
    ]
    if len(texts) > 1:
        yield "".join(texts)


def answer_texts(document: Any) -> Iterator[tuple[Path, str]]:
    """Each generated text of an answer, or of a piece of one, with its path, by which texts of
    several pieces belong together."""
    pending: list[tuple[Path, Any]] = [((), document)]
    while pending:
        path, node = pending.pop()
        if isinstance(node, str):
            if node:
                yield path, node
        elif isinstance(node, dict):
            pending += [
                ((*path, name), value)
                for name, value in node.items()
                if name not in _NOT_GENERATED and isinstance(value, str | dict | list)
            ]
        elif isinstance(node, list):
            pending += [
                ((*path, _position(one, at)), one)
                for at, one in enumerate(node)
                if isinstance(one, str | dict | list)
            ]


def _position(node: Any, at: int) -> int:
    """Where an element of a list belongs: pieces of a stream say it."""
    index = node.get("index") if isinstance(node, dict) else None
    return index if type(index) is int else at


def _unreadable(name: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"{name}: this model has a guard, which reads text: send text in place of token ids or "
        f"embeddings",
        parameter=name,
    )
