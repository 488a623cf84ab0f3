"""Parses command-line options by a function's signature: `--name Ada`, `--count=3`, `--verbose`,
`--no-verbose`; and values by a deployed function's JSON Schema. Pure."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pilotlight.cli.core.formatting import parse_json_or_text
from pilotlight.errors import InvalidInput


def parse_flags(
    signature: inspect.Signature, words: Sequence[str], *, what: str
) -> tuple[list[Any], dict[str, Any]]:
    """Match `words` to the parameters; return positional and named arguments. Raises InvalidInput,
    which names the option."""
    parameters = {
        name.replace("_", "-"): p
        for name, p in signature.parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            args.append(_positional(signature, len(args), word, what))
            continue
        key, equals, value = word[2:].partition("=")
        negated = key.removeprefix("no-")
        parameter = parameters.get(key) or (parameters.get(negated) if negated != key else None)
        if parameter is None and not takes_any:
            known = ", ".join(f"--{name}" for name in parameters) or "none"
            raise InvalidInput(f"{what} has no parameter --{key}", hint=f"Its options: {known}.")
        name = parameter.name if parameter else key.replace("-", "_")
        hint = parameter.annotation if parameter else inspect.Parameter.empty
        if _is_flag(hint) and not equals:
            kwargs[name] = key in parameters
        else:
            if not equals and not queue:
                raise InvalidInput(f"--{key} needs a value", hint=f"Write --{key} VALUE.")
            kwargs[name] = convert(value if equals else queue.pop(0), hint, option=f"--{key}")
    _check_complete(signature, args, kwargs, what)
    return args, kwargs


def convert(text: str, hint: Any, *, option: str) -> Any:
    """Convert `text` to the annotated type: strings stay as they are, numbers and flags are parsed,
    anything else is parsed as JSON if it is JSON."""
    kinds = _kinds(hint)
    if kinds == {str}:
        return text
    if type(None) in kinds and text in ("null", "None"):
        return None
    for kind in (bool, int, float):
        if kind in kinds and (value := _number(text, kind)) is not None:
            return value
    if kinds <= {bool, int, float, type(None)} and kinds:
        wanted = " or ".join(sorted(k.__name__ for k in kinds if k is not type(None)))
        raise InvalidInput(
            f"{option} {text!r} is not of type {wanted}", hint="Check the function's signature."
        )
    return text if str in kinds else parse_json_or_text(text)


def fit_to_schema(
    given: Mapping[str, Any], texts: Mapping[str, str], schema: Any
) -> dict[str, Any]:
    """Replace values that were parsed as JSON by their text where the schema of the arguments
    permits a string but no value of that type: `name=5` for `name: str` is "5"."""
    root = schema if isinstance(schema, Mapping) else {}
    properties = root.get("properties", {})
    out = dict(given)
    for name, value in given.items():
        kinds = _schema_types(properties.get(name, {}), root)
        if kinds is not None and "string" in kinds and not _TYPES_OF[type(value)] & kinds:
            out[name] = texts[name]
    return out


_TYPES_OF = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    type(None): {"null"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}


def _schema_types(schema: Any, root: Mapping[str, Any]) -> set[str] | None:
    """The JSON types that a schema permits; None for any."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        return _schema_types(root.get("$defs", {}).get(name, {}), {})
    if "anyOf" in schema:
        found = [_schema_types(option, root) for option in schema["anyOf"]]
        return None if None in found else set().union(*(kinds for kinds in found if kinds))
    if "enum" in schema:
        return set().union(*(_TYPES_OF[type(member)] for member in schema["enum"]))
    kinds = schema.get("type")
    return {kinds} if isinstance(kinds, str) else set(kinds) if kinds else None


def _number(text: str, kind: type) -> Any:
    if kind is bool:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(
            text.lower()
        )
    try:
        return kind(text)
    except ValueError:
        return None


def _kinds(hint: Any) -> set[Any]:
    if hint is inspect.Parameter.empty:
        return set()
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {typing.get_origin(arg) or arg for arg in typing.get_args(hint)}
    return {typing.get_origin(hint) or hint}


def _is_flag(hint: Any) -> bool:
    return bool in _kinds(hint) and not {int, float, str} & _kinds(hint)


def _positional(signature: inspect.Signature, index: int, word: str, what: str) -> Any:
    ordered = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    rest = next((p for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), None)
    parameter = ordered[index] if index < len(ordered) else rest
    if parameter is None:
        raise InvalidInput(
            f"{what} takes {len(ordered)} arguments: {word!r} is one too many",
            hint="Pass named arguments as --name value.",
        )
    return convert(word, parameter.annotation, option=parameter.name)


def _check_complete(
    signature: inspect.Signature, args: list[Any], kwargs: dict[str, Any], what: str
) -> None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in signature.parameters)
        raise InvalidInput(f"{what}: {e}", hint=f"Its options: {options or 'none'}.") from e
