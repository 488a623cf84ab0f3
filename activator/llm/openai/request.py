"""What a caller asks of a language model: its body, looked at once, and written again for the
engine that answers.

Only what is wrong for every engine is refused here, before anything is started: what is not JSON,
has another type than the API says, or bounds that no model keeps. Everything else is passed on as
it came, and the engine's own word on it passed back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from activator.llm.openai.errors import ModelNotFound
from activator.llm.request_size import CHAT, COMPLETIONS, EMBEDDINGS
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.engines import Task
from pilotlight.json_schema import check_schema
from pilotlight.schema_cost import pattern_weights

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PATHS: Final = frozenset({CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE})
"""Paths of an engine's API that take a model and a body."""
MAX_FORMAT_BYTES: Final = 65_536
MAX_FORMAT_PATTERNS: Final = 20_000
"""Of the schema that an answer is to have: checking one takes as long as it is large, and compiling
its patterns, too."""
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
"""Parameters whose type the API fixes; null stands for its default. `tokens.facts` looks at those
that it counts with."""
_INSIDE: Final = (
    "priority",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "prompt_embeds",
)
"""Parameters of vLLM's that reach past its API: before whom others wait, whose memory is read, what
plug-ins do, prompts nobody counts."""


class OpenAIRequest:
    """One request's body.

    Attributes:
        path: of the API. body: what came, as changed since. model: what it names as its model; "" =
        nothing. adapter: which adapter of the model it wants; "" = none. said: the bytes that its
        caller wrote, where a repeat has to be known by them; else b"". salt: keeps what engines
        remember of its prompt from other tenants; "" = nothing does. is_stream: whether the answer
        comes in pieces. shows_usage, shows_each_usage: whether its caller asked for the usage at a
        stream's end, and with each piece.
    """

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
        """Raises InvalidInput naming the parameter and what is wrong with it."""
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
        """Whether the model runs for it, so that its tokens are counted."""
        return self.path in TASKS

    def check(self, target: CallTarget) -> None:
        """Whether this revision can answer it at all. Raises InvalidInput, or ModelNotFound where
        it is no engine or lacks the adapter."""
        engine = target.spec.engine
        what = f"{target.app}/{target.function}"
        if engine is None:
            raise ModelNotFound(
                f"{what} is no language model: call it at /v1/functions/{what}:invoke",
                parameter="model",
            )
        if self.adapter and self.adapter not in engine.lora:
            has = (
                f"its adapters are {', '.join(sorted(engine.lora))}"
                if engine.lora
                else "it has none"
            )
            raise ModelNotFound(
                f"{what} has no adapter {self.adapter[:80]!r}; {has}", parameter="model"
            )
        task = TASKS.get(self.path)
        if task is not None and task is not engine.task:
            does, path = (
                ("generates text", CHAT)
                if engine.task is Task.GENERATE
                else ("embeds text", EMBEDDINGS)
            )
            raise errors.InvalidInput(f"{what} {does}: call it at {path}", parameter="model")

    def written_for(self, target: CallTarget) -> bytes:
        """The body for this engine: its own name for the model, and usage in every piece of a
        stream. Raises as `check`."""
        self.check(target)
        body = self.body
        body["model"] = self.adapter or target.spec.name
        if self.salt and self.counts:
            if inside := next((name for name in _INSIDE if body.get(name) is not None), None):
                raise _wrong(inside, "only the tenant whose model this is may say it")
            body["cache_salt"] = self.salt
        if self.is_stream:
            body["stream_options"] = {
                **(body.get("stream_options") or {}),
                "include_usage": True,
                "continuous_usage_stats": True,
            }
        try:
            return _encode(body).encode()
        except UnicodeEncodeError as e:
            raise errors.InvalidInput(
                "the body has half of a surrogate pair, which is no character"
            ) from e
        except ValueError as e:
            raise errors.InvalidInput(
                "the body has a number that is beyond all that can be written"
            ) from e
        except RecursionError as e:
            raise _too_deep() from e


def parsed(data: bytes) -> dict[str, Any]:
    """A request's body. Raises InvalidInput where it is no JSON object."""
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
    raise ValueError(f"{name} is no number of JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Made once: `json.dumps` makes one for each body that is not written as it likes."""


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
    """`name` is a text, texts, token ids, or lists of them; at least one."""

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
    """The engine looks at it."""


_CHECKS: Final = {
    CHAT: _check_chat,
    COMPLETIONS: _check_texts("prompt"),
    EMBEDDINGS: _check_texts("input"),
    TOKENIZE: _check_nothing,
    DETOKENIZE: _check_nothing,
}


def _check_format(given: Mapping[str, Any] | None) -> None:
    """A schema that is none may take an engine down, or a start with it."""
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
            f"json_schema.schema has more than {MAX_FORMAT_BYTES} bytes, or patterns that are too large",
        )
    try:
        check_schema(schema)
    except ValueError as e:  # ValidationError is one; half a surrogate pair in a name is another
        text = getattr(e, "message", str(e))
        raise _wrong(
            "response_format", f"json_schema.schema is no JSON Schema: {text[:300]}"
        ) from e
