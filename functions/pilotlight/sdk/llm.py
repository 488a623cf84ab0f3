"""`app.vllm(…)`: a language model becomes a function. What is declared here is completed when the
app is built, from the model's own files.

The function runs the stock vLLM OpenAI server; this module knows its command line's names and
nothing of its inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from pilotlight.client import sessions
from pilotlight.errors import InvalidInput
from pilotlight.sdk import active_app
from pilotlight.sdk.declaration import Declaration, check_declared_name
from pilotlight.sdk.image import Image
from pilotlight.sdk.options import parse_memory, resolve_options
from pilotlight.sdk.secret import Secret
from pilotlight.sdk.weights import Weights
from pilotlight.spec.engines import EngineSpec, Task, TokenLimits
from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.policies import (
    Fallback,
    ModelCard,
    Objectives,
    RetryPolicy,
    Variant,
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
"""Arguments of the server that the platform sets by itself."""
_PARALLEL = ("tensor-parallel-size", "pipeline-parallel-size")
_KV_BYTES = "kv-cache-memory-bytes"


class EngineOptions(TypedDict, total=False):
    """Keywords of `app.vllm()` beside its own; they mean what they mean to `@app.function()`
    (`pilotlight.sdk.options.FunctionOptions`)."""

    image: Image | None
    env: Mapping[str, str]
    cpu: float
    memory: str | int
    gpu: str | Sequence[str] | None
    min_instances: int
    max_instances: int | None
    buffer_instances: int | str | None
    scaledown_window: float | Literal["auto"]
    waiting_cost: float
    keep_asleep: float
    timeout: float
    startup_timeout: float | None
    queue_timeout: float
    result_ttl: float
    max_queued: int
    latency_objective: float
    snapshot: bool
    idempotent: bool
    description: str
    access: str | Sequence[str]
    priority: str | None
    tags: Mapping[str, str]
    retries: int | RetryPolicy | None
    fallback: Fallback | str | Sequence[Fallback | str]
    variants: Variant | str | Sequence[Variant | str]
    objectives: Objectives | None
    require: Mapping[str, str]
    card: ModelCard | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineDeclaration(Declaration):
    """A declared language model. `raw` is only the place of its declaration.

    Attributes:
        model: the weights that it serves.
        adapters: name → weights.
        max_model_len: None = as long as the model was made for.
        memory_bytes: of one instance; None = what it needs.
        arguments: further arguments of the server, without dashes.
    """

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
        """Nothing of it travels: it has no code of the user's."""
        return False

    def methods(self) -> tuple[MethodSpec, ...]:
        """The server itself."""
        return (MethodSpec(),)

    def method_names(self) -> tuple[str, ...]:
        """The server itself."""
        return ("",)

    def is_generator(self, method: str) -> bool:
        """Its streams are server-sent events of its own protocol."""
        return False

    def engine(
        self, *, max_model_len: int, kv_bytes: int | None, more: Mapping[str, Any]
    ) -> EngineSpec:
        """The record, once the model's own numbers are known; `more`: arguments that follow from
        them, unless they were given."""
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
    """Where `app.vllm(…)` was called: what a declaration has in place of a function."""

    def __init__(self, name: str, module: str, doc: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = module
        self.__doc__ = doc

    def __repr__(self) -> str:
        return f"<app.vllm({self.__name__!r}) in {self.__module__}>"


class Engine:
    """The handle of a language model: its name for OpenAI's clients, and a client that is ready to
    use."""

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
        """The handle of a deployed one. Nothing is asked before it is called."""
        return cls(app=app, name=name)

    @property
    def model(self) -> str:
        """What an application writes as `model`: `app/function`; an adapter is
        `app/function:adapter`."""
        return f"{active_app.deployed_name(self._app)}/{self._name}"

    def client(self, **options: Any) -> Any:
        """`openai.OpenAI`, with this platform's address and key. Raises InvalidInput when the
        package is not installed."""
        return _client("OpenAI", options)

    def async_client(self, **options: Any) -> Any:
        """`openai.AsyncOpenAI`, the same way."""
        return _client("AsyncOpenAI", options)


def _client(kind: str, options: Mapping[str, Any]) -> Any:
    try:
        import openai
    except ImportError as e:
        raise InvalidInput(
            "the package `openai` is not installed here: pip install openai, or call the HTTP API "
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
    """The HTTP client of an OpenAI client that connects to a Unix socket."""
    import httpx

    from pilotlight.core.cookies import no_cookies

    if kind.startswith("Async"):
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=path), timeout=None, cookies=no_cookies()
        )
    return httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=None, cookies=no_cookies())


