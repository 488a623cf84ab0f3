"""Whether one more instance may claim memory of a node: claims, reservations, and nodes for one
tenant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapshotter.errors import NoCapacity, Unsupported
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


def on(gpu: str, count: int = 0) -> LaunchSpec:
    return replace(launch_of(1), gpu=(gpu,), gpu_count=count)


def test_gpus_are_had_all_together_or_not_at_all() -> None:
    room = replace(ROOM, gpus=("NVIDIA H100 80GB HBM3",) * 8)
    five = replace(claim("a", 1), gpus=GpuGrant.unidentified(("H100",), 5))

    room.check(on("H100", 3), [five], None)
    with pytest.raises(NoCapacity, match="4 GPUs wanted, 3 of 8 free") as e:
        room.check(on("H100", 4), [five], None)
    assert e.value.detail["resource"] == "gpu"
    room.check(
        launch_of(1), [replace(claim("a", 1), gpus=GpuGrant.unidentified(("H100",), 8))], None
    )


def test_gpus_that_a_node_never_has_are_no_matter_of_waiting() -> None:
    room = replace(ROOM, gpus=("NVIDIA A100-SXM4-80GB",))

    room.check(on("A100"), [], None)
    room.check(on("A100-80GB"), [], None)
    room.check(on("any"), [], None)
    for gpu, count in (("H100", 1), ("A100", 2), ("A100-40GB", 1)):
        with pytest.raises(Unsupported, match="but this node has NVIDIA A100"):
            room.check(on(gpu, count), [], None)
    with pytest.raises(Unsupported, match="this node has none"):
        replace(ROOM, gpus=()).check(on("L4"), [], None)


def test_where_nobody_counts_gpus_nobody_is_refused_one() -> None:
    ROOM.check(on("H100", 8), [], None)
