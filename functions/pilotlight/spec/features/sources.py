"""Where a function's online features are read: keys of a Redis, made of the call's arguments.

A value of an argument is percent-encoded in a key but for letters, digits and `_ - . ~`, and two of
them are separated by something that is always encoded: no argument can make the key of another
entity."""

from __future__ import annotations

import re
import urllib.parse
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pilotlight.errors import InvalidInput
from pilotlight.spec.features.schema import FeatureSchema
from pilotlight.spec.policies import require_in_range

PARAMETER: Final = "features"
"""The function's parameter that gets online features."""
DEFAULT_URL_VARIABLE: Final = "FEATURES_REDIS_URL"
MAX_SOURCES: Final = 8
MAX_KEY_CHARS: Final = 256
MAX_VALUE_CHARS: Final = 256
"""Longest argument in a key."""
_FIELD: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SEPARATOR: Final = re.compile(r"[^A-Za-z0-9_.~%-]")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFeatures:
    """Features of one entity: a JSON object under one key of a Redis.

    Attributes:
        key: template of the key, such as `user:{user_id}`, with names of parameters.
        schema: the features, each with a default or nullable.
        url: name of the environment variable with the address: `redis://…`, `rediss://…` (TLS) or
            `unix://…`.
        deadline_ms: how long a call waits for it.
        max_age_s: greatest age of a value, by its `timestamp`; None = any.
        timestamp: member of the value with the time at which it was written: seconds since the
            epoch, or text as of RFC 3339.
    """

    key: str
    schema: FeatureSchema
    url: str = DEFAULT_URL_VARIABLE
    deadline_ms: float = 20.0
    max_age_s: float | None = None
    timestamp: str = "updated_at"

    def __post_init__(self) -> None:
        parts = _FIELD.split(self.key)
        rest = parts[::2]
        if not 1 <= len(self.key) <= MAX_KEY_CHARS or any(set(part) & {"{", "}"} for part in rest):
            raise _invalid(
                f"key = {self.key[:80]!r}: must have 1 to {MAX_KEY_CHARS} characters and names of "
                f"parameters in braces, such as 'user:{{user_id}}'"
            )
        if not self.fields or not all(map(_SEPARATOR.search, rest[1:-1])):
            raise _invalid(
                f"key = {self.key!r}: must have a parameter, and between two of them a separator "
                f"such as ':'"
            )
        if not _VARIABLE.match(self.url):
            raise _invalid(
                f"url = {self.url[:80]!r}: must be the name of an environment variable, which a "
                f"secret sets; the address itself is not written down"
            )
        require_in_range("deadline_ms", self.deadline_ms, 1, 1000)
        if self.max_age_s is not None:
            require_in_range("max_age", self.max_age_s, 1, 366 * 86_400)
        if missing := [one.name for one in self.schema.features if not one.has_default]:
            raise _invalid(
                f"{missing[0]} needs a default, or nullable=True: it is used when {self.key!r} "
                f"cannot be read"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the parameters in the key."""
        return tuple(_FIELD.findall(self.key))

    def key_of(self, **arguments: Any) -> str:
        """Return the key of an entity, under which its features are written:
        `source.key_of(user_id="ada")`. Raises InvalidInput."""
        return _FIELD.sub(lambda found: _encoded(found[1], arguments.get(found[1])), self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesSpec:
    """Features of a function's model.

    Attributes:
        arguments: those that callers send; None = not declared.
        online: those that are read when it is called.
    """

    arguments: FeatureSchema | None = None
    online: tuple[RedisFeatures, ...] = ()

    def __post_init__(self) -> None:
        if self.arguments is None and not self.online:
            raise _invalid("neither arguments nor online features: give a FeatureSchema or a Redis")
        if len(self.online) > MAX_SOURCES:
            raise _invalid(f"{len(self.online)} sources, at most {MAX_SOURCES}")
        _ = self.schema

    @property
    def schema(self) -> FeatureSchema:
        """All features: those of the arguments first."""
        given = () if self.arguments is None else (self.arguments,)
        return FeatureSchema.merge(*given, *(source.schema for source in self.online))


class Features(dict[str, Any]):
    """Online features of a call, by name.

    Attributes:
        degraded: name → why its value is the default: `missing`, `stale`, `invalid`, `deadline` or
            `unavailable`. Empty = all were read.
    """

    def __init__(
        self, values: Mapping[str, Any], *, degraded: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(values)
        self.degraded = dict(degraded or {})


def _encoded(name: str, value: Any) -> str:
    is_plain = isinstance(value, int | uuid.UUID) and not isinstance(value, bool)
    text = str(value) if is_plain else value
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_VALUE_CHARS:
        raise InvalidInput(
            f"{name}: must be text of 1 to {MAX_VALUE_CHARS} characters or a whole number: "
            f"features are read by it",
            parameter=name,
        )
    try:
        return urllib.parse.quote(text, safe="")
    except UnicodeEncodeError as e:
        raise InvalidInput(f"{name}: is no Unicode text", parameter=name) from e


def _invalid(text: str) -> InvalidInput:
    return InvalidInput(f"features: {text}", parameter="features")
