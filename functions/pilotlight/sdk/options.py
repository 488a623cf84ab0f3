"""The keywords of `@app.function()` and `@app.cls()`, and their conversion to the records of
`pilotlight.spec.function`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pilotlight.errors import InvalidInput
from pilotlight.sdk.batches import inputs_for_batches
from pilotlight.sdk.decorator_metadata import warn_ignored
from pilotlight.sdk.image import Image
from pilotlight.sdk.policies import resolve_policies
from pilotlight.sdk.secret import Secret
from pilotlight.sdk.storage.volume import Volume, check_volumes
from pilotlight.sdk.storage.weights import Weights
from pilotlight.sdk.unsupported import is_unsupported, not_supported
from pilotlight.spec.engines import GuardSpec
from pilotlight.spec.features.schema import FeatureSchema
from pilotlight.spec.features.sources import RedisFeatures
from pilotlight.spec.function import GIB, MIB, PUBLIC, Clocks, FunctionNetwork, Resources
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import AUTO_WINDOW_S, WAITING_COST, Scaling
from pilotlight.spec.monitor import MonitorSpec
from pilotlight.spec.policies import (
    Fallback,
    ModelCard,
    Objectives,
    ResponseCacheSpec,
    RetryPolicy,
    ScalingSchedule,
    Schedule,
    Variant,
)
from pilotlight.spec.prediction_log import PredictionLogSpec


class EngineOptions(TypedDict, total=False):
    """Keywords of every declaration, of `app.vllm()` too: see `FunctionOptions`."""

    image: Image | None
    env: Mapping[str, str]
    cpu: float | tuple[float, float]
    memory: str | int | tuple[int, int]
    gpu: str | Sequence[str] | None
    min_instances: int
    max_instances: int | None
    buffer_instances: int | str | None
    scaling_schedule: ScalingSchedule | Sequence[ScalingSchedule]
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
    guard: GuardSpec | None
    cache: ResponseCacheSpec | None


class FunctionOptions(EngineOptions, total=False):
    """Keywords of a declaration, all optional. Times are in seconds.

    Environment:
        name: name of the function; by default that of the Python function or class.
        image: environment to run in; by default that of the app.
        weights, secrets, env: model files, secrets and environment variables of instances.
        volumes: mount path → `pilotlight.Volume`, such as {"/data": volume}; writable.
        network: "egress" (default) for what the operator permits, or "none".
        egress: IPv4 networks or addresses to permit in addition.
        snapshot: False starts instances without snapshots.

    Resources:
        cpu: number of cores.
        memory: limit: "2GiB", "2Gi", "512MiB", or an integer in MiB.
        gpu: "H100", "H100:2", "H100-MIG-3g.40gb" (a MIG instance), "any", or a list of acceptable
            types, best first.

    Scaling:
        min_instances, max_instances: bounds of the number of instances.
        buffer_instances: spare instances while there are calls: a number, or a share of the busy
            ones such as "15%".
        scaling_schedule: one or more of `pilotlight.ScalingSchedule(cron="0 8 * * mon-fri",
            duration_s=10 * 3600, min_instances=2, timezone="Europe/Vienna")`, windows of time with
            a larger `min_instances`.
        scaledown_window: how long an idle instance is kept (60 s). With "auto" it is kept as long
            as the intervals between calls justify, where one second of a waiting caller is worth
            `waiting_cost` (default 10) seconds of an idle instance.
        keep_asleep: how long an idle instance sleeps before it is removed.
        max_queued: maximum number of waiting calls.
        latency_objective: a call that waits longer triggers a scale-up.

    Calls:
        timeout, startup_timeout, queue_timeout: limits of an execution, a start, and waiting.
        result_ttl: how long results of background calls are kept.
        idempotent: the platform may retry a call whose worker died before it answered.
        retries: a number, or `pilotlight.Retries(…)`.
        priority: of calls: "realtime", "standard" or "batch".
        access: "private", "public", or a list of further tenants that may call the function.
        cors: origins whose web pages may call a public function, such as ["https://app.example"];
            "*" for all. Browsers send no cookies.
        schedule: one or more of `pilotlight.Cron("0 6 * * *")` and `pilotlight.Period(hours=1)`.
        fallback, variants: what may answer in place of the function.
        cache: `pilotlight.ResponseCache("1h")`: equal calls are answered from memory.
        example, check: as for `@pilotlight.method()`.

    Releases:
        description, tags: for display; bills can be grouped by tags.
        objectives: `pilotlight.Objectives(…)`.
        require: bounds on metrics of an offline evaluation, such as {"accuracy": ">= 0.91"}.
        card: `pilotlight.ModelCard(…)`.
        log: `pilotlight.PredictionLog(…)`: which calls are logged, for `pilotlight log query`.
        monitor: `pilotlight.Monitor(…)`: what of the logged calls is watched for drift.
        features: what the model is made for: `pilotlight.FeatureSchema(…)` of the arguments,
            `pilotlight.Redis(…)` for features that are read at each call, or a list of them. A
            deploy is refused if the model card has another hash.
        guard: of a language model: `pilotlight.Guard(…)`, which is asked about prompts and answers.
        rollout_strategy: "surge", "wait" or "swap": what to do if there is no capacity for a new
            revision next to the serving one.
        keep_previous: how long the previous revision stays warm.

    The second block below holds Modal's names for the same options, the third options of Modal that
    are ignored with a warning."""

    name: str
    weights: Weights | Sequence[Weights]
    secrets: Sequence[Secret]
    volumes: Mapping[str, Volume]
    cors: str | Sequence[str]
    schedule: Schedule | Sequence[Schedule] | None
    log: PredictionLogSpec | None
    monitor: MonitorSpec | None
    features: FeatureSchema | RedisFeatures | Sequence[FeatureSchema | RedisFeatures] | None
    rollout_strategy: str
    keep_previous: float
    network: Literal["egress", "none"]
    egress: Sequence[str]
    example: Any
    check: Callable[[Any, Any], bool]

    min_containers: int
    max_containers: int | None
    buffer_containers: int | None
    container_idle_timeout: float
    keep_warm: int
    concurrency_limit: int | None
    allow_concurrent_inputs: int
    enable_memory_snapshot: bool
    secret: Secret
    block_network: bool

    region: Any
    cloud: Any
    ephemeral_disk: Any
    experimental_options: Any
    include_source: Any
    is_generator: Any
    mounts: Any
    nonpreemptible: Any
    routing_region: Any
    serialized: Any
    single_use_containers: Any


_ALIASES = {
    "min_containers": "min_instances",
    "keep_warm": "min_instances",
    "max_containers": "max_instances",
    "concurrency_limit": "max_instances",
    "buffer_containers": "buffer_instances",
    "container_idle_timeout": "scaledown_window",
    "enable_memory_snapshot": "snapshot",
}
IGNORED = {
    "region": "the platform runs where it is installed",
    "cloud": "the platform runs where it is installed",
    "routing_region": "the platform runs where it is installed",
    "ephemeral_disk": "instances use the disk of the node",
    "experimental_options": "there are none",
    "include_source": "source next to the app is always packaged; see .pilotlightignore",
    "is_generator": "it is detected from the function",
    "mounts": "source next to the app is always packaged",
    "nonpreemptible": "instances are not preempted",
    "serialized": "functions of __main__ and notebooks are deployed by value, others as source",
    "single_use_containers": "instances serve calls until they are idle",
}
_CLOCKS = {
    "timeout": "execution_s",
    "startup_timeout": "startup_s",
    "queue_timeout": "queue_s",
    "result_ttl": "result_ttl_s",
}
AUTO = "auto"
_SCALING = {
    "min_instances": "min_instances",
    "max_instances": "max_instances",
    "buffer_instances": "buffer_instances",
    "scaledown_window": "scaledown_window_s",
    "keep_asleep": "keep_asleep_s",
    "max_queued": "max_queued",
    "latency_objective": "latency_objective_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedOptions:
    """Parsed and checked options, as a declaration keeps them. `policies`: fields of
    `pilotlight.spec.function.FunctionSpec` that are records of `pilotlight.spec.policies`."""

    image: Image | None
    weights: tuple[Weights, ...]
    secrets: tuple[Secret, ...]
    volumes: Mapping[str, Volume]
    env: Mapping[str, str]
    resources: Resources
    scaling: Scaling
    clocks: Clocks
    snapshot: bool
    idempotent: bool
    description: str
    access: tuple[str, ...]
    priority: Priority | None
    tags: Mapping[str, str]
    policies: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOptions(CheckedOptions):
    """The options of one decorator. `has_image`: it names an image, or None."""

    name: str | None
    has_image: bool
    example: Any
    check: Callable[[Any, Any], bool] | None


def resolve_options(
    options: Mapping[str, Any], *, concurrent: Mapping[str, Any] | None, batched: Any = None
) -> ResolvedOptions:
    """Parse the keywords of a declaration. Raises InvalidInput naming the keyword.

    Args:
        concurrent: the mark of `@concurrent`.
        batched: the declared function or class, whose batches determine the default
            concurrency."""
    values = _resolve_aliases(options)
    inputs = inputs_for_batches(batched, _inputs(values, concurrent))
    scaling = {
        field: values[key] for key, field in _SCALING.items() if values.get(key) is not None
    } | _window(values)
    clocks = {field: values[key] for key, field in _CLOCKS.items() if values.get(key) is not None}
    schedules = _many(values, "scaling_schedule", ScalingSchedule)
    least = max([scaling.get("min_instances", 0), *(one.min_instances for one in schedules)])
    if least > scaling.get("max_instances", Scaling().max_instances):
        scaling.setdefault("max_instances", least)
    return ResolvedOptions(
        name=values.get("name"),
        image=_typed(values, "image", Image),
        has_image="image" in values,
        weights=_many(values, "weights", Weights),
        secrets=(*_many(values, "secrets", Secret), *_many(values, "secret", Secret)),
        volumes=check_volumes(values.get("volumes") or {}),
        env=_environment(values.get("env") or {}),
        resources=_resources(values),
        scaling=Scaling(**scaling, **inputs, schedules=schedules),
        clocks=Clocks(**clocks),
        snapshot=bool(values.get("snapshot", True)),
        idempotent=bool(values.get("idempotent", False)),
        description=str(values.get("description", "")),
        access=parse_access(values.get("access")),
        priority=parse_priority(values.get("priority")),
        tags=parse_tags(values.get("tags")),
        policies=resolve_policies(values),
        example=values.get("example"),
        check=values.get("check"),
    )


def _resolve_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    known = set(FunctionOptions.__annotations__)
    values: dict[str, Any] = {}
    for given, value in options.items():
        if is_unsupported(f"{given}="):
            raise not_supported(f"{given}=")
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else ""
            raise InvalidInput(f"unknown option {given}={hint}", parameter=given)
        if given in IGNORED:
            warn_ignored(given, IGNORED[given], stacklevel=5)
            continue
        name = _ALIASES.get(given, given)
        if given == "block_network":
            name, value = "network", FunctionNetwork.NONE if value else FunctionNetwork.EGRESS
        if name in values:
            raise InvalidInput(
                f"{name}= is set twice, also by {given}=: remove one", parameter=given
            )
        values[name] = value
    return values


def _inputs(values: Mapping[str, Any], concurrent: Mapping[str, Any] | None) -> dict[str, Any]:
    allowed = values.get("allow_concurrent_inputs")
    if allowed is not None and concurrent:
        raise InvalidInput(
            "allow_concurrent_inputs= and @concurrent() both set max_inputs: use only @concurrent()"
        )
    if allowed is not None:
        return {"max_inputs": allowed}
    return dict(concurrent or {})


def _window(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parse `scaledown_window="auto"` and `waiting_cost`."""
    window, cost = values.get("scaledown_window"), values.get("waiting_cost")
    if window == AUTO:
        return {
            "scaledown_window_s": AUTO_WINDOW_S,
            "waiting_cost": WAITING_COST if cost is None else cost,
        }
    if isinstance(window, str):
        raise InvalidInput(
            f'scaledown_window = {window!r}: must be a number of seconds, or "{AUTO}"',
            parameter="scaledown_window",
        )
    if cost is not None:
        raise InvalidInput(
            f'waiting_cost requires scaledown_window="{AUTO}"',
            parameter="waiting_cost",
        )
    return {}


