"""`FeatureSchema`: names, types and ranges of a model's features, with a hash by which training and
serving agree. Standard library only: training code and workers import it."""

from __future__ import annotations

import builtins
import enum
import hashlib
import math
import numbers
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pilotlight.errors import InvalidInput
from pilotlight.spec.record_json import canonical_json, from_json, to_json

MAX_FEATURES: Final = 256
MAX_TEXT_CHARS: Final = 1024
MAX_ITEMS: Final = 8192
MAX_VERSION_CHARS: Final = 256
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_FORMAT: Final = 1
"""Of what is hashed."""


class FeatureType(enum.StrEnum):
    """Type of a feature: a Python type. LIST: of numbers, such as an embedding."""

    INT = "int"
    FLOAT = "float"
    BOOL = "bool"
    STR = "str"
    LIST = "list"


_PYTHON_TYPES: Final[dict[Any, FeatureType]] = {
    kind: FeatureType(kind.__name__) for kind in (int, float, bool, str, list)
}
_NUMBERS: Final = frozenset({FeatureType.INT, FeatureType.FLOAT, FeatureType.LIST})


@dataclass(frozen=True, slots=True, init=False)
class Feature:
    """A feature: `Feature(float, default=0.0, low=0.0, high=1.0)`.

    Attributes:
        type: `int`, `float`, `bool`, `str` or `list` (of numbers).
        default: used where an online feature cannot be read; None = none, or, of a `nullable`
            feature, None itself. Not part of the hash.
        low, high: least and greatest value, also of each item of a list; None = no bound.
        size: number of items of a list; None = any, up to 8,192.
        nullable: whether None is a value: the feature is unknown.
        name: set by the schema.
    """

    type: FeatureType
    default: Any = None
    low: float | None = None
    high: float | None = None
    size: int | None = None
    nullable: bool = False
    name: str = ""

    def __init__(
        self,
        type: builtins.type | FeatureType,
        *,
        default: Any = None,
        low: float | None = None,
        high: float | None = None,
        size: int | None = None,
        nullable: bool = False,
        name: str = "",
    ) -> None:
        """Raises InvalidInput."""
        kind = _PYTHON_TYPES.get(type, type)
        if kind not in list(FeatureType):
            raise _invalid(name, f"type {type!r}: must be one of {', '.join(FeatureType)}")
        values: dict[str, Any] = {
            "type": FeatureType(kind),
            "default": default,
            "size": size,
            "nullable": nullable,
            "name": name,
            "low": low,
            "high": high,
        }
        for key in ("low", "high"):
            if (bound := values[key]) is not None:
                if kind not in _NUMBERS or not _is_number(bound):
                    raise _invalid(
                        name, f"{key} = {bound!r}: must be a number, of int, float and list"
                    )
                values[key] = float(bound)
        for key, value in values.items():
            object.__setattr__(self, key, value)
        if self.low is not None and self.high is not None and self.low > self.high:
            raise _invalid(name, f"range {self.low:g} to {self.high:g} is empty")
        if size is not None and (kind != FeatureType.LIST or not 1 <= size <= MAX_ITEMS):
            raise _invalid(name, f"size = {size}: must be 1 to {MAX_ITEMS}, of a list")
        if default is not None:
            object.__setattr__(self, "default", self.convert(default))

    @property
    def has_default(self) -> bool:
        """Whether there is a value for where it cannot be read."""
        return self.default is not None or self.nullable

    def convert(self, value: Any) -> Any:
        """Return a value as this type: whole numbers as `float` where that is asked, nothing else
        is converted. Accepts numpy's numbers and arrays. Raises InvalidInput."""
        match self.type:
            case FeatureType.BOOL:
                if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
                    return bool(value)
            case FeatureType.STR:
                if isinstance(value, str) and len(value) <= MAX_TEXT_CHARS:
                    return value
            case FeatureType.INT:
                if isinstance(value, numbers.Integral) and not isinstance(value, bool):
                    self._require_in_range(number := int(value))
                    return number
            case FeatureType.FLOAT:
                if _is_number(value):
                    self._require_in_range(real := float(value))
                    return real
            case FeatureType.LIST:
                return self._converted_list(value)
        raise _invalid(self.name, f"{_type_of(value)} is no {self.type.value}")

    def _converted_list(self, value: Any) -> list[float]:
        items = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(items, list | tuple) or not all(map(_is_number, items)):
            raise _invalid(self.name, f"{_type_of(value)} is no list of numbers")
        if len(items) > MAX_ITEMS or (self.size is not None and len(items) != self.size):
            wanted = f"up to {MAX_ITEMS}" if self.size is None else self.size
            raise _invalid(self.name, f"{len(items)} items: must be {wanted}")
        found = [float(item) for item in items]
        for item in found:
            self._require_in_range(item)
        return found

    def _require_in_range(self, value: float) -> None:
        if (self.low is not None and value < self.low) or (
            self.high is not None and value > self.high
        ):
            raise _invalid(self.name, "a value is out of range")


