"""`app.vllm(…)`: declares a language model as a function. The build completes the declaration from
the files of the model.

The function runs the stock vLLM OpenAI server. This module depends only on the option names of its
command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pilotlight.client import sessions
from pilotlight.errors import InvalidInput
from pilotlight.sdk import active_app
from pilotlight.sdk.declaration import Declaration, check_declared_name
from pilotlight.sdk.function import Function
from pilotlight.sdk.options import parse_memory, resolve_options
from pilotlight.sdk.secret import Secret
from pilotlight.sdk.storage.weights import Weights
from pilotlight.spec.engines import EngineSpec, GuardSpec, Task, TokenLimits
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.policies import (
    require_in_range,
)

OWN_ARGUMENTS = frozenset(
    {
        "api-key",
        "data-parallel-size",
        "disable-log-stats",
        "disable-uvicorn-access-log",
        "enable-lora",
        "enable-sleep-mode",
        "host",
        "lora-modules",
        "max-model-len",
        "max-num-seqs",
        "model",
        "port",
        "root-path",
        "runner",
        "served-model-name",
        "ssl-certfile",
        "ssl-keyfile",
        "task",
        "uds",
    }
)
"""Arguments of the server that are reserved for the platform."""
_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size")
_KV_BYTES = "kv-cache-memory-bytes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineDeclaration(Declaration):
    """A declared language model. `raw` is a `DeclarationSite`, since there is no user code.

    Attributes:
        model: the weights that it serves.
        adapters: LoRA adapters, name → weights.
        max_model_len: None = the maximum of the model.
        memory_bytes: memory of one instance; None = as needed.
        arguments: further arguments of the server, without dashes."""

    model: Weights
    adapters: Mapping[str, Weights] = field(default_factory=dict)
    task: Task = Task.GENERATE
    max_model_len: int | None = None
    max_num_seqs: int = 16
    kv_bytes: int | None = None
    sleep_level: int = 2
    memory_bytes: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by_value(self) -> bool:
        """Always False: it has no user code."""
        return False

    def methods(self) -> tuple[MethodSpec, ...]:
        """One callable: the server."""
        return (MethodSpec(),)

    def method_names(self) -> tuple[str, ...]:
        """One name: that of the server, ""."""
        return ("",)

    def is_generator(self, method: str) -> bool:
        """Always False: the server streams server-sent events of its own protocol."""
        return False

    def engine(
        self, *, max_model_len: int, kv_bytes: int | None, more: Mapping[str, Any]
    ) -> EngineSpec:
        """Return the record, given the dimensions of the model. `more`: arguments derived from the
        model, which explicit arguments override."""
        return EngineSpec(
            model=self.model.name,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            task=self.task,
            lora={name: weights.name for name, weights in self.adapters.items()},
            args={**more, **self.arguments},
            parallel=max(1, self.resources.gpu_count),
            kv_bytes=kv_bytes,
            sleep_level=self.sleep_level,
        )


class DeclarationSite:
    """The call site of `app.vllm(…)`, which replaces the function in a declaration."""

    def __init__(self, name: str, module: str, doc: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = module
        self.__doc__ = doc

    def __repr__(self) -> str:
        return f"<app.vllm({self.__name__!r}) in {self.__module__}>"


class Engine:
    """The handle of a language model: its name for OpenAI clients, and configured clients.

    With `llm = app.vllm("chat", weights=…)`:
    `llm.client().chat.completions.create(model=llm.model, messages=[…])`."""

    def __init__(
        self, *, app: str, name: str, declaration: EngineDeclaration | None = None
    ) -> None:
        self._app = app
        self._name = name
        if declaration is not None:
            self.__pilotlight__ = declaration
            self.__module__ = declaration.module

    def __repr__(self) -> str:
        return f"<Engine {self.model}>"

    @classmethod
    def from_name(cls, app: str, name: str) -> Engine:
        """Return the handle of a deployed model. Makes no request; a wrong name fails when
        called."""
        return cls(app=app, name=name)

    @property
    def model(self) -> str:
        """The value of `model` in requests: `app/function`. Append `:adapter` for a LoRA
        adapter."""
        return f"{active_app.deployed_name(self._app)}/{self._name}"

    def client(self, **options: Any) -> Any:
        """Return an `openai.OpenAI` configured with the address and API key of the platform.
        `options` are passed to its constructor. Raises InvalidInput if `openai` is not
        installed."""
        return _client("OpenAI", options)

    def async_client(self, **options: Any) -> Any:
        """Return an `openai.AsyncOpenAI`, configured like `client`."""
        return _client("AsyncOpenAI", options)


def _client(kind: str, options: Mapping[str, Any]) -> Any:
    try:
        import openai
    except ImportError as e:
        raise InvalidInput(
            "the package `openai` is not installed: run `pip install openai`, or call the HTTP API "
            "at /v1"
        ) from e
    profile = sessions.client().profile
    known: dict[str, Any] = {
        "base_url": f"{profile.base_url.rstrip('/')}/v1",
        "api_key": profile.api_key,
    }
    if profile.socket_path is not None and "http_client" not in options:
        known["http_client"] = _over_socket(kind, profile.socket_path)
    return getattr(openai, kind)(**{**known, **options})


def _over_socket(kind: str, path: str) -> Any:
    """Return an HTTP client for an OpenAI client that connects to a Unix socket."""
    import httpx

    from pilotlight.core.transport.cookies import no_cookies

    if kind.startswith("Async"):
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path), timeout=None, cookies=no_cookies()
        )
    return httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=None, cookies=no_cookies())


_DEFAULTS: Mapping[str, Any] = {"cpu": 2.0, "startup_timeout": 600.0, "timeout": 600.0}
"""Defaults of options: an engine takes tens of seconds to boot, and its answers take long."""
_NOT_HERE = {
    "name": "pass the name as the first argument",
    "example": "the platform verifies each snapshot with a known answer",
    "check": "the platform verifies each snapshot with a known answer",
    "allow_concurrent_inputs": "use max_num_seqs=",
    "schedule": "schedule a function that calls the model",
    "volumes": "an engine reads its model as weights",
    "secrets": "the engine runs offline, and is started and snapshotted before secrets are "
    "available",
}


def engine_declaration(
    app: str,
    name: str,
    *,
    module: str,
    weights: Weights,
    max_model_len: int | None,
    max_num_seqs: int,
    lora: Mapping[str, Weights] | None,
    engine_args: Mapping[str, Any] | None,
    task: str,
    sleep_level: int,
    limits: TokenLimits | None,
    options: Mapping[str, Any],
    secrets: tuple[Secret, ...],
    env: Mapping[str, str],
    tags: Mapping[str, str],
) -> EngineDeclaration:
    """Return the declaration of one `app.vllm(…)`. Raises InvalidInput naming the keyword."""
    for key in _NOT_HERE.keys() & options.keys():
        raise InvalidInput(f"app.vllm: {key}= is not supported: {_NOT_HERE[key]}", parameter=key)
    if not isinstance(weights, Weights):
        raise InvalidInput(
            f"app.vllm: weights = {weights!r}: expected pilotlight.Weights(…)", parameter="weights"
        )
    place, adapters = (
        DeclarationSite(name, module, str(options.get("description", ""))),
        _adapters(lora, function=name),
    )
    checked = check_declared_name(place, name)
    require_in_range("max_num_seqs", max_num_seqs, 1, 10_000)
    settled = resolve_options({**_DEFAULTS, **options}, concurrent={"max_inputs": max_num_seqs})
    arguments, kv_bytes = parse_engine_arguments(engine_args, gpus=settled.resources.gpu_count)
    memory, is_parallel = options.get("memory"), settled.resources.gpu_count > 1
    return EngineDeclaration(
        app=app,
        name=checked,
        raw=place,
        kind=FunctionKind.ENGINE,
        image=settled.image,
        weights=(weights, *adapters.values()),
        secrets=secrets,
        volumes={},
        env={**env, **settled.env},
        resources=settled.resources,
        scaling=settled.scaling,
        clocks=settled.clocks,
        snapshot=settled.snapshot and not is_parallel,
        idempotent=settled.idempotent,
        description=settled.description,
        access=settled.access,
        priority=settled.priority,
        tags={**tags, **settled.tags},
        policies={**settled.policies, "limits": _limits(limits)},
        model=weights,
        adapters=adapters,
        task=_task(task),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_bytes=kv_bytes,
        sleep_level=sleep_level,
        memory_bytes=None if memory is None else settled.resources.memory_bytes,
        arguments=arguments,
    )


def _task(task: str) -> Task:
    try:
        return Task(task)
    except ValueError as e:
        raise InvalidInput(
            f"task = {task!r}: must be one of {', '.join(Task)}", parameter="task"
        ) from e


def _adapters(lora: Mapping[str, Weights] | None, *, function: str) -> dict[str, Weights]:
    """Check the adapters. The engine serves them and the function as models, so names must differ.
    Raises InvalidInput."""
    for name, weights in (lora or {}).items():
        if name == function:
            raise InvalidInput(
                f"lora: the adapter {name!r} has the name of the function: rename it",
                parameter="lora",
            )
        if not isinstance(name, str) or not isinstance(weights, Weights):
            raise InvalidInput(
                f'lora[{name!r}] = {weights!r}: expected {{"name": pilotlight.Weights(…)}}',
                parameter="lora",
            )
    return dict(lora or {})


def parse_engine_arguments(
    given: Mapping[str, Any] | None, *, gpus: int
) -> tuple[dict[str, Any], int | None]:
    """Return the arguments of the server with normalized names (no leading dashes, `-` for `_`) and
    the size of the KV cache in bytes, if set. Raises InvalidInput."""
    found: dict[str, Any] = {}
    for key, value in (given or {}).items():
        name = str(key).lstrip("-").replace("_", "-")
        if name in OWN_ARGUMENTS:
            raise InvalidInput(
                f"engine_args: {name}= is reserved: the platform or a keyword of app.vllm() sets "
                "it",
                parameter="engine_args",
            )
        if name in found:
            raise InvalidInput(f"engine_args: {name}= is given twice", parameter="engine_args")
        if value is not None and not isinstance(value, str | int | float | bool | list | dict):
            raise InvalidInput(
                f"engine_args: {name} = {value!r}: must be a string, number, boolean, list or dict",
                parameter="engine_args",
            )
        found[name] = value
    product = 1
    for name in _PARALLEL:
        product *= parse_whole_number(name, found.get(name, 1))
    if any(name in found for name in _PARALLEL) and product != max(1, gpus):
        raise InvalidInput(
            f"engine_args: {' times '.join(n for n in _PARALLEL if n in found)} is {product}, but "
            f"gpu= requests {gpus} GPU{'' if gpus == 1 else 's'}: they must be equal",
            parameter="engine_args",
        )
    cache = found.pop(_KV_BYTES, None)
    return found, None if cache is None else parse_memory(cache) if isinstance(
        cache, str
    ) else parse_whole_number(_KV_BYTES, cache)


def parse_whole_number(name: str, value: Any) -> int:
    """Parse a positive integer among the arguments of the server. Raises InvalidInput."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise InvalidInput(
            f"engine_args: {name} = {value!r}: must be an integer, at least 1",
            parameter="engine_args",
        )
    return number


