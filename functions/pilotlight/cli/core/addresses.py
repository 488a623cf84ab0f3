"""Addresses of functions on the command line: `APP/FUNCTION`, or `APP/CLASS.METHOD` of a call; and
ids, which may be abbreviated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.spec.identifiers import parse_function_path

_HINT = "Write APP/FUNCTION; `pilotlight app list` lists the apps."


def match_id(rows: Iterable[Mapping[str, Any]], prefix: str, *, missing: str, hint: str) -> str:
    """The one id of `rows` that begins with `prefix`. Raises NotFound with the text `missing`,
    InvalidInput if several match."""
    ids = dict.fromkeys(str(row["id"]) for row in rows)  # a snapshot may be on several nodes
    found = [name for name in ids if name.startswith(prefix)]
    if not found:
        raise NotFound(missing, hint=hint)
    if len(found) > 1 and prefix not in found:
        raise InvalidInput(
            f"{prefix!r} matches {len(found)} ids: {', '.join(found[:5])}",
            hint="Write more characters of the id.",
        )
    return prefix if prefix in found else found[0]


def parse_address(text: str, *, hint: str = _HINT) -> tuple[str, str, str]:
    """Split an address into (app, function, method), method "" without one. Raises InvalidInput."""
    try:
        return parse_function_path(text)
    except ValueError as e:
        raise InvalidInput(str(e), hint=hint) from e


def parse_function(text: str, *, hint: str = _HINT, without_method: str = "") -> tuple[str, str]:
    """Split an address into (app, function). Raises InvalidInput. `without_method`: the hint for an
    address with a method; without it, the method is ignored."""
    app, function, method = parse_address(text, hint=hint)
    if method and without_method:
        raise InvalidInput(f"{text!r} names a method", hint=without_method)
    return app, function


def parse_optional_function(function: str | None, app: str | None) -> tuple[str | None, str | None]:
    """Combine the options --function and --app to (app, function). Raises InvalidInput if they
    contradict each other."""
    if not function:
        return app or None, None
    hint = "Write --function APP/FUNCTION, without --app."
    named, name = parse_function(function, hint=hint)
    if app not in (None, "", named):
        raise InvalidInput(f"--function {function!r} contradicts --app {app!r}", hint=hint)
    return named, name
