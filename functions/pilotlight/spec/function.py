"""`FunctionSpec`: the definition of a function, written by the SDK, stored by the controller, and
used by the activator for routing and by the worker for execution.

Frozen, standard library only, since it is imported in user processes. JSON keys are the field
names; unknown keys, wrong types and values out of range raise InvalidInput naming key, value and
bound."""

from __future__ import annotations

import enum
import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec import sandboxes
from pilotlight.spec.cors import check_origins
from pilotlight.spec.engines import EngineSpec, GuardSpec, LanguageModel, TokenLimits
from pilotlight.spec.features.sources import PARAMETER, FeaturesSpec
from pilotlight.spec.identifiers import Priority, check_name, require_name
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.instances.volumes import VolumeSpec, check_mounts
from pilotlight.spec.policies import (
    MAX_FALLBACKS,
    MAX_SCHEDULES,
    BatchPolicy,
    Fallback,
    ModelCard,
    Objectives,
    ResponseCacheSpec,
    RetryPolicy,
    RolloutTerms,
    Schedule,
    Variant,
    parse_gate,
    require_in_range,
)
from pilotlight.spec.prediction_log import PredictionLogSpec
from pilotlight.spec.record_json import canonical_json, to_json
from pilotlight.spec.web_servers import WebServerSpec

MIB = 1024**2
GIB = 1024**3
PUBLIC = "*"
"""In `access`: everyone, with or without a key."""
MAX_SHARED = 100
MAX_EGRESS = 32
MAX_TAGS = 16
MAX_TAG_CHARS = 128


class FunctionKind(enum.StrEnum):
    """The kind of a function. FUNCTION: one callable. CLASS: methods with shared state. ASGI: a web
    application that the callable returns, or the HTTP server that it starts
    (`FunctionSpec.web_server`). ENGINE: a stock server."""

    FUNCTION = "function"
    CLASS = "class"
    ASGI = "asgi"
    ENGINE = "engine"


