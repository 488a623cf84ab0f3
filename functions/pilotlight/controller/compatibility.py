"""Whether a new revision breaks the callers of the one that serves: its schemas compared, purely,
and said in words.

Arguments may only become wider: what the old schema accepts, the new one must. Answers may only
become narrower, but that an object may gain properties: callers ignore what they do not know. What
cannot be shown to be compatible counts as broken, and is told as such."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pilotlight.controller.schema_gaps import Gap, Steps, TooMuch, gaps
from pilotlight.spec import FunctionKind, FunctionSpec, MethodSpec

MAX_TOLD = 20
"""Breaks in one answer."""


def breaks(old: FunctionSpec, new: FunctionSpec) -> list[str]:
    """What callers of `old` would find broken in `new`, each in a sentence; at most MAX_TOLD of
    them. Empty when nothing is."""
    found = [text for text, _ in zip(_breaks(old, new), range(MAX_TOLD), strict=False)]
    return list(dict.fromkeys(found))


def _breaks(old: FunctionSpec, new: FunctionSpec) -> Iterator[str]:
    if (old.kind is FunctionKind.ASGI) != (new.kind is FunctionKind.ASGI):
        yield f"it was called as {_kind(old)}, and is {_kind(new)} now"
        return
    steps = Steps()
    for method in old.methods:
        after = new.method(method.name)
        if after is None:
            yield (
                f"method {method.name!r} is gone"
                if method.name
                else "it cannot be called by its own name any more: it has methods now"
            )
        else:
            yield from (
                f"method {method.name!r}: {text}" if method.name else text
                for text in _of_method(method, after, steps)
            )


def _of_method(old: MethodSpec, new: MethodSpec, steps: Steps) -> Iterator[str]:
    if old.is_generator != new.is_generator:
        kinds = ("one value", "a stream of items")
        yield f"the answer was {kinds[old.is_generator]}, and is {kinds[new.is_generator]} now"
        return
    yield from _of_positions(old, new)
    try:
        for gap in gaps(old.schema, new.schema, steps=steps):
            yield _argument(gap)
        if old.returns is not None:
            for gap in gaps(new.returns, old.returns, is_answer=True, steps=steps):
                yield _answer(gap)
    except TooMuch as e:
        yield str(e)


def _of_positions(old: MethodSpec, new: MethodSpec) -> Iterator[str]:
    known: Mapping[str, Any] = (new.schema or {}).get("properties", {})
    for name in old.parameters:
        if name not in new.parameters and name in known:
            yield f"argument {name!r} cannot be given by its position any more"
    kept = tuple(name for name in old.parameters if name in new.parameters)
    if new.parameters[: len(kept)] != kept:
        yield (
            f"arguments by position were ({', '.join(old.parameters)}), and are "
            f"({', '.join(new.parameters)}) now"
        )


def _argument(gap: Gap) -> str:
    where = f"argument {gap.where!r}" if gap.where else "its arguments"
    match gap.kind:
        case "required":
            return f"{where} is required now"
        case "unknown":
            return f"{where} is not accepted any more"
    return f"{where}: accepted {gap.sub}, accepts only {gap.sup} now"


def _answer(gap: Gap) -> str:
    where = f"the answer's {gap.where!r}" if gap.where else "the answer"
    if gap.kind == "required":
        return f"{where} may be missing now"
    return f"{where}: was {gap.sup}, may be {gap.sub} now"


def _kind(spec: FunctionSpec) -> str:
    return "a web application" if spec.kind is FunctionKind.ASGI else "a function"
