"""The quotas that apply to a call: those of the function's tenant, of the function, of the key, and
of the caller's own tenant (`access.grants` selects them).

`tenant` is always the caller's own tenant. A call to another tenant's function also falls under
that tenant's quotas, as `owner`. These are enforced, but not shown in headers or errors, because
they are confidential."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pilotlight.spec.quotas import MAX_COUNT, MAX_RATE, Quotas

Of = Literal["tenant", "owner", "function", "key", "customer", "address", "streams", "operations"]
"""Whose quotas. `streams`: the concurrent calls of one tenant to a language model
(`TokenLimits.max_streams_per_tenant`). `operations`: requests of a tenant or key about what runs
already (`operations_of`)."""

OPERATIONS_PER_REQUEST = 10
"""Operations that may be made in the time of one call: clients poll."""
LEAST_OPERATIONS_PER_S = 10.0
"""Fewer would not do to follow one call."""
DEFAULT_OPERATIONS_PER_S = 2000.0
"""Of a tenant without `requests_per_s`: a fraction of what an activator answers, so that other
tenants are answered, too."""
OPERATIONS_AT_ONCE = 16
"""Operations in progress for each concurrent call, since they may wait for news."""
OPERATION_BYTES = 64 * 1024
"""Bytes, of bodies and of answers, that count as one more operation."""

_SUBJECTS = {"owner": "tenant"}
"""A tenant has a single counter, as caller and as owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The quotas of one subject.

    Attributes:
        of: whose quotas these are, as seen by the caller.
        subject: id of the tenant or key, `<tenant>/<environment>/<app>/<function>`,
            `<tenant>/<customer>`, or a network address.
        quotas: the limits.
        tenant: id of the tenant for which refusals are counted; "" = none.
        is_shown: whether response headers may show the limits to the caller."""

    of: Of
    subject: str
    quotas: Quotas
    tenant: str
    is_shown: bool = True

    @property
    def counted_of(self) -> str:
        """Whose counter it uses: `of`, but a tenant's as caller and as owner is one."""
        return _SUBJECTS.get(self.of, self.of)

    @property
    def id(self) -> str:
        """Name of the counter: `tenant:t-…`, `function:…`, `key:k-…`, `address:…`."""
        return f"{self.counted_of}:{self.subject}"


Rules = tuple[Rule, ...]


def is_counted(quotas: Quotas) -> bool:
    """Whether a store must count something for these quotas. Other limits are checked elsewhere, or
    need no counter."""
    return not (
        quotas.requests_per_s is None
        and quotas.concurrent is None
        and quotas.tokens_per_min is None
    )


def operations_of(quotas: Quotas, default_per_s: float | None = None) -> Quotas:
    """The limits of requests to what runs or is stored already, for a tenant or key with these
    quotas. `default_per_s`: in a second, and ten times as many in a burst, where its calls have no
    limit; None = no limit either."""
    per_s, burst, concurrent = quotas.requests_per_s, quotas.burst, quotas.concurrent
    if per_s is not None:
        burst = int(max(quotas.depth, LEAST_OPERATIONS_PER_S) * OPERATIONS_PER_REQUEST)
        per_s = max(per_s * OPERATIONS_PER_REQUEST, LEAST_OPERATIONS_PER_S)
    elif default_per_s is not None:
        per_s, burst = default_per_s, int(10 * default_per_s)
    return Quotas(
        requests_per_s=None if per_s is None else min(per_s, MAX_RATE),
        burst=None if burst is None else min(burst, MAX_RATE),
        concurrent=None
        if concurrent is None
        else min(max(1, concurrent) * OPERATIONS_AT_ONCE, MAX_COUNT),
    )


def counted(rules: Rules) -> Rules:
    """The rules that a store must count."""
    return tuple(rule for rule in rules if is_counted(rule.quotas))


class TokenBound(NamedTuple):
    """The smallest bucket of tokens that a call must fit into.

    Attributes:
        of: whose quota it is.
        limit: size in tokens.
        is_shown: whether the caller may read the number."""

    of: str
    limit: int
    is_shown: bool
