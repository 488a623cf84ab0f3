"""The text in requests and answers of OpenAI's API: all of it, wherever it is, so that
no field is a way around a guard.

Templates of models use many fields of a request (tools, documents, reasoning of earlier answers),
and servers have more than OpenAI's API. So every string counts except those that a model neither
gets nor writes. Images and sounds are not text; token ids are text that cannot be read here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pilotlight import errors
from pilotlight.validation.json_size import count_values

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
"""Members of a part of a message whose value is no text where it begins with one of these."""
_IDS_OF_ANSWERS: Final = ("return_token_ids", "return_tokens_as_token_ids")
_JOINTS: Final = ("", "\n")
"""What servers put between the parts of a message."""
MAX_ARGUMENTS: Final = 20_000
"""Most JSON values in the arguments of all tool calls (`json_size`): some milliseconds."""
_DIGITS_OF_TEXT: Final = 10**8
"""Numbers from here on are text, too: those of cards and accounts are."""
_NOT_GENERATED: Final = frozenset(
    {"created", "finish_reason", "id", "logprobs", "model", "object", "role", "service_tier"}
    | {"system_fingerprint", "type", "usage"}
)
"""Members of an answer that a model does not write; of `logprobs` only the tokens are read: they
also have what a server leaves out of the text, such as reasoning."""

Path = tuple[str | int, ...]


def request_text(body: Mapping[str, Any]) -> str:
    """All text of a request. Raises InvalidInput for token ids, which cannot be checked, and
    TooLarge."""
    for name in _TOKENS:
        value = body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], str | dict):
            raise _unreadable(name)
    for name in _NO_TEXT:
        if body.get(name) is not None:
            raise _unreadable(name)
    texts: list[str] = []
    left = MAX_ARGUMENTS
    contents, parts = _places(body.get("messages"))
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
                and not (name in _MEDIA_MEMBERS and id(node) in parts and _is_medium(value))
            ]
            arguments = node.get("arguments")
            if isinstance(arguments, str) and "\\" in arguments:
                left -= count_values(arguments.encode("utf-8", "replace"))
                pending.append(_decoded(arguments, left))
        elif isinstance(node, list):
            texts += _joined(node, has_strings=id(node) in contents)
            pending += [one for one in node if isinstance(one, str | int | float | dict | list)]
        elif type(node) in (int, float) and abs(node) >= _DIGITS_OF_TEXT:
            texts.append(str(node))
    texts.reverse()
    return SEPARATOR.join(texts)


def require_text_answers(body: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a request whose answer would have its text as token ids."""
    for name in _IDS_OF_ANSWERS:
        if body.get(name):
            raise errors.InvalidInput(
                f"{name}: this model has a guard, which reads text: leave it out",
                parameter=name,
            )


def _places(messages: Any) -> tuple[set[int], set[int]]:
    """The ids of the lists that messages consist of, and of the objects in which a medium may be:
    parts of messages, and what their members for media have. Elsewhere, in a tool's parameters say,
    a template writes the same text into the prompt."""
    contents: set[int] = set()
    parts: set[int] = set()
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        contents.add(id(content))
        for part in content:
            if isinstance(part, dict):
                parts.add(id(part))
                parts.update(id(part.get(name)) for name in _MEDIA_MEMBERS if name in part)
    return contents, parts


def _decoded(arguments: str, left: int) -> Any:
    """Arguments of a tool call with escapes in them, as servers decode them for templates. Raises
    TooLarge where not even 0 values are `left`."""
    if left < 0:
        raise errors.TooLarge(
            f"the arguments of tool calls have more than {MAX_ARGUMENTS} JSON values, which the "
            f"guard of this model cannot check: send fewer",
            limit_values=MAX_ARGUMENTS,
        )
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _is_medium(value: Any) -> bool:
    """Whether it is an image or a sound in place of its address."""
    return isinstance(value, str) and value.startswith(_MEDIA)


def _joined(parts: Sequence[Any], *, has_strings: bool) -> Iterator[str]:
    """The parts of one message, as templates join them: a text may be split over them.
    `has_strings`: strings are parts, too."""
    said = (part.get("text") if isinstance(part, dict) else has_strings and part for part in parts)
    texts = [text for text in said if isinstance(text, str)]
    if len(texts) > 1:
        yield from (joint.join(texts) for joint in _JOINTS)


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
            if tokens := _tokens(node.get("logprobs")):
                yield (*path, "logprobs"), tokens
        elif isinstance(node, list):
            pending += [
                ((*path, _position(one, at)), one)
                for at, one in enumerate(node)
                if isinstance(one, str | dict | list)
            ]


def _tokens(logprobs: Any) -> str:
    """The tokens of a chat's or a completion's `logprobs` as one text."""
    if not isinstance(logprobs, dict):
        return ""
    tokens: list[Any] = []
    for name in ("tokens", "content", "refusal"):
        value = logprobs.get(name)
        tokens += value if isinstance(value, list) else ()
    texts = (one.get("token") if isinstance(one, dict) else one for one in tokens)
    return "".join(one for one in texts if isinstance(one, str))


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
