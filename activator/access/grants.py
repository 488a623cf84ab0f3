"""Access grants: the quotas, priorities and limits of a caller at a revision, computed ahead of
calls.

Creating a grant costs some tens of microseconds, once for each caller and revision; using it costs
what the quota store costs."""

from __future__ import annotations

from dataclasses import replace

from activator.calls.caller import Caller
from activator.fairness.queue_priority import QueueBound, QueuePriority
from activator.http.payloads import (
    CONTENT_TYPE,
    JSON,
    PICKLE,
    accepts_pickles,
    checked_type,
    payload_type,
)
from activator.http.trusted_proxies import network_of
from activator.quotas.admission import Admission, admit
from activator.quotas.rules import (
    DEFAULT_OPERATIONS_PER_S,
    Rule,
    Rules,
    TokenBound,
    operations_of,
)
from activator.quotas.store_protocol import QuotaCheck, QuotaStore
from activator.routing.api_keys import Principal
from activator.routing.call_origin import CallOrigin
from activator.routing.call_target import CallTarget
from activator.routing.route_table import RouteTable
from activator.routing.tenants import priority_of
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.protocol import HEADER_CUSTOMER, HEADER_PRIORITY, TENANT_PATH
from pilotlight.spec.identifiers import Priority, require_customer
from pilotlight.spec.quotas import MAX_RATE, Quotas

MAX_ENTRIES = 16_384
"""Most cached entries; each is small, but a flood of keys must not fill the memory."""


class AccessGrant:
    """Access of one caller to one revision. Immutable.

    Attributes:
        calling_tenant: the caller's tenant where it is not the function's own, else ""; "" for an
            anonymous caller, too.
        accepts_pickle: whether its calls may be pickles: the caller has a key of the function's own
            tenant.
        quota_check: quotas that its calls must pass; None = nothing is counted.
        body_bytes: the largest body.
        raw_body_bytes: the same for raw HTTP, which only quotas limit; None = no limit.
        callers: of its calls, by the `Pilotlight-Priority` header; None = without the header.
        token_bound: the smallest token bucket that its calls must fit into; None = tokens are not
            counted.
    """

    __slots__ = (
        "accepts_pickle",
        "body_bytes",
        "caller",
        "callers",
        "calling_tenant",
        "quota_check",
        "raw_body_bytes",
        "target",
        "token_bound",
    )

    def __init__(
        self,
        caller: Principal,
        target: CallTarget,
        *,
        rules: Rules,
        store: QuotaStore,
        max_body_bytes: int,
        ranks: dict[bytes | None, QueuePriority],
    ) -> None:
        self.caller = caller
        self.target = target
        self.calling_tenant = caller.tenant if caller.tenant != target.tenant else ""
        self.accepts_pickle = caller.may_send_pickles and accepts_pickles(
            caller.tenant, target.tenant
        )
        self.quota_check = store.quota_check(rules) if rules else None
        self.raw_body_bytes = body_bytes_of(rules, None)
        self.body_bytes = body_bytes_of(rules, max_body_bytes) or 0
        self.callers = {
            asked: Caller(
                key_id=caller.key_id,
                tenant=self.calling_tenant,
                rank=rank,
                accepts_pickle=self.accepts_pickle,
                # ids of customers are the owner's, which a caller of another tenant cannot name
                customer="" if self.calling_tenant else caller.customer,
            )
            for asked, rank in ranks.items()
        }
        self.token_bound = token_bound_of(rules)

    def __repr__(self) -> str:
        return f"<AccessGrant {self.caller!r} {self.target!r} {self.quota_check!r}>"

    async def admit(self, *, holds: int = 1, tokens: int = 0) -> Admission:
        """Admit one call. Raises OverQuota, Unavailable."""
        return await admit(self.quota_check, holds=holds, tokens=tokens)

    def content_type(self, headers: dict[bytes, bytes]) -> bytes:
        """Return the type of a call's body, `payloads.JSON` or `payloads.PICKLE`. Raises
        UnsupportedMediaType for a pickle that is not accepted here."""
        if self.target.spec.sandbox and payload_type(headers.get(CONTENT_TYPE)) is PICKLE:
            # its response would be opened as one, and its code is not the tenant's
            raise errors.UnsupportedMediaType(
                f"a sandbox is created with JSON: send its arguments as {JSON.decode()}",
                parameter="content-type",
            )
        return checked_type(headers.get(CONTENT_TYPE), accepts=self.accepts_pickle)

    def caller_of(self, headers: dict[bytes, bytes], origin: CallOrigin | None = None) -> Caller:
        """Return the caller of a call, which the call of a function makes where `origin` is given.
        Raises InvalidInput for an unknown priority or an invalid customer, Forbidden for a customer
        that the caller may not name."""
        asked = headers.get(_PRIORITY)
        caller = self.callers.get(asked.lower() if asked is not None else None)
        if caller is None:
            raise errors.InvalidInput(
                f"header {HEADER_PRIORITY}: must be one of {', '.join(Priority)}",
                parameter=HEADER_PRIORITY,
            )
        if CUSTOMER in headers:
            caller = replace(caller, customer=self.customer_of(headers))
        return caller if origin is None else replace(caller, origin=origin)

    def customer_of(self, headers: dict[bytes, bytes]) -> str:
        """Return the customer of a call: the one that it names, else its key's; "" = neither.
        Raises InvalidInput, Forbidden."""
        own = self.callers[None].customer
        named = headers.get(CUSTOMER)
        if named is None:
            return own
        if not self.caller.may_name_customers or self.calling_tenant:
            raise errors.Forbidden(
                f"header {HEADER_CUSTOMER}: customers are those of the function's tenant, and only "
                f"its own keys may name them: omit the header"
            )
        customer = require_customer(named.decode("latin-1"), parameter=HEADER_CUSTOMER)
        if own not in ("", customer):
            raise errors.Forbidden(
                f"header {HEADER_CUSTOMER}: this API key is for customer {own!r} only"
            )
        return customer


