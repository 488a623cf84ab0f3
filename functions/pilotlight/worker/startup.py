"""A worker's life in order: import, enter, warm up, snapshot point; then, as an instance, wake and
serve. Every phase is timed.

A fork may be parked between the snapshot point and its wake: it then does ahead what needs neither
an identity nor user code. A fork, or the worker itself, may also be told to stand still for a
snapshot on disk; a restored copy of it is at its snapshot point again."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pilotlight.worker import checkpoint, faults, hooks, memory_access, output, proof, wake
from pilotlight.worker.control import Control, Order
from pilotlight.worker.launch import Launch
from pilotlight.worker.loader import load
from pilotlight.worker.obstacles import Scene
from pilotlight.worker.pages import Touched
from pilotlight.worker.phases import Phases
from pilotlight.worker.places import SocketPlaces, UserCode
from pilotlight.worker.running import Whose
from pilotlight.worker.secrets import Secrets
from pilotlight.worker.server import Server
from pilotlight.worker.standing import Standing
from pilotlight.worker.target import Method, Target, make_target
from pilotlight.worker.template import Template, connect_output, surplus_threads, wait_environment

WORKER_VARIABLE = "PILOTLIGHT_WORKER"
"""Set to 1: the SDK in user code then takes weights and secrets from the platform and looks for no
local files."""
WEIGHTS_VARIABLE = "PILOTLIGHT_WEIGHTS"
"""JSON object: name of weights → directory; how `pilotlight.Weights(...).path` finds them inside a
worker."""
HOOK_SHARE = 0.9
"""Of the startup clock, for what runs before the snapshot: the hook that hangs is named before the
node agent's clock ends us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What stands at the snapshot point, and what its forks become instances with."""

    launch: Launch
    control: Control
    server: Server
    touched: Touched
    target: Target
    known: Mapping[str, proof.Known]
    secrets: Secrets
    scene: Scene
    booted_ms: Mapping[str, float]


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
    Whose.set(function=launch.spec.name, key=launch.revision)
    control = Control(launch.control_fd)
    os.register_at_fork(after_in_child=control.leave_fork)
    phases = Phases(control)
    phases.ms["boot"] = round(boot_ms, 3)
    user = UserCode(launch.code, by_value=launch.spec.pickled is not None)
    places, secrets = (
        SocketPlaces(user),
        Secrets(launch.secret_variables, user, snapshot=launch.spec.snapshot),
    )
    places.watch()
    secrets.guard()
    with phases.phase("import"):
        raw = load(launch)
    with phases.phase("enter"):
        target = make_target(raw, launch.spec)
        hooks.run_before_snapshot(
            target,
            within_s=launch.spec.clocks.startup_s * HOOK_SHARE - sum(phases.ms.values()) / 1000,
        )
    with phases.phase("warmup"):
        server = Server(target, launch.spec)
        touched, known = _warm_up(target, server)
    places.unwatch()
    scene = Scene(writable=(launch.work, tempfile.gettempdir()), places=places)
    threads = _reach_snapshot_point(control, phases, touched, scene)
    worker = Worker(
        launch=launch,
        control=control,
        server=server,
        touched=touched,
        target=target,
        known=known,
        secrets=secrets,
        scene=scene,
        booted_ms=phases.ms,
    )
    _obey(worker, threads=threads)


def _obey(worker: Worker, *, threads: tuple[str, ...]) -> NoReturn:
    """Be the Template until the shim is gone."""
    become, suspend = functools.partial(_become, worker), functools.partial(_suspend, worker)
    Template(worker.control, become, suspend, threads=threads).run()
    output.finish()
    os._exit(0)


def _warm_up(target: Target, server: Server) -> tuple[Touched, dict[str, proof.Known]]:
    """Every example once, and our own part of a call; what they touch is remembered where the
    process can be forked at all."""
    touched, known = Touched(), {}

    def rehearse() -> None:
        known.update(hooks.warm_up(target))
        server.rehearse()

    hooks.stop_helpers()
    if surplus_threads():
        rehearse()
    else:
        touched.watch(rehearse)
    return touched, known


