"""First code of a worker, executed by path: `<python> -I -S -B boot.py <launch.json>`.

It builds the module search path by hand, so that user code sees its own folder first, then the
standard library, then the site directories of its image, and of our runtime directories nothing but
our own packages, whatever else lies there. Only then is the rest of the worker imported, and all of
it before the user's folder is on the path: a user's `functions.py`, `helpers.py` or `json.py`
shadows nothing of ours."""

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
"""Set until the worker is an instance: each of these would start a thread pool, and a process with
threads cannot be forked."""


class RuntimeFinder:
    """Finds our packages in the runtime directories, and nothing else there."""

    def __init__(self, directories: Sequence[str]) -> None:
        self.directories = list(directories)

    def __repr__(self) -> str:
        return f"<RuntimeFinder {self.directories}>"

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """See importlib.abc.MetaPathFinder; submodules are found through their package's own
        path."""
        return PathFinder.find_spec(name, self.directories) if name in OUR_PACKAGES else None


def set_environment(*, env: Mapping[str, str], work: str) -> tuple[str, ...]:
    """Apply the launch environment, HOME and the working directory; the names of ONE_THREAD that
    the user did not set are returned."""
    os.environ.update(env)
    if "HOME" not in env:
        os.environ["HOME"] = work
    chosen_here = tuple(name for name in ONE_THREAD if name not in env)
    os.environ.update({name: ONE_THREAD[name] for name in chosen_here})
    os.chdir(work)
    return chosen_here


def set_path(*, runtime: Sequence[str], site_directories: Sequence[str]) -> None:
    """Make our packages and the image's site directories (with their .pth files) importable.

    An editable installation of the platform leaves a .pth that names our source tree: such entries
    are dropped again."""
    import site

    sys.meta_path.insert(0, RuntimeFinder(runtime))
    for directory in site_directories:
        site.addsitedir(directory)
    keep = {os.path.abspath(d) for d in site_directories}
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) in keep or not _holds_our_packages(p)]
    # `exit()` and `help()` exist in user code as in any Python, although -S was given
    site.setquit()
    site.sethelper()


def _holds_our_packages(directory: str) -> bool:
    return any(os.path.isdir(os.path.join(directory, name)) for name in OUR_PACKAGES)


def main(launch_path: str, *, interpreter_ms: float, started: float) -> None:
    """Boot the worker described by the launch file; returns only by leaving the process.

    Args:
        launch_path: the launch file (`docs/internals.md`, "The slot").
        interpreter_ms: what the interpreter's own start cost before this file ran.
        started: monotonic seconds when this file began.
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
