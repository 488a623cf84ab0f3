"""The report of a replay: counts, latencies, costs, and the paths at which answers differ. Pure.

Old values are shown as the log has them. A new value is shown only where it replaces a plain value
of the log: elsewhere it may be what `scrub` keeps out of the log, and its type is shown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from pilotlight.loadtest.results import nearest_rank
from pilotlight.replay.rows import SkippedRow
from pilotlight.replay.runner import FailedCall, Outcome, ReplayedCall
from pilotlight.validation.json_compare import Change, Difference
from pilotlight.validation.json_paths import format_path

MAX_PATHS: Final = 1_000
"""Paths that are counted; names of members may be data, and no two alike."""
SHOWN_PATHS: Final = 100
MAX_EXAMPLES: Final = 3
MAX_VALUE_CHARS: Final = 80
MAX_MESSAGE_CHARS: Final = 300
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95}
_TYPES: Final = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
_PLAIN: Final = (str, int, float, type(None))


@dataclass(slots=True)
class _PathCount:
    """Rows that differ at one path in one way. `largest`: of numbers, the largest relative
    difference."""

    rows: int = 0
    largest: float | None = None
    examples: list[dict[str, Any]] = field(default_factory=list)


class ReplayReport:
    """Counts outcomes. Owner: the event loop of the replay.

    Attributes:
        equal, different, failed: calls by their outcome.
        stopped: why the replay ended before its last row; "" = it did not.
    """

    def __init__(self) -> None:
        self.equal = self.different = self.failed = 0
        self.stopped = ""
        self._skipped = Counter[str]()
        self._versions = Counter[str]()
        self._failures: dict[str, dict[str, Any]] = {}
        self._paths: dict[tuple[str, Change], _PathCount] = {}
        self._uncounted = 0
        self._ms: dict[str, tuple[list[float], list[float]]] = {
            "exec": ([], []),
            "latency": ([], []),
        }
        self._cost = [Decimal(0), Decimal(0)]
        self._currency = ""

    def __repr__(self) -> str:
        return (
            f"<ReplayReport {self.equal} equal, {self.different} different, {self.failed} failed, "
            f"{self.skipped} skipped>"
        )

    @property
    def compared(self) -> int:
        """Calls whose answers were compared."""
        return self.equal + self.different

    @property
    def skipped(self) -> int:
        """Rows that were not called."""
        return self._skipped.total()

    @property
    def share(self) -> float:
        """Share of the calls that failed or got a different answer; 0 without calls."""
        bad = self.different + self.failed
        return bad / (self.compared + self.failed) if bad else 0.0

    def add(self, outcome: Outcome) -> None:
        """Count what became of a row."""
        if isinstance(outcome, SkippedRow):
            self._skipped[outcome.reason] += 1
            return
        self._versions[outcome.row.version] += 1
        if isinstance(outcome, FailedCall):
            self._add_failure(outcome)
        else:
            self._add_answer(outcome)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "compared": self.compared,
            "equal": self.equal,
            "different": self.different,
            "failed": self.failed,
            "skipped": self.skipped,
            "share": self.share,
            "stopped": self.stopped,
            "versions": {name: n for name, n in self._versions.most_common() if name},
            "skipped_by": dict(self._skipped.most_common()),
            "failures": self._failures,
            "ms": {name: _quantiles(*pair) for name, pair in self._ms.items() if pair[0]},
            "cost": self._costs(),
            "paths": self._differing_paths(),
            "uncounted_paths": self._uncounted,
        }

    def _add_failure(self, call: FailedCall) -> None:
        self.failed += 1
        found = self._failures.setdefault(
            call.reason, {"calls": 0, "request_id": call.row.id, "message": _message(call)}
        )
        found["calls"] += 1

    def _add_answer(self, call: ReplayedCall) -> None:
        row = call.row
        if call.differences:
            self.different += 1
        else:
            self.equal += 1
        for name, old, new in (
            ("exec", row.exec_ms, call.exec_ms),
            ("latency", row.latency_ms, call.latency_ms),
        ):
            if old is not None and new is not None:
                self._ms[name][0].append(old)
                self._ms[name][1].append(new)
        if row.cost is not None and call.cost is not None:
            self._cost[0] += row.cost
            self._cost[1] += call.cost
            self._currency = row.currency
        counted: set[tuple[str, Change]] = set()
        for one in call.differences:
            key = (_encodable(format_path(one.path, is_general=True)), one.change)
            self._add_path(key, one, call, is_first=key not in counted)
            counted.add(key)

    def _add_path(
        self, key: tuple[str, Change], one: Difference, call: ReplayedCall, *, is_first: bool
    ) -> None:
        """Count a difference; `is_first`: of its row at this path."""
        found = self._paths.get(key)
        if found is None:
            if len(self._paths) >= MAX_PATHS:
                self._uncounted += is_first
                return
            found = self._paths[key] = _PathCount()
        found.rows += is_first
        relative = _relative(one)
        if relative is not None:
            found.largest = max(relative, found.largest or 0.0)
        if is_first and len(found.examples) < MAX_EXAMPLES:
            ids = {"request_id": call.row.id, "replayed_as": call.request_id}
            found.examples.append({**ids, **describe(one)})

    def _costs(self) -> dict[str, str] | None:
        """The costs of the calls of which both are known; None without any."""
        if not self._currency:
            return None
        old, new = (f"{one:f}" for one in self._cost)
        return {"old": old, "new": new, "currency": self._currency}

    def _differing_paths(self) -> list[dict[str, Any]]:
        """The most frequent ones."""
        found = sorted(self._paths.items(), key=lambda one: -one[1].rows)
        return [
            {
                "path": path,
                "change": change.value,
                "rows": one.rows,
                "largest": one.largest,
                "examples": one.examples,
            }
            for (path, change), one in found[:SHOWN_PATHS]
        ]


def describe_outcome(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a line of a file."""
    if isinstance(outcome, SkippedRow):
        return {"request_id": outcome.id, "result": "skipped", "reason": outcome.reason.value}
    if isinstance(outcome, FailedCall):
        return {
            "request_id": outcome.row.id,
            "result": "failed",
            "reason": outcome.reason,
            "message": _message(outcome),
        }
    return {
        "request_id": outcome.row.id,
        "result": "different" if outcome.differences else "equal",
        "replayed_as": outcome.request_id,
        "differences": [describe(one) for one in outcome.differences],
        "ms": {"old": outcome.row.exec_ms, "new": outcome.exec_ms},
    }


