"""Runs batches, step by step, with all state in the database: a controller that is killed at any
point goes on where it was.

    input file → rows of `batch_lines` with due calls → activators → ends in these rows → files

A line becomes a row, and its call due, in the transaction that moves the batch's `position`; an
answer is counted in a file, and its row deleted, in one transaction. So no line is lost, run under
two calls or answered twice. Few lines of a batch are rows at a time. A step that cannot reach the
blob store, or finds a full disk, is tried again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from pilotlight.controller.batches import batches, files, lines, targets
from pilotlight.controller.batches.batches import STOPPED, Batch
from pilotlight.controller.batches.files import OUTPUT, BatchFile, ContentLost
from pilotlight.controller.batches.line_parser import LineParser
from pilotlight.controller.batches.line_process import MAX_LINE_BYTES
from pilotlight.controller.batches.lines import EndedLine, LineCounts
from pilotlight.controller.batches.targets import LineTarget
from pilotlight.controller.batches.validation import Validation
from pilotlight.controller.context import Context
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.database.transactions import in_read, in_write
from pilotlight.controller.identity import access_control
from pilotlight.controller.identity.access_control import Principal
from pilotlight.core.backoff import delay_s
from pilotlight.errors import (
    Forbidden,
    InvalidInput,
    NotFound,
    PilotlightError,
    StorageQuotaExceeded,
    Unauthenticated,
)

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
"""Interval of steps while batches run."""
IDLE_S: Final = 5.0
CLEAN_S: Final = 10.0
"""Interval of the deletion of files that were deleted or have expired."""
OF_TENANT: Final = 100
"""Lines of a tenant's batches whose calls run at once: some more than its instances answer
meanwhile, and few of `activator.max_pending_submits`."""
LEAST: Final = 10
CHECKED_LINES: Final = 2000
FLUSH_S: Final = 15.0
"""How long answers wait for more of them before they are written to a file."""
CANCEL_S: Final = 600.0
"""How long running calls of a cancelled batch have to end, as OpenAI's."""
AT_ONCE: Final = 2000
VALIDATIONS: Final = 4
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
T = TypeVar("T")


class _LineTooLong(InvalidInput):
    """Raised when a line of a file is longer than MAX_LINE_BYTES."""

    type = "line_too_long"


