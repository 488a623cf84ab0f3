"""Defers imports of large packages while an app is loaded to be deployed: most apps use torch in
their functions only, and a command that imports it takes seconds longer.

`import torch` in the app's own code, a whole package by its own name, gives a module that imports
the package when its first attribute is used: in an annotation, a decorator or a base class, say.
Everything else is imported at once."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = frozenset(
    {
        "accelerate",
        "datasets",
        "diffusers",
        "jax",
        "pandas",
        "scipy",
        "sentence_transformers",
        "sklearn",
        "tensorflow",
        "torch",
        "torchvision",
        "transformers",
        "vllm",
    }
)
"""They take 0.3 s and more, and other code does not depend on what their import does."""


@contextlib.contextmanager
def deferred_imports(root: Path) -> Iterator[None]:
    """Defer imports of `PACKAGES` by code below `root` while the context lasts."""
    original, below = builtins.__import__, f"{root}/"

    def deferring(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        file = str((globals or {}).get("__file__") or "")
        if (
            name in PACKAGES
            and not fromlist
            and name not in sys.modules
            and file.startswith(below)
            and "site-packages" not in file
            and importlib.util.find_spec(name) is not None
        ):
            return DeferredModule(name)
        return original(name, globals, locals, fromlist or (), level)

    builtins.__import__ = deferring
    try:
        yield
    finally:
        builtins.__import__ = original


class DeferredModule(ModuleType):
    """Stands for a module that is imported when an attribute of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_imported(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_imported(self), name, value)

    def __dir__(self) -> list[str]:
        return dir(_imported(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def _imported(module: ModuleType) -> ModuleType:
    return importlib.import_module(module.__name__)
