"""What a function imports, in which order, and the lists of modules that can be imported ahead of
it. Pure.

A list names the first imports of an order. Its last import may be *opened*: `name:`, followed by
the first modules that it imports itself. Then user code executes the module itself, and only these
are there already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

OPENED = ":"
LEAST_MS = 100.0
"""Imports that take less are not worth a snapshot: its restore takes about as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """One import. `ms`: how long it took, its parts included; `parts`: names and durations of the
    first modules that it imports itself."""

    name: str
    ms: float
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ImportOrder:
    """The imports of one function, in order."""

    imports: tuple[Imported, ...] = ()

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Self:
        """From `SnapshotPoint.imports`."""
        return cls(
            tuple(
                Imported(name=name, ms=ms, parts=tuple((n, t) for n, t in rest[0]) if rest else ())
                for name, ms, *rest in report.get("modules", ())
            )
        )

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Self:
        """Of imports whose durations are unknown."""
        return cls(tuple(Imported(name=name, ms=0.0) for name in names))

    @property
    def names(self) -> list[str]:
        """All imports, as a list for an environment snapshot."""
        return [one.name for one in self.imports]

    def begins_with(self, modules: Sequence[str]) -> bool:
        """Whether the function begins with the imports of this list."""
        return self.ms_of(modules) is not None

    def ms_of(self, modules: Sequence[str]) -> float | None:
        """How long the imports of this list took; None if the order does not begin with them."""
        whole, opened, parts = split(modules)
        if self.names[: len(whole)] != whole:
            return None
        ms = sum(one.ms for one in self.imports[: len(whole)])
        if not opened:
            return ms
        last = self.imports[len(whole)] if len(whole) < len(self.imports) else None
        if last is None or last.name != opened:
            return None
        if [name for name, _ in last.parts[: len(parts)]] != parts:
            return None
        return ms + sum(took for _, took in last.parts[: len(parts)])

    def with_parts_of(self, earlier: ImportOrder) -> ImportOrder:
        """With the parts that an earlier boot has reported, where this one reports none: what was
        imported ahead has none."""
        known = {one.name: one for one in earlier.imports if one.parts}
        return ImportOrder(
            tuple(one if one.parts else known.get(one.name, one) for one in self.imports)
        )

    def shorter(self, modules: Sequence[str], kept: int) -> list[str]:
        """The longest list to try next, where user code kept to the first `kept` imports of
        `modules` only: a later one has changed what an earlier one does. Empty if none is worth
        it.

        The last import is opened first, since it is the one that loads most; then that at which
        user code differed; then it is left out."""
        whole, opened, _ = split(modules)
        kept = min(kept, len(whole))
        lists = []
        if not opened and len(whole) - 1 > kept:
            lists.append(self._opening(len(whole) - 1))
        if not opened or len(whole) > kept:
            lists.append(self._opening(kept))
        lists.append(self.names[:kept])
        saved_ms = self.ms_of(modules) or 0.0
        return next((one for one in lists if LEAST_MS <= (self.ms_of(one) or 0.0) < saved_ms), [])

    def _opening(self, at: int) -> list[str]:
        """The imports before `at`, and the parts of that one, if it has any."""
        parts = [part for one in self.imports[at : at + 1] for part, _ in one.parts]
        opened = [f"{self.imports[at].name}{OPENED}"] if parts else []
        return [*self.names[:at], *opened, *parts]

    def __iter__(self) -> Iterator[Imported]:
        return iter(self.imports)


def split(modules: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """A list's imports, its opened one ("" if there is none), and the parts of that."""
    for n, name in enumerate(modules):
        if name.endswith(OPENED):
            return list(modules[:n]), name.removesuffix(OPENED), list(modules[n + 1 :])
    return list(modules), "", []
