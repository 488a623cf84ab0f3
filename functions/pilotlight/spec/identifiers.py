"""Identifiers and small nouns that every part of the platform shares. Standard library only."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NewType

TenantId = NewType("TenantId", str)
"""`t-` and 12 hex digits."""
FunctionId = NewType("FunctionId", str)
"""`f-` and 16 hex digits: the hash of (tenant, environment, app, function), so it never changes for
a name."""
RevisionName = NewType("RevisionName", str)
"""`v7-3f2a1c`: ordinal and the first hex digits of the content hash."""
KeyId = NewType("KeyId", str)
"""`k-` and 12 hex digits: names an API key without revealing it."""
CallId = NewType("CallId", str)
"""`req-` and 32 hex digits, sortable by time; the X-Request-Id of a call unless the caller chose
one."""

DEFAULT_ENVIRONMENT = "main"
MAX_NAME_LENGTH = 63
"""A DNS label's bound (RFC 1035 §2.3.4), so that any name can become part of a host or a Kubernetes
object."""

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?\Z")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may name an app, a function or an environment.

    Raises ValueError that says what is allowed: a letter, then letters, digits, `-` or `_`, at most
    63, not ending in `-` or `_`."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.match(name):
        raise ValueError(
            f"{kind} name {name!r} is not valid: use 1 to {MAX_NAME_LENGTH} letters, digits, '-' "
            f"or '_', "
            "starting with a letter and ending with a letter or digit"
        )
    return name


class Scope(enum.StrEnum):
    """What an API key may do. ADMIN includes all; DEPLOY includes INVOKE and READ_BILLING; these
    two include nothing."""

    ADMIN = "admin"
    DEPLOY = "deploy"
    INVOKE = "invoke"
    READ_BILLING = "read-billing"

    def reaches(self, demanded: Scope) -> bool:
        """Whether a key of this scope may do what needs `demanded`."""
        return self is demanded or demanded in _INCLUDED[self]


_INCLUDED: dict[Scope, frozenset[Scope]] = {
    Scope.ADMIN: frozenset(Scope),
    Scope.DEPLOY: frozenset({Scope.INVOKE, Scope.READ_BILLING}),
    Scope.INVOKE: frozenset(),
    Scope.READ_BILLING: frozenset(),
}


class Priority(enum.StrEnum):
    """Whose call waits less, and whose is shed first, when there is not enough for all: REALTIME
    before STANDARD before BATCH."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 for REALTIME, 2 for BATCH: the lower goes first."""
        return _RANKS[self]

    def at_most(self, bound: Priority) -> Priority:
        """This one, or `bound` where that is lower: nobody gets more than the plan allows."""
        return self if self.rank >= bound.rank else bound


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class Isolation(enum.StrEnum):
    """Whose machines a tenant's instances run on: SHARED with others, with a RESERVED part of them,
    or DEDICATED to the tenant."""

    SHARED = "shared"
    RESERVED = "reserved"
    DEDICATED = "dedicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionAddress:
    """Where a function is found: tenant and environment come from the key, the rest from the URL.

    `function` names what is deployed (a function or a class); `method` is empty for a plain
    function."""

    tenant: TenantId
    environment: str
    app: str
    function: str
    method: str = ""

    def __str__(self) -> str:
        dotted = f"{self.function}.{self.method}" if self.method else self.function
        return f"{self.app}/{dotted}"


def parse_function_path(path: str) -> tuple[str, str, str]:
    """Split `app/function` or `app/Class.method` into (app, function, method). Raises
    ValueError."""
    app, slash, dotted = path.partition("/")
    function, _, method = dotted.partition(".")
    if not (app and slash and function):
        raise ValueError(
            f"{path!r} is not a function's address: write app/function or app/Class.method"
        )
    return app, function, method
