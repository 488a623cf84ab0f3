"""Identifiers and small types shared by all parts of the platform."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NewType

from pilotlight.errors import InvalidInput

TenantId = NewType("TenantId", str)
"""`t-` and 12 hex digits."""
FunctionId = NewType("FunctionId", str)
"""`f-` and 16 hex digits: the hash of (tenant, environment, app, function), so it is stable for a
name."""

DEFAULT_ENVIRONMENT = "main"
MAX_NAME_LENGTH = 63
"""The limit of a DNS label (RFC 1035 §2.3.4), so that names can be part of host names and names of
Kubernetes objects."""

RUN_SUFFIX_LENGTH = 6
_RUN_MARK = "-run-"
_RUN_NAME = re.compile(rf"{_RUN_MARK}[0-9a-f]{{{RUN_SUFFIX_LENGTH}}}\Z")
MAX_CUSTOMER_LENGTH = 64
ANY_CUSTOMER = "*"
"""In place of an id: each customer that has nothing of its own."""
_CUSTOMER = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:@-]{{0,{MAX_CUSTOMER_LENGTH - 1}}}\Z")

_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?\Z")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it is a valid name for an app, function or environment.

    Valid are a letter, then letters, digits, `-` or `_`, at most 63 characters, not ending in `-`
    or `_`. Raises ValueError."""
    if len(name) > MAX_NAME_LENGTH or not _NAME.match(name):
        raise ValueError(
            f"{kind} name {name!r} is not valid: use 1 to {MAX_NAME_LENGTH} letters, digits, '-' "
            f"or '_', starting with a letter and ending with a letter or digit"
        )
    return name


def require_name(kind: str, name: str, *, parameter: str | None = None) -> str:
    """Return a valid `name` as `check_name` does. Raises InvalidInput; `parameter` is `kind`
    by default."""
    try:
        return check_name(kind, name)
    except ValueError as e:
        raise InvalidInput(str(e), parameter=parameter or kind) from e


def require_customer(text: str, *, parameter: str = "customer") -> str:
    """Return `text` if it is valid as the id of a tenant's customer: a letter or digit, then up to
    63 letters, digits or `.`, `_`, `-`, `:`, `@`. Raises InvalidInput."""
    if not _CUSTOMER.match(text):
        raise InvalidInput(
            f"{parameter} = {text[:80]!r}: use 1 to {MAX_CUSTOMER_LENGTH} letters, digits, '.', "
            f"'_', '-', ':' or '@', beginning with a letter or digit",
            parameter=parameter,
        )
    return text


class Scope(enum.StrEnum):
    """Permissions of an API key. ADMIN includes all; DEPLOY includes INVOKE and READ_BILLING; these
    two include no others."""

    ADMIN = "admin"
    DEPLOY = "deploy"
    INVOKE = "invoke"
    READ_BILLING = "read-billing"

    def reaches(self, demanded: Scope) -> bool:
        """Whether a key with this scope may do what requires scope `demanded`."""
        return self is demanded or demanded in _INCLUDED[self]


_INCLUDED: dict[Scope, frozenset[Scope]] = {
    Scope.ADMIN: frozenset(Scope),
    Scope.DEPLOY: frozenset({Scope.INVOKE, Scope.READ_BILLING}),
    Scope.INVOKE: frozenset(),
    Scope.READ_BILLING: frozenset(),
}


class Priority(enum.StrEnum):
    """Priority of a call in queues and load shedding: REALTIME before STANDARD before BATCH."""

    REALTIME = "realtime"
    STANDARD = "standard"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """0 for REALTIME, 2 for BATCH: lower ranks go first."""
        return _RANKS[self]

    def at_most(self, bound: Priority) -> Priority:
        """Return this priority, or `bound`, such as that of the plan, if that is lower."""
        return self if self.rank >= bound.rank else bound


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class Isolation(enum.StrEnum):
    """The machines of a tenant's instances: SHARED with others, with a RESERVED part of them, or
    DEDICATED to the tenant."""

    SHARED = "shared"
    RESERVED = "reserved"
    DEDICATED = "dedicated"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionAddress:
    """The address of a function: tenant and environment come from the key, the rest from the URL.

    `function` is the name of a function or class; `method` is empty for a plain function."""

    tenant: TenantId
    environment: str
    app: str
    function: str
    method: str = ""

    def __str__(self) -> str:
        dotted = f"{self.function}.{self.method}" if self.method else self.function
        return f"{self.app}/{dotted}"


def ephemeral_name(app: str, suffix: str) -> str:
    """Return the name of a temporary deployment of an app (`pilotlight run`):
    `hello-run-3f2a1c`."""
    keep = MAX_NAME_LENGTH - len(_RUN_MARK) - RUN_SUFFIX_LENGTH
    return f"{app[:keep]}{_RUN_MARK}{suffix}"


def without_run(app: str) -> str:
    """Return the name under which the figures of all temporary deployments of an app are added:
    `hello-run-*`; other names unchanged."""
    return _RUN_NAME.sub(f"{_RUN_MARK}*", app)


def parse_function_path(path: str) -> tuple[str, str, str]:
    """Split `app/function` or `app/Class.method` into (app, function, method). Raises
    ValueError."""
    app, slash, dotted = path.partition("/")
    function, _, method = dotted.partition(".")
    if not (app and slash and function):
        raise ValueError(
            f"{path!r} is not the address of a function: use app/function or app/Class.method"
        )
    return app, function, method
