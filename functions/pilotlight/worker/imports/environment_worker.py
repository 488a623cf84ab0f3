"""Worker of an environment snapshot: imports a list of modules of the image, before any user code
and any secret, and stops at its snapshot point. A restored copy becomes the worker of a function:
it reads the launch file again, which is that of its new slot, and boots from there.

The list comes from an earlier worker of the same tenant (`recorder.ImportRecorder.report`)."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pilotlight.worker.imports.imported_modules import ImportedModules
from pilotlight.worker.imports.recorder import ImportRecorder, held, left_out, thread_count
from pilotlight.worker.process import memory_access, resume
from pilotlight.worker.process.phase_timer import PhaseTimer
from pilotlight.worker.process.shim_channel import ShimChannel, ShimOrder
from pilotlight.worker.process.template import Template, surplus_threads
from pilotlight.worker.snapshot import hooks, quiesce
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan
from pilotlight.worker.user_code import output, user_errors
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource

OPENED = ":"
Boot = Callable[[ShimChannel, ImportedModules], NoReturn]
"""Boots the function of the new slot in this process."""


class CannotImportAhead(Exception):
    """Raised when a module of the list cannot be imported before user code. The message begins
    with its position in the list."""


def run(document: Mapping[str, Any], *, boot_ms: float, boot: Boot) -> NoReturn:
    """Run the worker, then exit the process or become another one by `boot`.

    Args:
        document: the launch file; `entry.imports` are the names of the modules.
        boot_ms: time since the interpreter's first instruction.
    """
    output.install()
    faulthandler.enable(2)
    control = ShimChannel(int(document["control_fd"]))
    phases = PhaseTimer(control)
    phases.ms["boot"] = round(boot_ms, 3)
    sys.argv = [""]
    with phases.phase("import"):
        ahead = import_all([str(name) for name in document["entry"]["imports"]])
    places = SocketOrigins(UserSource(document["code"], by_value=False))
    scene = BlockerScan(writable=(document["work"], tempfile.gettempdir()), places=places)
    resume.warm_resume_path()
    hooks.drop_caches()
    threads = surplus_threads()
    found = scene.scan(leave_aside={control.fileno()})
    output.finish()
    point = {"threads": list(threads), "phases_ms": phases.ms, "joins": True, **found.to_json()}
    control.send({"event": "snapshot_point", **point})
    become = functools.partial(_become, control, ahead, (document, boot))
    Template(control, become, functools.partial(_suspend, control, scene), threads=threads).run()
    output.finish()
    os._exit(0)


def import_all(names: Sequence[str]) -> ImportedModules:
    """Import the modules in this order. One that ends with `:` is opened: the following ones are
    imported in its place. Raises CannotImportAhead for the first one that fails, or leaves a
    thread, a socket or a device behind."""
    ahead = ImportedModules()
    for position, name in enumerate(names):
        if name.endswith(OPENED):
            ahead.open(name.removesuffix(OPENED))
            continue
        if name in sys.modules:
            raise CannotImportAhead(f"{position}: {name} is loaded already")
        before, began = frozenset(sys.modules), time.monotonic()
        threads, descriptors = thread_count(), held()
        try:
            importlib.import_module(name)
        except BaseException as e:  # a package may raise anything
            raise CannotImportAhead(f"{position}: importing {name} failed: {e!r:.200}") from e
        hooks.stop_helpers()
        if why := left_out(name, threads, descriptors):
            raise CannotImportAhead(f"{position}: {why}")
        ahead.add(name, (time.monotonic() - began) * 1000, before)
    ahead.copy_members()
    return ahead


def _suspend(control: ShimChannel, scene: BlockerScan, order: ShimOrder) -> None:
    with contextlib.suppress(quiesce.QuiesceBlocked):  # it has reported why to the shim
        quiesce.quiesce_process(control, order.descriptors, scene=scene, in_place=True)


def _become(
    control: ShimChannel,
    ahead: ImportedModules,
    launch: tuple[Mapping[str, Any], Boot],
    order: ShimOrder,
    started: float,
) -> NoReturn:
    document, boot = launch
    if order.op == "boot":
        memory_access.allow()
        gc.enable()
        os.environ.pop(quiesce.FROZEN_VARIABLE, None)
        resume.reseed()
        importlib.invalidate_caches()
        boot(control, ahead)
    if order.op == "prove":
        _prove(control, ahead, document, order, started)
    raise ValueError(f"invalid order {order.op!r} for a worker without a function")


def _prove(
    control: ShimChannel,
    ahead: ImportedModules,
    document: Mapping[str, Any],
    order: ShimOrder,
    started: float,
) -> NoReturn:
    """Import all of them once more, as user code would, and exit."""
    error: dict[str, str] | None = None
    try:
        recorder = ImportRecorder(site=document["site"], code=document["code"], ahead=ahead)
        recorder.start()
        while name := ahead.next_root:
            importlib.import_module(ahead.opened if ahead.is_opened else name)
        recorder.stop()
    except BaseException as e:  # a package may raise anything; it is reported as data
        user_errors.report(e)
        error = user_errors.as_data(e)
    output.finish()
    took = {"first_answer": round((time.monotonic() - started) * 1000, 3)}
    outcome: dict[str, Any] = {"ok": error is None, "error": error, "notes": [], "phases_ms": took}
    control.send({"event": "proved", "instance": order.instance, **outcome})
    os._exit(0)