_DEFAULTS: Mapping[str, Any] = {"cpu": 2.0, "startup_timeout": 600.0, "timeout": 600.0}
"""Of options that are not given: an engine boots for tens of seconds, and its answers are long."""
_NOT_HERE = {
    "name": "the first argument is the name",
    "example": "a known answer proves each snapshot by itself",
    "check": "a known answer proves each snapshot by itself",
    "allow_concurrent_inputs": "max_num_seqs= says it",
    "schedule": "schedule a function that calls the model",
    "secrets": "the engine runs offline, and is started and kept in a snapshot before any secret "
    "is handed out",
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
    """The record of one `app.vllm(…)`. Raises InvalidInput naming the keyword."""
    for key in _NOT_HERE.keys() & options.keys():
        raise InvalidInput(
            f"app.vllm: {key}= does not belong here: {_NOT_HERE[key]}", parameter=key
        )
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
    """Adapters as they are kept; to the engine they and the function are names of models. Raises
    InvalidInput."""
    for name, weights in (lora or {}).items():
        if name == function:
            raise InvalidInput(
                f"lora: the adapter {name!r} is called as the function is: give it another name",
                parameter="lora",
            )
        if not isinstance(name, str) or not isinstance(weights, Weights):
            raise InvalidInput(
                f'lora[{name!r}] = {weights!r}: write {{"name": pilotlight.Weights(…)}}',
                parameter="lora",
            )
    return dict(lora or {})


def parse_engine_arguments(
    given: Mapping[str, Any] | None, *, gpus: int
) -> tuple[dict[str, Any], int | None]:
    """The server's arguments without dashes in front, `_` as `-`, and what they say of the cache's
    size. Raises InvalidInput."""
    found: dict[str, Any] = {}
    for key, value in (given or {}).items():
        name = str(key).lstrip("-").replace("_", "-")
        if name in OWN_ARGUMENTS:
            raise InvalidInput(
                f"engine_args: {name}= is set by the platform, or by a keyword of app.vllm()",
                parameter="engine_args",
            )
        if name in found:
            raise InvalidInput(f"engine_args: {name}= is there twice", parameter="engine_args")
        if value is not None and not isinstance(value, str | int | float | bool | list | dict):
            raise InvalidInput(
                f"engine_args: {name} = {value!r}: write text, a number, true or false, or JSON",
                parameter="engine_args",
            )
        found[name] = value
    product = 1
    for name in _PARALLEL:
        product *= parse_whole_number(name, found.get(name, 1))
    if any(name in found for name in _PARALLEL) and product != max(1, gpus):
        raise InvalidInput(
            f"engine_args: {' times '.join(n for n in _PARALLEL if n in found)} makes {product}, "
            f"and gpu= asks for {gpus} GPU"
            f"{'' if gpus == 1 else 's'}: they must be the same",
            parameter="engine_args",
        )
    cache = found.pop(_KV_BYTES, None)
    return found, None if cache is None else parse_memory(cache) if isinstance(
        cache, str
    ) else parse_whole_number(_KV_BYTES, cache)


def parse_whole_number(name: str, value: Any) -> int:
    """A number among the server's arguments. Raises InvalidInput."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise InvalidInput(
            f"engine_args: {name} = {value!r}: write a whole number, at least 1",
            parameter="engine_args",
        )
    return number


def _limits(limits: TokenLimits | None) -> TokenLimits | None:
    """Raises InvalidInput for something else."""
    if limits is not None and not isinstance(limits, TokenLimits):
        raise InvalidInput(
            f"limits = {limits!r}: expected pilotlight.TokenLimits(…)", parameter="limits"
        )
    return limits
