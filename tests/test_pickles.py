"""Processes of the platform never unpickle: only a tenant's own worker, and the SDK with answers
that it asked for, do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLATFORM = ("activator", "snapshotter", "weight_cache", "functions/pilotlight")
TRUSTED = ("functions/pilotlight/worker/", "functions/pilotlight/client/pickling.py")
LOADERS = frozenset({"load", "loads", "Unpickler"})
MODULES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})


def loads(source: str) -> Iterator[str]:
    """Names by which a module could load objects of a format that runs code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from (f"{node.module}.{one.name}" for one in node.names if one.name in LOADERS)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in LOADERS
            and isinstance(node.value, ast.Name)
            and node.value.id in MODULES
        ):
            yield f"{node.value.id}.{node.attr}"


@pytest.mark.slow  # parses every file of the platform
def test_no_process_that_others_depend_on_unpickles() -> None:
    files = [path for package in PLATFORM for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 500
    found = {
        str(path.relative_to(ROOT)): names
        for path in files
        if not str(path.relative_to(ROOT)).startswith(TRUSTED)
        and (names := sorted(loads(path.read_text())))
    }
    assert found == {}


def test_a_module_that_unpickles_is_found() -> None:
    assert list(loads("import pickle\npickle.loads(b'')")) == ["pickle.loads"]
    assert list(loads("from cloudpickle import loads")) == ["cloudpickle.loads"]
    assert list(loads("import pickle, json\npickle.dumps(json.loads('1'))")) == []
    assert sorted(
        loads((ROOT / "functions/pilotlight/worker/user_code/arguments.py").read_text())
    ), "there they are loaded"
