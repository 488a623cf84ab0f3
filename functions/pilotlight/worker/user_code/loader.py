"""Loads the user's object: imports it from the code directory, or unpickles it from the bundle, and
unwraps it to the raw callable or class."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from typing import Any

from pilotlight.sdk.decorator_metadata import metadata_of
from pilotlight.worker.launch_file import Launch


def set_script(launch: Launch) -> None:
    """Make the code directory the first entry of the path, like a script's own folder."""
    sys.path.insert(0, launch.code)
    sys.argv = [launch.spec.name]


def load(launch: Launch) -> Any:
    """The undecorated callable or class of the launch's function. Raises what the user's module
    raises."""
    if launch.spec.pickled is not None:
        return _unwrapped(_unpickled(os.path.join(launch.code, launch.spec.pickled)))
    module = importlib.import_module(launch.spec.module)
    return _unwrapped(_attribute(module, launch.spec.qualname))


def _unpickled(path: str) -> Any:
    with open(path, "rb") as f:
        return pickle.load(f)  # the tenant's own code, in the tenant's own process


def _attribute(module: Any, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = _unwrapped(found)
        if inspect.isclass(found) and "asgi" in metadata_of(
            inspect.getattr_static(found, name, None)
        ):
            return found  # the class, of which `qualname` names a web application
        try:
            found = getattr(found, name)
        except AttributeError:
            where = getattr(module, "__file__", None)
            raise AttributeError(
                f"module {module.__name__!r} ({where}) has no attribute {qualname!r}: if it was "
                f"renamed, deploy again"
            ) from None
    return found


def _unwrapped(found: Any) -> Any:
    handle = getattr(found, "__pilotlight__", None)
    return found if handle is None else handle.raw
