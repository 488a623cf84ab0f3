"""Location of the source of a declaration: the directory to bundle, and the module name that
workers import."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotlight.errors import InvalidInput
from pilotlight.sdk.declaration import Declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """One directory to pack.

    Attributes:
        root: the directory; None for a notebook, of which only imported modules are packed.
        module: module to import in it; "" for functions deployed by value."""

    root: Path | None
    module: str


def find_source_tree(declaration: Declaration) -> SourceTree:
    """Return the source of a declaration. Raises InvalidInput if its module is not a file."""
    file = declaration.file
    if declaration.by_value:
        return SourceTree(root=file.parent if file else None, module="")
    if file is None:
        raise InvalidInput(
            f"{declaration.name}: module {declaration.module!r} is not a file, so it cannot be "
            f"packaged"
        )
    parts = module_parts(declaration.module, file)
    return SourceTree(root=import_root(file, parts), module=".".join(parts))


def module_parts(module: str, file: Path) -> list[str]:
    """Return the parts of the dotted module name if it matches the path of the file, otherwise the
    name of the file. Raises InvalidInput."""
    parts = module.split(".")
    tail = [*file.with_suffix("").parts]
    if tail[-1] == "__init__":
        tail.pop()
    if tail[-len(parts) :] == parts:
        return parts
    if "." in file.stem:
        raise InvalidInput(
            f"{file}: the name of a module file cannot contain further dots: rename it"
        )
    return [file.stem]


def import_root(file: Path, parts: Sequence[str]) -> Path:
    """Return the directory from which `parts` can be imported: for a module of a package, the
    parent of the package."""
    start = file.parent if file.stem == "__init__" else file
    return start.parents[len(parts) - 1]


def notebook_files(directory: Path) -> dict[str, Path]:
    """Return the modules below `directory` that this process has imported, except installed
    packages, by their name in an archive."""
    installed = {
        Path(sysconfig.get_paths()[kind]).resolve() for kind in ("purelib", "platlib", "stdlib")
    }
    found: dict[str, Path] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        path = Path(file).resolve() if file else None
        if path is None or path.suffix != ".py" or not path.is_relative_to(directory):
            continue
        if any(path.is_relative_to(place) for place in installed) or module.__name__ == "__main__":
            continue
        found[path.relative_to(directory).as_posix()] = path
    return found
