"""Lifecycle of a worker: import, enter, warm up, snapshot point; then, as an instance, wake and
serve. Every phase is timed.

A fork may be parked between the snapshot point and its wake; it then prepares everything that needs
neither an identity nor user code. A fork, or the worker itself, may also quiesce for a snapshot on
disk; a restored copy continues at the snapshot point."""

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

from pilotlight.worker.http.server import Server
from pilotlight.worker.imports.imported_modules import ImportedModules
from pilotlight.worker.imports.recorder import ImportOrderDiffers, ImportRecorder
from pilotlight.worker.launch_file import Launch
from pilotlight.worker.process import memory_access, resume
from pilotlight.worker.process.page_prefetch import TouchedPages
from pilotlight.worker.process.phase_timer import PhaseTimer
from pilotlight.worker.process.secrets import Secrets
from pilotlight.worker.process.shim_channel import ShimChannel, ShimOrder
from pilotlight.worker.process.template import (
    Template,
    connect_output,
    surplus_threads,
    wait_environment,
)
from pilotlight.worker.snapshot import hooks, quiesce
from pilotlight.worker.snapshot.snapshot_blockers import BlockerScan
from pilotlight.worker.status import InstanceStatus
from pilotlight.worker.user_code import example_check, output, user_errors
from pilotlight.worker.user_code.current_call import FunctionIdentity
from pilotlight.worker.user_code.loader import load, set_script
from pilotlight.worker.user_code.source_locations import SocketOrigins, UserSource
from pilotlight.worker.user_code.target import Method, Target, make_target

