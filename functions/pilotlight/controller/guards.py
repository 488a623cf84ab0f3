"""What must hold before a revision takes traffic from another: its schemas, its offline evaluation,
and an error budget that is not spent.

Approvals are asked for where traffic changes (`approvals.admit`), so that no way leads around them.
Going back is not guarded by any of these.

Comparing schemas takes tenths of a second for each function, and only one transaction writes at a
time. So a change that routes make goes through `change`: what it has to compare is compared between
two tries of it, outside of any transaction. Revisions do not change, so an outcome holds for both
of them whenever it was found; what serves is read again in each try."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from pilotlight.controller import compatibility, revisions
from pilotlight.controller.objectives import freeze
from pilotlight.controller.places import Place
from pilotlight.controller.store import Store, Write
from pilotlight.errors import Conflict, GateFailed, Incompatible, PilotlightError
from pilotlight.policies import parse_gate
from pilotlight.spec import FunctionSpec
from pilotlight.traffic import TrafficDocument

T = TypeVar("T")
MAX_TRIES = 4
"""Of one change: the first finds what is to be compared, another is needed only when something else
was let serve meanwhile."""


@dataclass(slots=True)
class _Comparisons:
    """What was compared for one change, and what is still to be, by the digests of the old and the
    new spec. Owner: one thread."""

    known: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    wanted: dict[tuple[str, str], tuple[FunctionSpec, FunctionSpec]] = field(default_factory=dict)

    def breaks(self, old: FunctionSpec, new: FunctionSpec) -> list[str]:
        """As far as it is known; else it is noted as wanted, and nothing."""
        pair = (old.digest(), new.digest())
        if pair not in self.known:
            self.wanted[pair] = (old, new)
        return self.known.get(pair, [])

    def compare(self) -> None:
        """All that is wanted."""
        self.known |= {pair: compatibility.breaks(*specs) for pair, specs in self.wanted.items()}
        self.wanted.clear()


class _Uncompared(Exception):
    """Raised when a transaction must not be committed yet."""


_comparing: ContextVar[_Comparisons | None] = ContextVar(
    "what is compared outside of the transaction", default=None
)


def change(store: Store, make: Callable[[Write], T]) -> T:
    """What `make` returns, in a transaction; it is called again when schemas had to be compared.
    Raises what it raises, or Conflict."""
    found = _Comparisons()
    for _ in range(MAX_TRIES):
        token = _comparing.set(found)
        try:
            with store.write() as write:
                made = make(write)
                if found.wanted:
                    raise _Uncompared
                return made
        except (_Uncompared, PilotlightError):
            if not found.wanted:
                raise
        finally:
            _comparing.reset(token)
        found.compare()
    raise Conflict(
        "other revisions were let serve again and again while this change was checked: try again"
    )


def demand(
    write: Write,
    place: Place,
    *,
    function: str,
    revision: str,
    serving: str,
    allow_breaking: bool,
    override_freeze: bool,
) -> None:
    """Raise Incompatible, GateFailed or ReleaseFrozen unless `revision` may take over from
    `serving`; "" = nothing serves yet."""
    function_id = place.function_id(function)
    new = revisions.spec_of(write.sql, function_id=function_id, revision=revision)
    if serving and not allow_breaking:
        demand_compatible(
            revisions.spec_of(write.sql, function_id=function_id, revision=serving),
            new,
            serving=serving,
        )
    demand_gates(new, evaluation=evaluation_of(write, function_id, revision))
    if serving and not override_freeze:
        freeze.demand(write.sql, function_id, now=write.now)


def admit(
    write: Write,
    place: Place,
    *,
    function: str,
    before: TrafficDocument,
    after: TrafficDocument,
    allow_breaking: bool = False,
    override_freeze: bool = False,
) -> None:
    """`demand` of each revision that never served and that a change of traffic lets answer: by
    weight, pin or arm.

    So what was made without traffic meets the guards when it gets some, whoever gives it.
    """
    serving = before.stable or before.heaviest()
    for revision in sorted(after.answering() - before.answering()):
        if (
            revision != serving
            and revisions.row(
                write.sql, function_id=place.function_id(function), revision=revision
            ).served_at
            is None
        ):
            demand(
                write,
                place,
                function=function,
                revision=revision,
                serving=serving,
                allow_breaking=allow_breaking,
                override_freeze=override_freeze,
            )


def demand_compatible(old: FunctionSpec, new: FunctionSpec, *, serving: str) -> None:
    """Raise Incompatible, naming every break."""
    comparisons = _comparing.get()
    if (
        found := compatibility.breaks(old, new)
        if comparisons is None
        else comparisons.breaks(old, new)
    ):
        how = "keep it as it was, or say that no caller depends on it: --allow-breaking"
        text = (
            f"function {new.name!r} would break callers of {serving}, which serves: "
            f"{'; '.join(found)}; {how}"
        )
        raise Incompatible(text, function=new.name, serving=serving, breaks=found)


def demand_gates(spec: FunctionSpec, *, evaluation: dict[str, float]) -> None:
    """Raise GateFailed, naming each number that is missing or not good enough.
    `<function>.<metric>` goes before `<metric>`."""
    failed = []
    for metric, text in spec.require.items():
        gate = parse_gate(metric, text)
        value = evaluation.get(f"{spec.name}.{metric}", evaluation.get(metric))
        if value is None:
            failed.append(f"{gate}: there is no such number")
        elif not gate.passes(value):
            failed.append(f"{gate}: it is {value:g}")
    if failed:
        how = (
            "give the numbers of its offline evaluation with --eval metrics.json, or change "
            "what it requires"
        )
        raise GateFailed(
            f"function {spec.name!r} does not reach what it requires: {'; '.join(failed)}; {how}",
            function=spec.name,
            failed=failed,
        )


def evaluation_of(write: Write, function_id: str, revision: str) -> dict[str, float]:
    """The numbers that were told of a revision."""
    return dict(
        json.loads(revisions.row(write.sql, function_id=function_id, revision=revision).evaluation)
    )
