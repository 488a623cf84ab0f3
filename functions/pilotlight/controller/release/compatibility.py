"""Backward compatibility of a new revision with the callers of the one that serves: a comparison of
their schemas, described in words. Pure.

Arguments may only become wider: the new schema must accept whatever the old one accepts. Results
may only become narrower, except that an object may gain properties, since callers ignore unknown
ones. What cannot be shown to be compatible counts, and is reported, as broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.controller.release.comparison_steps import ComparisonTooLarge, StepBudget
from pilotlight.controller.release.schema_diff import Incompatibility, incompatibilities
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec

MAX_REPORTED = 20
"""Breaking changes in one report."""


def breaking_changes(old: FunctionSpec, new: FunctionSpec) -> list[str]:
    """Describe what `new` breaks for callers of `old`, one sentence each, at most MAX_REPORTED.
    Empty if it is compatible."""
    found = [text for text, _ in zip(_breaks(old, new), range(MAX_REPORTED), strict=False)]
    return list(dict.fromkeys(found))


def _breaks(old: FunctionSpec, new: FunctionSpec) -> Iterator[str]:
    if (old.kind is FunctionKind.ASGI) != (new.kind is FunctionKind.ASGI):
        yield f"it was {_kind(old)}, and is now {_kind(new)}"
        return
    steps = StepBudget()
    for method in old.methods:
        after = new.method(method.name)
        if after is None:
            yield (
                f"method {method.name!r} was removed"
                if method.name
                else "it can no longer be called by its own name: it now has methods"
            )
        else:
            yield from (
                f"method {method.name!r}: {text}" if method.name else text
                for text in _of_method(method, after, steps)
            )


def _of_method(old: MethodSpec, new: MethodSpec, steps: StepBudget) -> Iterator[str]:
    if old.is_generator != new.is_generator:
        kinds = ("one value", "a stream of items")
        yield f"the result was {kinds[old.is_generator]}, and is now {kinds[new.is_generator]}"
        return
    yield from _of_positions(old, new)
    try:
        for gap in incompatibilities(old.schema, new.schema, steps=steps):
            yield _argument(gap)
        if old.returns is not None:
            for gap in incompatibilities(new.returns, old.returns, is_answer=True, steps=steps):
                yield _answer(gap)
    except ComparisonTooLarge as e:
        yield str(e)


def _of_positions(old: MethodSpec, new: MethodSpec) -> Iterator[str]:
    known: Mapping[str, Any] = (new.schema or {}).get("properties", {})
    for name in old.parameters:
        if name not in new.parameters and name in known:
            yield f"argument {name!r} can no longer be passed by position"
    kept = tuple(name for name in old.parameters if name in new.parameters)
    if new.parameters[: len(kept)] != kept:
        yield (
            f"positional arguments were ({', '.join(old.parameters)}), and are now "
            f"({', '.join(new.parameters)})"
        )


def _argument(gap: Incompatibility) -> str:
    where = f"argument {gap.where!r}" if gap.where else "its arguments"
    match gap.kind:
        case "required":
            return f"{where} is now required"
        case "unknown":
            return f"{where} is no longer accepted"
    return f"{where}: accepted {gap.sub}, now accepts only {gap.sup}"


def _answer(gap: Incompatibility) -> str:
    where = f"the result's {gap.where!r}" if gap.where else "the result"
    if gap.kind == "required":
        return f"{where} may now be missing"
    return f"{where}: was {gap.sup}, may now be {gap.sub}"


def _kind(spec: FunctionSpec) -> str:
    return "a web application" if spec.kind is FunctionKind.ASGI else "a function"
