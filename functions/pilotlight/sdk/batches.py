"""Batched callables: a caller passes one value per parameter and gets one result; the body takes
lists and returns a list.

This module converts between the two sides, for declarations, for `.local(…)` and for the worker: it
derives the types of one item, builds the lists for the body, and checks the results. The default of
a parameter is that of one item."""

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
from pilotlight.sdk.decorator_metadata import (
    PilotlightWarning,
    describe_target,
    metadata_of,
    undecorated,
)
from pilotlight.sdk.schema import hints_of
from pilotlight.spec.policies import BatchPolicy

INPUTS_PER_BATCH = 2
"""Default concurrency of an instance, in batches: while one batch runs, the next one fills."""
MOST_INPUTS = 10_000
"""Maximum of `Scaling.max_inputs`."""
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
    """Raised when a batched body does not return one result per item, with the actual and expected
    results."""

    type = "batch-results"
    status = 500


def batch_policy(function: Callable[..., Any]) -> BatchPolicy | None:
    """Return the batch policy of a function, None if it is not marked with `@batched`."""
    mark = metadata_of(function).get("batched")
    return None if mark is None else BatchPolicy(**{**mark, "buckets": tuple(mark["buckets"])})


def item_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations as seen by callers, of single items. Raises InvalidInput for an
    annotation that is certainly not a list."""
    found = {}
    for name, hint in hints_of(function).items():
        item = _item_of(hint)
        if item is None and name == "return" and not _is_no_list(hint):
            item = (Any,)  # for example an array, whose rows are the results
        if item is None:
            wanted = (
                "a list with one result for each item"
                if name == "return"
                else "a list of such values"
            )
            where = "returns" if name == "return" else f"parameter {name!r} is"
            raise InvalidInput(
                f"{describe_target(function)} is @batched, but {where} {_format(hint)}: it must be "
                f"{wanted}, annotate it as list[…]",
                parameter=name,
            )
        found[name] = item[0]
    return found


def check_batched(function: Callable[..., Any], *, is_method: bool) -> None:
    """Raise InvalidInput if a marked function cannot run in batches."""
    marks, what = metadata_of(function), f"{describe_target(function)} is @batched"
    if other := sorted(marks.keys() & {"enter", "exit", "asgi"}):
        raise InvalidInput(
            f"{what} and @{other[0]}: only calls can be batched, remove one of the decorators"
        )
    inner = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise InvalidInput(
            f"{what} but is a generator: streams cannot be batched, return a list with one result "
            f"per item"
        )
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    if variable := [p for p in parameters if p.kind in _VARIABLE]:
        raise InvalidInput(
            f"{what} but takes {variable[0]}: declare each parameter, as a list",
            parameter=variable[0].name,
        )
    if not parameters:
        raise InvalidInput(f"{what} but has no parameters: add one that takes a list")
    item_hints(function)


def inputs_for_batches(raw: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the concurrency `inputs` (fields of `Scaling`) of a declaration, with a default large
    enough for the batches of the function or class.

    Raises InvalidInput if that default would also let unbatched methods run concurrently, which
    must be declared."""
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
                f"@batched(max_batch_size={largest}): no batch can be full, because "
                f"max_inputs={given} admits only {given} calls at once",
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
            f"{raw.__qualname__} has batched methods, which need many concurrent calls, and the "
            f"unbatched method {plain[0].__name__}: set the number of concurrent calls with "
            "@pilotlight.concurrent(max_inputs=…), or split the class in two"
        )
    return {**inputs, "max_inputs": min(MOST_INPUTS, INPUTS_PER_BATCH * largest)}


class BatchLists:
    """Converts calls to the lists of one batch. Created once per callable; immutable."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`function` is a bound method for methods."""
        parameters = list(inspect.signature(function).parameters.values())
        self.title = str(getattr(function, "__name__", "the function"))
        self._defaults = [(p.name, p.default) for p in parameters]
        self._by_name = [
            p.name if p.kind is inspect.Parameter.KEYWORD_ONLY else "" for p in parameters
        ]

    def __repr__(self) -> str:
        return f"<BatchLists {self.title}({', '.join(name for name, _ in self._defaults)})>"

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return one value per parameter, in order, of a call with valid arguments."""
        given = len(args)
        return tuple(
            args[i] if i < given else kwargs.get(name, default)
            for i, (name, default) in enumerate(self._defaults)
        )

    def gathered(
        self, calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """Return the (positional, named) arguments of the body for the `values` of its calls."""
        columns = [list(column) for column in zip(*calls, strict=True)]
        named = {name: column for name, column in zip(self._by_name, columns, strict=True) if name}
        return [
            column for name, column in zip(self._by_name, columns, strict=True) if not name
        ], named

    def results(self, answer: Any, count: int) -> list[Any]:
        """Return the answer of the body as a list of `count` results. Raises WrongResults."""
        if (
            isinstance(answer, _NO_RESULTS)
            or not hasattr(answer, "__len__")
            or not hasattr(answer, "__iter__")
        ):
            kind = type(answer).__qualname__
            raise WrongResults(
                f"{self.title} is batched but returned {kind}: return a list with one result for "
                f"each of the {count} items"
            )
        found = list(answer) if getattr(answer, "ndim", 1) else []
        if len(found) != count:
            raise WrongResults(
                f"{self.title} returned {len(found)} results for a batch of {count} items: return "
                f"one per item, in order",
                results=len(found),
                items=count,
            )
        return found


class LocalBatch:
    """`.local` of a batched callable: runs each call as a batch of one, in this process."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.__signature__ = inspect.signature(body)
        self.__wrapped__ = body
        self._body = body
        self._lists = BatchLists(body)

    def __repr__(self) -> str:
        return f"<LocalBatch {self._lists.title}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.__signature__.bind(*args, **kwargs)  # raises TypeError like the function
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
    """Return the callable for `.local`: `body`, or if `function` is batched, a wrapper that takes
    single values."""
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
        if inspect.isfunction(found := undecorated(inspect.getattr_static(raw, name, None)))
    ]


def _item_of(hint: Any) -> tuple[Any] | None:
    """Return the type of one item as a 1-tuple, None if `hint` is not a list type."""
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


def _format(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