CUSTOMER = HEADER_CUSTOMER.encode()
_PRIORITY = HEADER_PRIORITY.encode()


class AccessCache:
    """Creates access grants, and caches them until the route table changes. Owner: the event
    loop."""

    def __init__(
        self, *, table: RouteTable, store: QuotaStore, settings: ActivatorSettings
    ) -> None:
        self._table = table
        self.store = store
        self._settings = settings
        self._entries: dict[tuple[str, CallTarget, str], AccessGrant] = {}
        self._quota_checks: dict[str, tuple[QuotaCheck | None, int]] = {}
        self._operation_checks: dict[str, QuotaCheck | None] = {}
        self._made_at = -1

    def __repr__(self) -> str:
        return f"<AccessCache {len(self._entries)} entries, {self.store!r}>"

    def entry(
        self, caller: Principal, target: CallTarget, address: str = "", customer: str = ""
    ) -> AccessGrant:
        """Return the grant of this caller, at `address`, for this revision, and for a customer of
        its tenant. Raises Forbidden when either tenant is suspended, or by scope."""
        self._evict_outdated()
        if customer and not self.has_quotas(target, customer):
            customer = ""
        entry = self._entries.get((caller.key_id, target, customer))
        if entry is None:
            entry = self._make(caller, target, address, customer)
            if not caller.is_anonymous:  # anonymous callers have a grant per address
                self._entries[caller.key_id, target, customer] = entry
        return entry

    def has_quotas(self, target: CallTarget, customer: str) -> bool:
        """Whether calls for this customer of the function's tenant have quotas of their own."""
        return not self._table.customer_quotas(target.tenant, customer).is_empty

    def before(self, caller: Principal, address: str) -> tuple[QuotaCheck | None, int]:
        """Return the quotas and the body limit of a request whose function is not known yet, by its
        caller alone."""
        self._evict_outdated()
        known = self._quota_checks.get(caller.key_id)
        if known is None:
            if caller.is_anonymous:
                rules: Rules = (
                    Rule(
                        of="address",
                        subject=network_of(address),
                        quotas=self._of_unauthenticated(),
                        tenant="",
                    ),
                )
            else:
                plan = self._table.plan_of(caller.tenant).quotas()
                rules = (
                    Rule(of="tenant", subject=caller.tenant, quotas=plan, tenant=caller.tenant),
                    Rule(
                        of="key", subject=caller.key_id, quotas=caller.quotas, tenant=caller.tenant
                    ),
                )
            rules = tuple(rule for rule in rules if not rule.quotas.is_empty)
            known = (
                self.store.quota_check(rules),
                body_bytes_of(rules, self._settings.max_body_bytes) or 0,
            )
            if not caller.is_anonymous:
                self._quota_checks[caller.key_id] = known
        return known

    def operations(self, caller: Principal) -> QuotaCheck | None:
        """Return the quotas of requests to sandboxes, about submitted calls, and to volumes, dicts
        and queues; None = they have none."""
        self._evict_outdated()
        if caller.key_id not in self._operation_checks:
            plan = self._table.plan_of(caller.tenant).quotas()
            self._operation_checks[caller.key_id] = self.store.quota_check(
                tuple(
                    Rule(
                        of="operations",
                        subject=subject,
                        quotas=operations_of(quotas, default_per_s),
                        tenant=caller.tenant,
                    )
                    for subject, quotas, default_per_s in (
                        (caller.tenant, plan, DEFAULT_OPERATIONS_PER_S),
                        (caller.key_id, caller.quotas, None),
                    )
                )
            )
        return self._operation_checks[caller.key_id]

    def _evict_outdated(self) -> None:
        if (
            self._made_at != self._table.generation
            or max(len(self._entries), len(self._quota_checks), len(self._operation_checks))
            >= MAX_ENTRIES
        ):
            self._entries.clear()
            self._quota_checks.clear()
            self._operation_checks.clear()
            self._made_at = self._table.generation

    def _make(
        self, caller: Principal, target: CallTarget, address: str, customer: str
    ) -> AccessGrant:
        caller.check_may_call()
        self.check_not_suspended(caller.tenant, target.tenant)
        rules = self._rules(caller, target, address)
        if customer:
            own = Rule(
                of="customer",
                subject=f"{target.tenant}/{customer}",
                quotas=self._table.customer_quotas(target.tenant, customer),
                tenant=target.tenant,
            )
            rules = (*rules, own)
        return AccessGrant(
            caller,
            target,
            rules=rules,
            store=self.store,
            max_body_bytes=self._settings.max_body_bytes,
            ranks=self._ranks(caller, target, rules),
        )

    def check_not_suspended(self, *tenants: str) -> None:
        """Raise Forbidden when one of the tenants is suspended."""
        for tenant in tenants:
            if self._table.tenants.is_suspended(tenant):
                raise errors.Forbidden(
                    f"tenant {self._table.tenant_name(tenant)!r} is suspended: ask the platform's "
                    f"operator"
                )

    def _rules(self, caller: Principal, target: CallTarget, address: str) -> Rules:
        table, owner, address = self._table, target.tenant, network_of(address)
        is_foreign = caller.tenant != owner
        rules = [
            Rule(
                of="owner" if is_foreign else "tenant",
                subject=owner,
                quotas=table.plan_of(owner).quotas(),
                tenant=owner,
                is_shown=not is_foreign,
            ),
            Rule(
                of="function",
                subject=target.name,
                quotas=table.quotas_of(target.name),
                tenant=owner,
            ),
        ]
        if is_foreign and caller.tenant:
            rules.append(
                Rule(
                    of="tenant",
                    subject=caller.tenant,
                    quotas=table.plan_of(caller.tenant).quotas(),
                    tenant=caller.tenant,
                )
            )
        if caller.is_anonymous:
            rules.append(
                Rule(of="address", subject=address, quotas=self._of_unauthenticated(), tenant="")
            )
        else:
            rules.append(
                Rule(of="key", subject=caller.key_id, quotas=caller.quotas, tenant=caller.tenant)
            )
        limits = target.spec.limits
        if limits is not None and limits.max_streams_per_tenant is not None:
            streams = Quotas(concurrent=limits.max_streams_per_tenant)
            rules.append(
                Rule(
                    of="streams",
                    subject=f"{target.name}@{caller.tenant or address}",
                    quotas=streams,
                    tenant=owner,
                )
            )
        return tuple(rule for rule in rules if not rule.quotas.is_empty)

    def _of_unauthenticated(self) -> Quotas:
        per_s = min(max(self._settings.unauthenticated_per_s, 0.001), MAX_RATE / 2)
        return Quotas(requests_per_s=per_s, burst=max(1, int(2 * per_s)))

    def _ranks(
        self, caller: Principal, target: CallTarget, rules: Rules
    ) -> dict[bytes | None, QueuePriority]:
        """Return the ranks by priority header. A foreign caller queues with the weight of its own
        tenant, and gets the lower priority of both plans."""
        own = self._table.plan_of(caller.tenant)
        plans = (
            (own,) if caller.tenant == target.tenant else (own, self._table.plan_of(target.tenant))
        )
        queued = queue_bounds_of(rules)
        return {
            asked.value.encode() if asked is not None else None: QueuePriority(
                priority=priority_of(asked, target.spec.priority, *plans),
                tenant=caller.tenant,
                weight=own.weight,
                queued=queued,
            )
            for asked in (None, *Priority)
        }


