"""Supervises the four processes of one machine: starts them in order, restarts each on its own,
stops them in reverse order.

Order: weight_cache (has no dependencies), snapshotter (leases weights), controller (the registry),
activator (needs all three). In reverse order, each process can still reach what it needs to drain:
the activator finishes its calls and ships its journal to the controller; then instances are
stopped, then their agent, then the cache."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotlight.cli.supervisor.child import Child, ProcessFailed, ProcessSpec, describe_exit_status
from pilotlight.cli.supervisor.process_log import ProcessLog
from pilotlight.cli.supervisor.stale_processes import stop_stale_process
from pilotlight.core.background_tasks import cancel_all
from snapshotter.client import AgentClient
from snapshotter.errors import SnapshotterError

PROCESSES = {
    "weight_cache": "weight_cache",
    "snapshotter": "snapshotter",
    "controller": "pilotlight.controller",
    "activator": "activator",
}
"""Name and module of each process, in start order."""
NICENESS = {"activator": -10, "snapshotter": -5}
"""Every call passes through the activator and every start through the node agent: neither may wait
for CPU behind busy workers."""
READY_TIMEOUT_S = {"controller": 3600.0}
"""Ready timeouts longer than the default. The first start after an upgrade migrates the ledger,
which may be large; a timeout would make it begin again. A controller that dies meanwhile is
detected at once."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0
"""Restart delay: doubles from the first value to the second."""
_STEADY_S = 10.0
"""After this uptime, the failure count of a process is reset."""
_HOUSEKEEPING_S = 30.0
_INSTANCE_GRACE_S = 10.0


class StopMode(enum.Enum):
    """Whether a stop includes instances: ALL stops them, KEEP leaves them for the next node agent
    to adopt.

    A node agent that terminates normally stops its instances; one that is killed leaves them, so
    KEEP kills it."""

    ALL = "all"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A state change to report: `kind` is `ready`, `died`, `failed`, `stopped`, `orphan` or
    `cleared`."""

    kind: str
    process: str
    text: str
    seconds: float = 0.0


Announce = Callable[[Notice], None]


def restart_delay_s(failures: int) -> float:
    """Delay before restart number `failures` (1 is the first): 0.1 s, doubled each time, at most
    5 s."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 16))


def platform_processes(
    config: Path,
    *,
    activators: int = 1,
    listen: str | None = None,
    listen_fds: tuple[int, ...] = (),
) -> tuple[ProcessSpec, ...]:
    """Specs of the four processes, run by this interpreter with `config`. Activators after the
    first are named `activator-1`, `activator-2`, …

    `listen`: address of the sockets opened for each activator; None = activators open their own.
    A single activator's stay open while it is restarted; of several, the others take over.
    `listen_fds`: sockets that all activators share."""
    specs = [
        ProcessSpec(
            name=name,
            argv=(sys.executable, "-m", module, "--config", str(config)),
            ready_timeout_s=READY_TIMEOUT_S.get(name, 60.0),
            niceness=NICENESS.get(name, 0),
            listen=listen if name == "activator" else None,
            keeps_listeners=name == "activator" and activators == 1,
            listen_fds=listen_fds if name == "activator" else (),
        )
        for name, module in PROCESSES.items()
    ]
    for index in range(1, activators):
        argv = (*specs[list(PROCESSES).index("activator")].argv, "--index", str(index))
        name = f"activator-{index}"
        specs.append(
            ProcessSpec(
                name=name,
                argv=argv,
                niceness=NICENESS["activator"],
                listen=listen,
                listen_fds=listen_fds,
            )
        )
    return tuple(specs)


