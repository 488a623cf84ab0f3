"""Bounded argument checks and translations: small ones run inline, others in separate processes,
which are killed at a deadline.

A validator, or a JSON parser, lets no other thread run and cannot be interrupted, so an expensive
check in this process would delay every other call. Each tenant has one expensive check or
translation at a time, and tenants take turns, so that slow checks of one do not block the
others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from weakref import WeakValueDictionary

from activator.arguments.check_process import GUARD
from activator.arguments.translations import (
    SMALL_BYTES,
    TRANSLATION_S,
    Asked,
    TooSlow,
    Translated,
    translated,
)
from activator.arguments.validator import ArgumentValidator, CheckTooExpensive
from pilotlight import errors
from pilotlight.core.compute.process import ComputeProcess, ComputeProcessLost

log = logging.getLogger(__name__)

PROCESSES = 2
MAX_WAITING = 256
"""Most waiting expensive checks of one tenant."""


class ArgumentChecker:
    """Checks arguments. Owner: the event loop. Its processes are started on first use; `aclose`
    ends them."""

    def __init__(self, *, deadline_s: float = 2.0, processes: int = PROCESSES) -> None:
        self._deadline_s = deadline_s
        self._free = asyncio.Semaphore(processes)
        self._idle: list[ComputeProcess] = []
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[bytes]] = set()
        self.overruns = 0

    def __repr__(self) -> str:
        return (
            f"<ArgumentChecker {len(self._tasks)} checks running, "
            f"{self._waiting.total() - len(self._tasks)} waiting, {len(self._idle)} processes "
            f"idle, {self.overruns} overruns>"
        )

    async def check(self, check: ArgumentValidator, body: bytes, *, tenant: str) -> None:
        """Check the arguments. `tenant`: owner of the schema. Raises InvalidInput, TooManyRequests,
        Unavailable."""
        try:
            check.check(body)
        except CheckTooExpensive:
            if answer := await self._check_in_process(
                check.document, body, tenant, self._deadline_s
            ):
                problem = json.loads(answer)
                raise errors.InvalidInput(problem["message"], **problem["detail"]) from None

    async def translate(
        self, asked: Asked, body: bytes, *, tenant: str, is_answer: bool
    ) -> Translated:
        """Run `arguments.translations.translated` for `tenant`, in another process unless little of
        the body has to become JSON values. Raises TooManyRequests, Unavailable, too."""
        is_binary = asked["head_bytes"] is not None or asked["is_packed"]
        if is_binary or len(body) <= SMALL_BYTES:
            try:
                return translated(asked, body, is_answer=is_answer, inline_bytes=SMALL_BYTES)
            except TooSlow:
                pass
        document = json.dumps({"translate": asked, "is_answer": is_answer}).encode()
        head, _, data = (
            await self._check_in_process(document, body, tenant, TRANSLATION_S)
        ).partition(b"\n")
        result = json.loads(head)
        if result["error"] is not None:
            kind = (
                errors.TooLarge
                if result["error"] == errors.TooLarge.__name__
                else errors.InvalidInput
            )
            raise kind(result["message"], **result["detail"])
        return Translated(data, **result["fields"])

    async def find_rule(self, guard: bytes, text: str, *, is_end: bool, tenant: str) -> str:
        """Return the first rule of a guard (`guard_patterns.patterns_of`) that a long text matches;
        "" = none. `tenant`: whose guard it is. Raises InvalidInput at the deadline,
        TooManyRequests, Unavailable."""
        document = GUARD + b':%b,"is_end":%b}' % (guard, b"true" if is_end else b"false")
        data = text.encode("utf-8", "replace")
        return (await self._check_in_process(document, data, tenant, self._deadline_s)).decode()

    async def _check_in_process(
        self, document: bytes, body: bytes, tenant: str, deadline_s: float
    ) -> bytes:
        if self._waiting[tenant] >= MAX_WAITING:
            raise errors.TooManyRequests(
                "too many calls of this tenant wait for argument checks",
                retry_after_s=self._deadline_s,
            )
        self._waiting[tenant] += 1
        try:
            async with self._turns.setdefault(tenant, asyncio.Lock()), self._free:
                # A disconnect of the caller does not cancel the exchange, because that would
                # require killing the process.
                task = asyncio.create_task(
                    self._run_in_process(document, body, deadline_s), name="argument check"
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                try:
                    return await asyncio.shield(task)
                except asyncio.CancelledError:
                    await asyncio.wait([task])
                    raise
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    async def _run_in_process(self, document: bytes, body: bytes, deadline_s: float) -> bytes:
        process = await self._process()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await process.ask(document, body)
        except (TimeoutError, ComputeProcessLost) as e:
            self.overruns += 1
            log.warning(
                "argument check aborted document=%.200r body_bytes=%d reason=%s",
                document,
                len(body),
                type(e).__name__,
            )
            problem = (
                f"checking the arguments took more than {deadline_s:g} s, or too much memory: send "
                f"fewer arguments, or simplify the schema"
            )
            raise errors.InvalidInput(problem) from e
        else:
            self._idle.append(process)
            return answer
        finally:
            if process not in self._idle:
                await process.aclose()

    async def _process(self) -> ComputeProcess:
        while self._idle:
            process = self._idle.pop()
            if not process.has_ended:
                return process
        try:
            return await ComputeProcess.start(
                "activator.arguments.check_process", str(self._deadline_s)
            )
        except (OSError, TimeoutError, ComputeProcessLost) as e:
            raise errors.Unavailable(
                f"the arguments cannot be checked now: {e}", retry_after_s=1
            ) from e

    async def aclose(self) -> None:
        """End the processes and the running checks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        idle, self._idle = self._idle, []
        for process in idle:
            await process.aclose()