def parse_tenant_prefix(path: str) -> tuple[str | None, str]:
    """Split `/t/{tenant}/rest` into the tenant's name and `/rest`; None and the path where it names
    no tenant."""
    if not path.startswith(TENANT_PATH):
        return None, path
    name, slash, rest = path[len(TENANT_PATH) :].partition("/")
    return name, slash + rest


def split_function(name: str) -> tuple[str | None, str]:
    """Split `t/{tenant}/{app}/{function}` into the tenant's name and the rest; None and the name
    where it names no tenant."""
    parts = name.split("/", 2)
    is_theirs = len(parts) == 3 and parts[0] == TENANT_PATH.strip("/")
    return (parts[1], parts[2]) if is_theirs else (None, name)


def token_bound_of(rules: Rules) -> TokenBound | None:
    """The smallest token quota among the rules; None = none."""
    bounds = [
        TokenBound(rule.of, rule.quotas.tokens_per_min, rule.is_shown)
        for rule in rules
        if rule.quotas.tokens_per_min is not None
    ]
    return min(bounds, key=lambda bound: bound.limit, default=None)


def body_bytes_of(rules: Rules, limit_bytes: int | None) -> int | None:
    """The smallest limit on a body, of all rules and `limit_bytes`; None = none."""
    bounds = [rule.quotas.body_bytes for rule in rules if rule.quotas.body_bytes is not None]
    if limit_bytes is not None:
        bounds.append(limit_bytes)
    return min(bounds, default=None)


def queue_bounds_of(rules: Rules) -> tuple[QueueBound, ...]:
    """Every `queued` quota among the rules."""
    return tuple(
        QueueBound(of=rule.counted_of, subject=rule.subject, limit=rule.quotas.queued)
        for rule in rules
        if rule.quotas.queued is not None
    )
