"""Batches: their rows, as OpenAI's clients read them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from pilotlight.controller.batches import files, targets
from pilotlight.controller.batches.files import INPUT
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.errors import Conflict, InvalidInput, NotFound, StorageQuotaExceeded
from pilotlight.spec.record_json import canonical_json

MAX_LINES: Final = 50_000
MAX_ACTIVE: Final = 16
"""Batches of a tenant that run at once."""
MAX_BATCHES: Final = 1000
KEEP_S: Final = files.KEEP_S
"""How long a batch is listed after its end; its files are kept as long."""
MAX_ERRORS: Final = 50
"""Errors of a file that are listed."""
_WINDOW: Final = re.compile(r"([1-9][0-9]{0,2})([hd])\Z")
_UNIT_S: Final = {"h": 3600.0, "d": 86_400.0}
MAX_WINDOW_S: Final = 7 * 86_400.0
STOPPED: Final = {"batch_cancelled": "cancelled", "batch_expired": "expired"}
"""Final states by the code of what ended a batch with its running calls. What else stops a batch
lets them end, and the batch is completed."""
_C = tables.batches.c


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch.

    Attributes:
        position, line: how many bytes and lines of the input have become calls.
        stop: why the remaining lines are not run: `code` and `message`; None = they are.
        times: when it entered its states.
        customer: for which its lines are run; "" = none was named.
    """

    id: str
    tenant: str
    environment: str
    key: str
    endpoint: str
    input_file: str
    metadata: Mapping[str, str]
    completion_window: str
    status: str
    problems: Sequence[Mapping[str, Any]]
    times: Mapping[str, float]
    stop: Mapping[str, str] | None
    output_file: str | None
    error_file: str | None
    total: int
    completed: int
    failed: int
    position: int
    line: int
    created_at: float
    expires_at: float
    is_active: bool
    customer: str

    @property
    def is_openai(self) -> bool:
        """Whether its lines are requests of OpenAI's API."""
        return self.endpoint in targets.OPENAI_ENDPOINTS

    def call_of(self, line: int) -> str:
        """Return the id of the call of a line, which is that of no other."""
        return f"req-{uuid.uuid5(uuid.NAMESPACE_OID, f'{self.tenant}/{self.id}/{line}').hex}"

    def to_json(self, ended: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        """Return it as OpenAI's clients read it. `ended`: completed and failed lines that are not
        in a file yet."""
        problems = list(self.problems)
        if self.stop is not None and self.stop["code"] not in STOPPED:
            problems.append({**self.stop, "line": None, "param": None})
        names = ("in_progress", "finalizing", "completed", "failed", "expired")
        at = {
            f"{name}_at": int(self.times[name]) if name in self.times else None
            for name in (*names, "cancelling", "cancelled")
        }
        is_final = not self.is_active
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input_file,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file if is_final else None,
            "error_file_id": self.error_file if is_final else None,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            **at,
            "request_counts": {
                "total": self.total,
                "completed": self.completed + ended[0],
                "failed": self.failed + ended[1],
            },
            "metadata": dict(self.metadata) or None,
        }


def of_row(row: sa.RowMapping) -> Batch:
    """Return the batch of a row."""
    values: dict[str, Any] = {str(name): value for name, value in row.items()}
    for name in ("metadata", "problems", "times"):
        values[name] = json.loads(values[name])
    values["stop"] = None if values["stop"] is None else json.loads(values["stop"])
    return Batch(**values)


