#!/usr/bin/env python3
"""Count what the structure of the code is judged by: `scripts/structure.py [--json]`.

Counts statements of product and test code, documented names, folders with many modules, import
circles, constructors with many parameters, long functions, classes of one name, private attributes
of the product that tests touch, retired words, and comments that switch a tool off. `--check` fails
for a retired class name or word, a docstring's reference that does not resolve, a folder with too
many modules, a constructor with too many parameters, an import circle, too many switches, and too
many private attributes that tests touch.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.docstring_references import dead_references  # noqa: E402 - needs the path

PACKAGES = ("activator", "snapshotter", "weight_cache", "functions/pilotlight")
MOST = 20
"""Modules in a folder, at most."""
RETIRED = frozenset((ROOT / "scripts/retired-names.txt").read_text().split())
"""Class names that were replaced by the standard term."""
RETIRED_WORDS = re.compile(
    r"\b(told|whoever|any more|of late)\b|(?<!`)\bnobody\b(?![:`])", re.IGNORECASE
)
"""Retired words; the user `nobody` of a system is not one of them."""
_MOST_PARAMETERS = 8
"""Parameters of a constructor, at most."""
_MOST_LINES = 60
"""Lines of a function's body: longer ones are counted."""
_MOST_TOUCHED = 40
"""Private attributes of the product that tests touch, at most."""
_MOST_SWITCHES = {"fmt: skip": 0, "type: ignore": 25, "noqa": 25}
_SWITCHES = {
    "fmt: skip": re.compile(r"# fmt: (?:skip|off)\b"),
    "type: ignore": re.compile(r"# type: ignore"),
    "noqa": re.compile(r"# noqa"),
}


def sources(*folders: str) -> Iterator[Path]:
    """Python files below these folders."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def statements(tree: ast.Module) -> int:
    """Statements, without docstrings and imports."""
    found = 0
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        found += (
            isinstance(node, ast.stmt)
            and not isinstance(node, ast.Import | ast.ImportFrom)
            and not is_text
        )
    return found


def is_documented(node: ast.AST) -> bool:
    """Whether a class or function has a docstring that says something itself."""
    text = (
        ast.get_docstring(node)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module)
        else None
    )
    return bool(text) and not re.match(r"See \S+\Z", text or "")


def private_names(trees: Iterable[ast.Module]) -> set[str]:
    """Names with one leading underscore that the product defines."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def touched(tree: ast.Module, names: set[str]) -> int:
    """How often a test's module reaches for one of these names in something that is not its own."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {
        node.attr
        for node in attributes
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    foreign = {"self", "cls", "os", "super()"}
    return sum(
        node.attr in names and node.attr not in own and ast.unparse(node.value) not in foreign
        for node in attributes
    )


def touches(trees: Iterable[ast.Module]) -> Iterator[tuple[Path, int]]:
    """Modules of the tests that reach for private attributes of these trees, and how often."""
    names = private_names(trees)
    for path in sources("tests"):
        if count := touched(ast.parse(path.read_text()), names):
            yield path, count


def wide_constructors(trees: Mapping[Path, ast.Module]) -> dict[str, int]:
    """Classes with more than `_MOST_PARAMETERS` of their constructor, and how many it has. Records
    (dataclasses) are not among them: their fields are what they are."""
    found = {}
    for path, tree in trees.items():
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    given = node.args
                    count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                    if count > _MOST_PARAMETERS:
                        found[f"{path.relative_to(ROOT)}: {owner.name}"] = count
    return found


def long_functions(trees: Mapping[Path, ast.Module]) -> dict[str, int]:
    """Functions with more than `_MOST_LINES` lines of body, without the docstring. Migrations are
    not among them."""
    found = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                lines = (node.end_lineno or 0) - body[0].lineno + 1
                if lines > _MOST_LINES and "migrations" not in path.parts:
                    found[f"{path.relative_to(ROOT)}: {node.name}"] = lines
    return found


def module_imports(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Module → modules of the product that it imports, wherever in the module."""
    names = {}
    for path in trees:
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[1:] if parts[0] == "functions" else parts
        names[path] = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    known, imports = set(names.values()), {}
    for path, tree in trees.items():
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in known else node.module for name in inside}
        imports[names[path]] = (found & known) - {names[path]}
    return imports


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of nodes that reach each other; nodes that reach none are left out first."""
    graph = {name: set(targets) for name, targets in graph.items()}
    while ends := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets - ends for name, targets in graph.items() if name not in ends}
    reached = {}
    for start in graph:
        seen, left = set[str](), [start]
        while left:
            new = graph.get(left.pop(), set()) - seen
            seen |= new
            left += new
        reached[start] = seen
    found = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in graph
    }
    return sorted((set(group) for group in found if len(group) > 1), key=sorted)


def mutual_subpackages(
    imports: Mapping[str, set[str]], packages: set[str]
) -> list[tuple[str, str]]:
    """Pairs of subpackages of one package that import each other."""
    pairs = set()
    for name, targets in imports.items():
        for target in targets:
            a, b = name.split("."), target.split(".")
            same = next(
                (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)),
            )
            one, other = ".".join(a[: same + 1]), ".".join(b[: same + 1])
            if same and {one, other} <= packages:
                pairs.add((one, other))
    return sorted((a, b) for a, b in pairs if a < b and (b, a) in pairs)


def import_circles(trees: Mapping[Path, ast.Module]) -> dict[str, list[str]]:
    """Circles of modules, and pairs of subpackages that import each other."""
    imports = module_imports(trees)
    packages = {
        ".".join(part for part in path.parent.relative_to(ROOT).parts if part != "functions")
        for path in trees
    }
    return {
        "modules": [" ".join(sorted(group)) for group in circles(imports)],
        "subpackages": [" ".join(pair) for pair in mutual_subpackages(imports, packages)],
    }


def dependencies() -> set[str]:
    """Packages that pyproject.toml names, by the names under which they are imported, as far as
    those are the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = (
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    )
    named = (one for group in groups for one in group if isinstance(one, str))
    return {re.split(r"[^\w-]", one, maxsplit=1)[0].replace("-", "_").lower() for one in named}


