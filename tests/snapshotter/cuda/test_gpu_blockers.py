"""What the driver cannot checkpoint is refused by name, with the way out, before a process is
touched; and GPUs are mapped by UUID."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.cuda.errors import CudaRefused
from snapshotter.cuda.gpu_blockers import refusals
from snapshotter.cuda.gpu_mapping import DeviceRecord, gpu_mapping, record_of
from snapshotter.cuda.gpu_usage import CudaNode, Gpu, GpuUsage
from tests.fakes.fake_cuda import CONTEXT_DEVICES, CONTEXT_MAPPINGS, GPU_A, GPU_B, NODE

GPU_C = Gpu(uuid="GPU-cccccccc-0000-0000-0000-000000000000", name="Other 24GB", minor=2)


def held(
    *mapped: tuple[str, int], devices: tuple[str, ...] = ("/dev/nvidiactl", "/dev/nvidia0")
) -> GpuUsage:
    return GpuUsage(pid=5, descriptors=tuple(enumerate(devices)), mapped=mapped)


def kinds(node: CudaNode, *processes: GpuUsage, minimum_release: int = 570) -> list[str]:
    found = refusals(node=node, held=processes, minimum_release=minimum_release)
    assert all(r.message.count(":") >= 1 for r in found), "each names a way out"
    return [r.kind for r in found]


def node(*gpus: Gpu, release: int | None = 580, mps: bool = False) -> CudaNode:
    return CudaNode(
        release=release, version=f"{release}.1.1" if release else "", gpus=gpus, mps=mps
    )


def test_an_ordinary_process_passes() -> None:
    assert kinds(NODE, held(("/dev/nvidia0", 4096)), held()) == []
    assert (
        kinds(
            replace(NODE, mig_instances=frozenset({30})),
            held(*CONTEXT_MAPPINGS, devices=CONTEXT_DEVICES),
        )
        == []
    )


def test_each_precondition_by_name() -> None:
    assert kinds(node(replace(GPU_A, mig=True)), held()) == ["mig"]
    cut_up = replace(NODE, mig_instances=frozenset({30}))
    assert kinds(cut_up, held(devices=("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30"))) == ["mig"]
    assert kinds(node(GPU_A, mps=True), held()) == ["mps"]
    older = node(GPU_A, GPU_B, release=579)
    assert kinds(older, held(("/dev/nvidia0", 1), ("/dev/nvidia1", 1))) == ["multi_gpu"]
    assert kinds(older, held(), held(devices=("/dev/nvidia1",))) == ["multi_gpu"]
    assert kinds(node(GPU_A, GPU_B), held(), held(devices=("/dev/nvidia1",))) == []
    assert kinds(node(release=None), held()) == ["cuda_driver"]


def test_a_partitioned_gpu_that_is_not_used_does_not_matter() -> None:
    assert kinds(node(GPU_A, replace(GPU_B, mig=True)), held()) == []


@pytest.mark.parametrize(
    "release, minimum, refused",
    [(554, 555, True), (555, 555, False), (569, 570, True), (570, 570, False)],
)
def test_the_driver_must_be_new_enough_for_the_way_taken(
    release: int, minimum: int, refused: bool
) -> None:
    assert kinds(node(GPU_A, release=release), held(), minimum_release=minimum) == (
        ["cuda_driver"] if refused else []
    )


@pytest.mark.parametrize("release, refused", [(609, True), (610, False)])
def test_cuda_ipc_needs_a_driver_that_knows_it(release: int, refused: bool) -> None:
    assert kinds(node(GPU_A, release=release), held(("/dev/shm/cuda.shm.0.1f4.1", 4096))) == (
        ["cuda_ipc"] if refused else []
    )


def test_all_reasons_are_said_at_once() -> None:
    bad = held(("/dev/shm/cuda.shm.0.1.1", 1))
    assert kinds(node(replace(GPU_A, mig=True), release=560, mps=True), bad) == [
        "cuda_driver",
        "mps",
        "mig",
        "cuda_ipc",
    ]


# -- which GPU at restore --------------------------------------------------------------------------


def test_the_same_gpus_need_no_mapping() -> None:
    here = node(GPU_A, GPU_B, release=570)
    assert gpu_mapping(record_of(here, [GPU_A.uuid], 1), here) == {}


def test_a_twin_takes_its_place() -> None:
    assert gpu_mapping(record_of(node(GPU_A), [GPU_A.uuid], 1), node(GPU_B)) == {
        GPU_A.uuid: GPU_B.uuid
    }


def test_a_chosen_target_swaps_and_every_gpu_of_the_node_is_in_the_mapping() -> None:
    here = node(GPU_A, GPU_B, GPU_C)
    mapping = gpu_mapping(record_of(here, [GPU_A.uuid], 1), here, target=[GPU_B.uuid])
    assert mapping == {GPU_A.uuid: GPU_B.uuid, GPU_B.uuid: GPU_A.uuid, GPU_C.uuid: GPU_C.uuid}


@pytest.mark.parametrize(
    "there, here, target, message",
    [
        (node(GPU_A), node(GPU_C), (), "made on a Fake 80GB, and this node has Other 24GB"),
        (node(GPU_A), node(), (), "this node has no GPU"),
        (node(GPU_A), node(GPU_A, GPU_C), (GPU_C.uuid,), f"{GPU_C.uuid} is Other 24GB"),
        (node(GPU_A), node(GPU_A), (GPU_B.uuid,), f"{GPU_B.uuid} is not on this node"),
        (node(GPU_A), node(GPU_A, GPU_B), (GPU_A.uuid, GPU_B.uuid), "on 1 GPUs, and 2 are granted"),
        (node(GPU_A), node(GPU_A, GPU_B), (), "this node has 2 GPUs and the snapshot's had 1"),
        (node(GPU_A, GPU_C), node(GPU_A), (), "made beside a Other 24GB"),
        (node(GPU_A), node(GPU_B, release=570), (), "needs driver 580"),
    ],
)
def test_a_node_that_does_not_fit_is_named(
    there: CudaNode, here: CudaNode, target: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CudaRefused, match=message) as caught:
        gpu_mapping(record_of(there, [GPU_A.uuid], 1), here, target=target)
    assert caught.value.refusals[0].kind == "gpu_remap"


def test_a_record_without_its_gpu_is_refused() -> None:
    with pytest.raises(CudaRefused, match="does not say which GPU"):
        gpu_mapping(DeviceRecord(processes=1), NODE)


def test_a_record_survives_the_manifest() -> None:
    record = record_of(node(GPU_A, GPU_C), [GPU_C.uuid], 2)
    assert DeviceRecord.from_json(record.to_json()) == record
    assert record.model == "Other 24GB"
    assert DeviceRecord().model == ""


def test_a_record_of_an_earlier_version_names_one_gpu_or_none() -> None:
    body = record_of(NODE, [GPU_A.uuid], 1).to_json()
    assert DeviceRecord.from_json({**body, "used": GPU_A.uuid}).used == (GPU_A.uuid,)
    assert DeviceRecord.from_json({**body, "used": None}).used == ()


def test_granted_gpus_are_recorded_in_the_order_in_which_cuda_numbers_them() -> None:
    record = record_of(node(GPU_A, GPU_B), [GPU_A.uuid], 1, granted=[GPU_B.uuid, GPU_A.uuid])
    assert record.used == (GPU_B.uuid, GPU_A.uuid), "one was not used yet, and may be later"


def test_several_gpus_keep_their_order() -> None:
    first, second = GPU_B, GPU_A
    here = node(GPU_A, GPU_B, GPU_C)
    record = record_of(here, [], 2, granted=[first.uuid, second.uuid])
    swapped = gpu_mapping(record, here, target=[second.uuid, first.uuid])
    assert swapped == {
        first.uuid: second.uuid,
        second.uuid: first.uuid,
        GPU_C.uuid: GPU_C.uuid,
    }
    assert gpu_mapping(record, here, target=[first.uuid, second.uuid]) == {}
    with pytest.raises(CudaRefused, match="is Other 24GB"):
        gpu_mapping(record, here, target=[first.uuid, GPU_C.uuid])


uuids = st.lists(
    st.sampled_from([f"GPU-{i}" for i in range(6)]), unique=True, min_size=1, max_size=6
)


@given(there=uuids, here=uuids, data=st.data())
def test_a_mapping_is_a_bijection_of_all_gpus_onto_the_target(
    there: list[str], here: list[str], data: st.DataObject
) -> None:
    def machine(names: list[str]) -> CudaNode:
        return node(*(Gpu(uuid=u, name="m", minor=i) for i, u in enumerate(names)))

    used = data.draw(st.lists(st.sampled_from(there), unique=True, min_size=1))
    size = min(len(used), len(here))
    target = data.draw(
        st.just([]) | st.lists(st.sampled_from(here), unique=True, min_size=size, max_size=size)
    )
    record = record_of(machine(there), used, 1)
    try:
        mapping = gpu_mapping(record, machine(here), target=target)
    except CudaRefused:
        assert len(there) != len(here)
        return
    if not mapping:
        assert set(there) == set(here)
        assert target in ([], used)
        return
    assert set(mapping) == set(there)
    assert set(mapping.values()) == set(here)
    assert target in ([], [mapping[uuid] for uuid in used])
