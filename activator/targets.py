"""What is called: one revision of one function, with its argument checks compiled and its price known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import jsonschema_rs

from pilotlight import errors
from pilotlight.policies import Objectives
from pilotlight.pricing import Footprint, Rates, rate_per_s
from pilotlight.protocol import FunctionRoute
from pilotlight.spec import FunctionSpec, MethodSpec, from_json
from snapshotter.types import LaunchSpec

MAX_NAMED_PROBLEMS = 5
"""Argument errors listed in one answer: enough to mend a call, not a way to make the platform write essays."""
MAX_PROBLEM_CHARS = 500
"""Of one of them: it quotes the argument, which may be megabytes."""


class ArgumentCheck:
    """Checks JSON arguments of one method against its schema, before anything is started."""

    __slots__ = ("_method", "_validator")

    def __init__(self, method: MethodSpec) -> None:
        self._method = method
        self._validator = jsonschema_rs.validator_for(dict(method.schema)) if method.schema is not None else None

    def check(self, body: bytes) -> None:
        """Raises InvalidInput naming the parameter and what is wrong with it."""
        arguments = _parsed(body) if body else {}
        named = arguments if type(arguments) is dict else self._by_name(arguments)
        validator = self._validator
        try:
            if validator is None or validator.is_valid(named):
                return
            problems = self._problems(validator, named)
        except ValueError as e:  # half a surrogate pair in a name, for one
            raise errors.InvalidInput(f"the arguments cannot be checked: {e}") from e
        first = problems[0]
        what = f"argument {first['parameter']!r}: " if first["parameter"] else ""
        raise errors.InvalidInput(f"{what}{first['message']}", parameter=first["parameter"], errors=problems)

    @staticmethod
    def _problems(validator: jsonschema_rs.Validator, named: Mapping[str, Any]) -> list[dict[str, str]]:
        found = itertools.islice(validator.iter_errors(named), MAX_NAMED_PROBLEMS)
        return [{"parameter": _shortened(_parameter(e)), "message": _shortened(e.message)} for e in found]

    def _by_name(self, arguments: Any) -> Mapping[str, Any]:
        if isinstance(arguments, dict):
            return arguments
        if not isinstance(arguments, list):
            raise errors.InvalidInput(
                f"the body must be a JSON object of arguments by name, or an array of them in order; got {type(arguments).__name__}"
            )
        names = self._method.parameters
        if len(arguments) > len(names) and self._method.schema is not None:
            raise errors.InvalidInput(f"{len(arguments)} positional arguments given, at most {len(names)} accepted")
        return dict(zip(names, arguments, strict=False))


_decode_at_once = json.JSONDecoder().raw_decode


def _parsed(body: bytes) -> Any:
    try:
        text = body.decode()
        if text[0] in "{[":
            value, end = _decode_at_once(text)  # `json.loads` without looking for white space around it
            if end == len(text):
                return value
        return json.loads(text)
    except ValueError as e:  # UnicodeDecodeError is one
        raise errors.InvalidInput(f"the body is not valid JSON: {e}") from e
    except RecursionError as e:
        raise errors.InvalidInput("the body is nested too deeply") from e


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM_CHARS else text[:MAX_PROBLEM_CHARS] + "…"


def _parameter(error: jsonschema_rs.ValidationError) -> str:
    if error.instance_path:
        return str(error.instance_path[0])
    kind = error.kind
    named = getattr(kind, "property", None) or next(iter(getattr(kind, "unexpected", ())), "")
    return str(named)


class Target:
    """One revision of one function, ready to be called. Immutable once made.

    Attributes:
        is_stable: the way back of a rollout: it keeps room for all of the function's traffic.
        is_shadow: it gets copies of calls, and answers nobody who does not ask for it.
        batched: methods whose calls are gathered, each with the greatest size of its batches; mostly none.
    """

    __slots__ = ("_checks", "app", "batched", "environment", "footprint", "function", "function_id", "is_shadow", "is_stable", "key",
                 "launch", "rate_per_s", "rates", "revision", "slow_first_ms", "slow_ms", "spec", "tenant", "warm_head")  # fmt: skip

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
        """`min_instances`: 0 for a revision that nobody is sent to unasked, at least so many for any other; None = as its spec says."""
        document = route.revisions[revision]
        self.spec: FunctionSpec = _kept(from_json(FunctionSpec, document["spec"]), min_instances)
        self.is_stable = is_stable
        self.is_shadow = is_shadow
        self.launch = LaunchSpec.from_json(document["launch"])
        self.batched = {method.name: method.batch.max_batch_size for method in self.spec.methods if method.batch is not None}
        promised = self.spec.objectives or Objectives()
        self.slow_ms, self.slow_first_ms = promised.warm_latency_s * 1000, promised.first_token_s * 1000
        self.key = str(self.launch.revision)
        self.tenant = route.tenant
        self.environment = route.environment
        self.app = route.app
        self.function = route.function
        self.function_id = route.id
        self.revision = revision
        self.warm_head = b"pilotlight-revision: %s\r\npilotlight-start: WARM\r\n" % revision.encode()
        gpu = self.spec.resources.gpu[0] if self.spec.resources.gpu else None
        self.footprint = Footprint(
            cpu=self.spec.resources.cpu,
            memory_bytes=self.spec.resources.memory_bytes,
            gpu=gpu,
            gpu_count=self.spec.resources.gpu_count,
        )
        self.rates = rates
        try:
            self.rate_per_s: Decimal = rate_per_s(self.footprint, rates)
        except KeyError as e:
            raise errors.Unavailable(f"no price for accelerator {gpu!r} in platform.yaml: add prices.gpu_s.{gpu}", retry_after_s=60) from e
        self._checks: dict[str, ArgumentCheck] = {}

    def __repr__(self) -> str:
        return f"<Target {self.app}/{self.function}@{self.revision}>"

    @property
    def name(self) -> str:
        """`<tenant>/<environment>/<app>/<function>`."""
        return f"{self.tenant}/{self.environment}/{self.app}/{self.function}"

    def check(self, method: str) -> ArgumentCheck:
        """The argument check of a method. Raises NotFound, naming the methods there are."""
        check = self._checks.get(method)
        if check is None:
            spec = self.spec.method(method)
            if spec is None:
                names = ", ".join(sorted(m.name for m in self.spec.methods if m.name))
                hint = f"its methods are: {names}" if names else "it has no methods: call it by its own name"
                raise errors.NotFound(f"{self.app}/{self.function} has no method {method!r}; {hint}")
            check = self._checks[method] = ArgumentCheck(spec)
        return check


def _kept(spec: FunctionSpec, min_instances: int | None) -> FunctionSpec:
    if min_instances is None:
        return spec
    wanted = max(spec.scaling.min_instances, min_instances) if min_instances else 0
    return replace(spec, scaling=replace(spec.scaling, min_instances=wanted))
