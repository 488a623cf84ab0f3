"""The house's rules about imports hold, and the checker of doors sees what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.doors import is_through_wall

ROOT = Path(__file__).parent.parent
ROOTS = frozenset({"activator", "pilotlight", "snapshotter", "weight_cache"})
DOORS = frozenset({"types", "errors", "client"})


@pytest.mark.slow
def test_every_import_contract_is_kept() -> None:
    program = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "functions")}

    run = subprocess.run(
        [program, "--no-logo"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    "importer,imported",
    [
        pytest.param("activator.gateway.pipeline", "pilotlight.types", id="a door"),
        pytest.param(
            "activator.gateway.pipeline", "snapshotter.client.pool", id="a module behind a door"
        ),
        pytest.param("pilotlight.cli.up", "pilotlight.controller.app", id="its own package"),
        pytest.param("activator.gateway.pipeline", "httptools", id="not ours"),
    ],
)
def test_doors_and_the_inside_of_a_package_are_open(importer: str, imported: str) -> None:
    assert not is_through_wall(importer, imported, roots=ROOTS, doors=DOORS)


@pytest.mark.parametrize(
    "importer,imported",
    [
        pytest.param("activator.gateway.pipeline", "snapshotter.shim.main", id="an inner module"),
        pytest.param(
            "activator.gateway.pipeline",
            "pilotlight.controller.types",
            id="a door's name, deeper inside",
        ),
        pytest.param("activator.gateway.pipeline", "pilotlight", id="the package itself"),
    ],
)
def test_everything_else_is_a_wall(importer: str, imported: str) -> None:
    assert is_through_wall(importer, imported, roots=ROOTS, doors=DOORS)
