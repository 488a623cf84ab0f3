"""docs/reference/dependencies.md says what happens without each thing that the platform needs; each of its
rows is held by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "dependencies.md"
FILES = (
    "tests/activator/test_dependencies.py",
    "tests/functions/controller/test_dependencies.py",
    "tests/e2e/test_dependencies.py",
)
COLUMNS = (
    "Dependency",
    "Needed for",
    "Timeout",
    "Breaker",
    "Fallback",
    "What the caller sees",
    "SLI charged",
    "Test",
)
DEPENDENCIES = {
    "Redis",
    "Database",
    "Controller",
    "Node agent",
    "Weight cache",
    "Object store",
    "Webhook receiver",
    "OTLP collector",
    "OpenID Connect issuer (`issuers`)",
    "Kubernetes API server (`fleet: knative`)",
}


def table() -> list[dict[str, str]]:
    """The rows, by their columns."""
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert tuple(head) == COLUMNS
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def named(row: dict[str, str]) -> set[str]:
    """`path::test` of a row."""
    return set(re.findall(r"`([^`]+::test_\w+)`", row["Test"]))


def written(files: Iterable[str] = FILES) -> set[str]:
    """`path::test` of all tests in these files."""
    return {
        f"{file}::{node.name}"
        for file in files
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_every_dependency_has_a_row() -> None:
    assert sorted(row["Dependency"] for row in table()) == sorted(DEPENDENCIES)


@pytest.mark.parametrize("row", table(), ids=lambda row: str(row["Dependency"]))
def test_every_row_is_whole_and_has_a_test(row: dict[str, str]) -> None:
    assert all(row.values()), row
    assert named(row), "no test is named"
    there = written({test.partition("::")[0] for test in named(row)})
    assert named(row) <= there, named(row) - there


def test_every_test_stands_in_the_table() -> None:
    assert written() <= set().union(*(named(row) for row in table()))