WORKER_VARIABLE = "PILOTLIGHT_WORKER"
"""Set to 1 in workers: the SDK then takes weights and secrets from the platform, not from local
files."""
WEIGHTS_VARIABLE = "PILOTLIGHT_WEIGHTS"
"""JSON object: name of weights → directory. `pilotlight.Weights(...).path` reads it in a worker."""
HOOK_SHARE = 0.9
"""Share of the startup clock for the hooks before the snapshot: a hook that hangs is reported by
name before the node agent's clock kills the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """State of a worker at the snapshot point, inherited by its forks."""

    launch: Launch
    control: ShimChannel
    server: Server
    touched: TouchedPages
    target: Target
    known: Mapping[str, example_check.ExpectedAnswer]
    secrets: Secrets
    scene: BlockerScan
    booted_ms: Mapping[str, float]
    start_kind: str


def run(launch: Launch, *, boot_ms: float) -> None:
    """Run the worker, then exit the process.

    Args:
        launch: the parsed launch file.
        boot_ms: time since the interpreter's first instruction.
    """
    output.install()
    faulthandler.enable(2)
    _run(launch, ShimChannel(launch.control_fd), boot_ms=boot_ms)


def run_in(
    control: ShimChannel,
    launch_path: str,
    *,
    ahead: ImportedModules,
    chosen_threads: tuple[str, ...],
) -> NoReturn:
    """Run the worker in a process that was restored from an environment snapshot; `ahead`: its
    modules. The other arguments are as for a boot."""
    began = time.monotonic()
    with open(launch_path, "rb") as f:
        launch = Launch.from_json(json.load(f), chosen_threads=chosen_threads)
    _run(launch, control, boot_ms=(time.monotonic() - began) * 1000, ahead=ahead)


def _run(
    launch: Launch, control: ShimChannel, *, boot_ms: float, ahead: ImportedModules | None = None
) -> NoReturn:
    os.environ[WORKER_VARIABLE] = "1"
    os.environ[WEIGHTS_VARIABLE] = json.dumps(dict(launch.weights))
    FunctionIdentity.set(function=launch.spec.name, key=launch.revision)
    os.register_at_fork(after_in_child=control.close_in_fork)
    phases = PhaseTimer(control)
    phases.ms["boot"] = round(boot_ms, 3)
    user = UserSource(launch.code, by_value=launch.spec.pickled is not None)
    places, secrets = (
        SocketOrigins(user),
        Secrets(launch.secret_variables, user, snapshot=launch.spec.snapshot),
    )
    imports = ImportRecorder(
        site=launch.site,
        code=launch.code,
        ahead=ahead,
        on_difference=functools.partial(_exit_differing, control),
    )
    places.watch()
    secrets.guard()
    set_script(launch)
    if launch.records_imports or ahead is not None:
        imports.start()
    with phases.phase("import"):
        raw = load(launch)
    with phases.phase("enter"):
        target = make_target(raw, launch.spec)
        if target.features is not None:
            target.features.require_variables({*os.environ, *launch.secret_variables})
        hooks.run_before_snapshot(
            target,
            within_s=launch.spec.clocks.startup_s * HOOK_SHARE - sum(phases.ms.values()) / 1000,
        )
    with phases.phase("warmup"):
        with imports.paused():
            server = Server(target, launch.spec)
        touched, known = _warm_up(target, server, imports)
    places.unwatch()
    scene = BlockerScan(
        writable=(launch.work, tempfile.gettempdir()), places=places, volumes=launch.volumes
    )
    # a worker that is booted the other way must answer alike
    is_compared = launch.records_imports or ahead is not None
    answers = example_check.summary(known) if is_compared else {}
    learned = {"imports": imports.report(), "answers": answers}
    threads = _reach_snapshot_point(control, phases, touched, scene, learned)
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
        start_kind="COLD" if ahead is None else "IMPORT",
    )
    _obey(worker, threads=threads)


def _obey(worker: Worker, *, threads: tuple[str, ...]) -> NoReturn:
    """Run as the Template until the shim disconnects."""
    become, suspend = functools.partial(_become, worker), functools.partial(_suspend, worker)
    Template(worker.control, become, suspend, threads=threads).run()
    output.finish()
    os._exit(0)


def _warm_up(
    target: Target, server: Server, imports: ImportRecorder
) -> tuple[TouchedPages, dict[str, example_check.ExpectedAnswer]]:
    """Run every example and our own part of a call once; record the pages they touch if the process
    can be forked."""
    touched, known = TouchedPages(), {}

    def rehearse() -> None:
        known.update(hooks.warm_up(target))
        imports.stop()
        server.rehearse()

    hooks.stop_helpers()
    if surplus_threads():
        rehearse()
    else:
        touched.watch(rehearse)
    return touched, known


def _exit_differing(control: ShimChannel, error: ImportOrderDiffers) -> NoReturn:
    """End a process whose user code does not begin with the imports that were made ahead of it. It
    is not raised there: user code could go on after the error."""
    output.finish()
    with contextlib.suppress(OSError):  # the shim has disconnected
        data = user_errors.as_data(error)
        control.send({"event": "failed", "instance": None, "phase": "import", "error": data})
    os._exit(1)


def _reach_snapshot_point(
    control: ShimChannel,
    phases: PhaseTimer,
    touched: TouchedPages,
    scene: BlockerScan,
    learned: Mapping[str, Any],
) -> tuple[str, ...]:
    """`learned`: what the message says beside the process' own state."""
    resume.warm_resume_path()
    hooks.drop_caches()
    touched.record()
    output.finish()
    threads = surplus_threads()
    found = scene.scan(leave_aside={control.fileno()})
    point = {"threads": list(threads), "phases_ms": phases.ms, "joins": True, **found.to_json()}
    control.send({"event": "snapshot_point", **point, **learned})
    return threads


def _become(worker: Worker, order: ShimOrder, started: float) -> NoReturn:
    """Execute an order in a forked child or in the worker itself."""
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
        if order.start.get("kind") == "FORK":
            output.name_instance(order.instance)
    memory_access.allow()
    phases = PhaseTimer(worker.control, instance=order.instance)
    listener = socket.socket(fileno=order.descriptors[0])
    phases.ms[doing] = round((time.monotonic() - started) * 1000, 3)
    with phases.phase("wake"):
        resume.reseed()
        worker.secrets.lift()
        resume.take_environment(order.instance, order.env)
        resume.raise_threads(
            cpu=worker.launch.spec.resources.cpu, variables=worker.launch.chosen_threads
        )
        worker.server.wake(
            listener,
            InstanceStatus.of(
                order,
                booted_ms=worker.booted_ms,
                woken_ms=phases.ms,
                booted=worker.start_kind,
            ),
        )

    def ready() -> None:
        worker.control.send({"event": "ready", "instance": order.instance, "phases_ms": phases.ms})

    worker.server.run(on_ready=ready, shim=worker.control.fileno())
    _exit_worker(0)


