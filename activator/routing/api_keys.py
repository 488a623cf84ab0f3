"""Who is calling: API keys as the feed tells them, and how far each one reaches.

Owner: the event loop, through `RouteTable`. A key's secret is never here: only its hash, and
headers that were found valid before."""

from __future__ import annotations

import hashlib
from typing import Any

from pilotlight import errors
from pilotlight.protocol import KeyRecord
from pilotlight.quotas import Quotas, parse_quotas
from pilotlight.types import Scope


class Principal:
    """A key's tenant, scope and reach; or nobody in particular, at a public function. Immutable.

    Attributes:
        key_id, tenant, tenant_name: "" of a caller without a key.
        environment, app, function: the only one that the key reaches; None = all.
        quotas: of this key alone.
    """

    __slots__ = (
        "app",
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
        """Raises ValueError for a scope or a quota that there is not."""
        self.key_id = record.id
        self.tenant = record.tenant
        self.tenant_name = tenant_name
        self.scope = Scope(record.scope)
        self.environment = record.environment
        self.app = record.app
        self.function = record.function
        self.expires_at = record.expires_at
        self.quotas: Quotas = parse_quotas(record.quotas)

    def __repr__(self) -> str:
        return f"<Caller {self.key_id or 'anonymous'} {self.scope}>"

    @property
    def is_anonymous(self) -> bool:
        """Whether there was no key."""
        return not self.key_id

    def check_reach(self, *, environment: str, app: str, function: str) -> None:
        """Raises Forbidden, naming what the key is for, when it does not reach this function;
        whether that exists is another question."""
        if self.environment is not None and environment != self.environment:
            raise errors.Forbidden(f"this API key is for environment {self.environment!r} only")
        if self.app is not None and app != self.app:
            raise errors.Forbidden(f"this API key is for {self._reach} only")
        if self.function is not None and function != self.function:
            raise errors.Forbidden(f"this API key is for {self._reach} only")

    @property
    def _reach(self) -> str:
        return (
            f"function {self.app}/{self.function}"
            if self.function is not None
            else f"app {self.app!r}"
        )

    def check_may_call(self) -> None:
        """Raises Forbidden for a key that may only read."""
        if not self.scope.reaches(Scope.INVOKE):
            raise errors.Forbidden(
                f"this API key has scope {self.scope.value!r}: calling functions needs 'invoke'"
            )


ANONYMOUS = Principal(KeyRecord(id="", hash="", tenant="", scope=Scope.INVOKE.value))
"""A caller without a key: it reaches public functions."""


MAX_KEY_BYTES = 1024
"""Ours are far shorter; what is longer is not hashed, so that a look-up costs the same whatever
came."""
_AS_WRITTEN = (b"Bearer ", b"bearer ")
_SCHEME_BYTES = 7


class ApiKeyIndex:
    """Keys by their hash, and callers by the header that proved to be theirs."""

    def __init__(self) -> None:
        self._records: dict[str, KeyRecord] = {}
        self._by_hash: dict[str, KeyRecord] = {}
        self._by_token: dict[bytes, Principal] = {}
        self._tokens: dict[str, set[bytes]] = {}
        """By key: its headers in `_by_token`, which are few."""

    def __repr__(self) -> str:
        return f"<ApiKeyIndex {len(self._records)}, {len(self._by_token)} in use>"

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, key_id: str, value: Any) -> None:
        """Take in a document; None = revoked. Raises TypeError or ValueError, and has changed
        nothing then."""
        record = KeyRecord(**value) if value is not None else None
        if record is not None:
            Principal(record)  # refuses a broken one
        old = self._records.pop(key_id, None)
        if old is not None:
            self._by_hash.pop(old.hash, None)
            self._forget(key_id)
        if record is not None:
            self._records[key_id] = record
            self._by_hash[record.hash] = record

    def forget_proofs(self, tenant: str) -> None:
        """Look this tenant's keys up again: something that its callers were made of has changed."""
        for key_id in {
            caller.key_id for caller in self._by_token.values() if caller.tenant == tenant
        }:
            self._forget(key_id)

    def _forget(self, key_id: str) -> None:
        for authorization in self._tokens.pop(key_id, ()):
            del self._by_token[authorization]

    def clear(self) -> None:
        """Forget all."""
        self._records.clear()
        self._by_hash.clear()
        self._by_token.clear()
        self._tokens.clear()

    def is_known(self, authorization: bytes) -> bool:
        """Whether this header was found valid before, so that no look-up is needed."""
        return authorization in self._by_token

    def record(self, key_id: str) -> KeyRecord | None:
        """A key by its id."""
        return self._records.get(key_id)

    def proven(self, authorization: bytes) -> Principal | None:
        """Whose header this is, if it was found valid before."""
        return self._by_token.get(authorization)

    def prove(self, authorization: bytes) -> KeyRecord:
        """The key in an Authorization header. Raises Unauthenticated, never saying which part was
        wrong."""
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
            raise errors.Unauthenticated("this API key is not valid: it is wrong, or was revoked")
        return record

    def remember(self, authorization: bytes, caller: Principal) -> None:
        """This header is this caller's, until its key changes. Written as it should be only: there
        are endless ways to write one key."""
        if (
            authorization.startswith(_AS_WRITTEN)
            and authorization[_SCHEME_BYTES:].strip() == authorization[_SCHEME_BYTES:]
        ):
            self._by_token[authorization] = caller
            self._tokens.setdefault(caller.key_id, set()).add(authorization)
