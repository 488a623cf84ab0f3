"""Decisions about the snapshots of a cluster's nodes. Pure functions of the register's rows and a
node's report.

    (unknown) ── a pod of its function is on the node ──▶ SEEN ── copy uploaded ──▶ APPROVED
    SEEN, APPROVED ── quarantined on any node, or on request ──▶ QUARANTINED
    any ── deleted ──▶ DELETED          APPROVED ── the store is to become smaller ──▶ EVICTED

Nodes restore the copy that is APPROVED for an identity, and no other: the first that was uploaded
by the node that made it, until it is quarantined, deleted or evicted. A node can so have others
restore only snapshots of functions of which it has, or had, a pod; for these it could also answer
calls."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from snapshotter.node_reports import ApprovedCopy, NodeReport, NodeSnapshot, SnapshotOrders
from snapshotter.types import SnapshotInfo, SnapshotState

USED_S = 60.0
"""Uses are recorded to the minute, so that not every report writes."""
HOT_S = 3600.0
"""How recently a snapshot must have been used to be received ahead of starts."""
MOST_APPROVED, MOST_FORGET, MOST_PREFETCH = 2000, 50, 20
"""Entries of an answer."""


class CopyState(enum.StrEnum):
    """State of a snapshot in the register; see the module."""

    SEEN = "SEEN"
    APPROVED = "APPROVED"
    EVICTED = "EVICTED"
    QUARANTINED = "QUARANTINED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSnapshot:
    """A row of the register.

    Attributes:
        node: that made it.
        kind: of that node (`NodeReport.kind`).
        identity: digest of its identity.
        record: sha256 of the record of its copy; "" while the store has none.
        reason: of a quarantine.
        last_used_at: on any node; changed_at: of the state; seconds since the epoch.
        info: the snapshot as that node reported it, for listings.
    """

    id: str
    state: CopyState
    node: str
    kind: str
    identity: str
    info: SnapshotInfo
    record: str = ""
    copy_bytes: int = 0
    reason: str = ""
    last_used_at: float = 0.0
    changed_at: float = 0.0

    @property
    def tenant(self) -> str:
        """Id of its tenant."""
        return self.info.labels.get("tenant", "")

    @property
    def function(self) -> str:
        """Id of its function."""
        return self.info.revision.partition("@")[0]

    def to_copy(self) -> ApprovedCopy:
        """Its copy, for nodes."""
        return ApprovedCopy(
            snapshot=self.id, tenant=self.tenant, identity=self.identity, record=self.record
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "info": self.info.to_json()}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        info = SnapshotInfo.from_json(body["info"])
        return cls(**{**body, "state": CopyState(body["state"]), "info": info})


Rows = Mapping[str, RegisteredSnapshot]


def candidates(rows: Rows, report: NodeReport) -> list[NodeSnapshot]:
    """Snapshots of a report that could be registered: made by its node, and not known yet."""
    return [
        s for s in report.snapshots if s.info is not None and s.digest and s.info.id not in rows
    ]


def registered(snapshot: NodeSnapshot, report: NodeReport, *, now: float) -> RegisteredSnapshot:
    """The first row of a snapshot."""
    assert snapshot.info is not None
    return RegisteredSnapshot(
        id=snapshot.info.id,
        state=CopyState.SEEN,
        node=report.node,
        kind=report.kind,
        identity=snapshot.digest,
        info=snapshot.info,
        last_used_at=min(now, snapshot.info.last_used_at),
        changed_at=now,
    )


def updates(rows: Rows, report: NodeReport, *, now: float) -> list[RegisteredSnapshot]:
    """The rows that a report changes."""
    approved = {row.identity for row in rows.values() if row.state is CopyState.APPROVED}
    changed: dict[str, RegisteredSnapshot] = {}
    for snapshot in (*report.snapshots, *report.others):
        row = rows.get(snapshot.info.id) if snapshot.info is not None else None
        if row is None or snapshot.info is None:
            continue
        new = _after(row, snapshot, report, is_taken=row.identity in approved, now=now)
        if new.state is CopyState.APPROVED:
            approved.add(new.identity)
        if new != row:
            changed[row.id] = new
    for snapshot_id in report.forgotten:
        row = changed.get(snapshot_id) or rows.get(snapshot_id)
        if row is not None and row.record and row.state is not CopyState.APPROVED:
            changed[row.id] = replace(row, record="")
    return list(changed.values())


def _after(
    row: RegisteredSnapshot,
    snapshot: NodeSnapshot,
    report: NodeReport,
    *,
    is_taken: bool,
    now: float,
) -> RegisteredSnapshot:
    info = snapshot.info
    assert info is not None
    if info.last_used_at - row.last_used_at >= USED_S:
        row = replace(row, last_used_at=min(now, info.last_used_at))
    is_live = row.state in (CopyState.SEEN, CopyState.APPROVED)
    if info.state is SnapshotState.QUARANTINED and is_live:
        reason = f"on node {report.node}: {info.reason}"
        return replace(row, state=CopyState.QUARANTINED, reason=reason, changed_at=now)
    is_its_copy = snapshot.copy and row.node == report.node and row.identity == snapshot.digest
    if is_its_copy and row.state is not CopyState.APPROVED and not row.record:
        row = replace(row, record=snapshot.copy, copy_bytes=snapshot.copy_bytes)
        if row.state is CopyState.SEEN:
            state = CopyState.EVICTED if is_taken else CopyState.APPROVED
            return replace(row, state=state, changed_at=now)
    return row


def evictions(rows: Rows, *, max_bytes: int, now: float) -> list[RegisteredSnapshot]:
    """The least recently used copies that have to go for all to fit into `max_bytes`."""
    approved = sorted(
        (row for row in rows.values() if row.state is CopyState.APPROVED),
        key=lambda row: row.last_used_at,
    )
    excess = sum(row.copy_bytes for row in approved) - max_bytes
    gone = []
    for row in approved:
        if excess <= 0:
            break
        excess -= row.copy_bytes
        gone.append(replace(row, state=CopyState.EVICTED, changed_at=now))
    return gone


def orders(
    rows: Rows, report: NodeReport, *, makers: Collection[str], now: float
) -> SnapshotOrders:
    """The answer to a report. `makers`: nodes with valid reports that make snapshots, of which one
    removes each copy."""
    there = {s.info.id: s for s in (*report.snapshots, *report.others) if s.info is not None}
    mine = [rows[name] for name in there if name in rows]
    approved = sorted(
        (r for r in rows.values() if r.state is CopyState.APPROVED and r.kind == report.kind),
        key=lambda row: (-row.last_used_at, row.id),
    )[:MOST_APPROVED]
    version = _version(approved)
    return SnapshotOrders(
        version=version,
        approved=None if version == report.orders else tuple(row.to_copy() for row in approved),
        delete=tuple(row.id for row in mine if row.state is CopyState.DELETED),
        quarantine={
            row.id: row.reason
            for row in mine
            if row.state is CopyState.QUARANTINED and there[row.id].is_ready
        },
        forget=tuple(
            row.to_copy()
            for row in rows.values()
            if row.record and row.state is not CopyState.APPROVED and _removes(row, report, makers)
        )[:MOST_FORGET],
        prefetch=tuple(
            row.id
            for row in approved
            if row.id not in there
            and row.tenant in report.tenants
            and now - row.last_used_at <= HOT_S
        )[:MOST_PREFETCH],
    )


def _removes(row: RegisteredSnapshot, report: NodeReport, makers: Collection[str]) -> bool:
    """Whether this node removes the copy: the one that made it, else the first of all."""
    return report.node == (row.node if row.node in makers else min(makers, default=""))


def _version(approved: Iterable[RegisteredSnapshot]) -> str:
    text = "\n".join(sorted(f"{row.id} {row.record}" for row in approved))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
