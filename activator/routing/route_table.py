"""What the data plane knows: functions, tenants, secrets and keys, as the controller's feed told
it.

The table is memory only and holds documents packed (a kilobyte or so each); a `Target` (parsed
spec, compiled argument checks) is made when a revision is first called, so thousands of functions
at zero cost their documents and nothing else. Owner: the event loop; every method is synchronous,
so no lock is needed. A broken document is refused whole, and the last good one stays."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from activator.llm.openai.model_catalog import Engines
from activator.routing.api_keys import ANONYMOUS, ApiKeyIndex, Principal
from activator.routing.call_target import CallTarget
from activator.routing.cutover import CutoverTracker
from activator.routing.tenants import Tenants
from activator.routing.traffic_split import FunctionRouter, document_of
from pilotlight import errors
from pilotlight.pricing import Rates
from pilotlight.protocol import BudgetRecord, FeedChange, FunctionRoute
from pilotlight.quotas import Plan, Quotas, parse_quotas
from pilotlight.seal import SealBroken, Sealer
from pilotlight.spec import PUBLIC
from pilotlight.types import DEFAULT_ENVIRONMENT, FunctionAddress

__all__ = ["ANONYMOUS", "CallTarget", "FunctionRouter", "Principal", "RouteTable"]

log = logging.getLogger(__name__)


class RouteTable:
    """Functions, keys, tenants, quotas and secrets by name.

    `version` is the position in the feed; `generation` changes with everything that could make an
    earlier answer wrong. `on_function` is told the name of a function that changed, and the keys of
    the revisions that could be called before and cannot any more. `on_budget` is told the id of a
    budget and what it is now, None when it is gone. `handovers`: None: whoever is given traffic has
    it at once. `engines`: the functions that are language models."""

    def __init__(self, lists: Mapping[str, Rates], secrets: Sealer) -> None:
        """`lists`: price lists by their version, the platform's own first. `secrets`: opens secrets
        of functions."""
        self._lists = lists
        self._own_rates = next(iter(lists.values()))
        self._sealer = secrets
        self._functions: dict[str, bytes] = {}
        self._names: dict[str, str] = {}
        self._kept_warm: set[str] = set()
        self._access: dict[str, frozenset[frozenset[str]]] = {}
        """Of each function: with whom the revisions that answer are shared. Others are refused
        without a look at its document."""
        self._routed: dict[str, FunctionRouter] = {}
        self._keys = ApiKeyIndex()
        self.tenants = Tenants()
        self.engines = Engines()
        self._quotas: dict[str, Quotas] = {}
        self._budgets: set[str] = set()
        self._secrets: dict[str, str] = {}
        self._unpriced: set[str] = set()
        self.version = 0
        self.generation = 0
        self.refused = 0
        self.on_function: Callable[[str, frozenset[str]], None] = _ignore
        self.handovers: CutoverTracker | None = None
        self.on_budget: Callable[[str, BudgetRecord | None], None] = _ignore_budget

    def __repr__(self) -> str:
        return (
            f"<RouteTable version {self.version}: {len(self._functions)} functions, "
            f"{len(self._keys)} keys, {self.refused} refused>"
        )

    # -- the feed's side ---------------------------------------------------------------------------
    def apply(self, change: FeedChange) -> bool:
        """Take in one change; False when its document was refused (and the last good one kept)."""
        self.version = max(self.version, change.seq)
        self.generation += 1
        try:
            getattr(self, f"_apply_{change.kind}")(change.key, change.value)
        except (KeyError, TypeError, ValueError, AttributeError, errors.PilotlightError) as e:
            self.refused += 1
            log.error(
                "feed document refused kind=%s key=%s seq=%d error=%s",
                change.kind,
                change.key,
                change.seq,
                e,
            )
            return False
        return True

    def clear(self) -> None:
        """Forget everything: the feed is about to be told anew."""
        self.generation += 1
        if self.handovers is not None:
            self.handovers.clear()
        for budget in self._budgets:
            self.on_budget(budget, None)
        for held in (
            self._functions,
            self._names,
            self._kept_warm,
            self._access,
            self._routed,
            self._keys,
            self.tenants,
            self.engines,
            self._quotas,
            self._budgets,
            self._secrets,
        ):
            held.clear()

    def _apply_function(self, name: str, value: Any) -> None:
        before, route, routed = self._route(name), None, None
        if value is None:
            self._functions.pop(name, None)
            self._access.pop(name, None)
            self._names.pop(before.id if before is not None else "", None)
            self._kept_warm.discard(name)
        else:
            route = FunctionRoute.from_json(value)
            # refuses a broken one; made again when called
            routed = FunctionRouter(route, self.rates_of(route.tenant))
            self._access[name] = frozenset(
                frozenset(target.spec.access) for target in routed.answering
            )
            self._functions[name] = zlib.compress(json.dumps(value).encode(), level=1)
            if before is not None and before.id != route.id:
                del self._names[before.id]
            self._names[route.id] = name
            self._kept_warm.discard(name)
            if any(target.spec.scaling.min_instances for target in routed.targets.values()):
                self._kept_warm.add(name)
        if route is not None and route.stopped:
            routed = None
        self.engines.apply(name, routed)
        self._hand_over(name, routed)
        self.on_function(name, _callable(before) - _callable(route))

    def _hand_over(self, name: str, routed: FunctionRouter | None) -> None:
        """From who answered the function's calls, if anybody called it, to `routed`; None: nobody
        answers them any more."""
        known = self._routed.pop(name, None)
        if self.handovers is None:
            return
        if routed is None or known is None:
            self.handovers.cancel(name)
            return
        self.handovers.begin(name, routed, known)
        if routed.handover is not None:
            self._routed[name] = routed

    def handed_over(self, name: str) -> None:
        """A handover is over: who answered before takes no calls any more."""
        self.generation += 1
        self._routed.pop(name, None)
        self.on_function(name, frozenset())

    def _apply_key(self, key_id: str, value: Any) -> None:
        self._keys.apply(key_id, value)

    def _apply_tenant(self, tenant: str, value: Any) -> None:
        before = self.rates_of(tenant)
        self.tenants.apply(tenant, value)
        self._keys.forget_proofs(tenant)
        if self.rates_of(tenant) is not before:
            for name in [name for name in self._routed if name.startswith(f"{tenant}/")]:
                del self._routed[name]  # priced anew
                self.on_function(name, frozenset())

    def _apply_quota(self, name: str, value: Any) -> None:
        if value is None:
            self._quotas.pop(name, None)
        else:
            self._quotas[name] = parse_quotas(value)

    def _apply_budget(self, budget: str, value: Any) -> None:
        record = BudgetRecord(**value) if value is not None else None
        if record is None:
            self._budgets.discard(budget)
        else:
            self._budgets.add(budget)
        self.on_budget(budget, record)

    def _apply_secret(self, name: str, value: Any) -> None:
        if value is None:
            self._secrets.pop(name, None)
        else:
            self._secrets[name] = str(value["sealed"] if isinstance(value, Mapping) else value)

    # -- the request's side ------------------------------------------------------------------------
    def authenticate(self, authorization: bytes, now: float) -> Principal:
        """The caller behind an Authorization header. Raises Unauthenticated, never saying which
        part was wrong."""
        caller = self._keys.proven(authorization)
        if caller is None:
            record = self._keys.prove(authorization)
            caller = Principal(record, tenant_name=self.tenants.name_of(record.tenant))
            self._keys.remember(authorization, caller)
        if caller.expires_at is not None and now >= caller.expires_at:
            raise errors.Unauthenticated(
                "this API key has expired: create another with `pilotlight token create`"
            )
        return caller

    def is_known(self, authorization: bytes) -> bool:
        """Whether this header was found valid before, so that no look-up is needed."""
        return self._keys.is_known(authorization)

    def caller_of(self, key_id: str) -> Principal | None:
        """The caller with this key, if the key is still there."""
        record = self._keys.record(key_id)
        return (
            Principal(record, tenant_name=self.tenants.name_of(record.tenant))
            if record is not None
            else None
        )

    def plan_of(self, tenant: str) -> Plan:
        """A tenant's plan, its overrides included; UNLIMITED where none is known."""
        return self.tenants.plan_of(tenant)

    def rates_of(self, tenant: str) -> Rates:
        """The price list of a tenant's plan; the platform's own where it names none, or one that
        there is not."""
        version = self.tenants.plan_of(tenant).prices
        if version is None or version in self._lists:
            return self._own_rates if version is None else self._lists[version]
        if version not in self._unpriced:
            self._unpriced.add(version)
            log.error(
                "a plan names prices that there are not; the platform's own apply prices=%s "
                "tenant=%s",
                version,
                tenant,
            )
        return self._own_rates

    def quotas_of(self, name: str) -> Quotas:
        """A function's own quotas, by `<tenant>/<environment>/<app>/<function>`."""
        return self._quotas.get(name, _NO_QUOTAS)

    def reserved(self) -> Mapping[str, int]:
        """Bytes of a node's instance memory that are kept free, by tenant."""
        return self.tenants.reserved()

    def tenant_named(self, name: str) -> str | None:
        """Id of the tenant of that name."""
        return self.tenants.named(name)

    def tenant_name(self, tenant: str) -> str:
        """A tenant's name; "" when unknown."""
        return self.tenants.name_of(tenant)

    def tenant_names(self) -> Mapping[str, str]:
        """All names by id."""
        return self.tenants.names()

    def routed_for(self, caller: Principal, address: FunctionAddress) -> FunctionRouter:
        """`routed` for a caller that may be another tenant's. What it may not call does not exist
        for it. Raises NotFound, Unavailable."""
        if caller.tenant != address.tenant and not self._is_open_to(caller, address):
            raise _no_function(address)
        return self.routed(address)

    def _is_open_to(self, caller: Principal, address: FunctionAddress) -> bool:
        """Whether every revision that may answer it is public, or shared with the caller's
        tenant."""
        name = _name_of(address)
        if (known := self._routed.get(name)) is not None:
            shared: Iterable[Iterable[str]] = [target.spec.access for target in known.answering]
        elif name in self._access:
            shared = self._access[name]
        else:
            return False
        names = {PUBLIC, caller.tenant_name} - {""}
        return all(not names.isdisjoint(access) for access in shared)

    def routed(self, address: FunctionAddress) -> FunctionRouter:
        """The function's revisions, and the choice between them. Raises NotFound or Unavailable."""
        name = _name_of(address)
        return self._routed.get(name) or self._make_routed(name, address)

    def target(self, address: FunctionAddress, revision: str = "") -> CallTarget:
        """`revision` while it can be called, else the one that serves this call, by weight. Raises
        NotFound or Unavailable."""
        return self.routed(address).any(revision)

    def _make_routed(self, name: str, address: FunctionAddress) -> FunctionRouter:
        route = self._route(name)
        if route is None:
            raise _no_function(address)
        if route.stopped:
            raise errors.Unavailable(
                f"app {address.app!r} is stopped: deploy it again to start it", retry_after_s=30
            )
        routed = self._routed[name] = FunctionRouter(route, self.rates_of(route.tenant))
        return routed

    def _route(self, name: str) -> FunctionRoute | None:
        document = self._functions.get(name)
        return (
            FunctionRoute.from_json(json.loads(zlib.decompress(document)))
            if document is not None
            else None
        )

    def targets_of(self, name: str) -> tuple[CallTarget, ...]:
        """The revisions of `<tenant>/<environment>/<app>/<function>` that can be called; empty when
        gone or stopped.

        Made for this answer only unless the function was called: thousands that are merely deployed
        must not be kept parsed."""
        known = self._routed.get(name)
        if known is not None:
            return (
                *known.targets.values(),
                *(known.handover.held if known.handover is not None else ()),
            )
        route = self._route(name)
        if route is None or route.stopped:
            return ()
        return tuple(FunctionRouter(route, self.rates_of(route.tenant)).targets.values())

    def target_keyed(self, tenant: str, key: str) -> CallTarget | None:
        """The tenant's revision with that platform-wide key, while it can be called; not for each
        call."""
        name = self._names.get(key.rpartition("@")[0], "")
        if not name.startswith(f"{tenant}/"):
            return None
        return next((target for target in self.targets_of(name) if target.key == key), None)

    def kept_warm(self) -> list[str]:
        """Names of functions that want instances without being asked (`min_instances`)."""
        return sorted(self._kept_warm)

    def keeps_previous_s(self, name: str) -> float:
        """How long a revision that has just lost the function's traffic stays warm; 0 for one that
        was gone back from, or is gone."""
        route = self._route(name)
        if route is None or route.stopped or document_of(route).at_once:
            return 0.0
        return max(
            (target.spec.rollout.keep_previous_s for target in self.targets_of(name)), default=0.0
        )

    def secret_env(self, target: CallTarget) -> dict[str, str]:
        """A function's secrets, opened: environment variables for its next start. Raises
        Unavailable naming a missing one."""
        values: dict[str, str] = {}
        for name in target.spec.secrets:
            sealed = self._secrets.get(f"{target.tenant}/{target.environment}/{name}")
            if sealed is None:
                raise errors.Unavailable(
                    f"secret {name!r} does not exist: `pilotlight secret set {name}` creates it",
                    retry_after_s=30,
                )
            try:
                values.update(_as_variables(name, self._sealer.open(sealed)))
            except SealBroken as e:
                raise errors.Unavailable(
                    f"secret {name!r} cannot be opened: {e}: store its values again",
                    retry_after_s=30,
                ) from e
        return values

    def statistics(self) -> Mapping[str, int]:
        """Sizes, for metrics."""
        return {
            "functions": len(self._functions),
            "keys": len(self._keys),
            "refused": self.refused,
            "version": self.version,
        }


