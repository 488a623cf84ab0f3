"""The list of what `make test` leaves out names tests that are there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import parallel, soak

ROOT = Path(__file__).parent.parent


def names_in(file: str) -> set[str]:
    """Of its tests."""
    found = ast.walk(ast.parse((ROOT / file).read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("file", sorted(soak.TESTS))
def test_every_test_that_is_left_out_is_there(file: str) -> None:
    assert {name.partition("[")[0] for name in soak.TESTS[file]} <= names_in(file)


@pytest.mark.parametrize("file", soak.FILES)
def test_every_file_that_is_left_out_is_there(file: str) -> None:
    assert any(name.startswith("test_") for name in names_in(file))


@pytest.mark.parametrize(
    "nodeid, is_left_out",
    [
        ("tests/e2e/test_frozen.py::test_anything", True),
        ("tests/e2e/test_cli.py::test_keys_secrets_and_environments", True),
        ("tests/e2e/test_cli.py::test_logs_of_one_call", False),
        (
            "tests/snapshotter/images/test_images.py::test_steps_run_in_order_and_the_image_serves[None]",
            True,
        ),
        (
            "tests/snapshotter/images/test_images.py::test_steps_run_in_order_and_the_image_serves[20077]",
            False,
        ),
        (
            "tests/functions/controller/test_process_user.py::test_one_that_stood_by_in_the_same_home_takes_over_without_root[9]",
            True,
        ),
        ("tests/test_tiers.py::test_keys_secrets_and_environments", False),
    ],
)
def test_what_is_left_out_is_told_by_file_name_and_case(nodeid: str, is_left_out: bool) -> None:
    assert soak.is_listed(nodeid) is is_left_out


class Named:
    """A test by its name alone."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_soak_tests_begin_with_another_file_for_another_commit() -> None:
    items = [Named(f"tests/test_{file}.py::test_{test}") for file in "abc" for test in "xy"]

    firsts = set()
    for commit in range(20):
        order = [item.nodeid for item in parallel.rotated(items, str(commit))]  # type: ignore[arg-type]
        assert sorted(order) == [item.nodeid for item in items]
        assert all(a[:-1] == b[:-1] for a, b in zip(order[::2], order[1::2], strict=True))
        firsts.add(order[0])

    assert len(firsts) == 3


@pytest.mark.slow
def test_a_soak_test_that_comes_too_late_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.soak\ndef test_long(): pass\n\ndef test_short(): pass\n"
    )
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tests.tiers', 'tests.parallel']\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadgroup", "-q"]
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--soak-until", "1", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
    assert "1 soak tests were left out" in ran.stdout


def test_soak_tests_of_a_file_are_a_unit_of_their_own() -> None:
    scheduler = parallel.FileScheduling.__new__(parallel.FileScheduling)
    units = [
        scheduler._split_scope(f"tests/e2e/test_cli.py::{name}")
        for name in ("test_logs_of_one_call", "test_keys_secrets_and_environments")
    ]
    assert units == ["platform", "soak tests/e2e/test_cli.py"]
    for unit, files in parallel.UNITS.items():
        assert {scheduler._split_scope(f"{file}::test_a") for file in files} == {unit}


def test_every_file_with_the_real_vllm_is_in_its_unit() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if file != Path(__file__) and "mark.vllm" in file.read_text()
    }
    assert marked == set(parallel.UNITS["vllm"])


@pytest.mark.parametrize("fixture", ["platform", "mortal_platform"])
def test_every_file_that_shares_a_platform_is_in_its_unit(fixture: str) -> None:
    sharing = {
        name
        for file in (ROOT / "tests/e2e").glob("test_*.py")
        if (name := str(file.relative_to(ROOT))) not in soak.FILES and fixture in shared_by(file)
    }
    others = {file for unit, files in parallel.UNITS.items() if unit != fixture for file in files}
    assert sharing - others == set(parallel.UNITS[fixture])


def shared_by(file: Path) -> set[str]:
    """Fixtures that its tests and fixtures request, and that it does not define."""
    requested, defined = set[str](), set[str]()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            is_fixture = "pytest.fixture" in decorators
            if is_fixture or node.name.startswith("test_"):
                requested |= {argument.arg for argument in node.args.args}
            if is_fixture:
                defined |= {node.name, *re.findall(r"name='(\w+)'", decorators)}
    return requested - defined
