"""Addresses of functions on the command line."""

from __future__ import annotations

from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import parse_function_path


def parse_address(
    target: str, *, hint: str = "List apps with `pilotlight app list`."
) -> tuple[str, str, str]:
    """Split APP/FUNCTION or APP/CLASS.METHOD into (app, function, method). Raises InvalidInput."""
    try:
        return parse_function_path(target)
    except ValueError as e:
        raise InvalidInput(str(e), hint=hint) from e


def parse_function(
    target: str, *, hint: str = "Write APP/FUNCTION.", without_method: str = ""
) -> tuple[str, str]:
    """Split APP/FUNCTION into (app, function). Raises InvalidInput. `without_method`: the hint for
    an address with a method; without it, the method is ignored."""
    app, function, method = parse_address(target, hint=hint)
    if method and without_method:
        raise InvalidInput(f"{target!r} names a method", hint=without_method)
    return app, function
