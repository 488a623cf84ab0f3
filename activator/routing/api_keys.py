"""API keys from the feed, and the functions that each may access.

Owner: the event loop, through `RouteTable`. The secret of a key is not stored here, only its hash
and headers that were validated before."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from pilotlight import errors
from pilotlight.protocol import KeyRecord
from pilotlight.spec.bound import is_bound_of
from pilotlight.spec.identifiers import Scope
from pilotlight.spec.quotas import Quotas, parse_quotas

SCHEDULER = "scheduler"
"""Key id of scheduled calls in the journal and in usage records."""


class Principal:
    """A caller: its key's tenant, scope and reach, or an anonymous caller of a public function.
    Immutable.

    Attributes:
        key_id, tenant, tenant_name: "" for a caller without a key.
        environment, app, function: the only one that the key may access; None = all.
        quotas: quotas of this key.
        customer: the customer for which all of its calls are made; "" = its holder may name any.
    """

    __slots__ = (
        "app",
        "customer",
        "environment",
        "expires_at",
        "function",
        "key_id",
        "quotas",
        "scope",
        "tenant",
        "tenant_name",
    )

    def __init__(self, record: KeyRecord, *, tenant_name: str = "") -> None:
        """Raises ValueError for an unknown scope or quota."""
        self.key_id = record.id
        self.tenant = record.tenant
        self.tenant_name = tenant_name
        self.scope = Scope(record.scope)
        self.environment = record.environment
        self.app = record.app
        self.function = record.function
        self.expires_at = record.expires_at
        self.quotas: Quotas = parse_quotas(record.quotas)
        self.customer = record.customer or ""

    def __repr__(self) -> str:
        return f"<Principal {self.key_id or 'anonymous'} {self.scope}>"

    @property
    def is_anonymous(self) -> bool:
        """Whether the caller has no key."""
        return not self.key_id

    @property
    def may_send_pickles(self) -> bool:
        """Whether its calls of functions of its tenant may be pickles."""
        return not self.is_anonymous

    @property
    def may_name_customers(self) -> bool:
        """Whether its calls may name a customer."""
        return not self.is_anonymous

    def require_key(self) -> None:
        """Raise Forbidden for a caller that has a token of an issuer instead of a key."""

    def check_reach(self, *, environment: str, app: str, function: str) -> None:
        """Raise Forbidden when the key may not access this function, whether or not the function
        exists."""
        if self.environment is not None and environment != self.environment:
            raise errors.Forbidden(f"this API key is for environment {self.environment!r} only")
        if self.app is not None and app != self.app:
            raise errors.Forbidden(f"this API key is for {self._reach} only")
        if self.function is not None and not _is_or_is_bound_of(function, self.function):
            raise errors.Forbidden(f"this API key is for {self._reach} only")

    @property
    def _reach(self) -> str:
        return (
            f"function {self.app}/{self.function}"
            if self.function is not None
            else f"app {self.app!r}"
        )

    def check_may_call(self) -> None:
        """Raise Forbidden for a key that may only read."""
        if not self.scope.reaches(Scope.INVOKE):
            raise errors.Forbidden(
                f"this API key has scope {self.scope.value!r}: calling functions needs 'invoke'"
            )


def _is_or_is_bound_of(function: str, base: str) -> bool:
    return function == base or is_bound_of(function, base)


FUNCTION_KEY = "function:"
"""Begin of the key ids of functions that call others,
`function:<tenant>/<environment>/<app>/<function>`: in journals and usage records. Ids of API keys
have no colon."""


class FunctionPrincipal(Principal):
    """A function that calls others: it may call all functions of its tenant and environment, and
    read the results of calls that functions of its app submitted.

    Attributes:
        calling_app: its app."""

    __slots__ = ("calling_app",)

    def __init__(self, key_id: str) -> None:
        """`key_id`: of the form of FUNCTION_KEY. Raises ValueError."""
        tenant, environment, app, _ = key_id.removeprefix(FUNCTION_KEY).split("/")
        super().__init__(
            KeyRecord(
                id=key_id,
                hash="",
                tenant=tenant,
                scope=Scope.INVOKE.value,
                environment=environment,
            )
        )
        self.calling_app = app


TOKEN_KEY = "token:"
"""Begin of the key ids of callers with a token of an issuer, `token:<issuer>:<hash>`: in journals
and usage records."""


class TokenPrincipal(Principal):
    """A caller with a token of one of the operator's issuers. It makes calls that wait for their
    answer, with JSON; it names no customer but its own."""

    __slots__ = ()

    @property
    def may_send_pickles(self) -> bool:
        """Never: a pickle runs code in the tenant's workers."""
        return False

    @property
    def may_name_customers(self) -> bool:
        """Only the one that its token names."""
        return bool(self.customer)

    def require_key(self) -> None:
        """Raise Forbidden: its token may have expired when the answer is there, and what is not a
        call is the tenant's."""
        raise errors.Forbidden(
            "a token of an issuer calls functions and waits for their answers: use an API key for "
            "anything else"
        )


