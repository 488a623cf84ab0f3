"""Batched callables: callers give one value of each parameter and get one result, the body takes
lists and returns a list.

What stands between the two sides is here, for the declaration, for `.local(…)`, and for the worker:
the types of one item, the lists that a body gets, and the results that it may return. A parameter's
default is that of one item."""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from pilotlight.errors import InvalidInput, PilotlightError
from pilotlight.sdk.decorators import PilotlightWarning, describe_target, metadata_of
from pilotlight.sdk.schema import hints_of
from pilotlight.spec.policies import BatchPolicy

INPUTS_PER_BATCH = 2
"""Calls that an instance takes, in batches, where nobody says how many: while one computes, the
next one gathers."""
MOST_INPUTS = 10_000
"""`Scaling.max_inputs` has no more."""
_LISTS = frozenset(
    {
        list,
        collections.abc.Sequence,
        collections.abc.Iterable,
        collections.abc.Collection,
        collections.abc.MutableSequence,
    }
)
_NO_RESULTS = (str, bytes, bytearray, Mapping, AbstractSet)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_NONE = type(None)


class WrongResults(PilotlightError):
    """Raised when a batched body does not return one result for each item: it names what came, and
    how many there should be."""

    type = "batch-results"
    status = 500


def batch_policy(function: Callable[..., Any]) -> BatchPolicy | None:
    """How calls of a marked function are gathered; None for one that is not marked."""
    mark = metadata_of(function).get("batched")
    return None if mark is None else BatchPolicy(**{**mark, "buckets": tuple(mark["buckets"])})


def item_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Its annotations as a caller sees them: of one item each. Raises InvalidInput where one is
    certainly no list."""
    found = {}
    for name, hint in hints_of(function).items():
        item = _item_of(hint)
        if item is None and name == "return" and not _is_no_list(hint):
            item = (Any,)  # an array, say: its rows are the results
        if item is None:
            wanted = (
                "a list with one result for each item"
                if name == "return"
                else "a list of such values"
            )
            where = "returns" if name == "return" else f"parameter {name!r} is"
            raise InvalidInput(
                f"{describe_target(function)} is @batched, and {where} {_shown(hint)}: its body "
                f"gets and "
                f"gives {wanted}, annotate it as list[…]",
                parameter=name,
            )
        found[name] = item[0]
    return found


def check_batched(function: Callable[..., Any], *, is_method: bool) -> None:
    """Raise InvalidInput when a marked function cannot be run in batches."""
    marks, what = metadata_of(function), f"{describe_target(function)} is @batched"
    if other := sorted(marks.keys() & {"enter", "exit", "asgi"}):
        raise InvalidInput(
            f"{what} and @{other[0]}: batches are made of calls, take one of the two away"
        )
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise InvalidInput(
            f"{what} and yields: a batch has one result for each item, return them as a list "
            f"(streams cannot be batched)"
        )
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    if variable := [p for p in parameters if p.kind in _VARIABLE]:
        raise InvalidInput(
            f"{what} and takes {variable[0]}: write out its parameters, each one is a list",
            parameter=variable[0].name,
        )
    if not parameters:
        raise InvalidInput(f"{what} and takes nothing that could be a list: give it a parameter")
    item_hints(function)


def inputs_for_batches(raw: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`inputs` (of `Scaling`), as a declaration gave them, with what the batches of a function or
    class need where it gave none.

    Raises InvalidInput when they would let several calls of a method in at once of which nobody
    said that they may run so."""
    functions = _functions(raw)
    largest = max(
        (
            policy.max_batch_size
            for function in functions
            if (policy := batch_policy(function)) is not None
        ),
        default=0,
    )
    if not largest:
        return dict(inputs)
    if (given := inputs.get("max_inputs")) is not None:
        if given < largest:
            warnings.warn(
                f"@batched(max_batch_size={largest}): max_inputs={given} lets only {given} calls "
                f"in at once, so no such batch is ever full",
                PilotlightWarning,
                stacklevel=4,
            )
        return dict(inputs)
    plain = [
        function
        for function in functions
        if "method" in metadata_of(function) and "batched" not in metadata_of(function)
    ]
    if plain:
        raise InvalidInput(
            f"{raw.__qualname__} has batched methods, for which it takes many calls at once, and "
            f"{plain[0].__name__}, which is not: "
            "say with @pilotlight.concurrent(max_inputs=…) how many calls may run at once, or "
            "split the class in two"
        )
    return {**inputs, "max_inputs": min(MOST_INPUTS, INPUTS_PER_BATCH * largest)}


