"""The register of a cluster's snapshots: which copy nodes may restore, what they are told, and what
tenants see of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.controller.database.store import Store
from pilotlight.controller.kubernetes.node_reports import FRESH_S, NodeReports
from pilotlight.controller.node_snapshots import register as registers
from pilotlight.controller.node_snapshots.orders import HOT_S, CopyState
from pilotlight.controller.node_snapshots.register import LOOK_S, SnapshotRegister
from snapshotter.errors import AgentUnavailable, SnapshotUnknown
from snapshotter.node_reports import NODES_PATH, NodeReport, NodeSnapshot, SnapshotOrders
from snapshotter.types import SnapshotState
from tests.fakes.cluster_snapshots import Pods
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import snapshot

NOW, KIND, ONE, TWO = 1000.0, "k" * 64, "1" * 64, "2" * 64
A, B = "node-a", "node-b"


def has(name: str = "sn-1", *, copy: str = "", digest: str = ONE, **changes: Any) -> NodeSnapshot:
    """A snapshot that a node reports."""
    info = snapshot("t-1", name=name, **{"last_used_at": NOW, **changes})
    is_ready = info.state is SnapshotState.READY
    return NodeSnapshot(
        revision=info.revision,
        identity=dict(info.identity),
        digest=digest if is_ready else "",
        copy=copy,
        copy_bytes=100 if copy else 0,
        info=info,
    )


class Nodes:
    """A register, and nodes that report to it."""

    def __init__(self, store: Store, pods: Pods, *, max_bytes: int = 10_000) -> None:
        self.store, self.pods, self.max_bytes = store, pods, max_bytes
        self.reports = NodeReports()
        self.now = NOW
        self.register = self.again()

    def again(self) -> SnapshotRegister:
        """The register of the next controller."""
        self.register = SnapshotRegister(
            self.store, self.reports, self.pods.has, max_bytes=self.max_bytes
        )
        return self.register

    async def tell(self, node: str, *found: NodeSnapshot, **changes: Any) -> SnapshotOrders:
        """The answer to a report."""
        report = NodeReport(
            node=node,
            version="1",
            snapshots=tuple(s for s in found if s.is_ready),
            others=tuple(s for s in found if not s.is_ready),
            **{"kind": KIND, "tenants": ("t-1",), **changes},
        )
        assert NodeReport.from_json(report.to_json()) == report
        self.reports.take(report, now=self.now)
        return await self.register.take(report, now=self.now)

    async def shown(self, labels: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
        """Id, node, where it is, and state of each entry of the list."""
        return [
            (info.id, info.node, info.where, info.state)
            for info in await self.register.infos(labels or {}, now=self.now)
        ]


@pytest.fixture
def nodes(store: Store) -> Nodes:
    return Nodes(store, Pods(("f-1", A)))


async def test_a_copy_is_approved_once_it_is_there_and_the_other_nodes_of_the_kind_learn_of_it(
    nodes: Nodes,
) -> None:
    first = await nodes.tell(A, has())
    assert first.approved == (), "there is no copy yet"
    uploaded = await nodes.tell(A, has(copy=TWO), orders=first.version)
    assert uploaded.approved is not None
    (copy,) = uploaded.approved
    assert (copy.snapshot, copy.tenant, copy.identity, copy.record) == ("sn-1", "t-1", ONE, TWO)
    assert (await nodes.tell(A, has(copy=TWO), orders=uploaded.version)).approved is None
    assert (await nodes.tell(B)).approved == (copy,)
    assert (await nodes.tell("other", kind="o" * 64)).approved == ()


async def test_a_node_without_a_pod_of_the_function_has_nobody_restore_what_it_made(
    nodes: Nodes,
) -> None:
    nodes.pods.pods.clear()
    assert (await nodes.tell(A, has(copy=TWO))).approved == ()
    assert (await nodes.tell(A, has(copy=TWO))).approved == ()
    assert nodes.pods.asked == 1, "not asked again at once"
    nodes.pods.pods.add(("f-1", A))
    nodes.now += LOOK_S
    assert (await nodes.tell(A, has(copy=TWO))).approved
    assert await nodes.shown() == [("sn-1", A, "disk, store", "READY")]


async def test_a_cluster_that_does_not_answer_approves_nothing(nodes: Nodes) -> None:
    async def away(function: str, tenant: str, node: str) -> bool:
        raise AgentUnavailable("the API server is away")

    nodes.register = SnapshotRegister(nodes.store, nodes.reports, away, max_bytes=1)
    assert (await nodes.tell(A, has(copy=TWO))).approved == ()


async def test_another_node_replaces_no_approved_copy_and_changes_no_record(nodes: Nodes) -> None:
    nodes.pods.pods.add(("f-1", B))
    await nodes.tell(A, has(copy=TWO))
    (copy,) = (await nodes.tell(B)).approved or ()
    planted = await nodes.tell(B, has(copy="f" * 64), has("sn-2", copy="e" * 64))
    assert planted.approved == (copy,)
    assert [gone.snapshot for gone in planted.forget] == ["sn-2"]


async def test_quarantined_on_one_node_it_is_quarantined_on_all_and_its_copy_goes(
    nodes: Nodes,
) -> None:
    await nodes.tell(A, has(copy=TWO))
    await nodes.tell(B, has())
    bad = has(state=SnapshotState.QUARANTINED, reason="three restores failed")
    there = await nodes.tell(B, bad)
    assert (there.approved, there.quarantine, there.forget) == ((), {}, ())
    told = await nodes.tell(A, has(copy=TWO))
    assert told.quarantine == {"sn-1": f"on node {B}: three restores failed"}
    assert [copy.record for copy in told.forget] == [TWO]
    done = has(state=SnapshotState.QUARANTINED, reason="as told")
    assert (await nodes.tell(A, done, forgotten=("sn-1",))).forget == ()
    assert (await nodes.tell(A, done)).forget == ()
    nodes.again()
    assert (await nodes.tell("late", has())).quarantine, "it outlives the controller"


async def test_deleting_reaches_each_node_with_its_next_report_also_one_that_was_away(
    nodes: Nodes,
) -> None:
    await nodes.tell(A, has(copy=TWO), has("sn-2", digest=TWO))
    await nodes.tell(B, has(), has("sn-3", digest="3" * 64))
    assert await nodes.register.delete(snapshot_id="sn-1", now=nodes.now) == 1
    assert await nodes.register.delete(snapshot_id="sn-1", now=nodes.now) == 0
    assert [row[:2] for row in await nodes.shown()] == [("sn-2", A), ("sn-3", B)]
    nodes.now += FRESH_S + 1
    nodes.again()
    assert (await nodes.tell(B, has(), has("sn-3"))).delete == ("sn-1",)
    told = await nodes.tell(B, has("sn-3"))
    assert (told.delete, [copy.snapshot for copy in told.forget]) == ((), ["sn-1"]), (
        "the node that made it is away: another one removes its copy"
    )
    assert await nodes.register.delete(function="f-1", now=nodes.now) == 2
    assert (await nodes.tell(B, has("sn-3"))).delete == ("sn-3",), "known from a report alone"
    assert (await nodes.tell(A, has("sn-2"))).delete == ("sn-2",)


async def test_copies_are_bounded_in_bytes_and_the_least_recently_used_go(store: Store) -> None:
    nodes = Nodes(store, Pods(("f-1", A)), max_bytes=250)
    old = has("sn-1", copy="a" * 64, digest="1" * 64, last_used_at=NOW - 300)
    new = has("sn-2", copy="b" * 64, digest="2" * 64, last_used_at=NOW - 200)
    await nodes.tell(A, old, new)
    used = has("sn-1", copy="a" * 64, digest="1" * 64, last_used_at=NOW)
    told = await nodes.tell(A, used, new, has("sn-3", copy="c" * 64, digest="3" * 64))
    assert [copy.snapshot for copy in told.forget] == ["sn-2"]
    assert sorted(copy.snapshot for copy in told.approved or ()) == ["sn-1", "sn-3"]
    again = await nodes.tell(A, used, has("sn-2", digest="2" * 64), forgotten=("sn-2",))
    assert (again.forget, again.delete) == ((), ()), "on the node it stays"


async def test_what_is_hot_is_received_ahead_where_its_tenant_has_pods(nodes: Nodes) -> None:
    await nodes.tell(A, has(copy=TWO))
    assert (await nodes.tell(B)).prefetch == ("sn-1",)
    assert (await nodes.tell(B, has())).prefetch == ()
    assert (await nodes.tell("new", tenants=("t-2",))).prefetch == ()
    nodes.now += HOT_S + 1
    assert (await nodes.tell(B)).prefetch == ()


async def test_the_list_says_where_each_is(nodes: Nodes) -> None:
    await nodes.tell(A, has(copy=TWO))
    await nodes.tell(B, has(), has("sn-2", state=SnapshotState.PROVING))
    assert await nodes.shown({"tenant": "t-1"}) == [
        ("sn-1", A, "disk, store", "READY"),
        ("sn-1", B, "disk, store", "READY"),
        ("sn-2", B, "disk", "PROVING"),
    ]
    assert await nodes.shown({"tenant": "t-2"}) == []
    nodes.now += FRESH_S + 1
    assert await nodes.shown() == [("sn-1", "", "store", "READY")]
    shown = await nodes.register.quarantine("sn-1", "by command", now=nodes.now)
    assert (shown.state, shown.reason) == (SnapshotState.QUARANTINED, "by command")
    with pytest.raises(SnapshotUnknown):
        await nodes.register.quarantine("sn-9", "by command", now=nodes.now)


async def test_what_no_node_needs_to_hear_of_any_more_is_forgotten(nodes: Nodes) -> None:
    await nodes.tell(A, has())
    await nodes.register.delete(snapshot_id="sn-1", now=nodes.now)
    nodes.now += registers.KEEP_S + 1
    await nodes.register.delete(snapshot_id="sn-2", now=nodes.now)
    assert "0 rows" in repr(nodes.register)


async def test_a_report_that_lies_about_types_is_no_report() -> None:
    good = has(copy=TWO).to_json()
    for change in (
        {"digest": "../x"},
        {"copy": 5},
        {"copy_bytes": -1},
        {"info": {**good["info"], "labels": ["tenant"]}},
        {"info": {**good["info"], "id": "sn-../../x"}},
        {"info": {**good["info"], "image_bytes": float("nan")}},
        {"info": {**good["info"], "colour": "red"}},
    ):
        with pytest.raises((TypeError, ValueError, AttributeError)):
            NodeSnapshot.from_json({**good, **change})
    with pytest.raises(ValueError, match="more than 500 snapshots"):
        NodeReport.from_json({"node": "n", "version": "1", "snapshots": [good] * 501})
    earlier = NodeSnapshot.from_json({"revision": "f@1", "identity": {"kernel": "6"}})
    assert earlier.is_ready
    assert CopyState("SEEN") is CopyState.SEEN


async def test_orders_are_the_answer_to_a_report_where_there_is_a_register(
    controller: Controller,
) -> None:
    pods = Pods(("f-1", A))
    register = SnapshotRegister(
        controller.context.store, controller.context.nodes, pods.has, max_bytes=1000
    )
    knowing = replace(controller, context=replace(controller.context, register=register))
    report = NodeReport(node=A, version="1", kind=KIND, snapshots=(has(copy=TWO),))
    headers = {"pilotlight-platform-token": controller.context.key.token}
    async with knowing.client(None) as http:
        answer = await http.post(NODES_PATH, json=report.to_json(), headers=headers)
    assert answer.status_code == 200
    (copy,) = SnapshotOrders.from_json(answer.json()).approved or ()
    assert copy.record == TWO
