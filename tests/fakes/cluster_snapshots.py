"""Nodes with snapshots and the real register of a controller, in one process: reports and orders
travel as the JSON that they are between processes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from pilotlight.controller.kubernetes.node_reports import NodeReports
from pilotlight.controller.node_snapshots.register import SnapshotRegister
from snapshotter.checkpointing.api import SnapshotApi
from snapshotter.checkpointing.controller_orders import ControllerOrders
from snapshotter.node_reports import NodeReport, SnapshotOrders


class Pods:
    """Where pods of functions are: (function id, node), all of tenant t-1. `asked`: how often
    somebody wanted to know."""

    def __init__(self, *pods: tuple[str, str]) -> None:
        self.pods = set(pods)
        self.asked = 0

    async def has(self, function: str, tenant: str, node: str) -> bool:
        """Whether one of a function is on a node."""
        self.asked += 1
        return tenant == "t-1" and (function, node) in self.pods


@dataclass(kw_only=True)
class ReportingNode:
    """A node that reports when it is told to.

    Attributes:
        tenants: that have pods there.
    """

    name: str
    orders: ControllerOrders
    reports: NodeReports
    register: SnapshotRegister
    tenants: tuple[str, ...] = ()
    last: SnapshotOrders = field(default_factory=SnapshotOrders)

    @classmethod
    def of(
        cls,
        name: str,
        snapshots: SnapshotApi,
        reports: NodeReports,
        register: SnapshotRegister,
        *,
        tenants: tuple[str, ...] = (),
    ) -> ReportingNode:
        """A node with these snapshots."""
        return cls(
            name=name,
            orders=ControllerOrders(snapshots),
            reports=reports,
            register=register,
            tenants=tenants,
        )

    def report(self) -> NodeReport:
        """As `snapshotter.agent.node_report.Reporter` makes it."""
        found = self.orders.reported()
        return NodeReport(
            node=self.name,
            version="1",
            snapshots=tuple(s for s in found if s.is_ready),
            others=tuple(s for s in found if not s.is_ready),
            tenants=self.tenants,
            kind=self.orders.kind,
            orders=self.orders.version,
            forgotten=self.orders.forgotten(),
        )

    async def tell(self, *, now: float) -> SnapshotOrders:
        """Report, and begin to do what the answer says."""
        sent = NodeReport.from_json(json.loads(json.dumps(self.report().to_json())))
        self.reports.take(sent, now=now)
        answer = await self.register.take(sent, now=now)
        self.last = SnapshotOrders.from_json(json.loads(json.dumps(answer.to_json())))
        self.orders.apply(self.last)
        return self.last