def _resources(values: Mapping[str, Any]) -> Resources:
    found: dict[str, Any] = {}
    if values.get("cpu") is not None:
        found["cpu"] = float(_limit(values["cpu"]))
    if values.get("memory") is not None:
        found["memory_bytes"] = parse_memory(_limit(values["memory"]))
    gpu, count = parse_gpu(values.get("gpu"))
    return Resources(**found, gpu=gpu, gpu_count=count)


def _limit(value: Any) -> Any:
    return value[-1] if isinstance(value, tuple) and value else value  # Modal's (request, limit)


_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)\s*\Z", re.IGNORECASE)
_BINARY = {"k": 1024, "m": MIB, "g": GIB, "t": 1024 * GIB}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_memory(memory: Any) -> int:
    """Parse "2GiB", "2Gi", "1.5 GiB", "2G" and "2GB" (decimal), or an integer in MiB, to bytes.
    Raises InvalidInput."""
    if isinstance(memory, int) and not isinstance(memory, bool):
        return memory * MIB
    match = _MEMORY.match(memory) if isinstance(memory, str) else None
    if match is None:
        raise InvalidInput(
            f"memory = {memory!r}: must be a size such as '2GiB' or '512MiB', or an integer in MiB",
            parameter="memory",
        )
    number, unit = float(match[1]), match[2].lower()
    if unit == "b":
        return int(number)
    return int(number * (_BINARY if "i" in unit else _DECIMAL)[unit[0]])


