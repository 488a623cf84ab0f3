"""A caller's request to a language model: its body, validated once, and rewritten for the engine
that answers.

Only what is invalid for every engine is rejected here, before anything is started: invalid JSON,
wrong types, or values that no model supports. Everything else is passed on unchanged, and the
engine's own error returned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from activator.llm.openai.errors import ModelNotFound
from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.engines import Task
from pilotlight.validation.json_schema import check_schema
from pilotlight.validation.schema_cost import pattern_weights

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PATHS: Final = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE})
"""Paths of an engine's API that accept a model and a body."""
MAX_FORMAT_BYTES: Final = 65_536
MAX_FORMAT_PATTERNS: Final = 20_000
"""Limits of the schema of an answer: the time to check it, and to compile its patterns, grows with
its size."""
TASKS: Final = {CHAT: Task.GENERATE, COMPLETIONS: Task.GENERATE, EMBEDDINGS: Task.EMBED}

_NUMBER, _WHOLE, _FLAG, _TEXT = (int, float), (int,), (bool,), (str,)
_KINDS: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "presence_penalty", "frequency_penalty"), (_NUMBER, "a number")
    ),
    **dict.fromkeys(("seed", "top_logprobs"), (_WHOLE, "a whole number")),
    **dict.fromkeys(("stream", "parallel_tool_calls", "echo"), (_FLAG, "true or false")),
    **dict.fromkeys(("model", "user", "suffix", "encoding_format"), (_TEXT, "a string")),
    **dict.fromkeys(("stream_options", "response_format", "logit_bias"), ((dict,), "an object")),
    "tools": ((list,), "a list"),
    "stop": ((str, list), "a string, or a list of them"),
}
"""Parameters with a fixed type; null is the default. `request_size` validates those that it counts
with."""
_INSIDE: Final = (
    "priority",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "prompt_embeds",
)
"""Parameters of vLLM that have effects beyond one request: queue priority, memory transfer, plug-in
options, uncounted prompts."""


class OpenAIRequest:
    """One request's body.

    Attributes:
        path: of the API.
        body: as received and modified since.
        model: the requested model; "" = none.
        adapter: the requested adapter of the model; "" = none.
        said: the caller's bytes, if a repeat must be recognized by them; otherwise b"".
        salt: separates the prefix cache from other tenants; "" = shared.
        is_stream: whether the answer is streamed.
        shows_usage, shows_each_usage: whether the caller requested the usage at the end of a
            stream, and with each piece."""

    __slots__ = (
        "adapter",
        "body",
        "is_stream",
        "model",
        "path",
        "said",
        "salt",
        "shows_each_usage",
        "shows_usage",
    )

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        """Raises InvalidInput naming the parameter and the problem."""
        self.path = path
        self.body = body
        for name, value in body.items():
            kind = _KINDS.get(name)
            if kind is not None and value is not None and not _fits(value, kind[0]):
                raise _wrong(name, f"write {kind[1]}, not {_named(value)}")
        self.model: str = body.get("model") or ""
        self.adapter = self.salt = ""
        self.said = b""
        _CHECKS[path](body)
        self.is_stream = bool(body.get("stream")) and path in (CHAT, COMPLETIONS)
        options = body.get("stream_options") or {}
        self.shows_usage = self.is_stream and options.get("include_usage") is True
        self.shows_each_usage = self.shows_usage and options.get("continuous_usage_stats") is True
        if "response_format" in body:
            _check_format(body["response_format"])

    def __repr__(self) -> str:
        return f"<Asked {self.path} of {self.model!r}>"

    @property
    def counts(self) -> bool:
        """Whether it uses the model, so that its tokens are counted."""
        return self.path in TASKS

    def check(self, target: CallTarget) -> None:
        """Check that this revision can answer it. Raises InvalidInput, NotFound for a path that it
        does not have, or ModelNotFound if it is no language model or lacks the adapter."""
        model = target.spec.language_model
        what = f"{target.app}/{target.function}"
        if model is None:
            raise ModelNotFound(
                f"{what} is not a language model: call it at /v1/functions/{what}:invoke",
                parameter="model",
            )
        if self.adapter and self.adapter not in model.others:
            noun = "adapter" if model.is_engine else "model"
            has = f"its {noun}s are {', '.join(model.others)}" if model.others else "it has none"
            raise ModelNotFound(
                f"{what} has no {noun} {self.adapter[:80]!r}; {has}", parameter="model"
            )
        task = TASKS.get(self.path)
        if task is None and not model.is_engine:
            raise errors.NotFound(
                f"{what} is a web server: POST {self.path} is none of {', '.join(TASKS)}, whose "
                f"tokens are counted"
            )
        if task is not None and model.task is not None and task is not model.task:
            does, path = (
                ("generates text", CHAT)
                if model.task is Task.GENERATE
                else ("embeds text", EMBEDDINGS)
            )
            raise errors.InvalidInput(f"{what} {does}: call it at {path}", parameter="model")

    def written_for(self, target: CallTarget) -> bytes:
        """The body for this server: with its own name of the model, and usage in every piece of a
        stream (at the end of one, of a web server: other servers than vLLM know no other). Raises
        as `check`."""
        self.check(target)
        body, model = self.body, target.spec.language_model
        assert model is not None
        body["model"] = self.adapter or model.served
        if self.salt and self.counts:
            if inside := next((name for name in _INSIDE if body.get(name) is not None), None):
                raise _wrong(inside, "only the tenant that owns the model may set it")
            if model.is_engine:
                body["cache_salt"] = self.salt
        if self.is_stream:
            each = {"continuous_usage_stats": True} if model.is_engine else {}
            body["stream_options"] = {
                **(body.get("stream_options") or {}),
                "include_usage": True,
                **each,
            }
        try:
            return _encode(body).encode()
        except UnicodeEncodeError as e:
            raise errors.InvalidInput(
                "the body contains an unpaired surrogate, which is not a character"
            ) from e
        except ValueError as e:
            raise errors.InvalidInput("the body contains a number that is out of range") from e
        except RecursionError as e:
            raise _too_deep() from e


