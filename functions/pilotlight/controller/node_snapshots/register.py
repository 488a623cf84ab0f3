"""The register of a cluster's snapshots: what the nodes have, which copies they may restore, and
which orders they get (`orders` decides).

Nodes report what they have every ten seconds, and the answer has their orders; so a change reaches
a node with its next report. The register is in the table `node_snapshots`: a quarantine or deletion
also reaches nodes that were away, and outlives the controller. A snapshot without a row is listed
from the reports alone, and restored only where it was made."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store
from pilotlight.controller.node_snapshots import orders
from pilotlight.controller.node_snapshots.orders import CopyState, RegisteredSnapshot
from snapshotter.errors import SnapshotterError, SnapshotUnknown
from snapshotter.node_reports import NodeReport, NodeSnapshot, SnapshotOrders
from snapshotter.types import SnapshotInfo, SnapshotState

log = logging.getLogger(__name__)

HasPod = Callable[[str, str, str], Awaitable[bool]]
"""Whether a pod of a function (id) of a tenant (id) is on a node. Raises SnapshotterError."""
LOOK_S = 30.0
"""Interval of looking for the pod that a snapshot must have been made beside."""
KEEP_S = 30 * 86400.0
"""How long snapshots without a copy are remembered after their last change and use: a node that was
away for longer keeps what was deleted until its own budget evicts it."""
MAX_ROWS = 50_000
MAX_LOOKS = 20
"""Questions to the cluster about pods, in one report."""


class FreshReports(Protocol):
    """The latest reports (`kubernetes.node_reports.NodeReports`)."""

    def fresh(self, *, now: float) -> dict[str, NodeReport]: ...


class SnapshotRegister:
    """The register. Owner: the event loop of the controller that leads; rows are changed under
    `_changing`, and in the database first."""

    def __init__(
        self, store: Store, reports: FreshReports, has_pod: HasPod, *, max_bytes: int
    ) -> None:
        """`max_bytes`: of all copies together; the least recently used are removed beyond it."""
        self._store = store
        self._reports = reports
        self._has_pod = has_pod
        self._max_bytes = max_bytes
        self._rows: dict[str, RegisteredSnapshot] | None = None
        self._changing = asyncio.Lock()
        self._looked_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<SnapshotRegister {len(self._rows or {})} rows>"

    async def take(self, report: NodeReport, *, now: float) -> SnapshotOrders:
        """Register what a report tells, and answer it."""
        rows = await self._loaded()
        made = [
            orders.registered(snapshot, report, now=now)
            for snapshot in orders.candidates(rows, report)
            if len(rows) < MAX_ROWS and await self._is_credible(snapshot, report, now=now)
        ]
        async with self._changing:
            await self._save([row for row in made if row.id not in rows])
            await self._save(orders.updates(rows, report, now=now))
            await self._save(orders.evictions(rows, max_bytes=self._max_bytes, now=now))
        makers = {n for n, known in self._reports.fresh(now=now).items() if known.kind}
        return orders.orders(rows, report, makers=makers, now=now)

    async def infos(self, labels: Mapping[str, str], *, now: float) -> list[SnapshotInfo]:
        """The snapshots with these labels, oldest first: one entry for each node that has one, and
        for copies that no node has."""
        rows = await self._loaded()
        found: list[SnapshotInfo] = []
        for node, report in self._reports.fresh(now=now).items():
            for info in _infos(report):
                row = rows.get(info.id)
                if row is None or row.state is not CopyState.DELETED:
                    found.append(_with_node_state(info, row, node=node))
        there = {info.id for info in found}
        found += [
            replace(row.info, node="", where="store", remote=True)
            for row in rows.values()
            if row.state is CopyState.APPROVED and row.id not in there
        ]
        return sorted(
            (info for info in found if labels.items() <= info.labels.items()),
            key=lambda info: (info.created_at, info.node),
        )

    async def quarantine(self, snapshot_id: str, reason: str, *, now: float) -> SnapshotInfo:
        """Quarantine a snapshot on all nodes, and remove its copy. Raises SnapshotUnknown."""
        await self._change(
            lambda row: row.id == snapshot_id, CopyState.QUARANTINED, reason=reason, now=now
        )
        found = [info for info in await self.infos({}, now=now) if info.id == snapshot_id]
        if found:
            return found[0]
        row = (await self._loaded()).get(snapshot_id)
        if row is None:
            raise SnapshotUnknown(f"snapshot {snapshot_id} is on no node")
        return _with_node_state(row.info, row, node="")

    async def delete(
        self,
        *,
        snapshot_id: str | None = None,
        revision: str | None = None,
        function: str | None = None,
        now: float,
    ) -> int:
        """Delete snapshots on all nodes, and their copies; returns how many different ones."""

        def is_meant(row: RegisteredSnapshot) -> bool:
            return (
                row.id == snapshot_id
                or row.info.revision == revision
                or (function is not None and row.function == function)
            )

        return await self._change(is_meant, CopyState.DELETED, now=now)

    async def _change(
        self,
        is_meant: Callable[[RegisteredSnapshot], bool],
        state: CopyState,
        *,
        reason: str = "",
        now: float,
    ) -> int:
        rows = await self._loaded()
        async with self._changing:
            known = {**_reported(self._reports, now=now), **rows}
            changed = [
                replace(row, state=state, reason=reason, changed_at=now)
                for row in known.values()
                if row.state not in (state, CopyState.DELETED) and is_meant(row)
            ]
            await self._save(changed)
            await self._delete_old(now)
        return len(changed)

    async def _is_credible(self, snapshot: NodeSnapshot, report: NodeReport, *, now: float) -> bool:
        """Whether its node has a pod of its function."""
        assert snapshot.info is not None
        self._looked_at = {key: at for key, at in self._looked_at.items() if now - at < LOOK_S}
        key = f"{report.node} {snapshot.info.id}"
        looks = sum(name.startswith(f"{report.node} ") for name in self._looked_at)
        if key in self._looked_at or looks >= MAX_LOOKS:
            return False
        self._looked_at[key] = now
        try:
            function, _, _ = snapshot.info.revision.partition("@")
            tenant = snapshot.info.labels.get("tenant", "")
            return await self._has_pod(function, tenant, report.node)
        except SnapshotterError as e:
            log.info("event=snapshot_not_registered snapshot=%s error=%s", snapshot.info.id, e)
            return False

    # -- rows --------------------------------------------------------------------------------------

    async def _loaded(self) -> dict[str, RegisteredSnapshot]:
        async with self._changing:
            if self._rows is None:
                self._rows = await anyio.to_thread.run_sync(self._read)
            return self._rows

    def _read(self) -> dict[str, RegisteredSnapshot]:
        with self._store.read() as sql:
            documents = sql.execute(sa.select(tables.node_snapshots.c.document)).scalars()
            rows = [RegisteredSnapshot.from_json(json.loads(text)) for text in documents]
        return {row.id: row for row in rows}

    async def _save(self, changed: Iterable[RegisteredSnapshot]) -> None:
        changed = list(changed)
        if not changed:
            return
        await anyio.to_thread.run_sync(self._write, changed, [])
        assert self._rows is not None
        self._rows.update((row.id, row) for row in changed)
        for row in changed:
            log.info("event=snapshot_registered snapshot=%s state=%s", row.id, row.state)

    async def _delete_old(self, now: float) -> None:
        """Remove rows that no node needs orders for."""
        assert self._rows is not None
        gone = [
            row.id
            for row in self._rows.values()
            if not row.record and now - max(row.changed_at, row.last_used_at) > KEEP_S
        ]
        if gone:
            await anyio.to_thread.run_sync(self._write, [], gone)
            for name in gone:
                del self._rows[name]

    def _write(self, changed: list[RegisteredSnapshot], gone: list[str]) -> None:
        table = tables.node_snapshots
        names = [*(row.id for row in changed), *gone]
        with self._store.write() as write:
            for name in names:
                write.sql.execute(sa.delete(table).where(table.c.id == name))
            if changed:
                write.sql.execute(
                    sa.insert(table),
                    [
                        {
                            "id": row.id,
                            "function": row.function,
                            "state": row.state,
                            "changed_at": row.changed_at,
                            "document": json.dumps(row.to_json(), sort_keys=True),
                        }
                        for row in changed
                    ],
                )


def _infos(report: NodeReport) -> list[SnapshotInfo]:
    return [s.info for s in (*report.snapshots, *report.others) if s.info is not None]


def _with_node_state(
    info: SnapshotInfo, row: RegisteredSnapshot | None, *, node: str
) -> SnapshotInfo:
    """As it is listed: with its node, and in the state that all nodes will soon have."""
    is_stored = row is not None and row.state is CopyState.APPROVED
    where = "disk, store" if is_stored else "disk"
    shown = replace(info, node=node, where=where, remote=is_stored)
    if row is not None and row.state is CopyState.QUARANTINED:
        return replace(shown, state=SnapshotState.QUARANTINED, reason=row.reason or info.reason)
    return shown


def _reported(reports: FreshReports, *, now: float) -> dict[str, RegisteredSnapshot]:
    """Rows of what nodes have, registered or not, so that an order can name it."""
    return {
        s.info.id: orders.registered(s, report, now=now)
        for report in reports.fresh(now=now).values()
        for s in (*report.snapshots, *report.others)
        if s.info is not None
    }
