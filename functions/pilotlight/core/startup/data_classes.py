"""`dataclass`: as `dataclasses.dataclass`, at a third of its cost at import.

The standard decorator writes the six methods of a frozen class as text and compiles each, half a
millisecond for a class; a worker imports 50 classes before it runs user code, a controller 350.
Here `__init__` alone is compiled, and the others are closures. Fields, slots and `__match_args__`
are the standard library's, so `fields`, `replace` and `asdict` work as usual. Type checkers see
the standard decorator."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from typing import TYPE_CHECKING, Any, cast

__all__ = ["dataclass"]

_Values = Callable[[Any], tuple[Any, ...]]
_STANDARD: Any = dataclasses.dataclass

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None,
        /,
        *,
        frozen: bool = False,
        slots: bool = False,
        kw_only: bool = False,
        eq: bool = True,
    ) -> Any:
        """Make a data class, as `dataclasses.dataclass` does with these arguments. Raises TypeError
        for a field of the type InitVar.

        `__dataclass_params__` does not say that a class is frozen, so that its subclasses that are
        data classes have to use this decorator, too; the standard one raises TypeError."""

        def make(cls: type) -> type:
            return _made(cls, frozen=frozen, slots=slots, kw_only=kw_only, eq=eq)

        return make if cls is None else make(cls)


def _made(cls: type, *, frozen: bool, slots: bool, kw_only: bool, eq: bool) -> type:
    own = cls.__dict__
    hashes = "__hash__" in own and not (own["__hash__"] is None and "__eq__" in own)
    if not own.get("__doc__"):  # it would be made from the signature, which takes long
        cls.__doc__ = f"{cls.__name__}({', '.join(own.get('__annotations__', ()))})"
    made: Any = _STANDARD(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
    fields = dataclasses.fields(made)
    if any(_is_init_var(f.type) for f in made.__dataclass_fields__.values()):
        raise TypeError(f"{cls.__qualname__}: a field of the type InitVar is not supported")
    methods: dict[str, Any] = {"__repr__": _repr(tuple(f.name for f in fields if f.repr))}
    compared = _values_of(tuple(f.name for f in fields if f.compare))
    hashed = _values_of(tuple(f.name for f in fields if (f.compare if f.hash is None else f.hash)))
    if eq:
        methods["__eq__"] = _eq(compared)
    if frozen:
        methods["__setattr__"], methods["__delattr__"] = _refusals(made)
    if frozen and slots:
        methods["__getstate__"], methods["__setstate__"] = _state(tuple(f.name for f in fields))
    if "__init__" not in own:
        made.__init__ = _init(made, fields, frozen=frozen, slots=slots)
    for name, method in methods.items():
        if name not in own:
            method.__name__, method.__qualname__ = name, f"{made.__qualname__}.{name}"
            setattr(made, name, method)
    if eq and not hashes:
        made.__hash__ = _hash(hashed) if frozen else None
    return cast(type, made)


def _is_init_var(kind: Any) -> bool:
    return isinstance(kind, dataclasses.InitVar) or "InitVar" in str(kind)


def _values_of(names: tuple[str, ...]) -> _Values:
    """A function that returns these attributes of an object as a tuple."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    if not names:
        return lambda _: ()
    [name] = names
    return lambda one: (getattr(one, name),)


def _repr(names: tuple[str, ...]) -> Any:
    @reprlib.recursive_repr()
    def represent(self: Any) -> str:
        values = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
        return f"{self.__class__.__qualname__}({values})"

    return represent


def _eq(values: _Values) -> Any:
    def equals(self: Any, other: Any) -> Any:
        if other.__class__ is self.__class__:
            return values(self) == values(other)
        return NotImplemented

    return equals


def _hash(values: _Values) -> Any:
    def hash_values(self: Any) -> int:
        return hash(values(self))

    return hash_values


def _refusals(cls: Any) -> tuple[Any, Any]:
    def refuse_set(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def refuse_delete(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return refuse_set, refuse_delete


def _state(names: tuple[str, ...]) -> tuple[Any, Any]:
    """What pickle calls: instances refuse attributes, so that it cannot set them."""

    def get_state(self: Any) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: Any, state: list[Any]) -> None:
        for name, value in zip(names, state, strict=False):
            object.__setattr__(self, name, value)

    return get_state, set_state


def _init(cls: Any, fields: tuple[Field[Any], ...], *, frozen: bool, slots: bool) -> Any:
    """Compile `__init__`."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": MISSING}
    names["__name__"] = cls.__module__
    lines = []
    for f in fields:
        value = f.name
        if f.default_factory is not MISSING:
            names[f"_make_{f.name}"] = f.default_factory
            value = f"_make_{f.name}()"
            if f.init:
                value = f"{value} if {f.name} is _MISSING else {f.name}"
        elif not f.init:
            if not slots or f.default is MISSING:
                continue
            value = f"_default_{f.name}"
        if f.default is not MISSING:
            names[f"_default_{f.name}"] = f.default
        lines.append(
            f"  _set(self,{f.name!r},{value})\n" if frozen else f"  self.{f.name}={value}\n"
        )
    if hasattr(cls, "__post_init__"):
        lines.append("  self.__post_init__()\n")
    source = f"def __init__({_parameters(fields)}):\n{''.join(lines) or '  pass'}"
    exec(source, names)
    made = names["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {f.name: f.type for f in fields if f.init} | {"return": None}
    return made


def _parameters(fields: tuple[Field[Any], ...]) -> str:
    """The parameters of `__init__`, by position first. Raises TypeError where one without a default
    follows one that has it."""
    either = [f for f in fields if f.init and not f.kw_only]
    optional = [f for f in either if _has_default(f)]
    if optional and (late := [f for f in either[either.index(optional[0]) :] if f not in optional]):
        raise TypeError(f"non-default argument {late[0].name!r} follows default argument")
    by_name = [f for f in fields if f.init and f.kw_only]
    parts = ["self", *map(_parameter, either)]
    if by_name:
        parts += ["*", *map(_parameter, by_name)]
    return ",".join(parts)


def _parameter(field: Field[Any]) -> str:
    if field.default is not MISSING:
        return f"{field.name}=_default_{field.name}"
    return f"{field.name}=_MISSING" if field.default_factory is not MISSING else field.name


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
