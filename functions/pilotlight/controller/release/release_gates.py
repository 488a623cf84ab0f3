"""Release gates: conditions before a revision takes traffic from another. Its schemas are
compatible, its offline evaluation passes, and the error budget is not spent.

Approvals are checked where traffic changes (`approvals.require_approvals`), so that they cannot be
bypassed. A rollback is not subject to any of these.

Comparing schemas takes tenths of a second per function, and only one transaction writes at a time.
So routes make changes through `write_with_gates`, which compares schemas between two tries of the
change, outside of any transaction. Revisions are immutable, so a comparison stays valid; the
serving revision is read again in each try."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.registry import revisions
from pilotlight.controller.registry.app_ref import AppRef
from pilotlight.controller.release import compatibility
from pilotlight.controller.slo import release_freeze
from pilotlight.errors import Conflict, GateFailed, Incompatible, PilotlightError
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.policies import parse_gate
from pilotlight.spec.traffic import TrafficDocument

T = TypeVar("T")
MAX_TRIES = 4
"""Tries of a change: the first finds what must be compared; more than two are needed only when
another revision started to serve meanwhile."""


@dataclass(slots=True)
class _SchemaComparisons:
    """Finished and pending comparisons of one change, by the digests of the old and the new spec.
    Owner: one thread."""

    known: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    pending: dict[tuple[str, str], tuple[FunctionSpec, FunctionSpec]] = field(default_factory=dict)

    def breaks(self, old: FunctionSpec, new: FunctionSpec) -> list[str]:
        """Return the result of a comparison; if there is none yet, add it to the pending ones and
        return an empty list."""
        pair = (old.digest(), new.digest())
        if pair not in self.known:
            self.pending[pair] = (old, new)
        return self.known.get(pair, [])

    def compare(self) -> None:
        """Run all pending comparisons."""
        self.known |= {
            pair: compatibility.breaking_changes(*specs) for pair, specs in self.pending.items()
        }
        self.pending.clear()


class _Uncompared(Exception):
    """Raised to roll back a transaction whose comparisons are pending."""


_comparing: ContextVar[_SchemaComparisons | None] = ContextVar(
    "schema comparisons outside of the transaction", default=None
)


def write_with_gates(store: Store, make: Callable[[Write], T]) -> T:
    """Run `make` in a transaction and return its result; run it again after comparing schemas.
    Raises what `make` raises, or Conflict."""
    comparisons = _SchemaComparisons()
    for _ in range(MAX_TRIES):
        token = _comparing.set(comparisons)
        try:
            with store.write() as write:
                result = make(write)
                if comparisons.pending:
                    raise _Uncompared
                return result
        except (_Uncompared, PilotlightError):
            if not comparisons.pending:
                raise
        finally:
            _comparing.reset(token)
        comparisons.compare()
    raise Conflict(
        "the serving revisions changed repeatedly while this change was checked: try again"
    )


def require_all_gates(
    write: Write,
    place: AppRef,
    *,
    function: str,
    revision: str,
    serving: str,
    allow_breaking: bool,
    override_freeze: bool,
) -> None:
    """Raise Incompatible, GateFailed or ReleaseFrozen unless `revision` may replace `serving`; "" =
    nothing serves yet."""
    function_id = place.function_id(function)
    new = revisions.spec_of(write.sql, function_id=function_id, revision=revision)
    if serving and not allow_breaking:
        require_compatible(
            revisions.spec_of(write.sql, function_id=function_id, revision=serving),
            new,
            serving=serving,
        )
    require_gates(new, evaluation=evaluation_of(write, function_id, revision))
    if serving and not override_freeze:
        release_freeze.require_error_budget(write.sql, function_id, now=write.now)


def require_gates_for_change(
    write: Write,
    place: AppRef,
    *,
    function: str,
    before: TrafficDocument,
    after: TrafficDocument,
    allow_breaking: bool = False,
    override_freeze: bool = False,
) -> None:
    """Check the gates (`require_all_gates`) of each revision that has never served and that a
    traffic change gives traffic: by weight, pin or arm.

    So a revision that was created without traffic passes the gates when it first gets some.
    """
    serving = before.stable or before.heaviest()
    for revision in sorted(after.answering() - before.answering()):
        if (
            revision != serving
            and revisions.get_row(
                write.sql, function_id=place.function_id(function), revision=revision
            ).served_at
            is None
        ):
            require_all_gates(
                write,
                place,
                function=function,
                revision=revision,
                serving=serving,
                allow_breaking=allow_breaking,
                override_freeze=override_freeze,
            )


def require_compatible(old: FunctionSpec, new: FunctionSpec, *, serving: str) -> None:
    """Raise Incompatible with every breaking change."""
    comparisons = _comparing.get()
    if (
        found := compatibility.breaking_changes(old, new)
        if comparisons is None
        else comparisons.breaks(old, new)
    ):
        how = "undo these changes, or use --allow-breaking if no caller depends on them"
        text = (
            f"function {new.name!r} would break callers of {serving}, the serving revision: "
            f"{'; '.join(found)}; {how}"
        )
        raise Incompatible(text, function=new.name, serving=serving, breaks=found)


def require_gates(spec: FunctionSpec, *, evaluation: dict[str, float]) -> None:
    """Raise GateFailed with each metric that is missing or fails its gate. `<function>.<metric>`
    takes precedence over `<metric>`."""
    failed = []
    for metric, text in spec.require.items():
        gate = parse_gate(metric, text)
        value = evaluation.get(f"{spec.name}.{metric}", evaluation.get(metric))
        if value is None:
            failed.append(f"{gate}: the metric is missing")
        elif not gate.passes(value):
            failed.append(f"{gate}: the value is {value:g}")
    if failed:
        how = (
            "pass the metrics of its offline evaluation with --eval metrics.json, or change its "
            "requirements"
        )
        raise GateFailed(
            f"function {spec.name!r} fails its release gates: {'; '.join(failed)}; {how}",
            function=spec.name,
            failed=failed,
        )


def evaluation_of(write: Write, function_id: str, revision: str) -> dict[str, float]:
    """Return a revision's evaluation metrics."""
    return dict(
        json.loads(
            revisions.get_row(write.sql, function_id=function_id, revision=revision).evaluation
        )
    )