def report() -> dict[str, Any]:
    """All counts."""
    product = {path: path.read_text() for path in sources(*PACKAGES)}
    trees = {path: ast.parse(text) for path, text in product.items()}
    classes: Counter[tuple[str, str]] = Counter()
    public = documented = 0
    for path, tree in trees.items():
        package = path.relative_to(ROOT).parts[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[package, node.name] += 1
            if isinstance(
                node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and not node.name.startswith("_"):
                public, documented = public + 1, documented + is_documented(node)
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in product)
    tests = [ast.parse(path.read_text()) for path in sources("tests")]
    return {
        "statements": {
            "product": sum(map(statements, trees.values())),
            "tests": sum(map(statements, tests)),
        },
        "private attributes that tests touch": sum(n for _, n in touches(trees.values())),
        "documented": {"public": public, "with a docstring of their own": documented},
        f"folders above {MOST} modules": {
            name: count for name, count in folders.most_common() if count > MOST
        },
        "import circles": {kind: len(found) for kind, found in import_circles(trees).items()},
        f"constructors with more than {_MOST_PARAMETERS} parameters": wide_constructors(trees),
        f"functions with more than {_MOST_LINES} lines of body": long_functions(trees),
        "classes of one name in a package": {
            f"{p}: {name}": count for (p, name), count in classes.most_common() if count > 2
        },
        "words": sum(len(list(RETIRED_WORDS.finditer(text))) for text in product.values()),
        **{
            name: sum(len(pattern.findall(text)) for text in product.values())
            for name, pattern in _SWITCHES.items()
        },
    }


def faults() -> list[str]:
    """Return what `--check` refuses, a line each."""
    found = []
    counts: dict[str, int] = defaultdict(int)
    switches: dict[str, int] = defaultdict(int)
    trees = {}
    for path in sources(*PACKAGES):
        name = str(path.relative_to(ROOT))
        trees[path] = ast.parse(path.read_text())
        counts[str(path.parent.relative_to(ROOT))] += 1
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [
                f"{name}:{number}: {word} has another name now"
                for word in re.findall(r"\b[A-Z]\w+", line)
                if word in RETIRED
            ]
            found += [
                f"{name}:{number}: {word[0]!r} is retired: write it in plain English"
                for word in RETIRED_WORDS.finditer(line)
            ]
            for switch, pattern in _SWITCHES.items():
                switches[switch] += len(pattern.findall(line))
    found += [
        f"{folder} has {count} modules: at most {MOST}"
        for folder, count in counts.items()
        if count > MOST
    ]
    found += [
        f"{name} has {count} parameters of its constructor: at most {_MOST_PARAMETERS}; group what "
        "belongs together under a type with a name, or split the class"
        for name, count in wide_constructors(trees).items()
    ]
    found += [
        f"import circles of {kind}, those for type checkers and in functions included: "
        f"{'; '.join(groups)}"
        for kind, groups in import_circles(trees).items()
        if groups
    ]
    found += dead_references(ROOT, trees, dependencies())
    reached = dict(touches(trees.values()))
    if (total := sum(reached.values())) > _MOST_TOUCHED:
        where = ", ".join(f"{path.relative_to(ROOT)} {n}" for path, n in reached.items())
        found.append(f"tests touch {total} private attributes: at most {_MOST_TOUCHED}; in {where}")
    return found + [
        f"{count} comments {switch!r}: at most {_MOST_SWITCHES[switch]}"
        for switch, count in switches.items()
        if count > _MOST_SWITCHES[switch]
    ]


def main() -> int:
    """Exit status: 1 where `--check` finds something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="fail where a bound is exceeded or a retired name or word is used",
    )
    parser.add_argument("--json", action="store_true", help="the counts as JSON")
    given = parser.parse_args()
    if given.check:
        print("\n".join(found := faults()), end="\n" if found else "")
        return 1 if found else 0
    counts = report()
    if given.json:
        print(json.dumps(counts))
        return 0
    for name, value in counts.items():
        print(
            f"{name}: {value if not isinstance(value, dict) else ', '.join(f'{k} {v}' for k, v in value.items()) or 'none'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