def _wait_parked(worker: Worker, order: ShimOrder) -> ShimOrder:
    """Prepare everything that needs no identity and no user code, report it, and wait for the
    assignment. Exits if the shim closes the channel first."""
    channel, go, *_ = order.descriptors
    desk = ShimChannel(channel)
    _wait_go(go)
    gc.enable()
    worker.server.prepare()
    worker.touched.populate()
    worker.server.prepare_first_call()
    worker.control.send({"event": "parked", "instance": order.instance})
    assignment = desk.receive()
    if assignment is None:
        os._exit(0)
    with contextlib.suppress(OSError):  # the shim does not read the confirmation
        desk.send({"event": "assigned"})
    desk.close()
    connect_output(assignment)
    return assignment


def _stand_still(worker: Worker, order: ShimOrder) -> NoReturn:
    """Quiesce a fork for a snapshot; its restored copy is a Template."""
    *descriptors, go = order.descriptors[:3]
    _wait_go(go)
    quiesce.release_output()
    try:
        quiesce.quiesce_process(worker.control, descriptors, scene=worker.scene, in_place=False)
    except quiesce.QuiesceBlocked:
        os._exit(0)  # quiesce_process has reported it to the shim
    _obey(worker, threads=())


def _suspend(worker: Worker, order: ShimOrder) -> None:
    """Quiesce the worker itself, with its threads and processes, for a snapshot. Its output streams
    stay open."""
    # if blocked, quiesce_process has reported it to the shim; wait for further orders
    with contextlib.suppress(quiesce.QuiesceBlocked):
        quiesce.quiesce_process(
            worker.control, order.descriptors, scene=worker.scene, in_place=True
        )


def _prove(worker: Worker, order: ShimOrder, started: float) -> NoReturn:
    """Answer the examples again, compare with the own answers or with those of the order, and exit.
    Uses one thread, as before the snapshot: several threads add numbers in another order.

    Before them it does what an instance does before its first call, and with `order.records` it
    also serves them, so that the memory that it accesses is that of a start and its first call."""
    gc.enable()
    worker.server.prepare()
    resume.reseed()
    worker.server.prepare_first_call()
    answered: dict[str, float] = {}
    error: dict[str, str] | None = None
    notes: list[str] = []
    with asyncio.Runner() as runner:

        def answer_example(method: Method) -> Any:
            answer = runner.run(hooks.answer_example(method))
            answered.setdefault("first_answer", round((time.monotonic() - started) * 1000, 3))
            return answer

        try:
            known, examples = worker.known, worker.target.examples
            if order.answers:
                known = example_check.from_summary(order.answers, examples)
            notes = example_check.compare(examples, known, answer_example)
        except (
            BaseException
        ) as e:  # user code may raise anything; it is reported as data and ends the process
            user_errors.report(e)
            error = user_errors.as_data(e)
    if order.records:
        worker.server.serve_examples(worker.target.examples)
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
    if order.records:
        worker.control.receive()
    os._exit(0)


def _wait_go(go: int) -> None:
    if not os.read(go, 1):
        os._exit(0)  # the shim cancelled the instance
    os.close(go)


def _exit_worker(status: int) -> NoReturn:
    """Run atexit functions, then exit without finalizing the interpreter, which would copy the
    shared heap's pages."""
    import atexit

    # the function that the interpreter itself calls
    run_functions: Any = getattr(atexit, "_run_exitfuncs", lambda: None)
    run_functions()
    output.finish()
    os._exit(status)
