"""Count what the structure of the code is judged by: `python scripts/structure.py [--json]`.

Counts statements of product and test code, documented names, folders with many modules, classes of
one name, private attributes of the product that tests touch, retired words, and comments that switch
a tool off. `--check` fails for a retired class
name or word, a folder with too many modules, too many switches, and too many private attributes that
tests touch.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("activator", "snapshotter", "weight_cache", "functions/pilotlight")
MOST = 20
"""Modules in a folder, at most."""
RETIRED = frozenset((ROOT / "scripts/retired-names.txt").read_text().split())
"""Class names that were replaced by the standard term."""
_WORDS = re.compile(r"\b(told|whoever|any more|of late)\b|(?<!`)\bnobody\b(?![:`])", re.IGNORECASE)
"""Retired words; the user `nobody` of a system is not one of them."""
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
        "folders above 20 modules": {
            name: count for name, count in folders.most_common() if count > 20
        },
        "classes of one name in a package": {
            f"{p}: {name}": count for (p, name), count in classes.most_common() if count > 2
        },
        "words": sum(len(list(_WORDS.finditer(text))) for text in product.values()),
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
    trees = []
    for path in sources(*PACKAGES):
        name = str(path.relative_to(ROOT))
        trees.append(ast.parse(path.read_text()))
        counts[str(path.parent.relative_to(ROOT))] += 1
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [
                f"{name}:{number}: {word} has another name now"
                for word in re.findall(r"\b[A-Z]\w+", line)
                if word in RETIRED
            ]
            found += [
                f"{name}:{number}: {word[0]!r} is retired: write it in plain English"
                for word in _WORDS.finditer(line)
            ]
            for switch, pattern in _SWITCHES.items():
                switches[switch] += len(pattern.findall(line))
    found += [
        f"{folder} has {count} modules: at most {MOST}"
        for folder, count in counts.items()
        if count > MOST
    ]
    reached = dict(touches(trees))
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
