"""Operations on dicts and queues that were done under an id of their caller's choice, so that one
whose answer was lost can be sent again: it is not done twice, and has the same answer.

An id is known for MEMORY_S. Its answer, which may have the values that were taken, is kept as long,
within bounds for each collection; after that a repeat raises Conflict."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.errors import Conflict

MEMORY_S = 300.0
"""How long an id is known: longer than a client tries again (60 s of waiting)."""
FORGET_EVERY = 16
"""One of so many operations forgets older ones, of all collections. It is drawn by chance, so
that no caller can choose its operations such that none does."""
FORGOTTEN_AT_ONCE = 20 * FORGET_EVERY
"""How many it forgets: more than were added meanwhile."""
KEPT_ANSWERS = 1024
"""Answers that are kept of one collection, the newest ones."""
KEPT_BYTES = 2 * 1024 * 1024
"""The same in bytes, unless the newest one alone is larger."""
TENANT_ANSWERS, TENANT_BYTES = 16 * KEPT_ANSWERS, 16 * KEPT_BYTES
"""The same of all collections of a tenant: they are beyond what its plan and the bounds of
collections count."""
LARGE_BYTES = 64 * 1024
"""An answer of this size makes room at once."""
_DROPPED = -1
"""Size of an answer that is kept no more."""
_TABLE = tables.collection_operations
_LENGTH = struct.Struct(">I")


def once(
    write: Write,
    collection: str,
    operation_id: str,
    do: Callable[[], Sequence[bytes]],
    *,
    is_kept: Callable[[Sequence[bytes]], bool] = lambda _: True,
) -> list[bytes]:
    """Do an operation and return its answer; where one with this id was done on the collection,
    return that one's. "": it has no id. `is_kept`: whether the answer must be the same for a
    repeat; if not, a repeat does it again. Raises Conflict where the answer is kept no more."""
    if not operation_id:
        return list(do())
    is_due = not secrets.randbelow(FORGET_EVERY)
    if is_due:
        _delete_oldest(write)
    insert = write.insert(_TABLE).values(
        collection=collection, id=operation_id, at=write.now, size_bytes=0, answer=b""
    )
    made = write.sql.execute(insert.on_conflict_do_nothing().returning(_TABLE.c.id))
    place = (_TABLE.c.collection == collection, _TABLE.c.id == operation_id)
    if made.first() is None:
        size_bytes, answer = write.sql.execute(
            sa.select(_TABLE.c.size_bytes, _TABLE.c.answer).where(*place)
        ).one()
        if size_bytes == _DROPPED:
            raise Conflict(
                f"operation {operation_id!r} was done before, and its answer is no longer kept: of "
                f"one dict or queue the newest {KEPT_ANSWERS} answers and {KEPT_BYTES} bytes are, "
                f"of a tenant 16 times as many"
            )
        return _unpacked(bytes(answer))
    parts = list(do())
    if not is_kept(parts):
        write.sql.execute(sa.delete(_TABLE).where(*place))
        return parts
    answer = _packed(parts)
    if answer:
        values = {"size_bytes": len(answer), "answer": answer}
        write.sql.execute(sa.update(_TABLE).where(*place).values(**values))
    if answer and (is_due or len(answer) >= LARGE_BYTES):
        _drop_answers(write, collection)
    return parts


def is_known(sql: sa.Connection, collection: str, operation_id: str) -> bool:
    """Whether an operation with this id was done on the collection."""
    if not operation_id:
        return False
    query = sa.select(_TABLE.c.id).where(
        _TABLE.c.collection == collection, _TABLE.c.id == operation_id
    )
    return sql.execute(query).first() is not None


def delete_all(write: Write, collection: str) -> None:
    """Forget all operations on a collection."""
    write.sql.execute(sa.delete(_TABLE).where(_TABLE.c.collection == collection))


def _delete_oldest(write: Write) -> None:
    """Delete the oldest operations that need not be known."""
    old = sa.select(_TABLE.c.collection, _TABLE.c.id).where(_TABLE.c.at < write.now - MEMORY_S)
    old = old.order_by(_TABLE.c.at).limit(FORGOTTEN_AT_ONCE)
    place = sa.tuple_(_TABLE.c.collection, _TABLE.c.id)
    write.sql.execute(sa.delete(_TABLE).where(place.in_(old)))


def _drop_answers(write: Write, collection: str) -> None:
    """Drop the answers of a collection, and those of all of its tenant's, beyond their bounds,
    oldest first; their ids stay known."""
    of = tables.collections.c
    tenant = sa.select(of.tenant).where(of.id == collection).scalar_subquery()
    theirs = _TABLE.c.collection.in_(sa.select(of.id).where(of.tenant == tenant))
    for where, answers, most in (
        (_TABLE.c.collection == collection, KEPT_ANSWERS, KEPT_BYTES),
        (theirs, TENANT_ANSWERS, TENANT_BYTES),
    ):
        _drop_beyond(write, where, answers, most)


def _drop_beyond(
    write: Write, where: sa.ColumnElement[bool], answers: int, size_bytes: int
) -> None:
    kept = (where, _TABLE.c.size_bytes > 0)
    sums = sa.select(sa.func.count(), sa.func.sum(_TABLE.c.size_bytes)).where(*kept)
    number, total = write.sql.execute(sums).one()
    if number <= answers and (number <= 1 or total <= size_bytes):
        return
    query = sa.select(_TABLE.c.collection, _TABLE.c.id, _TABLE.c.size_bytes).where(*kept)
    query = query.order_by(_TABLE.c.at.desc(), _TABLE.c.collection, _TABLE.c.id)
    total, dropped = 0, []
    for number, row in enumerate(write.sql.execute(query).all()):
        total += row.size_bytes
        if number >= answers or (number and total > size_bytes):
            dropped.append({"place": row.collection, "of": row.id})
    update = sa.update(_TABLE).where(
        _TABLE.c.collection == sa.bindparam("place"), _TABLE.c.id == sa.bindparam("of")
    )
    write.sql.execute(update.values(size_bytes=_DROPPED, answer=b""), dropped)


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unpacked(answer: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(answer):
        (length,) = _LENGTH.unpack_from(answer, at)
        at += _LENGTH.size
        parts.append(answer[at : at + length])
        at += length
    return parts