_NO_QUOTAS = Quotas()


def _ignore(name: str, left: frozenset[str]) -> None:
    """Nobody follows the table yet."""


def _ignore_budget(budget: str, record: BudgetRecord | None) -> None:
    """Nobody keeps budgets yet."""


def _name_of(address: FunctionAddress) -> str:
    return f"{address.tenant}/{address.environment}/{address.app}/{address.function}"


def _no_function(address: FunctionAddress) -> errors.NotFound:
    environment = (
        ""
        if address.environment == DEFAULT_ENVIRONMENT
        else f" in environment {address.environment!r}"
    )
    return errors.NotFound(
        f"no function {address.app}/{address.function}{environment}: `pilotlight app list` shows "
        f"what is deployed"
    )


def _callable(route: FunctionRoute | None) -> frozenset[str]:
    """Keys of the revisions that can be called: those with a weight, and those that are only
    named."""
    if route is None or route.stopped:
        return frozenset()
    return frozenset(
        str(route.revisions[revision]["launch"]["revision"])
        for revision in document_of(route).named()
    )


def _as_variables(name: str, text: str) -> dict[str, str]:
    """A secret is a JSON object of variables, or one value named like the secret."""
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, dict) and all(isinstance(v, str) for v in values.values()):
        return values
    return {name: text}