def window_s(text: str) -> float:
    """Return the seconds of a completion window, such as 24h. Raises InvalidInput."""
    found = _WINDOW.match(text)
    seconds = int(found[1]) * _UNIT_S[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidInput(
            f"completion_window = {text[:80]!r}: hours or days, such as 24h, at most 7d",
            parameter="completion_window",
        )
    return seconds


def create(
    write: Write,
    caller: Principal,
    *,
    input_file: str,
    endpoint: str,
    completion_window: str,
    metadata: Mapping[str, str],
    customer: str | None = None,
) -> Batch:
    """Create a batch; its file is checked later. Raises InvalidInput, NotFound, Forbidden,
    StorageQuotaExceeded for a tenant that has too many."""
    length_s = window_s(completion_window)
    file = files.find(write.sql, caller, input_file, now=write.now)
    if file.purpose != INPUT:
        raise InvalidInput(
            f"{file.id} has purpose {file.purpose!r}: a batch needs a file with purpose {INPUT!r}",
            parameter="input_file_id",
        )
    if endpoint not in targets.OPENAI_ENDPOINTS:
        targets.find_function(write.sql, caller, endpoint)
    _require_few(write, caller.tenant)
    batch = Batch(
        id=f"batch_{uuid.uuid4().hex[:24]}",
        tenant=caller.tenant,
        environment=caller.environment,
        key=caller.key,
        endpoint=endpoint,
        input_file=file.id,
        metadata=metadata,
        completion_window=completion_window,
        status="validating",
        problems=(),
        times={},
        stop=None,
        output_file=None,
        error_file=None,
        total=0,
        completed=0,
        failed=0,
        position=0,
        line=0,
        created_at=write.now,
        expires_at=write.now + length_s,
        is_active=True,
        customer=caller.customer_of(customer),
    )
    values = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
    for name in ("metadata", "problems", "times"):
        values[name] = canonical_json(values[name]).decode()
    write.sql.execute(sa.insert(tables.batches).values(**values))
    _keep_input(write, batch)
    write.fed = True  # wakes the loop that runs batches
    return batch


def _keep_input(write: Write, batch: Batch) -> None:
    """Keep the input file at least until the batch has ended."""
    c = tables.batch_files.c
    until = batch.expires_at + 86_400.0
    write.sql.execute(
        sa.update(tables.batch_files)
        .where(c.id == batch.input_file, c.expires_at < until)
        .values(expires_at=until)
    )


def _require_few(write: Write, tenant: str) -> None:
    active = sa.func.sum(sa.case((_C.is_active, 1), else_=0))
    query = sa.select(sa.func.count(), active).select_from(tables.batches)
    count, running = write.sql.execute(query.where(_C.tenant == tenant)).one()
    for used, limit, what in (
        (int(running or 0), MAX_ACTIVE, "running batches"),
        (int(count), MAX_BATCHES, "batches of the last 30 days"),
    ):
        if used >= limit:
            raise StorageQuotaExceeded(
                f"this tenant has {used} {what}, the maximum is {limit}: wait until some have "
                f"ended, or put more lines in each (at most {MAX_LINES})",
                quota="batches",
                limit=limit,
                used=used,
            )


def _mine(caller: Principal) -> tuple[sa.ColumnElement[bool], ...]:
    own = (_C.key == caller.key,) if caller.bound_app is not None else ()
    return (_C.tenant == caller.tenant, _C.environment == caller.environment, *own)


def find(sql: sa.Connection, caller: Principal, batch_id: str) -> Batch:
    """Return a batch that the caller may see. Raises NotFound."""
    query = sa.select(tables.batches).where(_C.id == batch_id, *_mine(caller))
    row = sql.execute(query).mappings().first()
    if row is None:
        raise NotFound(f"no batch {batch_id[:80]!r}: it does not exist, or belongs to another key")
    return of_row(row)


def listing(sql: sa.Connection, caller: Principal, *, after: str | None, limit: int) -> list[Batch]:
    """Return up to `limit` batches, newest first. Raises NotFound for an unknown `after`."""
    query = sa.select(tables.batches).where(*_mine(caller))
    if after is not None:
        last = find(sql, caller, after)
        here = sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
        query = query.where(sa.tuple_(_C.created_at, _C.id) < here)
    order = (_C.created_at.desc(), _C.id.desc())
    return [of_row(row) for row in sql.execute(query.order_by(*order).limit(limit)).mappings()]


def cancel(write: Write, caller: Principal, batch_id: str) -> Batch:
    """Cancel a batch: lines that have not ended end without an answer. Idempotent. Raises Conflict
    for one that has ended."""
    batch = find(write.sql, caller, batch_id)
    if batch.status == "cancelling":
        return batch
    if not batch.is_active:
        raise Conflict(f"batch {batch.id} is {batch.status}: it cannot be cancelled")
    write.fed = True
    return change(
        write,
        batch,
        status="cancelling",
        stop={"code": "batch_cancelled", "message": "the batch was cancelled"},
    )


def change(write: Write, batch: Batch, **values: Any) -> Batch:
    """Change columns of a batch. A new `status` or `stop` is noted in
    `times`."""
    names = [values.get("status"), "stopped" if values.get("stop") else None]
    if any(names):
        values["times"] = {**batch.times, **{name: write.now for name in names if name}}
    for name in ("problems", "times", "stop"):
        if values.get(name) is not None:
            values[name] = canonical_json(values[name]).decode()
    row = write.sql.execute(
        sa.update(tables.batches)
        .where(_C.id == batch.id)
        .values(**values)
        .returning(tables.batches)
    )
    return of_row(row.mappings().one())


def is_used(sql: sa.Connection, file_id: str) -> str | None:
    """Return the running batch that reads or writes a file; None = none does."""
    uses = (_C.input_file == file_id) | (_C.output_file == file_id) | (_C.error_file == file_id)
    return sql.execute(sa.select(_C.id).where(_C.is_active, uses)).scalar()


def ended_lines(sql: sa.Connection, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return, by batch, how many lines have been completed and have failed whose answers are not
    in a file yet."""
    c = tables.batch_lines.c
    failed = sa.func.sum(sa.case((c.is_failed, 1), else_=0))
    query = sa.select(c.batch, sa.func.count(), failed).where(c.batch.in_(ids), c.is_done)
    return {
        batch: (int(count) - int(bad), int(bad))
        for batch, count, bad in sql.execute(query.group_by(c.batch)).all()
    }


def purge(write: Write, *, now: float, limit: int = 100) -> None:
    """Delete batches that ended long ago."""
    old = sa.select(_C.id).where(~_C.is_active, _C.created_at < now - KEEP_S - MAX_WINDOW_S)
    ids = write.sql.execute(old.limit(limit)).scalars().all()
    if ids:
        write.sql.execute(sa.delete(tables.batches).where(_C.id.in_(ids)))