def parsed(data: bytes) -> dict[str, Any]:
    """Parse a request's body. Raises InvalidInput if it is not a JSON object."""
    try:
        body = _decode(data.decode())
    except ValueError as e:  # UnicodeDecodeError is one
        raise errors.InvalidInput(f"the body is not valid JSON: {e}") from e
    except RecursionError as e:
        raise _too_deep() from e
    if not isinstance(body, dict):
        raise errors.InvalidInput(f"the body must be a JSON object, not {_named(body)}")
    return body


def _too_deep() -> errors.InvalidInput:
    return errors.InvalidInput("the body is nested too deeply")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Created once: `json.dumps` creates an encoder for each call with options."""


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (type(value) is not bool or bool in kinds)


def _named(value: Any) -> str:
    if value is None:
        return "null"
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]


def _wrong(parameter: str, text: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"{parameter}: {text}", parameter=parameter)


def _check_chat(body: Mapping[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", 'write at least one message, [{"role": "user", "content": "…"}]')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _wrong(
                "messages", 'each is an object with a role, {"role": "user", "content": "…"}'
            )
    for tool in body.get("tools") or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(
                "tools",
                'each is {"type": "function", "function": {"name": "…", "parameters": {…}}}',
            )


def _check_texts(name: str) -> Callable[[Mapping[str, Any]], None]:
    """Check that `name` is a text, texts, token ids, or lists of them; at least one."""

    def check(body: Mapping[str, Any]) -> None:
        given = body.get(name)
        if isinstance(given, str) or (given is None and name == "input" and body.get("messages")):
            return
        kind = type(given[0]) if isinstance(given, list) and given else None
        if kind not in (str, int, list) or any(
            type(one) is not kind or one == [] for one in given or ()
        ):
            raise _wrong(
                name, "write a string, a list of them, token ids, or lists of those; at least one"
            )

    return check


def _check_nothing(body: Mapping[str, Any]) -> None:
    """Accept any body: the engine validates it."""


_CHECKS: Final = {
    CHAT: _check_chat,
    COMPLETIONS: _check_texts("prompt"),
    EMBEDDINGS: _check_texts("input"),
    TOKENIZE: _check_nothing,
    DETOKENIZE: _check_nothing,
}


def _check_format(given: Mapping[str, Any] | None) -> None:
    """Check the schema of an answer. An invalid one may crash an engine, or cause a useless
    start."""
    if given is None or given.get("type") != "json_schema":
        return
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise _wrong(
            "response_format",
            'write {"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}',
        )
    if len(_encode(schema)) > MAX_FORMAT_BYTES or pattern_weights(schema) > MAX_FORMAT_PATTERNS:
        raise _wrong(
            "response_format",
            f"json_schema.schema has more than {MAX_FORMAT_BYTES} bytes, or patterns that are too complex",
        )
    try:
        check_schema(schema)
    except ValueError as e:  # includes ValidationError, and an unpaired surrogate in a name
        text = getattr(e, "message", str(e))
        raise _wrong(
            "response_format", f"json_schema.schema is not a valid JSON Schema: {text[:300]}"
        ) from e
