"""The state of the data plane from the controller's feed: functions, tenants, secrets and keys.

The table is in memory only. A `CallTarget` (parsed spec, compiled argument checks) is created when
a revision is first called; of other functions it has what `FunctionIndex` keeps. Owner: the event
loop; every method is synchronous, so no lock is needed. An invalid document is refused as a whole,
and the last valid one is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from activator.routing.api_keys import (
    ANONYMOUS,
    TOKEN_KEY,
    ApiKeyIndex,
    Principal,
    TokenVerifier,
    unknown_key,
)
from activator.routing.call_target import CallTarget
from activator.routing.function_index import FunctionIndex
from activator.routing.model_catalog import Engines
from activator.routing.tenants import Tenants, TenantSecrets
from activator.routing.traffic_split import (
    Cutovers,
    FunctionRouter,
    document_of,
    previous_route,
)
from pilotlight import errors
from pilotlight.core.crypto import Sealer
from pilotlight.protocol import BudgetRecord, CreditRecord, FeedChange, FunctionRoute
from pilotlight.spec.function import PUBLIC
from pilotlight.spec.identifiers import ANY_CUSTOMER, DEFAULT_ENVIRONMENT, FunctionAddress
from pilotlight.spec.pricing import Rates
from pilotlight.spec.quotas import Plan, Quotas, parse_quotas

__all__ = ["ANONYMOUS", "CallTarget", "FunctionRouter", "Principal", "RouteTable"]

log = logging.getLogger(__name__)


class RouteTable:
    """Functions, keys, tenants, quotas and secrets by name.

    `version` is the position in the feed; `generation` changes with every change that can
    invalidate cached results. `on_function` is called with the name of a changed function, and the
    keys of the revisions that can no longer be called. `on_budget` is called with the id of a
    budget and its new state, None when it was deleted; `on_tenant_deleted` with the id of a tenant
    that is deleted. `handovers`: None = traffic moves at once. `functions`: what is deployed.
    `engines`: the functions that are language models. `secrets`: those of all tenants. `tokens`:
    callers by a token of an issuer; None = there are none."""

    def __init__(self, lists: Mapping[str, Rates], secrets: Sealer) -> None:
        """`lists`: price lists by version, the platform's own first. `secrets`: decrypts those of
        tenants."""
        self._lists = lists
        self._own_rates = next(iter(lists.values()))
        self.functions = FunctionIndex()
        self._routed: dict[str, FunctionRouter] = {}
        self._keys = ApiKeyIndex()
        self.tokens: TokenVerifier | None = None
        self.tenants = Tenants()
        self.secrets = TenantSecrets(secrets)
        self.engines = Engines()
        self._quotas: dict[str, Quotas] = {}
        self._budgets: set[str] = set()
        self._unpriced: set[str] = set()
        self.version = 0
        self.generation = 0
        self.refused = 0
        self.on_function: Callable[[str, frozenset[str]], None] = _ignore
        self.handovers: Cutovers | None = None
        self._previous: dict[str, FunctionRouter] = {}
        self._has_resumed = False
        self.on_budget: Callable[[str, BudgetRecord | None], None] = _ignore_budget
        self.on_tenant_deleted: Callable[[str], None] = _ignore_tenant

    def __repr__(self) -> str:
        return (
            f"<RouteTable version {self.version}: {len(self.functions)} functions, "
            f"{self._keys!r}, {self.refused} refused>"
        )

    # -- changes from the feed ---------------------------------------------------------------------
    def apply(self, change: FeedChange) -> bool:
        """Apply one change; returns False when its document was refused (and the last valid one
        kept)."""
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
        """Remove everything, before the feed starts again."""
        self.generation += 1
        if self.handovers is not None:
            self.handovers.clear()
        for budget in self._budgets:
            self.on_budget(budget, None)
        for held in (
            self.functions,
            self._routed,
            self._previous,
            self._keys,
            self.tenants,
            self.engines,
            self._quotas,
            self._budgets,
            self.secrets,
        ):
            held.clear()

    def _apply_function(self, name: str, value: Any) -> None:
        before, route, routed = self.functions.route(name), None, None
        if value is None:
            self.functions.remove(name)
        else:
            route = FunctionRoute.from_json(value)
            # validates the document; created again when called
            routed = FunctionRouter(route, self.rates_of(route.tenant))
            self.functions.put(name, value, routed, id=route.id)
        if route is not None and route.stopped:
            routed = None
        self.engines.apply(name, routed)
        self._hand_over(name, routed)
        self._remember_previous(name, route if routed is not None else None)
        self.on_function(name, _callable(before) - _callable(route))

    def _hand_over(self, name: str, routed: FunctionRouter | None) -> None:
        """Begin a cutover to `routed` if the function was called before; None = the function can no
        longer be called."""
        known = self._routed.pop(name, None)
        if self.handovers is None:
            return
        if routed is None or known is None:
            self.handovers.cancel(name)
            return
        self.handovers.begin(name, routed, known)
        self._routed[name] = routed  # it is called: the next change must know that, too

    def _remember_previous(self, name: str, route: FunctionRoute | None) -> None:
        """Keep who answered before, until this process knows its instances (`resume_cutovers`)."""
        self._previous.pop(name, None)
        if self.handovers is None or self._has_resumed or route is None:
            return
        if (previous := previous_route(route)) is not None:
            self._previous[name] = FunctionRouter(previous, self.rates_of(route.tenant))

    def previous_targets(self) -> list[CallTarget]:
        """Return the revisions that answered before the cutovers that `resume_cutovers` will
        continue."""
        return [target for router in self._previous.values() for target in router.answering]

    def resume_cutovers(self) -> None:
        """Continue the cutovers that a previous process had begun, once the instances that it left
        are known. Has an effect once."""
        self._has_resumed = True
        previous, self._previous = self._previous, {}
        for name, before in previous.items():
            route = self.functions.route(name)
            if self.handovers is None or route is None:
                continue
            routed = FunctionRouter(route, self.rates_of(route.tenant))
            self.handovers.begin(name, routed, before)
            if routed.handover is not None:
                self.generation += 1
                self._routed[name] = routed
            self.on_function(name, frozenset())

    def handed_over(self, name: str) -> None:
        """End a cutover: the previous revisions get no more calls."""
        self.generation += 1
        route = self.functions.route(name)
        if self._routed.pop(name, None) is not None and route is not None and not route.stopped:
            self._routed[name] = FunctionRouter(route, self.rates_of(route.tenant))
        self.on_function(name, frozenset())

    def _apply_key(self, key_id: str, value: Any) -> None:
        self._keys.apply(key_id, value)

    def _apply_tenant(self, tenant: str, value: Any) -> None:
        before = self.rates_of(tenant)
        self.tenants.apply(tenant, value)
        if self.tenants.is_deleted(tenant):
            self.on_tenant_deleted(tenant)
        self._keys.evict_callers(tenant)
        if self.rates_of(tenant) is not before:
            for name in [name for name in self._routed if name.startswith(f"{tenant}/")]:
                del self._routed[name]  # its prices have changed
                self.on_function(name, frozenset())

    def _apply_quota(self, name: str, value: Any) -> None:
        if value is None:
            self._quotas.pop(name, None)
        else:
            self._quotas[name] = parse_quotas(value)

    def _apply_budget(self, budget: str, value: Any) -> None:
        self._put_budget(budget, BudgetRecord(**value) if value is not None else None)

    def _apply_credit(self, credit: str, value: Any) -> None:
        self._put_budget(credit, CreditRecord(**value) if value is not None else None)

    def _put_budget(self, budget: str, record: BudgetRecord | None) -> None:
        if record is None:
            self._budgets.discard(budget)
        else:
            self._budgets.add(budget)
        self.on_budget(budget, record)

    def _apply_secret(self, name: str, value: Any) -> None:
        self.secrets.put(name, None if value is None else str(value))

    # -- lookups by requests -----------------------------------------------------------------------
    def authenticate(self, authorization: bytes, now: float) -> Principal:
        """Return the caller of an Authorization header. Raises Unauthenticated, without saying
        which part is wrong."""
        caller = self._keys.cached_caller(authorization)
        if caller is None and self.tokens is not None:
            caller = self.tokens.cached_caller(authorization)
            if caller is not None and self.tenants.is_deleted(caller.tenant):
                raise unknown_key()
        if caller is None:
            record = self._keys.validate(authorization)
            if self.tenants.is_deleted(record.tenant):
                raise unknown_key()
            caller = Principal(record, tenant_name=self.tenants.name_of(record.tenant))
            self._keys.cache_caller(authorization, caller)
        if caller.expires_at is not None and now >= caller.expires_at:
            raise errors.Unauthenticated(
                "this API key has expired: create another with `pilotlight token create`"
            )
        return caller

    def is_known(self, authorization: bytes) -> bool:
        """Return whether this header was validated before, so that no lookup is needed."""
        return self._keys.is_known(authorization)

    def caller_of(self, key_id: str) -> Principal | None:
        """Return the caller with this key; None if the key was deleted."""
        if key_id.startswith(TOKEN_KEY):
            return self.tokens.caller_of(key_id) if self.tokens is not None else None
        record = self._keys.record(key_id)
        return (
            Principal(record, tenant_name=self.tenants.name_of(record.tenant))
            if record is not None
            else None
        )

    def plan_of(self, tenant: str) -> Plan:
        """Return a tenant's plan with its overrides; UNLIMITED where none is known."""
        return self.tenants.plan_of(tenant)

    def rates_of(self, tenant: str) -> Rates:
        """Return the price list of a tenant's plan; the platform's own where it names none, or an
        unknown one."""
        version = self.tenants.plan_of(tenant).prices
        if version is None or version in self._lists:
            return self._own_rates if version is None else self._lists[version]
        if version not in self._unpriced:
            self._unpriced.add(version)
            log.error(
                "plan names an unknown price list; using the platform's own prices=%s tenant=%s",
                version,
                tenant,
            )
        return self._own_rates

    def quotas_of(self, name: str) -> Quotas:
        """Return a function's own quotas, by `<tenant>/<environment>/<app>/<function>`."""
        return self._quotas.get(name, _NO_QUOTAS)

    def customer_quotas(self, tenant: str, customer: str) -> Quotas:
        """Return a customer's own quotas, else those that its tenant set for each customer."""
        own = self._quotas.get(f"{tenant}/{customer}")
        return own or self.quotas_of(f"{tenant}/{ANY_CUSTOMER}")

    def reserved(self) -> Mapping[str, int]:
        """Return the bytes of a node's instance memory that are reserved, by tenant."""
        return self.tenants.reserved()

    def tenant_name(self, tenant: str) -> str:
        """Return a tenant's name; "" when unknown."""
        return self.tenants.name_of(tenant)

    def routed_for(self, caller: Principal, address: FunctionAddress) -> FunctionRouter:
        """Return `routed` for a caller that may be of another tenant. Functions that it may not
        call are not found. Raises NotFound, Unavailable."""
        if caller.tenant != address.tenant and not self._is_open_to(caller, address):
            raise _no_function(address)
        return self.routed(address)

    def _is_open_to(self, caller: Principal, address: FunctionAddress) -> bool:
        """Return whether every revision that may answer is public, or shared with the caller's
        tenant."""
        name = _name_of(address)
        if (known := self._routed.get(name)) is not None:
            shared: Iterable[Iterable[str]] = [target.spec.access for target in known.answering]
        elif name in self.functions.access:
            shared = self.functions.access[name]
        else:
            return False
        names = {PUBLIC, caller.tenant_name} - {""}
        return all(not names.isdisjoint(access) for access in shared)

    def origins_of(self, address: FunctionAddress) -> frozenset[str]:
        """Return the origins whose pages may call a function; empty without `cors`. A public
        function's only, so the answer reveals no other."""
        return self.functions.origins.get(_name_of(address), frozenset())

    def routed(self, address: FunctionAddress) -> FunctionRouter:
        """Return the router of a function. Raises NotFound or Unavailable."""
        name = _name_of(address)
        return self._routed.get(name) or self._make_routed(name, address)

    def target(self, address: FunctionAddress, revision: str = "") -> CallTarget:
        """Return `revision` while it can be called, else one by weight. Raises NotFound or
        Unavailable."""
        return self.routed(address).any(revision)

    def _make_routed(self, name: str, address: FunctionAddress) -> FunctionRouter:
        route = self.functions.route(name)
        if route is None:
            raise _no_function(address)
        if route.stopped:
            raise errors.Unavailable(
                f"app {address.app!r} is stopped: deploy it again to start it", retry_after_s=30
            )
        routed = self._routed[name] = FunctionRouter(route, self.rates_of(route.tenant))
        return routed

    def targets_of(self, name: str) -> tuple[CallTarget, ...]:
        """Return the revisions of `<tenant>/<environment>/<app>/<function>` that can be called, or
        answer until those have an instance; empty when it was removed or stopped.

        They are not cached unless the function was called: thousands of functions that are only
        deployed must not stay parsed."""
        known = self._routed.get(name)
        if known is not None:
            return (
                *known.targets.values(),
                *(known.handover.held if known.handover is not None else ()),
            )
        route = self.functions.route(name)
        if route is None or route.stopped:
            return ()
        targets = FunctionRouter(route, self.rates_of(route.tenant)).targets
        previous = self._previous[name].targets if name in self._previous else {}
        return tuple({**previous, **targets}.values())

    def has_function(self, tenant: str, key: str) -> bool:
        """Whether the function of a revision's platform-wide key is the tenant's, and has a route
        here, be it to other revisions."""
        return self.functions.name_of(key).startswith(f"{tenant}/")

    def target_keyed(self, tenant: str, key: str) -> CallTarget | None:
        """Return the tenant's revision with that platform-wide key, while it can be called. Not for
        the hot path."""
        if not self.has_function(tenant, key):
            return None
        name = self.functions.name_of(key)
        return next((target for target in self.targets_of(name) if target.key == key), None)

    def previous_retention_s(self, name: str) -> float:
        """Return how long a revision that has just lost the function's traffic stays warm; 0 after
        a rollback, or when the function was removed."""
        route = self.functions.route(name)
        if route is None or route.stopped or document_of(route).at_once:
            return 0.0
        return max(
            (target.spec.rollout.keep_previous_s for target in self.targets_of(name)), default=0.0
        )

    def statistics(self) -> Mapping[str, int]:
        """Return sizes, for metrics."""
        return {
            "functions": len(self.functions),
            "keys": len(self._keys),
            "refused": self.refused,
            "version": self.version,
        }


_NO_QUOTAS = Quotas()


def _ignore(name: str, left: frozenset[str]) -> None:
    """Default of `on_function`."""


def _ignore_tenant(tenant: str) -> None:
    """Default of `on_tenant_deleted`."""


def _ignore_budget(budget: str, record: BudgetRecord | None) -> None:
    """Default of `on_budget`."""


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
        f"what is deployed",
        app=address.app,
        function=address.function,
    )


def _callable(route: FunctionRoute | None) -> frozenset[str]:
    """Return the keys of the revisions that can be called: by weight or by name."""
    if route is None or route.stopped:
        return frozenset()
    return frozenset(
        str(route.revisions[revision]["launch"]["revision"])
        for revision in document_of(route).named()
    )
