"""Loading of an App by reference: `app.py`, `app.py::name`, `package.module`,
`package.module::name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from pilotlight.errors import InvalidInput, NotFound
from pilotlight.packaging.app import App
from pilotlight.packaging.deferred_imports import deferred_imports


def load_app(reference: str) -> App:
    """Import the module that `reference` names and return its app.

    Raises NotFound or InvalidInput. Exceptions of the user's module are not wrapped."""
    target, _, name = reference.partition("::")
    return find_app(load_module(target), name)


def load_module(target: str) -> ModuleType:
    """Import a file (under the name that workers use) or a dotted module, with its directory first
    on `sys.path`."""
    if not (target.endswith(".py") or os.sep in target):
        return _import(target, Path.cwd())
    file = Path(target).resolve()
    if file.is_dir():
        file = file / "__init__.py"
    if not file.is_file():
        raise NotFound(
            f"{target}: no such file",
            hint="Specify the file that defines the app: `pilotlight deploy FILE`.",
        )
    parts = [file.stem]
    root = file.parent
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if parts[-1] == "__init__":
        parts.pop()
    return _import(".".join(parts), root, file=file)


def find_app(module: ModuleType, name: str = "") -> App:
    """Return the app of a module: the one in the variable `name`, otherwise in `app`, otherwise the
    only one. Raises NotFound or InvalidInput."""
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if name:
        if name not in apps:
            raise NotFound(
                f"{module.__name__} has no App named {name!r}; it has: {', '.join(apps) or 'none'}"
            )
        return apps[name]
    if "app" in apps:
        return apps["app"]
    distinct = {id(app): app for app in apps.values()}
    if len(distinct) != 1:
        hint = (
            f"specify one: {module.__name__}::{next(iter(apps))}"
            if apps
            else 'declare one: app = pilotlight.App("name")'
        )
        raise InvalidInput(
            f"{module.__name__} has {len(distinct)} apps ({', '.join(apps) or 'none'}); {hint}"
        )
    return next(iter(distinct.values()))


def _import(name: str, root: Path, file: Path | None = None) -> ModuleType:
    if file is not None and name in {*sys.stdlib_module_names, "pilotlight"}:
        raise InvalidInput(
            f"{file}: the module {name!r} would shadow an existing module of that name: rename the "
            f"file"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    there = sys.modules.get(name)
    if (
        there is not None
        and file is not None
        and Path(getattr(there, "__file__", None) or "").resolve() != file
    ):
        # another file with this module name was loaded earlier
        return _import_file(name, file)
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise NotFound(f"module {name!r} was not found in {root}")
    with deferred_imports(root):
        module = importlib.import_module(name)
    if file is not None and Path(module.__file__ or "").resolve() != file:
        return _import_file(name, file)
    return module


def _import_file(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with deferred_imports(file.parent):
        spec.loader.exec_module(module)
    return module