def _limits(limits: TokenLimits | None) -> TokenLimits | None:
    """Check the type. Raises InvalidInput."""
    if limits is not None and not isinstance(limits, TokenLimits):
        raise InvalidInput(
            f"limits = {limits!r}: expected pilotlight.TokenLimits(…)", parameter="limits"
        )
    return limits


def Guard(
    *,
    patterns: Sequence[str] = (),
    words: Sequence[str] = (),
    expressions: Mapping[str, str] | None = None,
    function: Function[Any, Any] | str = "",
    input: bool = True,
    output: bool = True,
    window_chars: int = 200,
) -> GuardSpec:
    """Check prompts and answers of a language model: `app.vllm("chat", weights=…,
    guard=pilotlight.Guard(patterns=["email", "credit_card"], words=["Project Falcon"]))`.

    Args:
        patterns: built-in ones: "api_key", "credit_card", "email", "iban", "private_key", "us_ssn".
        words: words and phrases, in upper or lower case, with any spaces between them.
        expressions: regular expressions by the name of their rule: {"ticket": "TCK-[0-9]{6}"}.
            Without look-around and back-references, which take more than linear time.
        function: is asked with `stage` ("input" or "output") and `text`, and answers
            {"allow": True}, or {"allow": False, "rule": "…"}: a function, or its name.
        input, output: whether prompts, and generated text, are checked.
        window_chars: of a stream, how many characters are held back for expressions, and how many
            the function gets at least at a time.

    Raises InvalidInput for a value out of range."""
    for name, given in (("patterns", patterns), ("words", words)):
        if isinstance(given, str) or not all(isinstance(one, str) for one in given):
            raise InvalidInput(
                f'guard: {name} = {given!r}: must be a list, such as ["email"]', parameter="guard"
            )
    own = dict(expressions or {})
    if not all(isinstance(one, str) for pair in own.items() for one in pair):
        raise InvalidInput(
            f'guard: expressions = {own!r}: must be a dict such as {{"ticket": "TCK-[0-9]{{6}}"}}',
            parameter="guard",
        )
    if not isinstance(function, Function | str):
        raise InvalidInput(
            f"guard: function = {function!r}: must be a function of an app, or its name",
            parameter="guard",
        )
    return GuardSpec(
        patterns=tuple(patterns),
        words=tuple(words),
        expressions=own,
        function=function if isinstance(function, str) else function.address,
        input=input,
        output=output,
        window_chars=window_chars,
    )
