"""`import pilotlight` is what every user's script pays for, and importing the clients of Kubernetes
what each activator and controller of a cluster pays for, so they stay light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIMIT_S = 0.150
"""A tenth of a second is where a command stops feeling immediate; half of that again for a slow
machine. Of the process's own time: what else runs on the machine is no part of it."""
HEAVY = (
    "torch",
    "numpy",
    "fastapi",
    "pydantic",
    "httpx",
    "rich",
    "typer",
    "boto3",
    "sqlalchemy",
    "uvicorn",
    "transformers",
)

PROBE = f"""
import json, sys, time
started = time.process_time()
import pilotlight
seconds = time.process_time() - started
print(json.dumps([seconds, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def _import_in_a_fresh_interpreter() -> tuple[float, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "functions")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
    )
    seconds, heavy = json.loads(run.stdout)
    return seconds, heavy


def test_importing_the_sdk_brings_in_nothing_heavy() -> None:
    _, heavy = _import_in_a_fresh_interpreter()

    assert heavy == []


@pytest.mark.slow
def test_importing_the_sdk_takes_less_than_150_ms() -> None:
    best = min(_import_in_a_fresh_interpreter()[0] for _ in range(5))

    assert best < LIMIT_S


CLUSTER_PROBE = """
import sys
from pilotlight.kubernetes.official_client import ApiClient
import pilotlight.kubernetes.cluster
names = [name for name in sys.modules if name.startswith("kubernetes")]
assert len(names) < 30, names
from kubernetes.aio import client as asynchronous
assert asynchronous.ApiClient is ApiClient
from kubernetes.aio.client import api_client
assert api_client.kubernetes.aio.client.models.V1Pod is asynchronous.V1Pod
assert not hasattr(asynchronous, "V1Nothing")
"""


def test_the_cluster_imports_no_generated_model_until_something_asks_for_one() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "functions")}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", CLUSTER_PROBE], env=environment, check=True
    )


def test_an_activator_imports_no_command_line() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}
    probe = "import sys, activator.__main__; assert 'rich' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], env=environment, check=True)


WORKER_PROBE = f"""
import sys
sys.path.insert(0, {str(ROOT / "functions/pilotlight/worker")!r})
import boot
sys.path.pop(0)
boot.set_path(
    runtime=[{str(ROOT / "functions")!r}], site_directories=[{sysconfig.get_paths()["purelib"]!r}]
)
boot.import_worker()
print(*sys.modules)
"""
NOT_IN_WORKERS = (
    "click",
    "httpx",
    "pydantic",
    "rich",
    "snapshotter",
    "uvicorn.main",
    "uvicorn.supervisors",
    "watchfiles",
)
"""What each COLD start would pay for, although no worker needs it."""


def test_a_worker_imports_no_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", WORKER_PROBE],
        env={"PATH": os.defpath},  # nothing that measures coverage
        capture_output=True,
        text=True,
        check=True,
    )
    imported = run.stdout.split()

    assert [name for name in NOT_IN_WORKERS if name in imported] == []
    assert len(imported) < 370, "what each COLD start imports has grown: is all of it needed?"


@pytest.mark.slow
@pytest.mark.parametrize("process", ["activator", "pilotlight.controller"])
def test_a_process_of_the_platform_imports_no_command_line_of_uvicorn(process: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'functions'}"}
    probe = f"import sys, {process}.__main__; assert 'uvicorn.main' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], env=environment, check=True)


def test_uvicorn_is_whole_once_something_uses_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "functions")}
    probe = """
import sys
from pilotlight.core.startup.lazy_packages import defer_package
defer_package("uvicorn")
defer_package("uvicorn")  # no effect
defer_package("no_such_package")
import uvicorn.config
assert "uvicorn.main" not in sys.modules
import uvicorn
assert uvicorn.Config is uvicorn.config.Config
assert uvicorn.run is sys.modules["uvicorn.main"].run
assert not hasattr(uvicorn, "nothing")
from uvicorn import Server
"""
    subprocess.run([sys.executable, "-W", "error", "-c", probe], env=environment, check=True)
