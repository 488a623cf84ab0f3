"""What the data plane knows: functions, tenants, secrets and keys, as the controller's feed told it.

The table is memory only and holds documents packed (a kilobyte or so each); a `Target` (parsed spec, compiled argument checks) is made
when a revision
is first called, so thousands of functions at zero cost their documents and nothing else. Owner: the event loop; every
method is synchronous, so no lock is needed. A broken document is refused whole, and the last good one stays.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import random
import zlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import jsonschema_rs

from pilotlight import errors
from pilotlight.pricing import Footprint, Rates, rate_per_s
from pilotlight.protocol import FeedChange, FunctionRoute, KeyRecord, TenantRecord
from pilotlight.seal import PlatformKey
from pilotlight.spec import FunctionSpec, MethodSpec, from_json
from pilotlight.types import DEFAULT_ENVIRONMENT, FunctionAddress, Scope
from snapshotter.types import LaunchSpec

log = logging.getLogger(__name__)

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
    """One revision of one function, ready to be called. Immutable once made."""

    __slots__ = ("_checks", "app", "environment", "footprint", "function", "function_id", "key", "launch", "rate_per_s", "revision",
                 "spec", "tenant", "warm_head")  # fmt: skip

    def __init__(self, route: FunctionRoute, revision: str, rates: Rates) -> None:
        document = route.revisions[revision]
        self.spec: FunctionSpec = from_json(FunctionSpec, document["spec"])
        self.launch = LaunchSpec.from_json(document["launch"])
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
        try:
            self.rate_per_s: Decimal = rate_per_s(self.footprint, rates)
        except KeyError as e:
            raise errors.Unavailable(f"no price for accelerator {gpu!r} in platform.yaml: add prices.gpu_s.{gpu}", retry_after_s=60) from e
        self._checks: dict[str, ArgumentCheck] = {}

    def __repr__(self) -> str:
        return f"<Target {self.app}/{self.function}@{self.revision}>"

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


Targets = tuple[tuple[int, Target], ...]
"""Revisions of one function with their share of the traffic; shares add up to 100."""


def choose(targets: Targets) -> Target:
    """One of them, by weight."""
    if len(targets) == 1:
        return targets[0][1]
    draw = random.randrange(100)
    for weight, target in targets:
        draw -= weight
        if draw < 0:
            return target
    return targets[-1][1]


class Caller:
    """Who is calling: the key's tenant, scope and environment. Immutable."""

    __slots__ = ("environment", "expires_at", "key_id", "scope", "tenant")

    def __init__(self, record: KeyRecord) -> None:
        self.key_id = record.id
        self.tenant = record.tenant
        self.scope = Scope(record.scope)
        self.environment = record.environment
        self.expires_at = record.expires_at

    def __repr__(self) -> str:
        return f"<Caller {self.key_id} {self.scope}>"