def describe(difference: Difference) -> dict[str, str]:
    """A difference as texts, values as JSON."""
    path, change, old, new = difference
    found = {"path": _encodable(format_path(path)), "change": change.value}
    if change is not Change.ADDED:
        found["old"] = _text(old)
    if change is not Change.MISSING:
        is_shown = change is Change.CHANGED and isinstance(old, _PLAIN) and isinstance(new, _PLAIN)
        found["new"] = _text(new) if is_shown else f"<{_type_name(new)}>"
    return found


def _text(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return f"<{_type_name(value)}>"
    return _encodable(text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…")


def _encodable(text: str) -> str:
    """Text as files and terminals take it: half of a surrogate pair becomes "?"."""
    return text.encode("utf-8", "replace").decode()


def _type_name(value: Any) -> str:
    if isinstance(value, bytes):
        return "not JSON"
    return _TYPES.get(type(value), "number")


def _message(call: FailedCall) -> str:
    """The first line: others have the function's traceback."""
    return _encodable((call.message.splitlines() or [""])[0][:MAX_MESSAGE_CHARS])


def _relative(difference: Difference) -> float | None:
    """The relative difference of two numbers; None of other values."""
    old, new = difference.old, difference.new
    if not (_is_number(old) and _is_number(new)):
        return None
    try:
        found = abs(new - old) / max(abs(old), abs(new))
    except (OverflowError, ZeroDivisionError):
        return None
    return float(found) if math.isfinite(found) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quantiles(old: Sequence[float], new: Sequence[float]) -> Mapping[str, dict[str, float]]:
    ordered = {"old": sorted(old), "new": sorted(new)}
    return {
        which: {name: nearest_rank(values, share) for name, share in _QUANTILES.items()}
        for which, values in ordered.items()
    }
