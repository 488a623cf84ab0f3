"""References in docstrings resolve, and `scripts/structure.py --check` names those that do not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.docstring_references import dead_references

ROOT = Path("/project")
WAITING = """
import redis

LIMIT = 3

class Base:
    def close(self): ...

class Queue(Base):
    depth: int

    def __init__(self):
        self.waiting = []

class Client(redis.Redis): ...

class BalancingSettings:
    max_waiting: int

def starts_for_burst(): ...
"""


def dead(docstring: str, *, where: str = "balancing/throttler.py", packages: str = "") -> list[str]:
    """The references that a docstring of the module `where` names in vain."""
    modules = {
        "balancing/__init__.py": "",
        "balancing/types.py": "",
        "balancing/wait_queue.py": WAITING,
        "calls/runner.py": "",
        where: f'"""{docstring}"""',
    }
    trees = {ROOT / name: ast.parse(text) for name, text in modules.items()}
    return [
        line.split("`")[1]
        for line in dead_references(ROOT, trees, packages.split())
        if where in line
    ]


@pytest.mark.parametrize(
    "reference",
    [
        "wait_queue.LIMIT",
        "wait_queue.Queue",
        "wait_queue.Queue.close",
        "balancing.wait_queue",
        "balancing.wait_queue.starts_for_burst()",
        "Queue.depth",
        "Queue.waiting",
        "Queue.close",
        "balancing/wait_queue.py",
        "balancing.max_waiting",
    ],
)
def test_reference_that_exists_is_accepted(reference: str) -> None:
    assert dead(f"See `{reference}`.") == []


@pytest.mark.parametrize(
    "reference",
    [
        "wait_queue.make_room",
        "wait_queue.Queue.make_room",
        "balancing.old_queue",
        "burst.starts_for_burst",
        "Queue.make_room",
        "balancing/old_queue.py",
        "balancing.max_burst",
    ],
)
def test_reference_to_what_was_renamed_is_named(reference: str) -> None:
    assert dead(f"See `{reference}`.") == [reference]


@pytest.mark.parametrize(
    "reference",
    [
        "types.SimpleNamespace",
        "redis.Old_name",
        "Client.get_del",
        "spec.containers",
        "balancing.json",
        "other/file.py",
        "kpa.autoscaling.knative.dev",
    ],
)
def test_name_of_another_package_and_key_of_a_document_are_skipped(reference: str) -> None:
    assert dead(f"See `{reference}`.") == []


def test_dependency_that_no_module_imports_is_skipped() -> None:
    assert dead("See `openai.Queue`.") == ["openai.Queue"]
    assert dead("See `openai.Queue`.", packages="openai") == []


def test_package_names_the_files_of_its_own_folder() -> None:
    where = "balancing/__init__.py"

    assert dead("`wait_queue.py` queues, `runner.py` runs.", where=where) == ["runner.py"]
    assert dead("`calls/runner.py` runs.", where=where) == []


def test_parameter_and_attribute_are_not_modules() -> None:
    source = '''
class Call:
    runner: object

    def run(self, wait_queue):
        """`wait_queue.max_depth` and `runner.max_depth`; not `balancing.max_depth`."""
'''
    trees = {
        ROOT / "balancing/wait_queue.py": ast.parse(WAITING),
        ROOT / "calls/runner.py": ast.parse(source),
    }

    assert dead_references(ROOT, trees) == [
        "calls/runner.py:6: `balancing.max_depth` in the docstring does not exist"
    ]
