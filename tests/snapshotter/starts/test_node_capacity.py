"""Whether one more instance may claim memory of a node: claims, reservations, and nodes for one
tenant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshotter.errors import NoCapacity, Unsupported
from snapshotter.gpus.grants import GpuGrants
from snapshotter.starts.node_capacity import NodeCapacity
from snapshotter.types import (
    GpuGrant,
    InstanceId,
    InstanceInfo,
    InstanceState,
    LaunchSpec,
    RevisionKey,
    StartKind,
    TenantShare,
)
from tests.fakes.agent_home import MIB
from tests.fakes.fake_nvml import A100, H100, L4, FakeGpu, gpus, inventory_of, partitioned

ROOM = NodeCapacity(memory_bytes=1000 * MIB)


def launch_of(mib: int) -> LaunchSpec:
    return LaunchSpec(
        revision=RevisionKey("f-1@v1"),
        trust_domain="t-1",
        uid=None,
        bundle="b",
        image=None,
        entry={},
        memory_bytes=mib * MIB,
        cpu=1.0,
        startup_timeout_s=1.0,
        labels={"tenant": "t-1"},
    )


def claim(tenant: str, mib: int) -> InstanceInfo:
    return InstanceInfo(
        id=InstanceId("i-1"),
        revision=RevisionKey("f-1@v1"),
        state=InstanceState.READY,
        socket="",
        start_kind=StartKind.COLD,
        phases_ms={},
        lessee="a-0",
        started_at=0.0,
        pid=1,
        memory_bytes=mib * MIB,
        cpu=1.0,
        labels={"tenant": tenant},
    )


def share_of(tenant: str, **reserved_mib: int) -> TenantShare:
    return TenantShare(
        tenant=tenant,
        name=tenant.upper(),
        reserved={name: mib * MIB for name, mib in reserved_mib.items()},
    )


def test_what_others_have_reserved_and_do_not_use_is_not_free() -> None:
    instances = [claim("a", 300), claim("b", 100)]

    assert ROOM.free_bytes(instances, None) == 600 * MIB
    assert ROOM.free_bytes(instances, share_of("a", b=400)) == 300 * MIB, "b uses 100 of its 400"
    assert ROOM.free_bytes(instances, share_of("b", b=400)) == 600 * MIB, (
        "its own reservation is free for itself"
    )
    assert ROOM.free_bytes(instances, share_of("a", b=50)) == 600 * MIB, (
        "b uses more than it reserved"
    )
    assert ROOM.free_bytes([claim("a", 900)], share_of("c", b=400)) == -300 * MIB, (
        "reserved after it was given away"
    )


def test_a_start_that_does_not_fit_is_refused_with_numbers() -> None:
    ROOM.check(launch_of(600), [claim("a", 400)], share_of("b"))
    with pytest.raises(NoCapacity, match="601 MiB wanted, 600 MiB of 1000 MiB free") as e:
        ROOM.check(launch_of(601), [claim("a", 400)], share_of("b"))
    assert e.value.detail == {
        "resource": "memory",
        "asked": 601 * MIB,
        "free": 600 * MIB,
        "claimed": 400 * MIB,
        "total": 1000 * MIB,
    }
    with pytest.raises(NoCapacity, match="0 MiB of 1000 MiB free"):
        ROOM.check(launch_of(1), [claim("a", 900)], share_of("c", b=400))


def test_a_dedicated_node_is_for_its_tenant_only_and_a_dedicated_tenant_is_on_no_other() -> None:
    mine, other = NodeCapacity(memory_bytes=MIB, dedicated_to="ACME"), share_of("other")
    mine.require_tenant_allowed(share_of("acme"))
    for share in (other, None):
        with pytest.raises(NoCapacity, match="dedicated to tenant 'ACME'") as e:
            mine.require_tenant_allowed(share)
        assert e.value.detail == {"resource": "dedicated"}
    with pytest.raises(NoCapacity, match="dedicated to it only"):
        ROOM.require_tenant_allowed(replace(other, is_dedicated=True))
    ROOM.require_tenant_allowed(other)
    ROOM.require_tenant_allowed(None)


def test_a_share_survives_the_wire() -> None:
    share = TenantShare(tenant="t-1", name="acme", weight=4, is_dedicated=True, reserved={"t-2": 5})
    assert TenantShare.from_json(share.to_json()) == share


# -- GPUs ------------------------------------------------------------------------------------------


def on(*kinds: str, count: int = 0) -> LaunchSpec:
    return replace(launch_of(1), gpu=kinds, gpu_count=count)


class Held(list[GpuGrant | None]):
    """The grants of a node's instances and slots."""

    def room(self, *described: FakeGpu) -> NodeCapacity:
        return replace(ROOM, gpus=GpuGrants(inventory_of(*described), lambda: self))

    def admit(self, room: NodeCapacity, launch: LaunchSpec) -> GpuGrant:
        """A start."""
        grant = room.check(launch, [], None)
        assert grant is not None
        self.append(grant)
        return grant


