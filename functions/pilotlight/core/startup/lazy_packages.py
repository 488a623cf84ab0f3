"""Packages whose `__init__` runs at the first use of one of its names, not at the import of one of
their modules.

`uvicorn/__init__.py` imports uvicorn's command line, with click and what reloads sources: 25 ms of
the CPU time of each worker, controller and activator, which need its protocol classes only."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def defer_package(name: str) -> None:
    """Let `import name.module` run `name/__init__.py` only once an attribute of the package is
    used that none of its modules is. Does nothing for a package that is imported, or missing."""
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    if spec.loader is None or spec.submodule_search_locations is None:
        return
    package: Any = importlib.util.module_from_spec(spec)
    loader = spec.loader

    def __getattr__(attribute: str) -> Any:  # noqa: N807 - PEP 562
        if package.__dict__.pop("__getattr__", None) is not None:
            loader.exec_module(package)
            return getattr(package, attribute)
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    package.__getattr__ = __getattr__
    sys.modules[name] = package
