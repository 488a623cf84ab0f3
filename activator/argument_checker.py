"""Argument checks within bounds: inexpensive ones at once, all others in processes of their own, which are killed at a deadline.

A validator lets no other thread run while it works and cannot be interrupted, so only another process keeps an expensive check from
delaying every other call. Each tenant has one expensive check at a time, and tenants take turns, so that one whose checks take long
does not keep the others from theirs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from weakref import WeakValueDictionary

from activator.arguments import ArgumentCheck, CheckTooExpensive
from pilotlight import errors

log = logging.getLogger(__name__)

PROCESSES = 2
START_S = 30.0
"""How long a process may take to begin: seconds on a machine under load."""
MAX_WAITING = 256
"""Expensive checks of one tenant that wait."""


class _ProcessLost(Exception):
    """The process died, or was killed, in the middle of a check."""


class ArgumentChecker:
    """Checks arguments. Owner: the event loop. Its processes are started when they are needed first; `aclose` ends them."""

    def __init__(self, *, deadline_s: float = 2.0, processes: int = PROCESSES) -> None:
        self._deadline_s = deadline_s
        self._free = asyncio.Semaphore(processes)
        self._idle: list[Process] = []
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[bytes]] = set()
        self.overruns = 0

    def __repr__(self) -> str:
        return f"<ArgumentChecker {len(self._tasks)} checks run, {len(self._idle)} processes idle, {self.overruns} overruns>"

    async def check(self, check: ArgumentCheck, body: bytes, *, tenant: str) -> None:
        """Whether the arguments fit. `tenant`: whose schema it is. Raises InvalidInput, TooManyRequests, Unavailable."""
        try:
            check.check(body)
        except CheckTooExpensive:
            await self._check_elsewhere(check, body, tenant)

    async def _check_elsewhere(self, check: ArgumentCheck, body: bytes, tenant: str) -> None:
        if self._waiting[tenant] >= MAX_WAITING:
            raise errors.TooManyRequests("too many calls wait for their arguments to be checked", retry_after_s=self._deadline_s)
        self._waiting[tenant] += 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()), self._free:
                # A caller that leaves does not end the exchange: the process would have to be killed with it.
                task = asyncio.create_task(self._ask(check, body), name="argument check")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                try:
                    answer = await asyncio.shield(task)
                except asyncio.CancelledError:
                    await asyncio.wait([task])
                    raise
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        if answer:
            problem = json.loads(answer)
            raise errors.InvalidInput(problem["message"], **problem["detail"])

    async def _ask(self, check: ArgumentCheck, body: bytes) -> bytes:
        process = await self._process()
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await _exchange(process, check.document, body)
        except (TimeoutError, _ProcessLost) as e:
            self.overruns += 1
            log.warning("argument check ended check=%r body_bytes=%d reason=%s", check, len(body), type(e).__name__)
            problem = f"checking the arguments took more than {self._deadline_s:g} s, or too much memory: send fewer, or a simpler schema"
            raise errors.InvalidInput(problem) from e
        else:
            self._idle.append(process)
            return answer
        finally:
            if process not in self._idle:
                await _end(process)

    async def _process(self) -> Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        try:
            return await self._start()
        except (OSError, TimeoutError, _ProcessLost) as e:
            raise errors.Unavailable(f"the arguments cannot be checked now: {e}", retry_after_s=1) from e

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "activator.argument_check_process", str(self._deadline_s), stdin=PIPE, stdout=PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_S):
                await _read(process)
        except BaseException:
            await _end(process)
            raise
        return process

    async def aclose(self) -> None:
        """End the processes, and with them the checks that run."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        idle, self._idle = self._idle, []
        for process in idle:
            await _end(process)


async def _exchange(process: Process, document: bytes, body: bytes) -> bytes:
    assert process.stdin is not None
    try:
        for data in (document, body):
            process.stdin.write(len(data).to_bytes(4, "big"))
            process.stdin.write(data)
        await process.stdin.drain()
    except ConnectionError as e:
        raise _ProcessLost(str(e)) from e
    return await _read(process)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None
    try:
        size = int.from_bytes(await process.stdout.readexactly(4), "big")
        return await process.stdout.readexactly(size)
    except asyncio.IncompleteReadError as e:
        raise _ProcessLost("the process has ended") from e


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()
    await asyncio.sleep(0)  # lets the pipes' transports close