class Supervisor:
    """Supervises processes. Call `start`, then `run_until_stopped`; `stop` at any time. Owner: one
    event loop."""

    def __init__(
        self, specs: Sequence[ProcessSpec], *, run: Path, logs: Path, announce: Announce
    ) -> None:
        self._run = run
        self._announce = announce
        self.children = [
            Child(
                spec,
                run=run,
                log=ProcessLog(path=logs / f"{spec.name}.log"),
            )
            for spec in specs
        ]
        self._asked: asyncio.Queue[StopMode] = asyncio.Queue()

    def __repr__(self) -> str:
        return f"<Supervisor {' '.join(f'{c.spec.name}:{c.pid or None}' for c in self.children)}>"

    def request_stop(self, how: StopMode) -> None:
        """Make `run_until_stopped` end; a second request kills the processes that still drain."""
        self._asked.put_nowait(how)

    async def start(self) -> None:
        """Start the processes in order. On ProcessFailed, stop those already started and raise."""
        try:
            for child in self.children:
                self._report("ready", child, "ready", await child.start())
        except BaseException:
            await asyncio.shield(self._stop_children(StopMode.ALL))
            raise

    async def run_until_stopped(self) -> None:
        """Restart processes that die until a stop is requested; then stop all in order."""
        keepers = [
            asyncio.create_task(self._keep_running(child), name=f"keep {child.spec.name}")
            for child in self.children
        ]
        keepers.append(asyncio.create_task(self._bound_logs(), name="bound logs"))
        try:
            how = await self._asked.get()
        finally:
            await cancel_all(keepers)
        await self.stop(how)

    async def run(self, *, started: Callable[[], None]) -> None:
        """Run `start`, call `started`, then `run_until_stopped`. Honours stop requests while
        starting. Raises ProcessFailed."""
        starting = asyncio.create_task(self.start(), name="start")
        asked = asyncio.create_task(self._asked.get(), name="asked")
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            await cancel_all([starting])
            await self.stop(asked.result())
            return
        await cancel_all([asked])
        starting.result()
        started()
        await self.run_until_stopped()

    async def stop(self, how: StopMode) -> None:
        """Stop the processes in reverse order; a further stop request kills the remaining ones."""
        stopping = asyncio.create_task(self._stop_children(how), name="stop")
        hurry = asyncio.create_task(self._asked.get(), name="hurry")
        await asyncio.wait((stopping, hurry), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            for child in self.children:
                child.signal(signal.SIGKILL)
        hurry.cancel()
        await stopping

    async def _stop_children(self, how: StopMode) -> None:
        for child in reversed(self.children):
            if not child.is_alive:
                continue
            if child.spec.name == "snapshotter" and how is StopMode.ALL:
                await self._clear_node()
            elif child.spec.name == "snapshotter":
                child.signal(signal.SIGKILL)
            began = time.monotonic()
            status = await child.stop()
            self._report("stopped", child, describe_exit_status(status), time.monotonic() - began)

    async def _clear_node(self) -> None:
        """Stop all instances and Templates while their node agent is still running."""
        began = time.monotonic()
        agent = AgentClient(self._run / "snapshotter.sock")
        try:
            async with asyncio.timeout(_INSTANCE_GRACE_S + 5):
                count = await clear_node(agent)
            text = f"{count} instance{'' if count == 1 else 's'} stopped"
        except (SnapshotterError, TimeoutError) as e:
            text = (
                f"some instances may still be running ({str(e) or 'timed out'}): the next "
                f"`pilotlight up` adopts them"
            )
        finally:
            await agent.aclose()
        self._announce(
            Notice(
                kind="cleared", process="snapshotter", text=text, seconds=time.monotonic() - began
            )
        )

    async def _keep_running(self, child: Child) -> None:
        failures = 0
        while True:
            up_since = time.monotonic()
            status = await child.wait_gone()
            failures = 1 if time.monotonic() - up_since > _STEADY_S else failures + 1
            self._report("died", child, f"{describe_exit_status(status)}; log: {child.log.path}")
            failures = await self._restart(child, failures)

    async def _restart(self, child: Child, failures: int) -> int:
        while True:
            await asyncio.sleep(restart_delay_s(failures))
            try:
                self._report(
                    "ready",
                    child,
                    f"ready again after {failures} attempt{'' if failures == 1 else 's'}",
                    await child.start(),
                )
                return failures
            except ProcessFailed as e:
                failures += 1
                self._report(
                    "failed", child, str(e) if e.detail["log_tail"] else f"{e}: nothing in its log"
                )

    async def _bound_logs(self) -> None:
        while True:  # no event reports that a file has grown
            await asyncio.sleep(_HOUSEKEEPING_S)
            for child in self.children:
                child.log.rotate()

    def _report(self, kind: str, child: Child, text: str, seconds: float = 0.0) -> None:
        self._announce(Notice(kind=kind, process=child.spec.name, text=text, seconds=seconds))


async def stop_orphans(
    specs: Sequence[ProcessSpec], *, run: Path, announce: Announce
) -> dict[str, int]:
    """Stop the processes that a killed supervisor of this run directory left behind, last started
    first; return name → pid."""
    stopped = {}
    for spec in reversed(specs):
        pid_file = run / f"{spec.name}.pid"
        if pid := await stop_stale_process(pid_file, argv=spec.argv, grace_s=spec.grace_s):
            stopped[spec.name] = pid
            text = f"stopped process {pid}, left behind by a killed supervisor"
            announce(Notice(kind="orphan", process=spec.name, text=text))
    return stopped


async def clear_node(agent: AgentClient) -> int:
    """Drop all Templates of a node and stop all its instances concurrently; return the number of
    instances."""
    for template in await agent.templates():
        await agent.drop_template(template.revision)
    instances = await agent.instances()
    stops = [agent.stop(instance.id, grace_s=_INSTANCE_GRACE_S) for instance in instances]
    failures = [
        e
        for e in await asyncio.gather(*stops, return_exceptions=True)
        if isinstance(e, BaseException)
    ]
    if failures:
        raise failures[0]
    return len(instances)


@contextlib.contextmanager
def stop_on_signals(supervisor: Supervisor) -> Iterator[None]:
    """Within the block, stop everything on SIGINT, SIGTERM and SIGHUP; on SIGUSR1 leave instances
    running."""
    loop = asyncio.get_running_loop()
    wanted = {
        signal.SIGINT: StopMode.ALL,
        signal.SIGTERM: StopMode.ALL,
        signal.SIGUSR1: StopMode.KEEP,
    }
    for number, how in wanted.items():
        loop.add_signal_handler(number, supervisor.request_stop, how)
    loop.add_signal_handler(signal.SIGHUP, _on_hangup, supervisor)
    try:
        yield
    finally:
        for number in (*wanted, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _on_hangup(supervisor: Supervisor) -> None:
    """Stop everything: the terminal was closed. What is still printed to it goes nowhere, instead
    of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nowhere, number)
    os.close(nowhere)
    supervisor.request_stop(StopMode.ALL)