class FunctionNetwork(enum.StrEnum):
    """The network access of a function. EGRESS: what the operator permits for all functions,
    normally the internet. NONE: nothing, including the platform."""

    EGRESS = "egress"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSpec:
    """One callable of a function.

    Attributes:
        name: "" for a plain function or an ASGI app, otherwise the name of the method.
        is_generator: whether its results are streamed.
        schema: JSON Schema (2020-12) of the arguments as one object; None for any.
        parameters: names of positional parameters in order, to match JSON arrays.
        example: JSON arguments for warm-up and verification (array by position, or object by name);
            None for none.
        has_check: whether user code has a `check=` comparison.
        returns: JSON Schema of the result, or of one item of a generator; None for any.
        batch: batching of calls; the schemas are those of one call. None = no batching.
        takes_features: whether it has the parameter `features`, which is not in `schema`: it gets
            online features (`FunctionSpec.features`)."""

    name: str = ""
    is_generator: bool = False
    schema: Mapping[str, Any] | None = None
    parameters: tuple[str, ...] = ()
    example: Any = None
    has_check: bool = False
    returns: Mapping[str, Any] | None = None
    batch: BatchPolicy | None = None
    takes_features: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of one instance: `cpu` in cores, `memory_bytes` as a limit, `gpu` as acceptable
    types, best first (`H100`, `H100-MIG-3g.40gb`, `any`), of which it gets `gpu_count` of one."""

    cpu: float = 1.0
    memory_bytes: int = 1 * GIB
    gpu: tuple[str, ...] = ()
    gpu_count: int = 0

    def __post_init__(self) -> None:
        require_in_range("cpu", self.cpu, 0.05, 256)
        require_in_range("memory_bytes", self.memory_bytes, 32 * MIB, 4096 * GIB)
        require_in_range("gpu_count", self.gpu_count, 0, 99)
        instances = [kind for kind in self.gpu if "-MIG-" in kind.upper()]
        if self.gpu_count > 1 and instances:
            raise InvalidInput(
                f"gpu = '{instances[0]}:{self.gpu_count}': a process can use one MIG instance "
                f"only: name a larger profile, or whole GPUs",
                parameter="gpu",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Timeouts in seconds. The deadline of a caller is reduced to the smallest that applies.

    Attributes:
        queue_s: waiting for a slot, including a start.
        startup_s: one start.
        execution_s: from dispatch to the last byte.
        result_ttl_s: how long the result of a background call is kept."""

    queue_s: float = 600.0
    startup_s: float = 300.0
    execution_s: float = 300.0
    result_ttl_s: float = 86_400.0

    def __post_init__(self) -> None:
        for f in fields(self):
            require_in_range(f.name, getattr(self, f.name), 0.001, 7 * 86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSpec:
    """Weights by reference: `name` is that of the mount, `manifest` the sha256 of the manifest in
    the blob store."""

    name: str
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """The complete definition of a function, which the content hash of a revision covers.

    Attributes:
        name: deployed name (`function` in its address).
        module: importable module in the bundle; "" if `pickled` is set.
        qualname: the callable or class in that module.
        pickled: path in the bundle of the cloudpickled object, for functions of `__main__` or a
            notebook; unpickled only in the worker.
        bundle: sha256 of the source archive.
        image: digest of the image; None for the interpreter of the platform.
        container_image: reference, by digest, of the container image that was made of `image`, on a
            cluster; set by the platform.
        volumes: volumes that it mounts, on one machine.
        secrets: names of secrets, injected as environment variables after every start.
        env: plain environment variables.
        snapshot: False forbids templates and snapshots.
        idempotent: whether the platform may retry a call whose worker died before it answered.
        access: names of further tenants that may call it; "*" makes it public.
        priority: default priority of its calls; None = that of the plan.
        tags: for grouping of bills, such as {"team": "search"}.
        retries: retries of its calls; None = only those of the platform (one, if no byte reached a
            worker).
        schedules: when the platform calls it.
        fallback: what answers when it cannot, in order.
        variants: functions that may answer when it has no capacity, in order.
        objectives: service level objectives; None = the defaults of `Objectives`.
        require: bounds on its offline evaluation, required for traffic, such as
            {"accuracy": ">= 0.91"}.
        card: description of its model.
        engine: the server, for functions of kind ENGINE.
        web_server: the HTTP server that the callable starts, for functions of kind ASGI; None = the
            callable returns an application.
        limits: limits of tokens and streams, for a language model.
        rollout: how it replaces the previous revision.
        network: its network access.
        egress: IPv4 networks and addresses that it may reach in addition, if the operator lets
            functions request them.
        cors: origins whose web pages may call it, if it is public; "*" for all
            (`pilotlight.spec.cors`).
        parameters: of a class: JSON Schema of what its objects are made with
            (`pilotlight.parameter`); None for none.
        arguments: of a bound function (`pilotlight.spec.bound`): the values of all parameters.
        sandbox: each call is a sandbox (`pilotlight.spec.sandboxes`), with an instance of its
            own.
        log: its prediction log; None = it has none.
        features: features of its model; None = none are declared.
        guard: of a language model: what is asked about its prompts and answers; None = nothing
            is.
        cache: its response cache; None = each call is run."""

    name: str
    kind: FunctionKind = FunctionKind.FUNCTION
    module: str = ""
    qualname: str = ""
    pickled: str | None = None
    bundle: str
    image: str | None = None
    container_image: str | None = None
    methods: tuple[MethodSpec, ...] = ()
    resources: Resources = field(default_factory=Resources)
    scaling: Scaling = field(default_factory=Scaling)
    clocks: Clocks = field(default_factory=Clocks)
    weights: tuple[WeightsSpec, ...] = ()
    volumes: tuple[VolumeSpec, ...] = ()
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    snapshot: bool = True
    idempotent: bool = False
    description: str = ""
    access: tuple[str, ...] = ()
    priority: Priority | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    retries: RetryPolicy | None = None
    schedules: tuple[Schedule, ...] = ()
    fallback: tuple[Fallback, ...] = ()
    variants: tuple[Variant, ...] = ()
    objectives: Objectives | None = None
    require: Mapping[str, str] = field(default_factory=dict)
    card: ModelCard = field(default_factory=ModelCard)
    engine: EngineSpec | None = None
    web_server: WebServerSpec | None = None
    limits: TokenLimits | None = None
    rollout: RolloutTerms = field(default_factory=RolloutTerms)
    network: FunctionNetwork = FunctionNetwork.EGRESS
    egress: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    parameters: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sandbox: bool = False
    log: PredictionLogSpec | None = None
    features: FeaturesSpec | None = None
    guard: GuardSpec | None = None
    cache: ResponseCacheSpec | None = None

    def __post_init__(self) -> None:
        require_name("function", self.name, parameter="name")
        _check_access(self.access)
        _check_tags(self.tags)
        for name, most in (
            ("schedules", MAX_SCHEDULES),
            ("fallback", MAX_FALLBACKS),
            ("variants", MAX_FALLBACKS),
        ):
            if len(getattr(self, name)) > most:
                raise InvalidInput(
                    f"{name}: {len(getattr(self, name))} entries, at most {most}", parameter=name
                )
        for metric, text in self.require.items():
            parse_gate(metric, text)
        _check_engine(self)
        _check_web_server(self)
        _check_limits(self)
        _check_guard(self)
        _check_volumes(self)
        _check_egress(self)
        _check_cors(self)
        _check_parameters(self)
        _check_sandbox(self)
        _check_calls_only(self, "log", "have a prediction log")
        _check_calls_only(self, "features", "have features")
        _check_features(self)
        _check_cache(self)
        if not self.methods:
            raise InvalidInput(
                f"function {self.name!r} has no methods: declare at least one callable",
                parameter="methods",
            )

    def method(self, name: str) -> MethodSpec | None:
        """Return the method with this name, or None."""
        return next((m for m in self.methods if m.name == name), None)

    @property
    def language_model(self) -> LanguageModel | None:
        """What OpenAI's API calls; None for a function that is no language model."""
        if self.engine is not None:
            return LanguageModel(
                served=self.name,
                others=tuple(sorted(self.engine.lora)),
                max_model_len=self.engine.max_model_len,
                task=self.engine.task,
                is_engine=True,
            )
        if self.web_server is None or self.web_server.openai is None:
            return None
        openai = self.web_server.openai
        return LanguageModel(
            served=openai.models[0] if openai.models else self.name,
            others=openai.models[1:],
            max_model_len=openai.max_model_len,
            task=None,
            is_engine=False,
        )

    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical JSON, the identity of a revision."""
        return hashlib.sha256(canonical_json(to_json(self))).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """An environment to build once. Steps run in order, each `{"op":
    "pip"|"apt"|"run"|"copy"|"env", …}`; the first may be `{"op": "from", "image": …}`.

    Attributes:
        python: such as "3.11"; the node must have an interpreter of this version. "": that of the
            container image of the step "from".
        steps: canonical step records; a "copy" step contains the digest of a blob."""

    python: str
    steps: tuple[Mapping[str, Any], ...] = ()

    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical JSON, the name of the image."""
        return hashlib.sha256(canonical_json(to_json(self))).hexdigest()


def _check_engine(spec: FunctionSpec) -> None:
    if (spec.engine is not None) != (spec.kind is FunctionKind.ENGINE):
        raise InvalidInput(
            f"function {spec.name!r} of kind {spec.kind.value!r}: engine must be set for kind "
            f"'engine', and only for it"
        )
    if spec.engine is not None:
        known = {weights.name for weights in spec.weights}
        for name in (spec.engine.model, *spec.engine.lora.values()):
            if name not in known:
                raise InvalidInput(
                    f"engine: weights {name!r} are not among those of the function: "
                    f"{', '.join(sorted(known))}",
                    parameter="weights",
                )


def _check_web_server(spec: FunctionSpec) -> None:
    if spec.web_server is None:
        return
    if spec.kind is not FunctionKind.ASGI:
        raise InvalidInput(
            f"web_server: function {spec.name!r} is of kind {spec.kind.value!r}: only functions of "
            f"kind 'asgi' have one",
            parameter="web_server",
        )
    if spec.web_server.startup_s > spec.clocks.startup_s:
        raise InvalidInput(
            f"web_server: startup_timeout = {spec.web_server.startup_s:g} s, but a start of "
            f"{spec.name!r} may take {spec.clocks.startup_s:g} s in all: raise startup_timeout= of "
            f"the function above that of its server",
            parameter="startup_timeout",
        )


def _check_limits(spec: FunctionSpec) -> None:
    if spec.limits is not None and spec.language_model is None:
        raise InvalidInput(
            f"limits: function {spec.name!r} is no language model, whose tokens are counted: "
            f"remove limits, or declare its server with openai=True",
            parameter="limits",
        )


def _check_guard(spec: FunctionSpec) -> None:
    if spec.guard is None:
        return
    if spec.language_model is None:
        raise InvalidInput(
            f"guard: function {spec.name!r} is no language model, whose texts are checked: remove "
            f"guard, or declare its server with openai=True",
            parameter="guard",
        )
    if spec.guard.function == spec.name:
        raise InvalidInput(
            f"guard: function {spec.name!r} cannot be its own guard: name another function",
            parameter="guard",
        )


def _check_sandbox(spec: FunctionSpec) -> None:
    """A sandbox is for callers of its tenant, and for one of them at a time."""
    if not spec.sandbox:
        return
    refused = {
        "kind": spec.kind is not FunctionKind.FUNCTION,
        "entry": (spec.module, spec.qualname) != sandboxes.ENTRY or spec.pickled is not None,
        "access": bool(spec.access),
        "idempotent": spec.idempotent,
        "max_inputs": spec.scaling.max_inputs != 1,
        "keep_asleep": spec.scaling.keep_asleep_s > 0,
        "gpu": bool(spec.resources.gpu),
        **{
            name: bool(getattr(spec, name))
            for name in ("retries", "schedules", "fallback", "variants", "arguments", "weights")
        },
    }
    if found := [name for name, is_refused in refused.items() if is_refused]:
        raise InvalidInput(
            f"function {spec.name!r}: {found[0]} cannot be chosen for a sandbox: remove it",
            parameter=found[0],
        )


def _check_calls_only(spec: FunctionSpec, key: str, what: str) -> None:
    """Raise InvalidInput if a kind of function has `key` whose calls have no arguments."""
    if getattr(spec, key) is None or (
        spec.kind in (FunctionKind.FUNCTION, FunctionKind.CLASS) and not spec.sandbox
    ):
        return
    kind = "a sandbox" if spec.sandbox else f"of kind {spec.kind.value!r}"
    raise InvalidInput(
        f"{key}: function {spec.name!r} is {kind}: only functions and classes, whose calls have "
        f"arguments and a result, {what}: remove {key}",
        parameter=key,
    )


def _check_features(spec: FunctionSpec) -> None:
    """Raise InvalidInput unless keys are made of arguments, and the model was trained with these
    features."""
    if spec.features is None:
        return
    if spec.features.online and spec.network is FunctionNetwork.NONE:
        raise InvalidInput(
            'features: network="none" reaches no Redis: remove network, or the online features',
            parameter="features",
        )
    takers = [method for method in spec.methods if method.takes_features]
    if spec.features.online and not takers:
        raise InvalidInput(
            f"features: {spec.name} does not take them: add a parameter {PARAMETER!r}, behind the "
            f"others",
            parameter="features",
        )
    for source in spec.features.online:
        for method in takers:
            known = (method.schema or {}).get("properties", {})
            if method.schema is not None and (unknown := set(source.fields) - set(known)):
                raise InvalidInput(
                    f"features: key {source.key!r}: {method.name or spec.name} has no parameter "
                    f"{min(unknown)!r}",
                    parameter="features",
                )
    if spec.card.features and spec.card.features != (declared := spec.features.schema.hash):
        raise InvalidInput(
            f"features: {spec.name} has features of hash {declared[:12]}…, but its model was "
            f"trained with {spec.card.features[:12]}… (model card): train the model with these "
            f"features, or deploy it with those of its training",
            parameter="features",
        )


def _check_cache(spec: FunctionSpec) -> None:
    """Raise InvalidInput where answers do not depend on the arguments alone, or cannot be kept."""
    if spec.cache is None:
        return
    if spec.sandbox:
        why = "a sandbox answers no calls that repeat"
    elif spec.language_model is None and spec.kind not in (
        FunctionKind.FUNCTION,
        FunctionKind.CLASS,
    ):
        why = "requests to a web server are not compared: let it set Cache-Control for its callers"
    elif spec.features is not None and spec.features.online:
        why = "online features change between calls with the same arguments"
    elif spec.guard is not None:
        why = "its guard is asked about each call, and kept answers would pass by it"
    elif spec.methods and all(method.is_generator for method in spec.methods):
        why = "its results are streamed, and streams are not kept"
    else:
        return
    raise InvalidInput(f"cache: function {spec.name!r}: {why}: remove cache", parameter="cache")


def _check_volumes(spec: FunctionSpec) -> None:
    if spec.volumes and (spec.engine is not None or spec.network is FunctionNetwork.NONE):
        why = (
            "an engine reads its model as weights"
            if spec.engine is not None
            else 'network="none" leaves no way to commit'
        )
        raise InvalidInput(f"volumes: {why}: remove volumes", parameter="volumes")
    check_mounts(spec.volumes)


def _check_egress(spec: FunctionSpec) -> None:
    if len(spec.egress) > MAX_EGRESS:
        raise InvalidInput(
            f"egress: {len(spec.egress)} networks, at most {MAX_EGRESS}", parameter="egress"
        )
    if spec.egress and (spec.network is FunctionNetwork.NONE or spec.engine is not None):
        why = (
            "an engine runs offline"
            if spec.engine is not None
            else 'network="none" blocks all traffic'
        )
        raise InvalidInput(f"egress: {why}: remove egress", parameter="egress")
    for text in spec.egress:
        try:
            ipaddress.IPv4Network(text)
        except ValueError as e:
            message = (
                f"egress: {text[:80]!r}: {e}; must be an IPv4 network or address, such as "
                f"10.1.0.0/16 or 192.168.1.10"
            )
            raise InvalidInput(message, parameter="egress") from e


def _check_cors(spec: FunctionSpec) -> None:
    if not spec.cors:
        return
    if PUBLIC not in spec.access:
        raise InvalidInput(
            'cors: web pages reach public functions only: add access="public", or remove cors',
            parameter="cors",
        )
    if spec.engine is not None:
        raise InvalidInput(
            "cors: a language model is called through the OpenAI API, where no function is named "
            "before the body: remove cors",
            parameter="cors",
        )
    check_origins(spec.cors)


_PARAMETER_TYPES = ("string", "integer", "number", "boolean")
MAX_PARAMETERS = 32


def _check_parameters(spec: FunctionSpec) -> None:
    """Raise InvalidInput unless `parameters` is an object of plain values, for a class, and
    `arguments` has values of it."""
    if spec.parameters is None:
        known: Mapping[str, Any] = {}
    else:
        known = spec.parameters.get("properties", {})
        is_plain = isinstance(known, Mapping) and all(
            isinstance(one, Mapping) and one.get("type") in _PARAMETER_TYPES
            for one in known.values()
        )
        if not is_plain or not 1 <= len(known) <= MAX_PARAMETERS:
            raise InvalidInput(
                f"parameters: must be a schema with 1 to {MAX_PARAMETERS} properties of type "
                f"{', '.join(_PARAMETER_TYPES)}",
                parameter="parameters",
            )
        if spec.kind not in (FunctionKind.CLASS, FunctionKind.ASGI):
            raise InvalidInput(
                f"parameters: {spec.name!r} is of kind {spec.kind.value!r}: only classes have them",
                parameter="parameters",
            )
    if unknown := sorted(set(spec.arguments) - set(known)):
        raise InvalidInput(
            f"arguments: {spec.name!r} has no parameter {unknown[0]!r}", parameter="arguments"
        )


def _check_access(access: tuple[str, ...]) -> None:
    if len(access) > MAX_SHARED:
        raise InvalidInput(
            f"access names {len(access)} tenants: at most {MAX_SHARED}", parameter="access"
        )
    for name in access:
        try:
            if name != PUBLIC:
                check_name("tenant", name)
        except ValueError as e:
            raise InvalidInput(
                f"access: {e}; or {PUBLIC!r} for everyone", parameter="access"
            ) from e


def _check_tags(tags: Mapping[str, str]) -> None:
    if len(tags) > MAX_TAGS:
        raise InvalidInput(f"tags: {len(tags)} entries, at most {MAX_TAGS}", parameter="tags")
    for name, value in tags.items():
        if not name or len(name) > MAX_TAG_CHARS or len(value) > MAX_TAG_CHARS:
            raise InvalidInput(
                f"tags: {name[:80]!r}: names must have 1 to {MAX_TAG_CHARS} characters, values at "
                f"most {MAX_TAG_CHARS}",
                parameter="tags",
            )