def _reach_snapshot_point(
    control: Control, phases: Phases, touched: Touched, scene: Scene
) -> tuple[str, ...]:
    wake.rehearse()
    hooks.drop_caches()
    touched.look()
    output.finish()
    threads = surplus_threads()
    found = scene.look(leave_aside={control.fileno()})
    point = {"threads": list(threads), "phases_ms": phases.ms, "joins": True, **found.to_json()}
    control.send({"event": "snapshot_point", **point})
    return threads


def _become(worker: Worker, order: Order, started: float) -> NoReturn:
    """What a forked child, or the worker itself, does with its order."""
    if order.op == "checkpoint":
        _stand_still(worker, order)
    if order.op == "prove":
        _prove(worker, order, started)
    if order.op == "park":
        order = _wait_parked(worker, order)
        started, doing = time.monotonic(), "assign"
    else:
        connect_output(order)
        worker.server.prepare()
        order = wait_environment(order)
        gc.enable()
        doing = order.op
    memory_access.allow()
    phases = Phases(worker.control, instance=order.instance)
    listener = socket.socket(fileno=order.descriptors[0])
    phases.ms[doing] = round((time.monotonic() - started) * 1000, 3)
    with phases.phase("wake"):
        wake.reseed()
        worker.secrets.lift()
        wake.take_environment(order.instance, order.env)
        wake.raise_threads(
            cpu=worker.launch.spec.resources.cpu, variables=worker.launch.chosen_threads
        )
        worker.server.wake(
            listener, Standing.of(order, booted_ms=worker.booted_ms, woken_ms=phases.ms)
        )

    def ready() -> None:
        worker.control.send({"event": "ready", "instance": order.instance, "phases_ms": phases.ms})

    worker.server.run(on_ready=ready, shim=worker.control.fileno())
    _leave(0)


def _wait_parked(worker: Worker, order: Order) -> Order:
    """Do all that needs no identity and runs no user code, say so, and wait for the assignment. A
    parked fork nobody wants leaves."""
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


def _stand_still(worker: Worker, order: Order) -> NoReturn:
    """A fork that is to be a snapshot; from its restored copy on it is a Template."""
    *descriptors, go = order.descriptors[:3]
    _wait_go(go)
    checkpoint.let_go_of_output()
    try:
        checkpoint.stand_still(worker.control, descriptors, scene=worker.scene, in_place=False)
    except checkpoint.Obstructed:
        os._exit(0)  # the shim has been told
    _obey(worker, threads=())


def _suspend(worker: Worker, order: Order) -> None:
    """The worker itself, with its threads and processes, is to be a snapshot. Its output stays what
    it is."""
    # the shim has been told; we wait for other orders
    with contextlib.suppress(checkpoint.Obstructed):
        checkpoint.stand_still(worker.control, order.descriptors, scene=worker.scene, in_place=True)


def _prove(worker: Worker, order: Order, started: float) -> NoReturn:
    """Answer the examples again, and leave. With one thread, as before the snapshot: more of them
    add up in another order."""
    gc.enable()
    wake.reseed()
    answered: dict[str, float] = {}
    error: dict[str, str] | None = None
    notes: list[str] = []
    with asyncio.Runner() as runner:

        def answer_example(method: Method) -> Any:
            answer = runner.run(hooks.answer_example(method))
            answered.setdefault("first_answer", round((time.monotonic() - started) * 1000, 3))
            return answer

        try:
            notes = proof.compare(worker.target.examples, worker.known, answer_example)
        except BaseException as e:  # noqa: BLE001  # user code may raise anything; it is reported as data and ends us
            faults.report(e)
            error = faults.as_data(e)
    output.finish()
    worker.control.send(
        {
            "event": "proved",
            "instance": order.instance,
            "ok": error is None,
            "error": error,
            "notes": notes,
            "phases_ms": answered,
        }
    )
    os._exit(0)


def _wait_go(go: int) -> None:
    if not os.read(go, 1):
        os._exit(0)  # whoever ordered the instance gave it up
    os.close(go)


def _leave(status: int) -> NoReturn:
    """Run atexit functions, then leave without finalising: tearing a copied heap down would only
    copy its pages first."""
    import atexit

    # what the interpreter itself would call
    run_functions: Any = getattr(atexit, "_run_exitfuncs", lambda: None)
    run_functions()
    output.finish()
    os._exit(status)
