"""Metadata that decorators attach to functions and classes, and what decorators have in common.

A mark is an entry in the dictionary `_pilotlight_marks` of the function or class itself.
`@app.function()` and `@app.cls()` read marks at declaration, the worker reads them at run time. No
decorator wraps its target, except `@method()`, so that `self.name.remote(…)` knows its object: a
marked function is called as before."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.errors import InvalidInput

METADATA_ATTRIBUTE = "_pilotlight_marks"


class PilotlightWarning(UserWarning):
    """Warns of an option that is accepted but has no effect."""


def metadata_of(target: Any) -> Mapping[str, Any]:
    """Return the marks of a function or class itself, without those of base classes."""
    found = vars(target).get(METADATA_ATTRIBUTE, {}) if hasattr(target, "__dict__") else {}
    return found if isinstance(found, Mapping) else {}


def set_metadata(target: Any, key: str, value: Any) -> None:
    """Add one mark to `target`. Raises InvalidInput if `target` already has it."""
    marks = dict(metadata_of(target))
    if key in marks:
        raise InvalidInput(f"{describe_target(target)} is marked @{key} twice: remove one")
    setattr(target, METADATA_ATTRIBUTE, {**marks, key: value})


def method_metadata(*, example: Any, check: Callable[[Any, Any], bool] | None) -> dict[str, Any]:
    """Validate the example and check of a callable and return its mark. Raises InvalidInput."""
    if example is not None and not isinstance(example, list | tuple | dict):
        raise InvalidInput(
            f"example = {example!r}: pass the arguments as a list, example=[{example!r}], or by "
            f"name as a dict",
            parameter="example",
        )
    try:
        json.dumps(example)
    except (TypeError, ValueError) as e:
        raise InvalidInput(
            f"example = {example!r} cannot be encoded as JSON: {e}", parameter="example"
        ) from e
    if check is not None and not callable(check):
        raise InvalidInput(
            f"check = {check!r}: must be a function check(answer, expected) -> bool",
            parameter="check",
        )
    if check is not None and example is None:
        raise InvalidInput(
            "check= compares answers to the example: pass example= as well", parameter="check"
        )
    return {"example": list(example) if isinstance(example, tuple) else example, "check": check}


def undecorated(found: Any) -> Any:
    """Return the plain function of what the body of a class has under a name: of a `@method()`, the
    function that it marks; anything else itself."""
    return getattr(found, "marked_function", found)


def describe_target(target: Any) -> str:
    """Return `name (file:line)` of a function or class, as far as known, for error messages."""
    name = getattr(target, "__qualname__", None) or repr(target)
    code = getattr(target, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


def refuse_bare(decorator: str, target: Any) -> None:
    """Raise InvalidInput if a decorator was used without parentheses, which passes the decorated
    object as `target`."""
    if target is not None:
        raise InvalidInput(
            f"@{decorator} was written without parentheses on {describe_target(target)}: write "
            f"@{decorator}()"
        )


def warn_ignored(name: str, why: str, *, stacklevel: int = 3) -> None:
    """Warn that an option is accepted but has no effect."""
    warnings.warn(
        f"{name}= has no effect on pilotlight: {why}", PilotlightWarning, stacklevel=stacklevel
    )
