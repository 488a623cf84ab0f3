"""Base of frozen dataclasses that travel as JSON objects, member by member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self, cast


class JsonRecord:
    """Conversion of a dataclass whose members are JSON values; others override a direction."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(cast(Any, self))}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)