@dataclass(frozen=True, slots=True, init=False)
class FeatureSchema:
    """Features of a model, in order:
    `FeatureSchema({"age": int, "income": Feature(float, low=0)}, version="2026-11")`.

    Attributes:
        features: each with its name; given as a dict from names to types or `Feature`.
        version: of what the values mean, such as the version of the code that computes them: it is
            part of the hash. "" = none.
    """

    features: tuple[Feature, ...]
    version: str = ""

    def __init__(
        self, features: Mapping[str, Any] | Sequence[Feature], *, version: str = ""
    ) -> None:
        """Raises InvalidInput naming the feature."""
        if isinstance(features, Mapping):
            named = [
                replace(one if isinstance(one, Feature) else Feature(one), name=str(name))
                for name, one in features.items()
            ]
        else:
            named = list(features)
        names = [one.name for one in named]
        if not 1 <= len(names) <= MAX_FEATURES or len(set(names)) < len(names):
            raise InvalidInput(
                f"features: {len(names)} features: give 1 to {MAX_FEATURES}, each name once",
                parameter="features",
            )
        for name in names:
            if not _NAME.match(name):
                raise InvalidInput(
                    f"features: {name[:80]!r}: names have 1 to 64 letters, digits and _, no digit "
                    f"at first",
                    parameter="features",
                )
        if len(version) > MAX_VERSION_CHARS:
            raise InvalidInput(
                f"features: version has {len(version)} characters, at most {MAX_VERSION_CHARS}",
                parameter="features",
            )
        object.__setattr__(self, "features", tuple(named))
        object.__setattr__(self, "version", version)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features, in order."""
        return tuple(one.name for one in self.features)

    @property
    def hash(self) -> str:
        """sha256 (hex) of names, types, order, ranges, sizes, `nullable` and `version`; not of
        defaults."""
        plain = [{**to_json(one), "default": None} for one in self.features]
        document = {"format": _FORMAT, "version": self.version, "features": plain}
        return hashlib.sha256(canonical_json(document)).hexdigest()

    def validate(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the features of a row, converted and in order; its other values are left out.
        Raises InvalidInput naming the first feature that is missing or wrong."""
        found: dict[str, Any] = {}
        for one in self.features:
            value = row.get(one.name)
            if value is None:
                if not one.nullable:
                    raise _invalid(one.name, "is missing")
                found[one.name] = None
            else:
                found[one.name] = one.convert(value)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        body: dict[str, Any] = to_json(self)
        return body

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """The reverse of `to_json`. Raises InvalidInput."""
        return from_json(cls, body)

    @classmethod
    def merge(cls, *schemas: FeatureSchema) -> Self:
        """Return one schema with the features of all, in order: that of a model with features of
        several sources. Raises InvalidInput for a name that occurs twice."""
        return cls(
            [one for schema in schemas for one in schema.features],
            version="+".join(schema.version for schema in schemas if schema.version),
        )


def _is_number(value: Any) -> bool:
    """Whether it is a finite number; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _type_of(value: Any) -> str:
    """A value in an error: its type alone, since values may be personal."""
    return f"a value of type {type(value).__name__}"


def _invalid(name: str, text: str) -> InvalidInput:
    where = f"features: {name}: " if name else "features: "
    return InvalidInput(f"{where}{text}", parameter=name or "features")
