"""The life of a sandbox: the function that its call runs, and the processes that live as long.

Everything here belongs to code of the caller: its processes have the uid of this one, and may
signal it. So this process holds nothing of value (`docs/reference/security/code.md`), and the
activator and the node agent end the sandbox if it does not."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pilotlight.errors import InvalidInput, NotFound, TooManyRequests, Unavailable
from pilotlight.spec.sandboxes import DEFAULT_TIMEOUT_S, MAX_PROCESSES
from pilotlight.worker.sandbox.processes import TIMED_OUT, SandboxProcess

BEGIN_S = 10.0
"""How long a request waits for the call that it may overtake."""
MAX_ENDED = 256
"""Ended commands whose output is kept."""
MAIN = 0
"""Number of the command with which a sandbox began."""
_OURS = "PILOTLIGHT_"
_SLOT = "/run/pilotlight/slot"
"""Root of the platform's files in a slot (`snapshotter.shim.sandbox.mounts.ROOT`)."""


class Sandbox:
    """The sandbox of this process. Owner: the event loop, from its call on.

    Attributes:
        processes: its commands by number, the newest ended ones too.
        workdir: where commands run, and relative paths begin.
        on_end: called at the end: this process has to exit, and the node agent then ends its slot,
            with what commands have left behind in it.
    """

    def __init__(self) -> None:
        self.processes: dict[int, SandboxProcess] = {}
        self._next = MAIN + 1
        self._env: dict[str, str] = {}
        self._begun: asyncio.Event | None = None
        self._is_over = False
        self.used_at = 0.0
        self.workdir = ""
        self.on_end: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Sandbox in {self.workdir or 'no directory yet'}, {len(self.processes)} commands>"

    async def run(
        self,
        args: Sequence[str],
        *,
        timeout_s: float,
        idle_timeout_s: float | None,
        workdir: str,
        env: Mapping[str, str],
    ) -> dict[str, Any]:
        """Live until the command ends, the time is over, or the call is cancelled. Raises
        InvalidInput for a command that cannot be executed."""
        try:
            await asyncio.to_thread(self._prepare, workdir, env)
            main = await self._execute(MAIN, args, workdir=self.workdir) if args else None
            self._event().set()
            try:
                async with asyncio.timeout(timeout_s):
                    if main is not None:
                        return _ended("exited", await main.wait(), main)
                    await self._wait_idle(idle_timeout_s)
                    return _ended("idle", 0)
            except TimeoutError:
                return _ended("timeout", TIMED_OUT, main)
        finally:
            self._is_over = True
            for process in self.processes.values():
                process.kill()
            self.on_end()

    async def wait_started(self) -> None:
        """Return once its call runs. Raises Unavailable."""
        self.used_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(BEGIN_S):
                await self._event().wait()
        except TimeoutError as e:
            raise Unavailable("the sandbox has not begun", retry_after_s=1.0) from e

    async def execute(
        self, args: Sequence[str], *, workdir: str, env: Mapping[str, str], timeout_s: float | None
    ) -> SandboxProcess:
        """Execute a command. Raises InvalidInput, TooManyRequests."""
        if not args:
            raise InvalidInput("args is empty: name a command", parameter="args")
        running = [p for p in self.processes.values() if not p.is_ended]
        if len(running) >= MAX_PROCESSES:
            raise TooManyRequests(
                f"{len(running)} commands run in this sandbox, the most: wait for one of them",
                retry_after_s=1.0,
            )
        number, self._next = self._next, self._next + 1
        place = os.path.join(self.workdir, workdir)
        process = await self._execute(number, args, workdir=place, env=env)
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(timeout_s, lambda: process.kill(is_late=True))
        return process

    def process(self, number: int) -> SandboxProcess:
        """Return a command. Raises NotFound."""
        found = self.processes.get(number)
        if found is None:
            raise NotFound(
                f"the sandbox has no command {number}: the newest {MAX_ENDED} that have ended are "
                f"kept"
            )
        return found

    async def _execute(
        self, number: int, args: Sequence[str], *, workdir: str, env: Mapping[str, str] = {}
    ) -> SandboxProcess:
        if self._is_over:
            raise Unavailable("the sandbox is ending")
        try:
            process = await SandboxProcess.start(
                number, args, workdir=workdir, env={**self._env, **env}
            )
        except (OSError, ValueError) as e:
            raise InvalidInput(f"cannot execute {args[0][:200]!r}: {e}", parameter="args") from e
        self.processes[number] = process
        ended = [n for n, one in self.processes.items() if one.is_ended and n != MAIN]
        for n in ended[: max(0, len(ended) - MAX_ENDED)]:
            del self.processes[n]
        return process

    def _prepare(self, workdir: str, env: Mapping[str, str]) -> None:
        self.workdir = os.path.join(os.getcwd(), workdir)
        try:
            os.makedirs(self.workdir, exist_ok=True)
        except OSError as e:
            raise InvalidInput(f"workdir = {workdir[:200]!r}: {e}", parameter="workdir") from e
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        # commands import what functions of the image import
        site = ":".join(entry for entry in sys.path if entry.startswith(f"{_SLOT}/env/"))
        if site:
            kept.setdefault("PYTHONPATH", site)
        self._env = {**kept, **env}

    async def _wait_idle(self, idle_timeout_s: float | None) -> None:
        """Return once no command ran, and no request came, for this long; None: never."""
        if idle_timeout_s is None:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        self.used_at = loop.time()
        while (left_s := self.used_at + idle_timeout_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
            if any(not process.is_ended for process in self.processes.values()):
                self.used_at = loop.time()

    def _event(self) -> asyncio.Event:
        if self._begun is None:
            self._begun = asyncio.Event()
        return self._begun


SANDBOX = Sandbox()
"""The sandbox of this process: an instance has one, and no other call."""


async def run(
    args: Sequence[str] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    idle_timeout_s: float | None = None,
    workdir: str = "",
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Live as a sandbox, and return how it ended (`pilotlight.spec.sandboxes.ARGUMENTS`)."""
    return await SANDBOX.run(
        args, timeout_s=timeout_s, idle_timeout_s=idle_timeout_s, workdir=workdir, env=env or {}
    )


def _ended(reason: str, returncode: int, main: SandboxProcess | None = None) -> dict[str, Any]:
    """Return the result of the call: with the output of its command that was not read."""
    result: dict[str, Any] = {"reason": reason, "returncode": returncode}
    for name in ("stdout", "stderr") if main is not None else ():
        output = getattr(main, name)
        unread = output.unread()
        result[name] = base64.b64encode(unread).decode()
        result[f"{name}_end"] = output.end
    return result
