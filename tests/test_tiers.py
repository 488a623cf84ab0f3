"""The list of what `make test` leaves out names tests that are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import soak

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
