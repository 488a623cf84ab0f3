"""The configuration feed that activators follow: the newest change per (kind, key), in commit
order.

A position consists of a sequence number and the generation of the last purge: `generation << 40 |
seq`. Removals are kept as tombstones for a while; purging them starts a new generation. A follower
whose position is older than the last purge and of an earlier generation may have missed a removal,
so it must start over. A follower that pages through the feed from the start holds positions of the
current generation, and continues."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write
from pilotlight.spec.record_json import canonical_json

_SEQ_BITS = 40
"""A million changes per second for twelve days, or a hundred for three hundred years."""
TOMBSTONE_TTL_S = 86_400.0
"""A follower that is disconnected for longer starts over, which takes a second but loses
nothing."""
PAGE_BYTES = 8 * 1024 * 1024
"""A page ends early at this size, so that a thousand large schemas do not make one huge
response."""

FUNCTION, KEY, TENANT, SECRET, QUOTA, BUDGET, CREDIT = (
    "function",
    "key",
    "tenant",
    "secret",
    "quota",
    "budget",
    "credit",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Changes after a position.

    Attributes:
        seq: the position for the next request.
        reset: discard all known state: the changes from here on are the complete state.
        more: another page is available now.
        changes: JSON texts of FeedChange.
    """

    seq: int
    reset: bool
    more: bool
    changes: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the page as a JSON document."""
        head = f'{{"seq":{self.seq},"reset":{json.dumps(self.reset)},"more":{json.dumps(self.more)},"changes":['
        return (head + ",".join(self.changes) + "]}").encode()


def append(write: Write, kind: str, key: str, value: Any) -> None:
    """Publish `value` (JSON) as the state of (kind, key); None removes it. Does nothing if that is
    the current state."""
    text = None if value is None else canonical_json(value).decode()
    feed = tables.feed
    known = write.sql.execute(
        sa.select(feed.c.value).where(feed.c.kind == kind, feed.c.key == key)
    ).first()
    if (known is None and text is None) or (known is not None and known.value == text):
        return
    state = tables.feed_state
    head = write.sql.execute(
        sa.update(state).values(head=state.c.head + 1).returning(state.c.head)
    ).scalar_one()
    row = {"seq": head, "value": text, "changed_at": write.now}
    insert = write.insert(feed).values(kind=kind, key=key, **row)
    write.sql.execute(insert.on_conflict_do_update(index_elements=["kind", "key"], set_=row))
    write.fed = True


def size_bytes(sql: sa.Connection, kind: str, key: str) -> int:
    """Return the size of the published value of (kind, key); 0 if there is none."""
    feed = tables.feed
    known = sql.execute(
        sa.select(feed.c.value).where(feed.c.kind == kind, feed.c.key == key)
    ).scalar()
    return len(known.encode()) if known is not None else 0


def read(sql: sa.Connection, *, after: int, limit: int) -> Page:
    """Return the page after position `after` (0: from the start), at most `limit` changes."""
    state = sql.execute(sa.select(tables.feed_state)).one()
    generation, seq = after >> _SEQ_BITS, after & ((1 << _SEQ_BITS) - 1)
    missed = seq < state.purged and generation != state.generation
    reset = after <= 0 or seq > state.head or generation > state.generation or missed
    start = 0 if reset else seq
    feed = tables.feed
    query = sa.select(feed).where(feed.c.seq > start).order_by(feed.c.seq).limit(limit + 1)
    changes: list[str] = []
    size, last, more = 0, start, False
    for row in sql.execute(query):
        if len(changes) == limit or size > PAGE_BYTES:
            more = True
            break
        size += len(row.value or "")
        last = row.seq
        at = _position(state.generation, row.seq)
        changes.append(
            f'{{"seq":{at},"kind":{json.dumps(row.kind)},"key":{json.dumps(row.key)},"value":{row.value or "null"}}}'
        )
    if not more:
        last = max(last, state.head)
    return Page(
        seq=_position(state.generation, last), reset=reset, more=more, changes=tuple(changes)
    )


def purge(write: Write, *, before: float) -> int:
    """Delete tombstones older than `before` (epoch seconds) and start a new generation; return how
    many were deleted."""
    feed, state = tables.feed, tables.feed_state
    old = (feed.c.value.is_(None)) & (feed.c.changed_at < before)
    count, newest = write.sql.execute(
        sa.select(sa.func.count(), sa.func.max(feed.c.seq)).where(old)
    ).one()
    if count:
        write.sql.execute(sa.delete(feed).where(old))
        write.sql.execute(sa.update(state).values(purged=newest, generation=state.c.generation + 1))
    return int(count)


def _position(generation: int, seq: int) -> int:
    return generation << _SEQ_BITS | seq
