"""Entry point of a worker, executed by path: `<python> -I -S -B boot.py <launch.json>`.

It builds the module search path by hand: the user's folder first, then the standard library, then
the site directories of the image; of our runtime directories, only our own packages are importable.
The worker is imported completely before the user's folder is added to the path, so that a user's
`functions.py`, `helpers.py` or `json.py` cannot shadow our modules."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

OUR_PACKAGES = frozenset({"pilotlight", "snapshotter", "weight_cache"})

MAX_FILES_BYTES = 16 * 1024**2
"""Of an image's files in the working directory: they are in its memory, and in each snapshot."""
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


def copy_files(source: str, work: str) -> None:
    """Copy the files of the image into the working directory, where they fit into MAX_FILES_BYTES
    and nothing has their names. They are copies, because a snapshot keeps the directory, and no
    link that leads out of it."""
    found, size = _files_below(source), 0
    for path in found:
        size += os.stat(os.path.join(source, path)).st_size
    if size > MAX_FILES_BYTES:
        print(
            f"the image has {size} bytes of files for the working directory, which takes "
            f"{MAX_FILES_BYTES}: copy them to an absolute path, such as /data",
            file=sys.stderr,
        )
        return
    for path in found:
        there = os.path.join(work, path)
        os.makedirs(os.path.dirname(there), exist_ok=True)
        if not os.path.lexists(there):
            with open(os.path.join(source, path), "rb") as old, open(there, "wb") as new:
                new.write(old.read())
                os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode & 0o777 | 0o200)


def _files_below(source: str) -> list[str]:
    """Paths of the files below a directory, without those of names that begin with a dot at its
    top; "" has none."""
    found: list[str] = []
    for folder, folders, files in os.walk(source) if source else ():
        if folder == source:
            folders[:] = [name for name in folders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".")]
        paths = [os.path.join(folder, name) for name in files]
        found += [os.path.relpath(path, source) for path in paths if os.path.isfile(path)]
    return found


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


def import_worker() -> None:
    """Import the worker, without uvicorn's command line and without the garbage collector: modules
    are no garbage, and looking for it takes a twelfth of the time."""
    gc.disable()
    from pilotlight.core.startup.lazy_packages import defer_package

    defer_package("uvicorn")
    importlib.import_module("pilotlight.worker.worker")
    gc.freeze()
    gc.enable()


def main(launch_path: str, *, interpreter_ms: float, started: float) -> None:
    """Boot the worker described by the launch file, of a function or of an environment snapshot;
    never returns.

    Args:
        launch_path: the launch file (`docs/reference/internals/slot.md`).
        interpreter_ms: duration of the interpreter's start, before this file ran.
        started: monotonic seconds at which this file began.
    """
    with open(launch_path, "rb") as f:
        document = json.load(f)
    chosen_here = set_environment(env=document["env"], work=document["work"])
    copy_files(document.get("files", ""), document["work"])
    set_path(runtime=document["runtime"], site_directories=document["site"])

    import_worker()

    from pilotlight.spec.function import FunctionKind
    from pilotlight.worker import worker
    from pilotlight.worker.launch_file import Launch

    if "imports" in document["entry"]:
        from pilotlight.worker.imports import environment_worker

        environment_worker.run(
            document,
            boot_ms=interpreter_ms + (time.monotonic() - started) * 1000,
            boot=lambda control, ahead: worker.run_in(
                control, launch_path, ahead=ahead, chosen_threads=chosen_here
            ),
        )
    launch = Launch.from_json(document, chosen_threads=chosen_here)
    if launch.spec.kind is FunctionKind.ENGINE:
        from pilotlight.worker.engine import engine_worker

        engine_worker.run(
            launch,
            site=document["site"],
            boot_ms=interpreter_ms + (time.monotonic() - started) * 1000,
        )
    if launch.spec.web_server is not None:
        from pilotlight.worker.engine import web_server

        web_server.run(launch, boot_ms=interpreter_ms + (time.monotonic() - started) * 1000)
    worker.run(launch, boot_ms=interpreter_ms + (time.monotonic() - started) * 1000)


if __name__ == "__main__":
    main(sys.argv[1], interpreter_ms=time.process_time() * 1000, started=time.monotonic())