def test_gpus_are_had_all_together_or_not_at_all() -> None:
    held = Held()
    room = held.room(*gpus(*(H100,) * 8))
    held.admit(room, on("H100", count=5))
    with pytest.raises(NoCapacity, match="4 GPUs wanted, 3 of 8 H100 free") as e:
        room.check(on("H100", count=4), [], None)
    assert e.value.detail == {
        "resource": "gpu",
        "asked": 4,
        "free": 3,
        "claimed": 5,
        "total": 8,
        "kinds": {"H100": {"free": 3, "claimed": 5, "total": 8}},
    }
    held.admit(room, on("H100", count=3))
    assert len({uuid for grant in held if grant for uuid in grant.uuids}) == 8
    assert room.check(launch_of(1), [], None) is None


def test_a_gpu_of_another_kind_is_not_admitted_in_its_place() -> None:
    held = Held()
    room = held.room(*gpus(H100, L4))
    assert held.admit(room, on("H100")).kind == "H100"
    with pytest.raises(NoCapacity, match="1 GPUs wanted, 0 of 1 H100 free") as e:
        room.check(on("H100"), [], None)
    assert e.value.detail["claimed"] == 1
    assert held.admit(room, on("H100", "L4")).kind == "L4"
    with pytest.raises(NoCapacity, match="0 of 1 H100 free, 0 of 1 L4 free") as e:
        room.check(on("H100", "L4"), [], None)
    assert e.value.detail["kinds"] == {
        "H100": {"free": 0, "claimed": 1, "total": 1},
        "L4": {"free": 0, "claimed": 1, "total": 1},
    }


def test_gpus_that_a_node_never_has_are_no_matter_of_waiting() -> None:
    held = Held()
    room = held.room(*gpus(A100))
    for kind in ("A100", "A100-40GB", "any"):
        room.check(on(kind), [], None)
    for kind, count in (("H100", 1), ("A100", 2), ("A100-80GB", 1), ("A100-MIG-3g.20gb", 1)):
        with pytest.raises(Unsupported, match="but this node has NVIDIA A100"):
            room.check(on(kind, count=count), [], None)
    with pytest.raises(Unsupported, match="1 L4 or T4 GPU wanted, but this node has none"):
        Held().room().check(on("L4", "T4"), [], None)


def test_a_worker_that_becomes_an_instance_hands_over_its_gpus() -> None:
    held = Held()
    room = held.room(*gpus(H100))
    template = held.admit(room, on("H100"))
    assert room.check(on("H100"), [], None, has=template) is template


def test_a_reservation_holds_gpus_that_no_slot_has_and_ends_with_its_context() -> None:
    room = Held().room(*gpus(H100, H100))
    with room.reserved_gpus(on("H100")) as one, room.reserved_gpus(on("H100"), one) as same:
        assert same is one
        with room.reserved_gpus(on("H100")) as other:
            assert one is not None
            assert other is not None
            assert set(one.uuids).isdisjoint(other.uuids)
            with pytest.raises(NoCapacity):
                room.check(on("H100"), [], None)
        with pytest.raises(NoCapacity, match="2 GPUs wanted, 1 of 2 H100 free"):
            room.check(on("H100", count=2), [], None)
    room.check(on("H100", count=2), [], None)
    with room.reserved_gpus(launch_of(1)) as none:
        assert none is None


def test_the_figures_of_the_node_are_by_kind() -> None:
    held = Held()
    room = held.room(*gpus(H100, H100, L4), partitioned(A100, 3, "3g.20gb"))
    held.admit(room, on("H100"))
    held.append(held[0])  # the instance, and its slot
    assert room.gpus is not None
    assert room.gpus.count_by_kind() == {
        "H100": (2, 1),
        "L4": (1, 0),
        "A100-MIG-3g.20gb": (1, 0),
    }
    assert room.gpus.fragmentation() == {"H100": 1.0, "L4": 1.0}
    assert repr(room.gpus) == "<GpuGrants 1 of 4 granted>"


def test_where_nobody_counts_gpus_nobody_is_refused_one() -> None:
    assert ROOM.check(on("H100", count=8), [], None) is None