class BatchRunner:
    """Runs all batches of the platform. Owner: the task of `run`.

    Attributes:
        parser: parses what tenants sent."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self.parser = LineParser()
        self._validations: dict[str, Validation] = {}
        self._written: dict[str, float] = {}
        """When answers of a batch were written to a file last, or it was first seen (monotonic)."""
        self._cancelled: set[str] = set()
        """Batches whose calls were cancelled; after a restart they are cancelled again."""
        self._failures: dict[str, tuple[int, float]] = {}
        """Failed steps of a batch in a row, and when the next one is due (monotonic)."""
        self._cleaned = 0.0

    def __repr__(self) -> str:
        return f"<BatchRunner {len(self._written)} batches>"

    async def run(self) -> None:
        """Run until the notifier is closed."""
        notifier = self._context.notifier
        try:
            while not notifier.closed:
                ring = notifier.next_change()
                wait_s: float = IDLE_S
                try:
                    wait_s = await self.round()
                except (SQLAlchemyError, PilotlightError) as e:
                    log.error("event=batches_failed error=%r", e)
                if wait_s < IDLE_S:
                    await asyncio.sleep(wait_s)
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await ring.wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End the process that parses."""
        await self.parser.aclose()

    async def round(self) -> float:
        """Take one step of each running batch; return the seconds to the next round. Raises
        SQLAlchemyError."""
        await self._clean()
        found = await in_read(self._store, _active)
        self._forget({batch.id for batch in found})
        if not found:
            await self.aclose()
            return IDLE_S
        shares = Counter(batch.tenant for batch in found)
        has_more = False
        for batch in found:
            count, due_at = self._failures.get(batch.id, (0, 0.0))
            if due_at > time.monotonic():
                continue
            try:
                share = max(LEAST, OF_TENANT // shares[batch.tenant])
                has_more = await self._step(batch, share) or has_more
                self._failures.pop(batch.id, None)
            except (SQLAlchemyError, PilotlightError) as e:
                pause_s = delay_s(count, first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S, jitter=0.5)
                self._failures[batch.id] = (count + 1, time.monotonic() + pause_s)
                self._validations.pop(batch.id, None)
                log.warning("event=batch_step_failed batch=%s error=%r", batch.id, e)
        return 0.0 if has_more else POLL_S

    def _forget(self, active: set[str]) -> None:
        for batch in self._written.keys() - active:
            del self._written[batch]
        for known in (self._validations, self._failures):
            for batch in known.keys() - active:
                del known[batch]
        self._cancelled &= active

    async def _clean(self) -> None:
        if time.monotonic() < self._cleaned + CLEAN_S:
            return
        self._cleaned = time.monotonic()
        await in_write(self._store, lambda write: batches.purge(write, now=write.now))
        try:
            while await files.delete_expired(self._context) == files.EXPIRE_BATCH:
                pass
        except PilotlightError as e:
            log.warning("event=batch_files_not_deleted error=%r", e)

    # -- one step ----------------------------------------------------------------------------------
    async def _step(self, batch: Batch, share: int) -> bool:
        """Take one step; return whether another one can follow at once."""
        batch, caller = await self._checked(batch)
        stop = batch.stop
        if "in_progress" in batch.times:
            if stop is not None and stop["code"] in STOPPED:
                await self._cancel(batch, stop)
            return await self._move(batch, caller, share)
        if stop is not None:
            await in_write(self._store, partial(_finish, batch))
            return False
        return caller is not None and await self._validate(batch, caller)

    async def _checked(self, batch: Batch) -> tuple[Batch, Principal | None]:
        """Stop a batch whose time is over or whose key was revoked. Return it, and the key while
        its lines may run: not while its tenant is suspended."""
        now = self._context.clock()
        caller, why = await in_read(self._store, partial(_caller, batch, now))
        stop = batch.stop
        if now >= batch.expires_at and (stop is None or stop["code"] not in STOPPED):
            text = "This request could not be executed before the completion window expired."
            return await self._stop(batch, "batch_expired", text), None
        if stop is None and caller is None:
            return await self._stop(batch, "unauthenticated", why), None
        if caller is not None and caller.suspended:
            self._validations.pop(batch.id, None)
            return batch, None
        return batch, caller

    async def _move(self, batch: Batch, caller: Principal | None, share: int) -> bool:
        """Write answers, or begin more lines, or end the batch."""
        self._written.setdefault(batch.id, time.monotonic())
        counts = await in_read(self._store, lambda sql: lines.count(sql, batch.id))
        if self._is_flush_due(batch, counts):
            await self._flush(batch)
            return True
        file = await self._input(batch)
        if batch.position >= file.size_bytes:
            if not counts.running and not counts.ended:
                await in_write(self._store, partial(_finish, batch))
            return False
        if batch.stop is not None:
            return await self._advance(batch, file, CHECKED_LINES, None)
        room = min(share - counts.running, 2 * share - counts.running - counts.ended)
        if caller is not None and room > 0:
            return await self._advance(batch, file, room, caller)
        return False

    async def _input(self, batch: Batch) -> BatchFile:
        """Return the input file. Raises NotFound."""
        file = await in_read(self._store, lambda sql: files.get(sql, batch.input_file))
        if file is None:
            raise NotFound(f"the input file {batch.input_file} is gone")
        return file

    def _is_flush_due(self, batch: Batch, counts: LineCounts) -> bool:
        is_old = time.monotonic() > self._written[batch.id] + FLUSH_S
        return counts.ended > 0 and (
            is_old
            or not counts.running
            or counts.ended >= OF_TENANT
            or counts.ended_chars > lines.FLUSH_CHARS
        )

    async def _stop(self, batch: Batch, code: str, message: str) -> Batch:
        log.info("event=batch_stopped batch=%s code=%s", batch.id, code)
        stop = {"code": code, "message": message}
        return await in_write(self._store, lambda write: batches.change(write, batch, stop=stop))

    async def _cancel(self, batch: Batch, stop: Mapping[str, str]) -> None:
        is_late = self._context.clock() > batch.times.get("stopped", 0.0) + CANCEL_S
        if batch.id in self._cancelled and not is_late:
            return
        await in_write(self._store, lambda write: lines.cancel(write, batch, stop, is_all=is_late))
        self._cancelled.add(batch.id)

    # -- reading -----------------------------------------------------------------------------------
    async def _validate(self, batch: Batch, caller: Principal) -> bool:
        known = self._validations
        if batch.id not in known:
            if len(known) >= VALIDATIONS or batch.tenant in {one.tenant for one in known.values()}:
                return False
            known[batch.id] = Validation(batch.tenant)
        state = known[batch.id]
        file = await self._input(batch)
        try:
            data = await self._piece(file, state.position, CHECKED_LINES)
        except (_LineTooLong, ContentLost) as e:
            line = state.line + 1
            state.problems.append({"code": e.type, "message": str(e), "line": line, "param": None})
        else:
            found = await self._parse(batch, data)
            resolved = await in_read(self._store, partial(_resolve, caller, batch, _models(found)))
            state.add(found, {m: e for m, e in resolved.items() if isinstance(e, PilotlightError)})
            state.position += len(data)
            state.line += data.count(b"\n")
            if state.position < file.size_bytes and not state.is_hopeless:
                return True
        await in_write(self._store, partial(_validated, batch, state))
        del known[batch.id]
        return True

    async def _advance(
        self, batch: Batch, file: BatchFile, room: int, caller: Principal | None
    ) -> bool:
        """Turn the next lines into rows; `caller`: None = they are not run, as `batch.stop`
        says."""
        try:
            data = await self._piece(file, batch.position, room)
        except ContentLost as e:
            await self._stop(batch, e.type, str(e))
            await in_write(
                self._store,
                lambda write: batches.change(write, batch, position=file.size_bytes),
            )
            return True
        found = await self._parse(batch, data)
        resolved: Mapping[str, LineTarget | PilotlightError] = {}
        if caller is not None:
            resolved = await in_read(self._store, partial(_resolve, caller, batch, _models(found)))

        def add(write: Write) -> bool:
            now = _reload(write.sql, batch)
            if now is None or now.position != batch.position or now.stop != batch.stop:
                return False  # it was cancelled meanwhile
            if batch.stop is None:
                lines.add(write, batch, found, resolved)
            else:
                lines.add_stopped(write, batch, found, batch.stop)
            batches.change(
                write,
                batch,
                position=batch.position + len(data),
                line=batch.line + data.count(b"\n"),
            )
            return True

        return await in_write(self._store, add) and batch.stop is not None

    async def _piece(self, file: BatchFile, position: int, max_lines: int) -> bytes:
        """Return up to `max_lines` whole lines. Raises _LineTooLong, NotFound, Unavailable."""
        data = await files.read(self._context, file, offset=position, length=MAX_LINE_BYTES + 1)
        if position + len(data) < file.size_bytes:
            data = data[: data.rfind(b"\n") + 1]
            if not data:
                raise _LineTooLong(f"a line has at most {MAX_LINE_BYTES} bytes")
        end = -1
        for _ in range(max_lines):
            end = data.find(b"\n", end + 1)
            if end < 0:
                return data
        return data[: end + 1]

    async def _parse(self, batch: Batch, data: bytes) -> list[dict[str, Any]]:
        return await self.parser.parse(data, endpoint=batch.endpoint, is_openai=batch.is_openai)

    # -- writing -----------------------------------------------------------------------------------
    async def _flush(self, batch: Batch) -> None:
        """Write lines that have ended to the batch's files. Where the plan has no room, the answers
        are lost: the lines say so, and the batch stops."""
        found = await in_read(self._store, lambda sql: lines.ended(sql, batch))
        try:
            await self._put(batch, found, is_forced=False)
        except StorageQuotaExceeded as e:
            if batch.stop is None:
                batch = await self._stop(batch, e.type, str(e))
            await self._put(batch, [lines.refused(one, e) for one in found], is_forced=True)
        self._written[batch.id] = time.monotonic()

    async def _put(self, batch: Batch, found: Sequence[EndedLine], *, is_forced: bool) -> None:
        parts: list[tuple[BatchFile, int]] = []
        for is_failed, column in ((False, "output_file"), (True, "error_file")):
            some = [one.to_json() for one in found if one.is_failed == is_failed]
            if some:
                data = await self.parser.compose(some)
                file_id = await in_write(self._store, partial(_file_of, batch, column))
                file = await files.prepare(self._context, file_id, data, is_forced=is_forced)
                parts.append((file, len(data)))

        def count(write: Write) -> None:
            for file, size_bytes in parts:
                files.counted(write, file, size_bytes)
            lines.forget(write, batch, found)
            failed = sum(one.is_failed for one in found)
            c = tables.batches.c
            write.sql.execute(
                sa.update(tables.batches)
                .where(c.id == batch.id)
                .values(completed=c.completed + len(found) - failed, failed=c.failed + failed)
            )

        await in_write(self._store, count)


def _active(sql: sa.Connection) -> list[Batch]:
    c = tables.batches.c
    query = sa.select(tables.batches).where(c.is_active).order_by(c.created_at, c.id)
    return [batches.of_row(row) for row in sql.execute(query.limit(AT_ONCE)).mappings()]


def _reload(sql: sa.Connection, batch: Batch) -> Batch | None:
    query = sa.select(tables.batches).where(tables.batches.c.id == batch.id)
    row = sql.execute(query).mappings().first()
    return None if row is None else batches.of_row(row)


def _caller(batch: Batch, now: float, sql: sa.Connection) -> tuple[Principal | None, str]:
    """Return the key that made a batch; None, and why, if it may call nothing now."""
    which = tables.api_keys.c.id == batch.key
    try:
        return access_control.find_principal(sql, which, environment=batch.environment, now=now), ""
    except (Unauthenticated, Forbidden) as e:
        return None, f"{e}: lines that had not begun were not run"


def _models(found: Sequence[Mapping[str, Any]]) -> set[str]:
    return {one["model"] for one in found if "model" in one}


def _resolve(
    caller: Principal, batch: Batch, models: set[str], sql: sa.Connection
) -> dict[str, LineTarget | PilotlightError]:
    """Return what lines with these models call, or why they cannot."""
    resolved: dict[str, LineTarget | PilotlightError] = {}
    for model in models:
        try:
            resolved[model] = targets.find_target(sql, caller, endpoint=batch.endpoint, model=model)
        except (InvalidInput, NotFound, Forbidden) as e:
            resolved[model] = e
    return resolved


def _validated(batch: Batch, state: Validation, write: Write) -> None:
    now = _reload(write.sql, batch)
    if now is None or now.status != "validating":
        return  # it was cancelled meanwhile
    problems = state.problems
    if not problems and not state.total:
        text = "the file has no requests"
        problems = [{"code": "empty_file", "message": text, "line": None, "param": None}]
    if problems:
        batches.change(
            write, now, status="failed", is_active=False, problems=problems, total=state.total
        )
    else:
        batches.change(write, now, status="in_progress", total=state.total)


def _finish(batch: Batch, write: Write) -> None:
    """End a batch, all of whose lines are in its files."""
    now = _reload(write.sql, batch)
    if now is None or not now.is_active:
        return
    for file_id in (now.output_file, now.error_file):
        if file_id is not None:
            files.finish(write, file_id, purpose=OUTPUT, expires_at=write.now + files.KEEP_S)
    code = now.stop["code"] if now.stop is not None else ""
    now = batches.change(write, now, status="finalizing")
    batches.change(write, now, status=STOPPED.get(code, "completed"), is_active=False)


def _file_of(batch: Batch, column: str, write: Write) -> str:
    """Return the id of a batch's output or error file, which is created once."""
    now = _reload(write.sql, batch)
    if now is None:
        raise NotFound(f"batch {batch.id} is gone")
    known: str | None = getattr(now, column)
    if known is not None:
        return known
    file = files.create(
        write,
        tenant=batch.tenant,
        environment=batch.environment,
        key=batch.key,
        filename=f"{batch.id}_{column.removesuffix('_file')}.jsonl",
        purpose=OUTPUT,
        expires_at=batch.expires_at + files.KEEP_S,
        is_bounded=False,
    )
    batches.change(write, now, **{column: file.id})
    return file.id
