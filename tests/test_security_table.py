"""docs/reference/security names a mechanism and a test for each promise: its modules and its tests
exist, and no cell is empty.

A test is named as pytest does (`tests/path.py::test_name`); `none yet` stands for a row that no
test covers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from pilotlight.packaging.app_loader import load_module

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference" / "security").glob("*.md"))
INDEX = ROOT / "docs" / "reference" / "security" / "index.md"
COLUMNS = ["promise", "mechanism", "test"]
NONE = "none yet"
PLACES = (ROOT, ROOT / "functions" / "pilotlight")
"""Modules are named from one of these."""
FEWEST = 200


@dataclass(frozen=True, kw_only=True)
class Row:
    """One promise. `line`: of the page, from 1."""

    line: int
    promise: str
    mechanism: str
    test: str


def rows_of(text: str) -> list[Row]:
    """The rows of all tables of promises in a page. Raises ValueError for one that has not three
    cells."""
    found: list[Row] = []
    is_inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("|"):
            is_inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells == COLUMNS:
            is_inside = True
        elif is_inside and set(line) - set("|- "):
            if len(cells) != len(COLUMNS):
                raise ValueError(f"line {number} has {len(cells)} cells")
            promise, mechanism, test = cells
            found.append(Row(line=number, promise=promise, mechanism=mechanism, test=test))
    return found


def faults(row: Row) -> list[str]:
    """What is wrong with a row; nothing where it is whole and names what there is."""
    found = [f"no {column}" for column in COLUMNS if not getattr(row, column)]
    if row.test != NONE:
        rest = re.sub(r"`[^`]+`", "", row.test).strip()
        found += [f"neither a test nor {NONE!r}: {rest}"] if rest else []
        found += [
            f"no such test: {name}"
            for name in re.findall(r"`([^`]+)`", row.test)
            if not is_test(name)
        ]
    modules = re.findall(r"`([\w/]+\.py)`", row.mechanism)
    return found + [
        f"no such module: {name}"
        for name in modules
        if not any((place / name).is_file() for place in PLACES)
    ]


def is_test(name: str) -> bool:
    """Whether pytest would find `path::test` or `path::Class::test`."""
    path, _, inside = name.partition("::")
    return path.startswith("tests/") and (ROOT / path).is_file() and inside in names_in(ROOT / path)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests in a file; of those in a class with its name before them."""
    tree = ast.parse(path.read_text())
    classes = [
        (f"{node.name}::", node.body)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
    ]
    return frozenset(
        f"{prefix}{node.name}"
        for prefix, body in [("", tree.body), *classes]
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    )


def test_every_row_is_whole_and_names_tests_and_modules_that_exist() -> None:
    rows = [(page.name, row) for page in PAGES for row in rows_of(page.read_text())]

    assert len(rows) >= FEWEST
    assert {f"{page}:{row.line}": found for page, row in rows if (found := faults(row))} == {}


def test_no_promise_stands_twice() -> None:
    promises = [row.promise for page in PAGES for row in rows_of(page.read_text())]

    assert sorted(promises) == sorted(set(promises))


def test_attempts_of_a_worker_are_counted_and_those_that_succeed_are_listed() -> None:
    table = load_module(str(ROOT / "tests/e2e/apps/attacker.py")).TABLE
    page = INDEX.read_text()
    listed = re.findall(
        r"^- (.+)$", page.partition("\n## What is open\n")[2].partition("\n## ")[0], re.MULTILINE
    )
    still_open = [attempt.name for attempt in table if attempt.open_until]
    said = (
        f"{len(table)} attempts from inside one tenant's worker, against the platform, its "
        f"host and another tenant: "
    )

    assert sorted(listed) == sorted(still_open)
    assert (
        f"{said}{len(table) - len(still_open)} must be denied, the other {len(still_open)} are "
        f"[open]" in " ".join(page.split())
    )


HEAD = "| promise | mechanism | test |\n|---|---|---|\n"
GOOD = "`tests/test_security_table.py::test_no_promise_stands_twice`"


@pytest.mark.parametrize(
    "row,fault",
    [
        (f"| A | `core/crypto.py` | {GOOD} |", None),
        ("| A | B | none yet |", None),
        (f"| | B | {GOOD} |", "no promise"),
        (f"| A | | {GOOD} |", "no mechanism"),
        ("| A | B | |", "no test"),
        ("| A | B | soon |", "neither a test nor 'none yet': soon"),
        (f"| A | B | {GOOD} and others |", "neither a test nor 'none yet': and others"),
        (
            "| A | B | `tests/test_security_table.py::test_gone` |",
            "no such test: tests/test_security_table.py::test_gone",
        ),
        ("| A | B | `tests/gone.py::test_x` |", "no such test: tests/gone.py::test_x"),
        (
            "| A | B | `tests/test_security_table.py` |",
            "no such test: tests/test_security_table.py",
        ),
        (
            "| A | B | `tests/test_security_table.py::rows_of` |",
            "no such test: tests/test_security_table.py::rows_of",
        ),
        (f"| A | `activator/gone.py` | {GOOD} |", "no such module: activator/gone.py"),
    ],
)
def test_what_a_row_lacks_is_named(row: str, fault: str | None) -> None:
    (found,) = rows_of(HEAD + row)

    assert faults(found) == ([fault] if fault is not None else [])


def test_a_method_of_a_test_class_is_named_with_its_class() -> None:
    name = "test_a_public_page_signs_nobody_in_or_out_of_the_dashboard"

    assert is_test(f"tests/activator/test_other_tenants.py::TestPages::{name}")
    assert not is_test(f"tests/activator/test_other_tenants.py::{name}")


def test_only_tables_of_promises_are_read() -> None:
    text = (
        f"| scope | may |\n|---|---|\n| `admin` | everything |\n\n{HEAD}| A | B | none yet "
        f"|\n\n| A | B | C |\n"
    )

    assert [(row.line, row.promise) for row in rows_of(text)] == [(7, "A")]
    with pytest.raises(ValueError, match="line 3 has 4 cells"):
        rows_of(f"{HEAD}| A | B | C | D |")
