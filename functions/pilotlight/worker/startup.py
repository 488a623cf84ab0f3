"""A worker's life in order: import, enter, warm up, snapshot point; then, as an instance, wake and serve. Every phase is timed.

A fork may be parked between the snapshot point and its wake: it then does ahead what needs neither an identity nor user code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from pilotlight.worker import faults, hooks, output, wake
from pilotlight.worker.control import Control, Order
from pilotlight.worker.launch import Launch
from pilotlight.worker.loader import load
from pilotlight.worker.pages import Touched
from pilotlight.worker.server import Server
from pilotlight.worker.target import Target, make_target
from pilotlight.worker.template import Template, connect_output, surplus_threads

WORKER_VARIABLE = "PILOTLIGHT_WORKER"
"""Set to 1: the SDK in user code then takes weights and secrets from the platform and looks for no local files."""
WEIGHTS_VARIABLE = "PILOTLIGHT_WEIGHTS"
"""JSON object: name of weights → directory; how `pilotlight.Weights(...).path` finds them inside a worker."""


class Phases:
    """Stopwatch of the phases, in ms. A phase that raises is reported to the shim, and the process ends with status 1."""

    def __init__(self, control: Control, *, instance: str | None = None) -> None:
        self._control = control
        self._instance = instance
        self.ms: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase."""
        begun = time.monotonic()
        try:
            yield
        except BaseException as e:  # noqa: BLE001  # user code may raise anything while starting; it is reported as data and ends us
            self._fail(name, e)
        self.ms[name] = round((time.monotonic() - begun) * 1000, 3)

    def _fail(self, name: str, error: BaseException) -> NoReturn:
        faults.report(error)
        output.finish()
        with contextlib.suppress(OSError):  # a shim that is gone cannot be told
            self._control.send({"event": "failed", "instance": self._instance, "phase": name, "error": faults.as_data(error)})
        os._exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What stands at the snapshot point, and what its forks become instances with."""

    launch: Launch
    control: Control
    server: Server
    touched: Touched


def run(launch: Launch, *, boot_ms: float) -> None:
    """Run the worker; leaves the process when it is done.

    Args:
        launch: what to run.
        boot_ms: from the interpreter's first instruction to here.
    """
    output.install()
    faulthandler.enable(2)
    os.environ[WORKER_VARIABLE] = "1"
    os.environ[WEIGHTS_VARIABLE] = json.dumps(dict(launch.weights))
    control = Control(launch.control_fd)
    phases = Phases(control)
    phases.ms["boot"] = round(boot_ms, 3)
    with phases.phase("import"):
        raw = load(launch)
    with phases.phase("enter"):
        target = make_target(raw, launch.spec)
        hooks.run_before_snapshot(target)
    with phases.phase("warmup"):
        server = Server(target, launch.spec)
        touched = _warm_up(target, server)
    threads = _reach_snapshot_point(control, phases, touched)
    worker = Worker(launch=launch, control=control, server=server, touched=touched)
    Template(control, lambda order, started: _become(worker, order, started), threads=threads).run()
    output.finish()
    os._exit(0)


def _warm_up(target: Target, server: Server) -> Touched:
    """Every example once, and our own part of a call; what they touch is remembered where the process can be forked at all."""
    touched = Touched()

    def rehearse() -> None:
        hooks.warm_up(target)
        server.rehearse()

    if surplus_threads():
        rehearse()
    else:
        touched.watch(rehearse)
    return touched


def _reach_snapshot_point(control: Control, phases: Phases, touched: Touched) -> tuple[str, ...]:
    wake.rehearse()
    hooks.drop_caches()
    touched.look()
    output.finish()
    threads = surplus_threads()
    control.send({"event": "snapshot_point", "threads": list(threads), "phases_ms": phases.ms, "joins": True})
    return threads


def _become(worker: Worker, order: Order, started: float) -> NoReturn:
    """What a forked child, or the worker itself, does with its order."""
    if order.op == "park":
        order = _wait_parked(worker, order)
        started, doing = time.monotonic(), "assign"
    else:
        connect_output(order)
        worker.server.prepare()
        _wait_go(order.descriptors[3])
        gc.enable()
        doing = "fork"
    phases = Phases(worker.control, instance=order.instance)
    listener = socket.socket(fileno=order.descriptors[0])
    phases.ms[doing] = round((time.monotonic() - started) * 1000, 3)
    with phases.phase("wake"):
        wake.reseed()
        wake.take_environment(order.instance, order.env)
        wake.raise_threads(cpu=worker.launch.spec.resources.cpu, variables=worker.launch.chosen_threads)
        worker.server.wake(listener)

    def ready() -> None:
        worker.control.send({"event": "ready", "instance": order.instance, "phases_ms": phases.ms})

    worker.server.run(on_ready=ready, shim=worker.control.fileno())
    _leave(0)


def _wait_parked(worker: Worker, order: Order) -> Order:
    """Do all that needs no identity and runs no user code, say so, and wait for the assignment. A parked fork nobody wants leaves."""
    channel, go, *_ = order.descriptors
    desk = Control(channel)
    _wait_go(go)
    gc.enable()
    worker.server.prepare()
    worker.touched.bring_in()
    worker.server.settle_in()
    worker.control.send({"event": "parked", "instance": order.instance})
    assignment = desk.receive()
    if assignment is None:
        os._exit(0)
    with contextlib.suppress(OSError):  # a shim that does not listen for it
        desk.send({"event": "assigned"})
    desk.close()
    connect_output(assignment)
    return assignment


def _wait_go(go: int) -> None:
    if not os.read(go, 1):
        os._exit(0)  # whoever ordered the instance gave it up
    os.close(go)


def _leave(status: int) -> NoReturn:
    """Run atexit functions, then leave without finalising: tearing a copied heap down would only copy its pages first."""
    import atexit

    run_functions: Any = getattr(atexit, "_run_exitfuncs", lambda: None)  # what the interpreter itself would call
    run_functions()
    output.finish()
    os._exit(status)