_GPU = re.compile(r"([A-Za-z][A-Za-z0-9_.+-]*)(?::([1-9][0-9]?))?\Z")
_PART_OF_A_GPU = re.compile(r"([A-Za-z][A-Za-z0-9_-]*):\d*\.\d+\Z")
_MIG = re.compile(r"(.+)-MIG(?:-(.*))?\Z", re.IGNORECASE)
_MIG_PROFILE = re.compile(r"(\d+c\.)?\d+g\.\d+gb([+-][a-z]+(\.[a-z]+)?)*\Z", re.IGNORECASE)
"""Names of MIG profiles. Source: NVIDIA MIG User Guide, "MIG device names"."""


def parse_gpu(gpu: Any) -> tuple[tuple[str, ...], int]:
    """Parse None, "H100", "H100:2", "H100-MIG-3g.40gb", "any", or a list of those with equal
    counts, to (acceptable types, count). Raises InvalidInput."""
    if gpu is None or gpu == []:
        return (), 0
    kinds: list[str] = []
    counts: set[int] = set()
    for wanted in gpu if isinstance(gpu, list | tuple) else [gpu]:
        kind, count = _parse_gpu_kind(wanted)
        kinds.append(kind)
        counts.add(count)
    if len(counts) > 1:
        raise InvalidInput(
            f"gpu = {gpu!r}: all alternatives must have the same count", parameter="gpu"
        )
    return tuple(kinds), counts.pop()


