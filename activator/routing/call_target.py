"""A call target: one revision of one function, with compiled argument checks and its price."""

from __future__ import annotations

from dataclasses import replace

from activator.arguments.translations import for_tensors
from activator.arguments.validator import ArgumentValidator
from pilotlight import errors
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionSpec, MethodSpec
from pilotlight.spec.identifiers import MAX_NAME_LENGTH
from pilotlight.spec.policies import Objectives
from pilotlight.spec.pricing import Footprint, Rates, dearest_gpu, price_name_of
from pilotlight.spec.record_json import canonical_json, from_json, to_json
from snapshotter.types import GpuGrant, LaunchSpec


class CallTarget:
    """One revision of one function, ready to be called. Immutable once made.

    Attributes:
        is_stable: the rollback target of a rollout: it keeps capacity for all of the function's
            traffic.
        is_shadow: it gets copies of calls, and answers only callers that name it.
        footprint: of its dearest instance: with the acceptable GPU kind of the highest price.
            Budgets reserve by it; `granted_footprint` is what an instance is priced by.
        log: terms of its prediction log; None = it has none. `log_terms`: as JSON values.
        batched: methods whose calls are batched, each with its maximum batch size; mostly none.
        has_online_features: whether its workers read features when they are called.
        feature_schema: hash of the declared features; "" = none are declared.
        guard: its guard as JSON (`GuardSpec`); b"" = it has none.
        cache: terms of its response cache; None = it has none. `generation`: of the traffic that
            chose it, which each rollout and rollback changes.
        is_counted_by_head: whether heads of its answers say something that is counted.
    """

    __slots__ = (
        "_checks",
        "_tensor_checks",
        "app",
        "batched",
        "cache",
        "environment",
        "feature_schema",
        "footprint",
        "function",
        "function_id",
        "generation",
        "guard",
        "has_online_features",
        "is_counted_by_head",
        "is_shadow",
        "is_stable",
        "key",
        "launch",
        "log",
        "log_terms",
        "rates",
        "revision",
        "slow_first_ms",
        "slow_ms",
        "spec",
        "tenant",
        "warm_head",
    )

    def __init__(
        self,
        route: FunctionRoute,
        revision: str,
        rates: Rates,
        *,
        is_stable: bool = False,
        is_shadow: bool = False,
        min_instances: int | None = None,
    ) -> None:
        """`min_instances`: 0 for a revision without default traffic, else the minimum; None = as
        its spec says."""
        document = route.revisions[revision]
        self.spec: FunctionSpec = _kept(from_json(FunctionSpec, document["spec"]), min_instances)
        self.log = self.spec.log
        self.log_terms = to_json(self.log)
        self.cache = self.spec.cache
        self.generation: int = route.document.get("generation", 0)
        self.is_stable = is_stable
        self.is_shadow = is_shadow
        self.launch = LaunchSpec.from_json(document["launch"])
        self.batched = {
            method.name: method.batch.max_batch_size
            for method in self.spec.methods
            if method.batch is not None
        }
        features = self.spec.features
        self.has_online_features = features is not None and bool(features.online)
        self.feature_schema = features.schema.hash if features is not None else ""
        self.guard = b"" if self.spec.guard is None else canonical_json(to_json(self.spec.guard))
        self.is_counted_by_head = bool(self.batched) or self.has_online_features
        promised = self.spec.objectives or Objectives()
        self.slow_ms, self.slow_first_ms = (
            promised.warm_latency_s * 1000,
            promised.first_token_s * 1000,
        )
        self.key = str(self.launch.revision)
        self.tenant = route.tenant
        self.environment = route.environment
        self.app = route.app
        self.function = route.function
        self.function_id = route.id
        self.revision = revision
        self.warm_head = (
            b"pilotlight-revision: %s\r\npilotlight-start: WARM\r\n" % revision.encode()
        )
        self.rates = rates
        try:
            self.footprint = self._footprint(dearest_gpu(self.spec.resources.gpu, rates))
        except KeyError as e:
            raise _without_price(str(e.args[0])) from e
        self._checks: dict[str, ArgumentValidator] = {}
        self._tensor_checks: dict[str, ArgumentValidator] = {}

    def __repr__(self) -> str:
        return f"<Target {self.app}/{self.function}@{self.revision}>"

    @property
    def name(self) -> str:
        """`<tenant>/<environment>/<app>/<function>`."""
        return f"{self.tenant}/{self.environment}/{self.app}/{self.function}"

    def granted_footprint(self, gpus: GpuGrant | None) -> Footprint:
        """Return the footprint of an instance that was granted these GPUs: what it is priced by.
        Without a grant, whose kind the node did not record, the first kind that the spec names.

        Raises Unavailable when the kind has no price."""
        requested = self.spec.resources.gpu
        if not requested:
            return self.footprint
        granted = gpus.kind if gpus is not None and gpus.kind else requested[0]
        try:
            kind = price_name_of(granted, requested, self.rates)
        except KeyError as e:
            raise _without_price(granted) from e
        count = len(gpus.devices) if gpus is not None else self.footprint.gpu_count
        return replace(self.footprint, gpu=kind, gpu_count=count)

    def missing_price(self, gpus: GpuGrant | None) -> errors.Unavailable | None:
        """Why an instance with these GPUs cannot be billed; None where it can."""
        try:
            self.granted_footprint(gpus)
        except errors.Unavailable as e:
            return e
        return None

    def _footprint(self, gpu: str | None) -> Footprint:
        resources = self.spec.resources
        return Footprint(
            cpu=resources.cpu,
            memory_bytes=resources.memory_bytes,
            gpu=gpu,
            gpu_count=max(1, resources.gpu_count) if gpu is not None else 0,
        )

    def method(self, name: str) -> MethodSpec:
        """Return a method. Raises NotFound with the existing methods."""
        spec = self.spec.method(name)
        if spec is None:
            called = f"{self.app}/{self.function}"
            names = sorted(m.name for m in self.spec.methods if m.name)
            if not names:
                hint = "it has no methods: call it by its own name"
            else:
                hint = f"its methods are: {', '.join(names)}"
            if names and not name:
                raise errors.NotFound(
                    f"{called} is a class: call a method of it, such as {called}.{names[0]}; {hint}"
                )
            raise errors.NotFound(f"{called} has no method {name[:MAX_NAME_LENGTH]!r}; {hint}")
        return spec

    def check(self, method: str) -> ArgumentValidator:
        """Return the argument check of a method. Raises NotFound with the existing methods."""
        check = self._checks.get(method)
        if check is None:
            check = self._checks[method] = ArgumentValidator(
                self.method(method),
                self._place_of_schema,
            )
        return check

    def tensor_check(self, method: str) -> ArgumentValidator:
        """Return the check of what a method's arguments have beside tensors, which are null."""
        check = self._tensor_checks.get(method)
        if check is None:
            check = self._tensor_checks[method] = ArgumentValidator(
                for_tensors(self.method(method)), self._place_of_schema
            )
        return check

    @property
    def _place_of_schema(self) -> str:
        return f"schema of {self.app}/{self.function} in revision {self.revision}"


def _without_price(gpu: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"no price for GPU kind {gpu!r} in platform.yaml: add prices.gpu_s.{gpu}",
        retry_after_s=60,
    )


def _kept(spec: FunctionSpec, min_instances: int | None) -> FunctionSpec:
    if min_instances is None:
        return spec
    wanted = max(spec.scaling.min_instances, min_instances) if min_instances else 0
    schedules = spec.scaling.schedules if min_instances else ()
    return replace(spec, scaling=replace(spec.scaling, min_instances=wanted, schedules=schedules))