class RouteTable:
    """Functions, keys, tenants and secrets by name.

    `version` is the position in the feed; `generation` changes with everything that could make an earlier answer wrong. `on_function` is
    told the name of a function that changed, and the keys of the revisions that took calls before and do not any more.
    """

    def __init__(self, rates: Rates, platform_key: PlatformKey) -> None:
        self._rates = rates
        self._platform_key = platform_key
        self._functions: dict[str, bytes] = {}
        self._kept_warm: set[str] = set()
        self._targets: dict[str, Targets] = {}
        self._callers: dict[str, tuple[str, Caller]] = {}
        self._by_hash: dict[str, Caller] = {}
        self._by_token: dict[bytes, Caller] = {}
        self._tenants: dict[str, TenantRecord] = {}
        self._secrets: dict[str, str] = {}
        self.version = 0
        self.generation = 0
        self.refused = 0
        self.on_function: Callable[[str, frozenset[str]], None] = _ignore

    def __repr__(self) -> str:
        return f"<RouteTable version {self.version}: {len(self._functions)} functions, {len(self._callers)} keys, {self.refused} refused>"

    # -- the feed's side ----------------------------------------------------------------------------------------------
    def apply(self, change: FeedChange) -> bool:
        """Take in one change; False when its document was refused (and the last good one kept)."""
        self.version = max(self.version, change.seq)
        self.generation += 1
        try:
            getattr(self, f"_apply_{change.kind}")(change.key, change.value)
        except (KeyError, TypeError, ValueError, AttributeError, errors.PilotlightError) as e:
            self.refused += 1
            log.error("feed document refused kind=%s key=%s seq=%d error=%s", change.kind, change.key, change.seq, e)
            return False
        return True

    def clear(self) -> None:
        """Forget everything: the feed is about to be told anew."""
        self.generation += 1
        for held in (
            self._functions,
            self._kept_warm,
            self._targets,
            self._callers,
            self._by_hash,
            self._by_token,
            self._tenants,
            self._secrets,
        ):
            held.clear()

    def _apply_function(self, name: str, value: Any) -> None:
        before, route = self._route(name), None
        self._kept_warm.discard(name)
        if value is None:
            self._functions.pop(name, None)
        else:
            route = FunctionRoute.from_json(value)
            targets = [
                Target(route, revision, self._rates) for revision, _ in route.traffic
            ]  # refuses a broken one; made again when called
            self._functions[name] = zlib.compress(json.dumps(value).encode(), level=1)
            if any(target.spec.scaling.min_instances for target in targets):
                self._kept_warm.add(name)
        self._targets.pop(name, None)
        self.on_function(name, _routed(before) - _routed(route))

    def _apply_key(self, key_id: str, value: Any) -> None:
        record = KeyRecord(**value) if value is not None else None
        old = self._callers.pop(key_id, None)
        if old is not None:
            self._by_hash.pop(old[0], None)
            self._by_token.clear()
        if record is not None:
            caller = Caller(record)
            self._callers[key_id] = (record.hash, caller)
            self._by_hash[record.hash] = caller

    def _apply_tenant(self, tenant: str, value: Any) -> None:
        if value is None:
            self._tenants.pop(tenant, None)
        else:
            self._tenants[tenant] = TenantRecord(**value)

    def _apply_secret(self, name: str, value: Any) -> None:
        if value is None:
            self._secrets.pop(name, None)
        else:
            self._secrets[name] = str(value["sealed"] if isinstance(value, Mapping) else value)

    # -- the request's side -------------------------------------------------------------------------------------------
    def authenticate(self, authorization: bytes, now: float) -> Caller:
        """The caller behind an Authorization header. Raises Unauthenticated, never saying which part was wrong."""
        caller = self._by_token.get(authorization)
        if caller is None:
            caller = self._look_up(authorization)
        if caller.expires_at is not None and now >= caller.expires_at:
            raise errors.Unauthenticated("this API key has expired: create another with `pilotlight token create`")
        return caller

    def is_known(self, authorization: bytes) -> bool:
        """Whether this header was found valid before, so that no look-up is needed."""
        return authorization in self._by_token

    def _look_up(self, authorization: bytes) -> Caller:
        scheme, _, token = authorization.partition(b" ")
        if not token or scheme.lower() != b"bearer":
            raise errors.Unauthenticated("no API key: send the header 'Authorization: Bearer <key>'")
        caller = self._by_hash.get(hashlib.sha256(token.strip()).hexdigest())
        if caller is None:
            raise errors.Unauthenticated("this API key is not valid: it is wrong, or was revoked")
        self._by_token[authorization] = caller
        return caller

    def targets(self, address: FunctionAddress) -> Targets:
        """The revisions that share this function's traffic. Raises NotFound or Unavailable."""
        name = f"{address.tenant}/{address.environment}/{address.app}/{address.function}"
        return self._targets.get(name) or self._make_targets(name, address)

    def target(self, address: FunctionAddress) -> Target:
        """The revision that serves this call, by traffic weight. Raises NotFound or Unavailable."""
        return choose(self.targets(address))

    def _make_targets(self, name: str, address: FunctionAddress) -> Targets:
        route = self._route(name)
        if route is None:
            environment = "" if address.environment == DEFAULT_ENVIRONMENT else f" in environment {address.environment!r}"
            raise errors.NotFound(
                f"no function {address.app}/{address.function}{environment}: `pilotlight app list` shows what is deployed"
            )
        if route.stopped:
            raise errors.Unavailable(f"app {address.app!r} is stopped: deploy it again to start it", retry_after_s=30)
        targets = tuple((weight, Target(route, revision, self._rates)) for revision, weight in route.traffic if weight)
        self._targets[name] = targets
        return targets

    def _route(self, name: str) -> FunctionRoute | None:
        document = self._functions.get(name)
        return FunctionRoute.from_json(json.loads(zlib.decompress(document))) if document is not None else None

    def targets_of(self, name: str) -> tuple[Target, ...]:
        """The revisions with traffic of `<tenant>/<environment>/<app>/<function>`; empty when gone or stopped.

        Made for this answer only unless the function was called: thousands that are merely deployed must not be kept parsed.
        """
        known = self._targets.get(name)
        if known is not None:
            return tuple(target for _, target in known)
        route = self._route(name)
        if route is None or route.stopped:
            return ()
        return tuple(Target(route, revision, self._rates) for revision, weight in route.traffic if weight)

    def kept_warm(self) -> list[str]:
        """Names of functions that want instances without being asked (`min_instances`)."""
        return sorted(self._kept_warm)

    def secret_env(self, target: Target) -> dict[str, str]:
        """A function's secrets, opened: environment variables for its next start. Raises Unavailable naming a missing one."""
        values: dict[str, str] = {}
        for name in target.spec.secrets:
            sealed = self._secrets.get(f"{target.tenant}/{target.environment}/{name}")
            if sealed is None:
                raise errors.Unavailable(f"secret {name!r} does not exist: `pilotlight secret set {name}` creates it", retry_after_s=30)
            values.update(_as_variables(name, self._platform_key.open(sealed)))
        return values

    def statistics(self) -> Mapping[str, int]:
        """Sizes, for metrics."""
        return {"functions": len(self._functions), "keys": len(self._callers), "refused": self.refused, "version": self.version}


def _ignore(name: str, left: frozenset[str]) -> None:
    """Nobody follows the table yet."""


def _routed(route: FunctionRoute | None) -> frozenset[str]:
    """Keys of the revisions that take calls."""
    if route is None or route.stopped:
        return frozenset()
    return frozenset(str(route.revisions[revision]["launch"]["revision"]) for revision, weight in route.traffic if weight)


def _as_variables(name: str, text: str) -> dict[str, str]:
    """A secret is a JSON object of variables, or one value named like the secret."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, dict) and all(isinstance(v, str) for v in values.values()):
        return values
    return {name: text}