class TokenVerifier(Protocol):
    """Verifies tokens, and finds the callers of verified ones (`activator.tokens`)."""

    async def verify(self, authorization: bytes, address: str) -> None:
        """Verify the token of a header, if it has one that is not verified yet. Raises
        Unauthenticated, TooManyRequests, Unavailable."""

    def cached_caller(self, authorization: bytes) -> TokenPrincipal | None:
        """Return the caller of a header whose token was verified, and is still valid."""

    def caller_of(self, key_id: str) -> TokenPrincipal | None:
        """Return the caller with this id, whose token was verified lately."""


def token_in(authorization: bytes) -> bytes:
    """Return the token in an Authorization header, which may be anybody's; b"" where it has an API
    key, or nothing."""
    scheme, _, token = authorization.partition(b" ")
    is_token = token.startswith(_JWT) and token.count(b".") == 2 and scheme.lower() == b"bearer"
    return token if is_token else b""


_JWT = b"ey"
"""How a JSON object in base64url begins; no API key does."""

ANONYMOUS = Principal(KeyRecord(id="", hash="", tenant="", scope=Scope.INVOKE.value))
"""A caller without a key: it reaches public functions."""


def unknown_key() -> errors.Unauthenticated:
    """Return the error for a key that is unknown or was revoked, or whose tenant was deleted."""
    return errors.Unauthenticated("this API key is not valid: it is wrong, or was revoked")


MAX_KEY_BYTES = 1024
"""Longest key that is hashed: valid keys are far shorter, and this bounds the cost of a lookup."""
_AS_WRITTEN = (b"Bearer ", b"bearer ")
_SCHEME_BYTES = 7


class ApiKeyIndex:
    """Keys by their hash, and callers by their validated Authorization header."""

    def __init__(self) -> None:
        self._records: dict[str, KeyRecord] = {}
        self._by_hash: dict[str, KeyRecord] = {}
        self._by_token: dict[bytes, Principal] = {}
        self._tokens: dict[str, set[bytes]] = {}
        """By key: its few headers in `_by_token`."""

    def __repr__(self) -> str:
        return f"<ApiKeyIndex {len(self._records)}, {len(self._by_token)} in use>"

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, key_id: str, value: Any) -> None:
        """Apply a key document; None = revoked. Raises TypeError or ValueError, without changes."""
        record = KeyRecord(**value) if value is not None else None
        if record is not None:
            Principal(record)  # validates it
        old = self._records.pop(key_id, None)
        if old is not None:
            self._by_hash.pop(old.hash, None)
            self._evict(key_id)
        if record is not None:
            self._records[key_id] = record
            self._by_hash[record.hash] = record

    def evict_callers(self, tenant: str) -> None:
        """Drop the cached callers of a tenant, because its data has changed."""
        for key_id in {
            caller.key_id for caller in self._by_token.values() if caller.tenant == tenant
        }:
            self._evict(key_id)

    def _evict(self, key_id: str) -> None:
        for authorization in self._tokens.pop(key_id, ()):
            del self._by_token[authorization]

    def clear(self) -> None:
        """Remove all keys."""
        self._records.clear()
        self._by_hash.clear()
        self._by_token.clear()
        self._tokens.clear()

    def is_known(self, authorization: bytes) -> bool:
        """Return whether this header was validated before, so that no lookup is needed."""
        return authorization in self._by_token

    def record(self, key_id: str) -> KeyRecord | None:
        """Return a key by its id."""
        return self._records.get(key_id)

    def cached_caller(self, authorization: bytes) -> Principal | None:
        """Return the caller of this header, if it was validated before."""
        return self._by_token.get(authorization)

    def validate(self, authorization: bytes) -> KeyRecord:
        """Return the key in an Authorization header. Raises Unauthenticated, without saying which
        part is wrong."""
        scheme, _, token = authorization.partition(b" ")
        if not token or scheme.lower() != b"bearer":
            raise errors.Unauthenticated(
                "no API key: send the header 'Authorization: Bearer <key>'"
            )
        token = token.strip()
        record = (
            self._by_hash.get(hashlib.sha256(token).hexdigest())
            if len(token) <= MAX_KEY_BYTES
            else None
        )
        if record is None:
            raise unknown_key()
        return record

    def cache_caller(self, authorization: bytes, caller: Principal) -> None:
        """Cache the caller of a header until its key changes. Only the canonical spelling is
        cached, because one key can be written in many ways."""
        if (
            authorization.startswith(_AS_WRITTEN)
            and authorization[_SCHEME_BYTES:].strip() == authorization[_SCHEME_BYTES:]
        ):
            self._by_token[authorization] = caller
            self._tokens.setdefault(caller.key_id, set()).add(authorization)
