"""A worker's life in order: import, enter, warm up, snapshot point; then, as an instance, wake and serve. Every phase is timed."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from pilotlight.worker import faults, hooks, output, wake
from pilotlight.worker.control import Control, Order
from pilotlight.worker.launch import Launch
from pilotlight.worker.loader import load
from pilotlight.worker.server import Server
from pilotlight.worker.target import make_target
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
        hooks.warm_up(target)
        server = Server(target, launch.spec)
    threads = _reach_snapshot_point(control, phases)
    Template(control, lambda order, started: _become(launch, server, control, order, started), threads=threads).run()
    output.finish()
    os._exit(0)


def _reach_snapshot_point(control: Control, phases: Phases) -> tuple[str, ...]:
    Server.rehearse()
    wake.rehearse()
    hooks.drop_caches()
    output.finish()
    threads = surplus_threads()
    control.send({"event": "snapshot_point", "threads": list(threads), "phases_ms": phases.ms, "joins": True})
    return threads


def _become(launch: Launch, server: Server, control: Control, order: Order, started: float) -> NoReturn:
    """What a forked child, or the worker itself, does with its order."""
    if order.op == "park":
        order = _wait_parked(server, control, order)
        started, doing = time.monotonic(), "assign"
    else:
        connect_output(order)
        server.prepare()
        _wait_go(order.descriptors[3])
        gc.enable()
        doing = "fork"
    phases = Phases(control, instance=order.instance)
    listener = socket.socket(fileno=order.descriptors[0])
    phases.ms[doing] = round((time.monotonic() - started) * 1000, 3)
    with phases.phase("wake"):
        wake.reseed()
        wake.take_environment(order.instance, order.env)
        wake.raise_threads(cpu=launch.spec.resources.cpu, variables=launch.chosen_threads)
        server.wake(listener)

    def ready() -> None:
        control.send({"event": "ready", "instance": order.instance, "phases_ms": phases.ms})

    server.run(on_ready=ready, shim=control.fileno())
    _leave(0)


def _wait_parked(server: Server, control: Control, order: Order) -> Order:
    """Do all that needs no identity and runs no user code, say so, and wait for the assignment. A parked fork nobody wants leaves."""
    channel, go, *_ = order.descriptors
    desk = Control(channel)
    _wait_go(go)
    gc.enable()
    server.prepare()
    server.settle_in()
    control.send({"event": "parked", "instance": order.instance})
    assignment = desk.receive()
    if assignment is None:
        os._exit(0)
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
