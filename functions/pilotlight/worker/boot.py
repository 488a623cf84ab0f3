"""Entry point of a worker, executed by path: `<python> -I -S -B boot.py <launch.json>`.

It builds the module search path by hand: the user's folder first, then the standard library, then
the site directories of the image; of our runtime directories, only our own packages are importable.
The worker is imported completely before the user's folder is added to the path, so that a user's
`functions.py`, `helpers.py` or `json.py` cannot shadow our modules."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

OUR_PACKAGES = frozenset({"pilotlight", "snapshotter", "weight_cache"})

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set until the worker becomes an instance: these libraries would otherwise start thread pools, and
a process with threads cannot be forked."""


class RuntimeFinder:
    """Finds only our own packages in the runtime directories."""

    def __init__(self, directories: Sequence[str]) -> None:
        self.directories = list(directories)

    def __repr__(self) -> str:
        return f"<RuntimeFinder {self.directories}>"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Find a top-level package of ours (importlib.abc.MetaPathFinder); submodules are found
        through their package's path."""
        return PathFinder.find_spec(name, self.directories) if name in OUR_PACKAGES else None


def set_environment(*, env: Mapping[str, str], work: str) -> tuple[str, ...]:
    """Apply the launch environment, HOME and the working directory; returns the names of ONE_THREAD
    that the user did not set."""
    os.environ.update(env)
    if "HOME" not in env:
        os.environ["HOME"] = work
    chosen_here = tuple(name for name in ONE_THREAD if name not in env)
    os.environ.update({name: ONE_THREAD[name] for name in chosen_here})
    os.chdir(work)
    return chosen_here


def set_path(*, runtime: Sequence[str], site_directories: Sequence[str]) -> None:
    """Make our packages and the image's site directories (with their .pth files) importable.

    Entries that contain our packages are removed: an editable installation of the platform leaves a
    .pth file that names our source tree."""
    import site

    sys.meta_path.insert(0, RuntimeFinder(runtime))
    for directory in site_directories:
        site.addsitedir(directory)
    keep = {os.path.abspath(d) for d in site_directories}
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) in keep or not _holds_our_packages(p)]
    # -S omits `exit()` and `help()`, which user code may use
    site.setquit()
    site.sethelper()


def _holds_our_packages(directory: str) -> bool:
    return any(os.path.isdir(os.path.join(directory, name)) for name in OUR_PACKAGES)


def main(launch_path: str, *, interpreter_ms: float, started: float) -> None:
    """Boot the worker described by the launch file; never returns.

    Args:
        launch_path: the launch file (`docs/internals.md`, "The slot").
        interpreter_ms: duration of the interpreter's start, before this file ran.
        started: monotonic seconds at which this file began.
    """
    with open(launch_path, "rb") as f:
        document = json.load(f)
    chosen_here = set_environment(env=document["env"], work=document["work"])
    set_path(runtime=document["runtime"], site_directories=document["site"])

    from pilotlight.spec.function import FunctionKind
    from pilotlight.worker import worker
    from pilotlight.worker.launch_file import Launch

    launch = Launch.from_json(document, chosen_threads=chosen_here)
    if launch.spec.kind is FunctionKind.ENGINE:
        from pilotlight.worker.engine import engine_worker

        engine_worker.run(
            launch,
            site=document["site"],
            boot_ms=interpreter_ms + (time.monotonic() - started) * 1000,
        )
    worker.run(launch, boot_ms=interpreter_ms + (time.monotonic() - started) * 1000)


if __name__ == "__main__":
    main(sys.argv[1], interpreter_ms=time.process_time() * 1000, started=time.monotonic())