def _parse_gpu_kind(wanted: Any) -> tuple[str, int]:
    """Parse one kind of GPU and its count. Raises InvalidInput."""
    if isinstance(wanted, str) and (part := _PART_OF_A_GPU.match(wanted)):
        raise InvalidInput(
            f"gpu = {wanted!r}: nothing enforces a part of a GPU but MIG: name a MIG instance that "
            f"a node has, such as gpu='{part[1].upper()}-MIG-1g.10gb', or a whole GPU",
            parameter="gpu",
        )
    match = _GPU.match(wanted) if isinstance(wanted, str) else None
    if match is None:
        raise InvalidInput(
            f"gpu = {wanted!r}: must be 'H100', 'H100:2', 'H100-MIG-3g.40gb', 'any', or a list of "
            f"those",
            parameter="gpu",
        )
    name, count = match[1], int(match[2] or 1)
    if name.lower() == "any":
        return "any", count
    mig = _MIG.match(name)
    if mig is None:
        return name.upper(), count
    if not _MIG_PROFILE.match(mig[2] or ""):
        raise InvalidInput(
            f"gpu = {wanted!r}: must name a MIG profile after -MIG-, such as "
            f"'{mig[1].upper()}-MIG-3g.40gb'",
            parameter="gpu",
        )
    return f"{mig[1].upper()}-MIG-{mig[2].lower()}", count


_ACCESS = {"private": (), "public": (PUBLIC,)}


def parse_access(access: Any) -> tuple[str, ...]:
    """Convert None, "private", "public", or a list of tenant names to `FunctionSpec.access`. Raises
    InvalidInput."""
    if access is None:
        return ()
    if isinstance(access, str):
        if access in _ACCESS:
            return _ACCESS[access]
        raise InvalidInput(
            f'access = {access!r}: must be "private", "public", or a list such as [{access!r}]',
            parameter="access",
        )
    if not isinstance(access, Sequence) or not all(isinstance(name, str) for name in access):
        raise InvalidInput(
            f'access = {access!r}: must be "private", "public", or a list of tenant names',
            parameter="access",
        )
    return tuple(dict.fromkeys(access))


def parse_priority(priority: Any) -> Priority | None:
    """Parse the name of a priority; None returns None. Raises InvalidInput."""
    if priority is None:
        return None
    try:
        return Priority(priority)
    except ValueError as e:
        raise InvalidInput(
            f"priority = {priority!r}: must be one of {', '.join(Priority)}", parameter="priority"
        ) from e


def parse_tags(tags: Any) -> dict[str, str]:
    """Check that names and values of tags are strings. Raises InvalidInput."""
    if not isinstance(tags or {}, Mapping):
        raise InvalidInput(
            f'tags = {tags!r}: must be a dict such as {{"team": "search"}}', parameter="tags"
        )
    for name, value in (tags or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(
                f"tags[{name!r}] = {value!r}: names and values must be strings", parameter="tags"
            )
    return dict(tags or {})


def _typed(values: Mapping[str, Any], key: str, kind: type) -> Any:
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        raise InvalidInput(f"{key} = {value!r}: expected pilotlight.{kind.__name__}", parameter=key)
    return value


def _many(values: Mapping[str, Any], key: str, kind: type) -> tuple[Any, ...]:
    given = values.get(key)
    items = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
    for item in items:
        if not isinstance(item, kind):
            raise InvalidInput(
                f"{key} = {item!r}: expected pilotlight.{kind.__name__}", parameter=key
            )
    return items


def _environment(env: Mapping[str, Any]) -> dict[str, str]:
    for key, value in env.items():
        if not isinstance(value, str):
            raise InvalidInput(f"env[{key!r}] = {value!r}: must be a string", parameter="env")
    return dict(env)
