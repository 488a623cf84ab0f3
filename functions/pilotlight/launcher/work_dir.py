"""Prepares the worker's directories below PILOTLIGHT_WORK, its launch file, and the command that
boots it (`pilotlight.worker.boot`)."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.launcher.pod_environment import InvalidPod, PodEnvironment
from snapshotter.types import VISIBLE_DEVICES

PACKAGES = ("pilotlight", "snapshotter", "weight_cache")
"""The platform's packages that a worker imports."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that keep the worker single-threaded until it serves; the same values as on a single
machine (`worker.boot.ONE_THREAD`)."""


FILES = "/opt/pilotlight/files"
"""Directory of the files of `Image.copy` (`packaging.oci.environment`)."""


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """The command to execute; the launch file has the descriptor of the control channel.

    Attributes:
        control_fd: that descriptor; None: the one that the channel has in the launcher.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    work: Path
    control_fd: int | None = None


def prepare_work_dir(
    surroundings: PodEnvironment, *, code: Path, weights: Mapping[str, str], control_fd: int
) -> WorkerCommand:
    """Create the directories and write the launch file. Raises InvalidPod if PILOTLIGHT_WORK is not
    writable."""
    launch = surroundings.launch
    work, temporary, file = (
        surroundings.work / "work",
        surroundings.work / "tmp",
        surroundings.work / "launch.json",
    )
    runtime, site = _runtime(), _site(surroundings.env)
    document = {
        "entry": launch.entry,
        "revision": launch.revision,
        "code": str(code),
        "site": site,
        "runtime": runtime,
        "weights": dict(weights),
        "env": dict(launch.env),
        "secret_variables": list(launch.secret_variables),
        "control_fd": control_fd,
        "work": str(work),
        "files": FILES if FILES in site else "",
    }
    try:
        for directory in (work, temporary):
            directory.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(json.dumps(document))
    except OSError as e:
        raise InvalidPod(
            f"PILOTLIGHT_WORK = {str(surroundings.work)!r} cannot be written: {e.strerror or e}"
        ) from e
    env = {"PATH": os.defpath, "LANG": "C.UTF-8", **surroundings.env, **launch.env, **ONE_THREAD}
    env.update(HOME=str(work), TMPDIR=str(temporary), **surroundings.calls_env())
    boot = os.path.join(_directory("pilotlight"), "worker", "boot.py")
    return WorkerCommand(
        argv=(sys.executable, "-I", "-S", "-B", boot, str(file)), env=env, work=work
    )


def command_in_tree(surroundings: PodEnvironment, tree: Mapping[str, Any]) -> WorkerCommand:
    """The command for a worker in a slot's tree, which the node agent has built in this pod
    (docs/reference/internals/pods.md, "Launcher and node agent"). Raises KeyError, TypeError."""
    env = {name: value for name, value in tree["env"].items() if name != VISIBLE_DEVICES}
    if surroundings.gpus:
        env[VISIBLE_DEVICES] = ",".join(surroundings.gpus)
    return WorkerCommand(
        argv=tuple(tree["argv"]),
        env={**env, **surroundings.calls_env()},
        work=Path(tree["work"]),
        control_fd=int(tree["control_fd"]),
    )


def _directory(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidPod(
            f"package {package} is not in this image: install pilotlight[worker] in it"
        )
    return os.path.abspath(spec.submodule_search_locations[0])


def _runtime() -> list[str]:
    """Directories of the platform's packages: one for an installed wheel, several for a source
    tree."""
    return list(dict.fromkeys(os.path.dirname(_directory(package)) for package in PACKAGES))


def _site(environ: Mapping[str, str]) -> list[str]:
    """Directories of the image's packages: PYTHONPATH, which the worker's isolated interpreter does
    not read, then site-packages."""
    named = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return [path for path in dict.fromkeys([*named, *installed]) if os.path.isdir(path)]
