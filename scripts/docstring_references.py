"""Find references in docstrings that do not resolve: to a module, class or file that was renamed.

A reference is a text in backticks of the form `module.name`, `Class.attribute`, `package.module` or
`folder/file.py`; in the docstring of a package also `file.py`, of its own folder. It is checked if
its first word is a module, folder or class of the product, or if its last word is a function or
class of it. Skipped are names of the standard library and of other packages, names that start with
a parameter or an attribute of what the docstring is in, and plain words with dots, which are keys
of documents and names of files (`cpu.stat`)."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_DOTTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`(?!`)")
_FILE = re.compile(r"(?<!`)`((?:[\w-]+/)*\w+\.py)`(?!`)")
_PLAIN = re.compile(r"[a-z0-9.]+")
_NO_ATTRIBUTES = frozenset({"ABC", "Generic", "NamedTuple", "Protocol", "object"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Module = tuple[str, ...]


@dataclass(slots=True)
class _Tree:
    """The product: names that its modules define or import, the modules and places in their dotted
    names where a word occurs, its classes by name, and what it takes from other packages."""

    modules: defaultdict[_Module, set[str]] = field(default_factory=lambda: defaultdict(set))
    words: defaultdict[str, list[tuple[_Module, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    classes: defaultdict[str, list[ast.ClassDef]] = field(default_factory=lambda: defaultdict(list))
    defined: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)


def dead_references(
    root: Path, trees: Mapping[Path, ast.Module], packages: Collection[str] = ()
) -> list[str]:
    """Return a line for each reference that does not resolve. `trees`: the modules below `root` by
    their paths. `packages`: other packages, besides those that the modules import."""
    tree = _index(root, trees)
    tree.foreign |= set(packages)
    names = {path: str(path.relative_to(root)) for path in trees}
    ends = [f"/{name}" for name in names.values()]
    folders = {part for path in trees for part in path.relative_to(root).parent.parts}
    found = []
    for path, module in trees.items():
        for owner, line, text in _docstrings(module, ()):
            dead = [
                name[1]
                for name in _DOTTED.finditer(text)
                if _is_dead(tree, tuple(name[1].split("."))) and not _is_own(name[1], owner)
            ]
            for file in _FILE.findall(text):
                if path.name == "__init__.py" and "/" not in file:
                    dead += [file] * (path.with_name(file) not in trees)
                elif file.partition("/")[0] in folders:
                    dead += [file] * (not any(name.endswith(f"/{file}") for name in ends))
            found += [
                f"{names[path]}:{line}: `{name}` in the docstring does not exist" for name in dead
            ]
    return found


def _index(root: Path, trees: Mapping[Path, ast.Module]) -> _Tree:
    tree = _Tree()
    own = {path.relative_to(root).parts[0] for path in trees} | {"pilotlight"}
    for path, module in trees.items():
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[1:] if parts[0] == "functions" else parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for length in range(1, len(parts)):
            tree.modules[parts[:length]].add(parts[length])
        names = tree.modules[parts]
        for node in _flat(module.body):
            names |= set(_bound(node))
            if isinstance(node, _Function | ast.ClassDef):
                tree.defined.add(node.name)
            elif isinstance(node, ast.Import):
                tree.foreign |= {alias.name.partition(".")[0] for alias in node.names} - own
            elif isinstance(node, ast.ImportFrom) and node.module:
                tree.foreign |= {node.module.partition(".")[0]} - own
        for node in _classes(module.body):
            tree.classes[node.name].append(node)
    for place in tree.modules:
        for at, word in enumerate(place):
            tree.words[word].append((place, at))
    tree.foreign -= sys.stdlib_module_names
    return tree


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, and those in its `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _flat(node.body)
            if not isinstance(node, ast.With):
                yield from _flat(node.orelse)
            if isinstance(node, ast.Try):
                yield from _flat(one for handler in node.handlers for one in handler.body)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a statement binds."""
    if isinstance(node, _Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _classes(body: Iterable[ast.stmt]) -> Iterator[ast.ClassDef]:
    for node in _flat(body):
        if isinstance(node, ast.ClassDef):
            yield node
        if isinstance(node, _Function | ast.ClassDef):
            yield from _classes(node.body)


def _docstrings(
    owner: ast.Module | ast.ClassDef | _Function, within: tuple[ast.AST, ...]
) -> Iterator[tuple[tuple[ast.AST, ...], int, str]]:
    """Docstrings with a backtick, each with the classes and functions that it is in and its
    line."""
    within = (*within, owner)
    for node in owner.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and "`" in text:
                yield within, node.lineno, text
        elif isinstance(node, _Function | ast.ClassDef):
            yield from _docstrings(node, within)


def _is_own(name: str, within: tuple[ast.AST, ...]) -> bool:
    """Whether a name starts with a parameter or an attribute of what the docstring is in."""
    first = name.partition(".")[0]
    return any(
        _has_attribute(node, first)
        if isinstance(node, ast.ClassDef)
        else isinstance(node, _Function)
        and any(isinstance(part, ast.arg) and part.arg == first for part in ast.walk(node.args))
        for node in within
    )


def _is_dead(tree: _Tree, parts: _Module) -> bool:
    """Whether a dotted name is of the product and does not resolve."""
    first, last = parts[0], parts[-1]
    if last == "py" or _PLAIN.fullmatch(".".join(parts)) or first in tree.foreign:
        return False
    if first in tree.classes:
        return not _class_has(tree, first, parts[1], set())
    if first not in tree.words and (last not in tree.defined or _PLAIN.fullmatch(last)):
        return False
    section = first.title().replace("_", "") + "Settings"
    if section in tree.classes and _class_has(tree, section, parts[1], set()):
        return False
    return not _is_standard(*parts[:2]) and not any(
        parts[: len(place) - at] == place[at:]
        and _module_has(tree, place, parts[len(place) - at :])
        for place, at in tree.words[first]
    )


def _is_standard(module: str, name: str) -> bool:
    return module in sys.stdlib_module_names and hasattr(importlib.import_module(module), name)


def _module_has(tree: _Tree, place: _Module, rest: _Module) -> bool:
    """Whether a module has a name, or that name's class an attribute."""
    if not rest:
        return True
    if rest[0] not in tree.modules[place]:
        return False
    if len(rest) == 1:
        return True
    if (*place, rest[0]) in tree.modules:
        return False  # another place
    return rest[0] not in tree.classes or _class_has(tree, rest[0], rest[1], set())


def _class_has(tree: _Tree, name: str, attribute: str, seen: set[str]) -> bool:
    """Whether a class of this name or one of its bases has the attribute. A base of another package
    may have any."""
    if name not in tree.classes or name in seen:
        return name not in seen | _NO_ATTRIBUTES
    seen.add(name)
    return any(
        _has_attribute(node, attribute)
        or any(_class_has(tree, base, attribute, seen) for base in _bases(node))
        for node in tree.classes[name]
    )


def _bases(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        yield name.attr if isinstance(name, ast.Attribute) else ast.unparse(name)


def _has_attribute(node: ast.ClassDef, name: str) -> bool:
    """Whether a class's body binds the name or one of its methods sets an attribute so named."""
    return any(name in _bound(one) for one in _flat(node.body)) or any(
        isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.ctx, ast.Store)
        for part in ast.walk(node)
    )