class BatchLists:
    """From calls to the lists of one batch. Made once per callable; immutable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` as it is called: a bound method for methods."""
        parameters = list(inspect.signature(function).parameters.values())
        self.title = str(getattr(function, "__name__", "the function"))
        self._defaults = [(p.name, p.default) for p in parameters]
        self._by_name = [
            p.name if p.kind is inspect.Parameter.KEYWORD_ONLY else "" for p in parameters
        ]

    def __repr__(self) -> str:
        return f"<BatchLists {self.title}({', '.join(name for name, _ in self._defaults)})>"

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """One value for each parameter of a call that fits, in their order."""
        given = len(args)
        return tuple(
            args[i] if i < given else kwargs.get(name, default)
            for i, (name, default) in enumerate(self._defaults)
        )

    def gathered(
        self, calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """(positional, named) arguments of the body, for the `values` of its calls."""
        columns = [list(column) for column in zip(*calls, strict=True)]
        named = {name: column for name, column in zip(self._by_name, columns, strict=True) if name}
        return [
            column for name, column in zip(self._by_name, columns, strict=True) if not name
        ], named

    def results(self, answer: Any, count: int) -> list[Any]:
        """What the body returned, one for each of `count` items. Raises WrongResults."""
        if (
            isinstance(answer, _NO_RESULTS)
            or not hasattr(answer, "__len__")
            or not hasattr(answer, "__iter__")
        ):
            kind = type(answer).__qualname__
            raise WrongResults(
                f"{self.title} is batched and returned {kind}: return a list with one result for "
                f"each of its {count} items"
            )
        found = list(answer) if getattr(answer, "ndim", 1) else []
        if len(found) != count:
            raise WrongResults(
                f"{self.title} returned {len(found)} results for a batch of {count} items: return "
                f"one for each, in their order",
                results=len(found),
                items=count,
            )
        return found


class LocalBatch:
    """`.local` of a batched callable: one call is a batch of its own, here in this process."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.__signature__ = inspect.signature(body)
        self.__wrapped__ = body
        self._body = body
        self._lists = BatchLists(body)

    def __repr__(self) -> str:
        return f"<LocalBatch {self._lists.title}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__signature__.bind(*args, **kwargs)  # raises TypeError, as the function itself would
        positional, named = self._lists.gathered([self._lists.values(args, kwargs)])
        answer = self._body(*positional, **named)
        return self._later(answer) if inspect.isawaitable(answer) else self._only(answer)

    async def _later(self, answer: Any) -> Any:
        return self._only(await answer)

    def _only(self, answer: Any) -> Any:
        (result,) = self._lists.results(answer, 1)
        if isinstance(result, Exception):
            raise result
        return result


def local_body(body: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """What `.local` calls: `body` itself, or for one value where `function`, which it runs, is
    batched."""
    return body if batch_policy(function) is None else LocalBatch(body)


def _functions(raw: Any) -> list[Callable[..., Any]]:
    if raw is None:
        return []
    if not inspect.isclass(raw):
        return [raw]
    names = dict.fromkeys(name for base in raw.__mro__ for name in vars(base))
    return [
        found
        for name in names
        if inspect.isfunction(found := inspect.getattr_static(raw, name, None))
    ]


def _item_of(hint: Any) -> tuple[Any] | None:
    """(the type of one item), None for what is no list."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object or isinstance(hint, typing.TypeVar):
        return (Any,)
    if origin is typing.Annotated:
        return _item_of(args[0])
    if origin in (typing.Union, types.UnionType):
        options = [arg for arg in args if arg is not _NONE]
        return _item_of(options[0]) if len(options) == 1 else None
    if (origin or hint) in _LISTS:
        return (args[0] if args else Any,)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return (args[0],)
    return None


def _is_no_list(hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    return (
        kind is _NONE or not isinstance(kind, type) or issubclass(kind, (*_NO_RESULTS, int, float))
    )


def _shown(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
