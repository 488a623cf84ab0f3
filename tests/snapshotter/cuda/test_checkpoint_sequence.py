"""A tree that was touched ends suspended, running, or killed with the reason said; whatever fails,
and whenever the caller gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotter.cuda.checkpoint_sequence import CudaDevices
from snapshotter.cuda.devices import Suspension
from snapshotter.cuda.driver import Deadlines
from snapshotter.cuda.errors import CudaFailed, CudaLost, CudaRefused
from snapshotter.cuda.gpu_mapping import DeviceRecord, record_of
from snapshotter.cuda.transitions import CudaState
from tests.fakes.fake_cuda import CONTEXT_MAPPINGS, GPU_A, GPU_B, NODE, FakeCuda, FakeProcess, Fault
from tests.hypothesis_profiles import examples
from tests.snapshotter.cuda.virtual_time import run

DEADLINES = Deadlines(ask_s=1, lock_s=2, checkpoint_s=10, restore_s=20, unlock_s=3)
LIMIT_S = {"state": 1, "restore_thread": 1, "lock": 2, "checkpoint": 10, "restore": 20, "unlock": 3}
EPSILON_S = 1e-6


TWO = replace(NODE, gpus=(GPU_A, GPU_B))


def devices(cuda: FakeCuda) -> CudaDevices:
    return CudaDevices(cuda, cuda, deadlines=DEADLINES)


def checkpointed(pid: int = 1) -> FakeProcess:
    return FakeProcess(pid=pid, state=CudaState.CHECKPOINTED)


def record(processes: int = 1) -> DeviceRecord:
    return record_of(NODE, [GPU_A.uuid], processes)


# -- out -------------------------------------------------------------------------------------------


def test_a_tree_is_taken_off_the_gpu_with_each_phase_timed() -> None:
    cuda = FakeCuda(
        FakeProcess(pid=1),
        FakeProcess(pid=2, cuda=False, devices=(), mapped=()),
        FakeProcess(pid=3),
    )
    cuda.latency_s = {"lock": 0.5, "checkpoint": 4.0}
    suspension = run(devices(cuda).before_dump([1, 2, 3]))
    assert suspension.phases_ms == pytest.approx({"cuda_lock": 1000, "cuda_checkpoint": 8000})
    assert suspension.record == DeviceRecord(
        processes=2, used=(GPU_A.uuid,), gpus=((GPU_A.uuid, GPU_A.name),), release=580
    )
    assert repr(suspension) == "<Suspension open of 1, 3>"
    assert [cuda.processes[pid].history for pid in (1, 2, 3)] == [
        ["lock", "checkpoint"],
        [],
        ["lock", "checkpoint"],
    ]


def test_a_tree_without_a_device_is_left_alone() -> None:
    cuda = FakeCuda(FakeProcess(pid=1, cuda=False, devices=(), mapped=()))
    suspension = run(devices(cuda).before_dump([1]))
    assert suspension.record.processes == 0
    assert cuda.calls("restore_thread") == cuda.calls("lock") == 0


@pytest.mark.parametrize(
    "op, fault, history, edge",
    [
        ("lock", Fault.FAIL, [], "stay"),
        ("lock", Fault.HANG, [], "stay"),
        ("lock", Fault.LATE, ["unlock"], "unlock"),
        ("checkpoint", Fault.FAIL, ["lock", "unlock"], "unlock"),
        ("checkpoint", Fault.HANG, ["lock", "unlock"], "unlock"),
        ("checkpoint", Fault.LATE, ["lock", "restore", "unlock"], "restore+unlock"),
        ("checkpoint", Fault.IGNORED, ["lock", "unlock"], "unlock"),
    ],
)
def test_a_failure_on_the_way_out_names_its_edge_and_the_process_runs(
    op: str, fault: Fault, history: list[str], edge: str
) -> None:
    cuda = FakeCuda(FakeProcess(pid=1))
    cuda.faults[op] = [fault]
    with pytest.raises(CudaFailed, match=rf"rolled back by: {edge.replace('+', '.')}\)") as caught:
        run(devices(cuda).before_dump([1]))
    assert caught.value.detail == {"step": op, "pid": 1, "edges": {"1": edge}}
    assert cuda.processes[1].state is CudaState.RUNNING
    assert cuda.processes[1].history == history


def test_the_second_of_two_fails_and_both_run_again() -> None:
    cuda = FakeCuda(FakeProcess(pid=1), FakeProcess(pid=2))
    cuda.faults["checkpoint"] = [None, Fault.FAIL]
    with pytest.raises(CudaFailed) as caught:
        run(devices(cuda).before_dump([1, 2]))
    assert caught.value.detail["edges"] == {"1": "restore+unlock", "2": "unlock"}
    assert {p.state for p in cuda.processes.values()} == {CudaState.RUNNING}


@pytest.mark.parametrize(
    "op, fault", [("checkpoint", Fault.BROKEN), ("checkpoint", Fault.DIE), ("lock", Fault.BROKEN)]
)
def test_a_process_that_breaks_takes_its_tree_with_it(op: str, fault: Fault) -> None:
    cuda = FakeCuda(FakeProcess(pid=1), FakeProcess(pid=2))
    cuda.faults[op] = [fault]
    with pytest.raises(CudaLost, match="cannot be rolled back"):
        run(devices(cuda).before_dump([1, 2]))
    assert all(p.killed for p in cuda.processes.values())


def test_a_way_back_that_fails_ends_in_a_kill_with_both_reasons() -> None:
    cuda = FakeCuda(FakeProcess(pid=1))
    cuda.faults = {"checkpoint": [Fault.FAIL], "unlock": [Fault.HANG]}
    with pytest.raises(
        CudaLost, match=r"driver says no.*; then: CUDA unlock of process 1 did not end within 3 s"
    ):
        run(devices(cuda).before_dump([1]))
    assert cuda.processes[1].killed


def test_a_device_that_stays_open_is_refused_and_the_process_runs_on() -> None:
    cuda = FakeCuda(FakeProcess(pid=1, clings_to=("/dev/nvidia-modeset",)))
    with pytest.raises(CudaRefused, match="holds fd 3 → /dev/nvidia-modeset at the snapshot"):
        run(devices(cuda).before_dump([1]))
    assert cuda.processes[1].history == ["lock", "checkpoint", "restore", "unlock"]


def test_a_process_with_a_device_and_no_context_is_refused_untouched() -> None:
    cuda = FakeCuda(
        FakeProcess(pid=1), FakeProcess(pid=2, cuda=False, devices=("/dev/nvidiactl",), mapped=())
    )
    with pytest.raises(CudaRefused, match="process 2 holds /dev/nvidiactl without a CUDA context"):
        run(devices(cuda).before_dump([1, 2]))
    assert cuda.calls("lock") == 0


def test_preconditions_are_asked_before_anything_is_touched() -> None:
    cuda = FakeCuda(
        FakeProcess(pid=1, mapped=(*CONTEXT_MAPPINGS, ("/dev/nvidia1", 4096))),
        node=replace(TWO, release=575),
    )
    with pytest.raises(CudaRefused, match=r"uses 2 GPUs .*requires driver 580") as caught:
        run(devices(cuda).before_dump([1]))
    assert caught.value.detail["reasons"][0]["kind"] == "multi_gpu"
    assert cuda.calls("restore_thread") == 0


def test_managed_memory_that_the_driver_refuses_is_named_and_the_process_runs_on() -> None:
    cuda = FakeCuda(FakeProcess(pid=1, mapped=(*CONTEXT_MAPPINGS, ("/dev/nvidia-uvm", 64 * 2**20))))
    with pytest.raises(CudaRefused, match="process 1 uses 64 MiB of managed memory") as caught:
        run(devices(cuda).before_dump([1]))
    assert caught.value.detail["reasons"][0]["kind"] == "uvm"
    assert cuda.processes[1].history == ["lock", "unlock"]


def test_a_checkpoint_that_fails_for_another_reason_is_not_blamed_on_managed_memory() -> None:
    cuda = FakeCuda(FakeProcess(pid=1, mapped=(*CONTEXT_MAPPINGS, ("/dev/nvidia-uvm", 64 * 2**20))))
    cuda.faults = {"checkpoint": [Fault.HANG]}
    with pytest.raises(CudaFailed, match="CUDA checkpoint of process 1 did not end within"):
        run(devices(cuda).before_dump([1]))


def test_a_process_that_is_gone_before_the_checkpoint_is_said() -> None:
    with pytest.raises(CudaFailed, match="ended before the checkpoint"):
        run(devices(FakeCuda()).before_dump([7]))


def test_a_dump_that_failed_is_led_back_once() -> None:
    cuda = FakeCuda(FakeProcess(pid=1))

    async def story() -> Suspension:
        seam = devices(cuda)
        suspension = await seam.before_dump([1])
        await seam.rollback(suspension, "no space left")
        await seam.rollback(suspension, "no space left")
        return suspension

    assert repr(run(story())) == "<Suspension over of 1>"
    assert cuda.processes[1].history == ["lock", "checkpoint", "restore", "unlock"]


def test_a_checkpoint_that_is_called_off_is_led_back_first() -> None:
    cuda = FakeCuda(FakeProcess(pid=1))
    cuda.latency_s = {"checkpoint": 5}
    assert isinstance(
        run(called_off(devices(cuda).before_dump([1]), at_s=[3])), asyncio.CancelledError
    )
    assert cuda.processes[1].history == ["lock", "unlock"]


def test_a_way_back_that_is_called_off_too_ends_in_a_kill() -> None:
    cuda = FakeCuda(FakeProcess(pid=1))
    cuda.latency_s = {"checkpoint": 5, "unlock": 2}
    assert isinstance(
        run(called_off(devices(cuda).before_dump([1]), at_s=[3, 4])), asyncio.CancelledError
    )
    assert cuda.processes[1].killed


class Crashing(FakeCuda):
    """Its `checkpoint` and `restore` raise what no driver may."""

    async def checkpoint(self, pid: int) -> None:
        raise KeyError("ok")

    async def restore(self, pid: int, *, gpu_mapping: Mapping[str, str]) -> None:
        raise KeyError("ok")


def test_a_driver_that_breaks_its_promise_leaves_nothing_locked() -> None:
    cuda = Crashing(FakeProcess(pid=1))
    with pytest.raises(KeyError):
        run(devices(cuda).before_dump([1]))
    assert cuda.processes[1].history == ["lock", "unlock"]
    back = Crashing(checkpointed())
    with pytest.raises(KeyError):
        run(devices(back).after_restore([1], record()))
    assert back.processes[1].killed


# -- back ------------------------------------------------------------------------------------------


def test_a_tree_comes_back_with_each_phase_timed() -> None:
    cuda = FakeCuda(checkpointed(1), FakeProcess(pid=2, cuda=False, devices=(), mapped=()))
    cuda.latency_s = {"restore": 6.0, "unlock": 0.25}
    phases = run(devices(cuda).after_restore([1, 2], record()))
    assert phases == pytest.approx({"cuda_restore": 6000, "cuda_unlock": 250})
    assert cuda.processes[1].state is CudaState.RUNNING
    assert cuda.mappings == [{}]


def test_another_gpu_is_mapped_by_uuid() -> None:
    cuda = FakeCuda(
        checkpointed(1),
        node=NODE.__class__(release=580, version="580.1.1", gpus=(GPU_B,), mps=False),
    )
    run(devices(cuda).after_restore([1], record()))
    assert cuda.mappings == [{GPU_A.uuid: GPU_B.uuid}]


def test_a_tree_on_several_gpus_comes_back_on_its_new_ones_in_order() -> None:
    both = FakeProcess(pid=1, mapped=(*CONTEXT_MAPPINGS, ("/dev/nvidia1", 4096)))
    cuda = FakeCuda(both, FakeProcess(pid=2), node=TWO)
    granted = [GPU_B.uuid, GPU_A.uuid]
    suspension = run(devices(cuda).before_dump([1, 2], granted=granted))
    assert (suspension.record.used, suspension.record.processes) == (tuple(granted), 2)

    run(devices(cuda).after_restore([1, 2], suspension.record, target=granted[::-1]))
    swapped = {GPU_B.uuid: GPU_A.uuid, GPU_A.uuid: GPU_B.uuid}
    assert cuda.mappings == [swapped, swapped]
    assert all(p.state is CudaState.RUNNING for p in cuda.processes.values())


def test_a_tree_goes_to_the_gpu_that_is_granted_and_not_to_its_old_one() -> None:
    cuda = FakeCuda(checkpointed(1), node=TWO)
    made = record_of(TWO, [GPU_A.uuid], 1)
    run(devices(cuda).after_restore([1], made, target=[GPU_B.uuid]))
    assert cuda.mappings == [{GPU_A.uuid: GPU_B.uuid, GPU_B.uuid: GPU_A.uuid}]


def test_a_tree_on_a_gpu_that_it_was_not_granted_is_refused_untouched() -> None:
    cuda = FakeCuda(FakeProcess(pid=1), node=TWO)
    with pytest.raises(CudaRefused, match=f"uses {GPU_A.uuid}, which it was not granted"):
        run(devices(cuda).before_dump([1], granted=[GPU_B.uuid]))
    assert cuda.calls("lock") == 0


def test_gpus_of_another_model_or_number_do_not_fit() -> None:
    other = replace(GPU_B, name="Other 24GB")
    mixed = FakeCuda(node=replace(NODE, gpus=(GPU_A, other)))
    made = record_of(mixed.node(), [GPU_A.uuid], 1)
    devices(mixed).check_restore(made, target=[GPU_A.uuid])
    with pytest.raises(CudaRefused, match="is Other 24GB"):
        devices(mixed).check_restore(made, target=[other.uuid])
    with pytest.raises(CudaRefused, match="made on 1 GPUs, and 2 are granted"):
        devices(FakeCuda(node=TWO)).check_restore(
            record_of(TWO, [GPU_A.uuid], 1), target=[GPU_A.uuid, GPU_B.uuid]
        )


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("op", ["restore", "unlock"])
def test_a_failure_on_the_way_back_kills(op: str, fault: Fault) -> None:
    cuda = FakeCuda(checkpointed(1), FakeProcess(pid=2, cuda=False, devices=(), mapped=()))
    cuda.faults[op] = [fault]
    with pytest.raises(CudaLost, match="the process was killed") as caught:
        run(devices(cuda).after_restore([1, 2], record()))
    assert all(not p.alive for p in cuda.processes.values())
    assert caught.value.detail["pid"] == 1


@pytest.mark.parametrize(
    "cuda, wants, message",
    [
        (
            FakeCuda(FakeProcess(pid=1)),
            record(),
            "process 1 is running after restore, but should be checkpointed",
        ),
        (
            FakeCuda(checkpointed(1)),
            record(2),
            "1 restored processes have GPU state, but the snapshot has 2",
        ),
        (
            FakeCuda(FakeProcess(pid=1, cuda=False)),
            record(),
            "0 restored processes have GPU state",
        ),
        (FakeCuda(), record(), "process 1 is gone"),
    ],
)
def test_a_restore_that_lost_its_gpu_side_is_never_served(
    cuda: FakeCuda, wants: DeviceRecord, message: str
) -> None:
    with pytest.raises(CudaLost, match=message):
        run(devices(cuda).after_restore([1], wants))
    assert not any(p.alive for p in cuda.processes.values())


def test_a_node_that_does_not_fit_is_told_before_criu_starts() -> None:
    elsewhere = FakeCuda(node=NODE.__class__(release=580, version="580.1.1", gpus=(), mps=False))
    with pytest.raises(CudaRefused, match="this node has no GPU"):
        devices(elsewhere).check_restore(record())
    devices(elsewhere).check_restore(DeviceRecord())


# -- any sequence of faults ------------------------------------------------------------------------

faults = st.sampled_from(Fault) | st.none()
plan = st.fixed_dictionaries(
    {op: st.lists(faults, max_size=3) for op in ("lock", "checkpoint", "restore", "unlock")}
    | {
        op: st.lists(st.sampled_from([None, None, Fault.FAIL, Fault.HANG, Fault.DIE]), max_size=6)
        for op in ("state", "restore_thread")
    }
)
latencies = st.fixed_dictionaries({op: st.floats(0, 1.5 * limit) for op, limit in LIMIT_S.items()})
cancels = st.none() | st.tuples(st.floats(0, 15), st.floats(0, 4))
"""When the caller gives up, and how much later it does again, while the tree is led back."""


def times(cancel: tuple[float, float] | None) -> list[float]:
    return [] if cancel is None else [cancel[0], cancel[0] + cancel[1]]


async def called_off(journey: Coroutine[Any, Any, Any], *, at_s: Sequence[float]) -> Any:
    """What `journey` gave or raised, when it is cancelled at these times."""
    task = asyncio.ensure_future(journey)
    timers = [asyncio.get_running_loop().call_later(at, task.cancel) for at in at_s]
    outcome: Any = (await asyncio.gather(task, return_exceptions=True))[0]
    for timer in timers:
        timer.cancel()
    return outcome


def assert_deadlines_held(cuda: FakeCuda) -> None:
    assert all(took <= LIMIT_S[op] + EPSILON_S for op, took in cuda.longest_s.items()), (
        cuda.longest_s
    )


def assert_settled(cuda: FakeCuda) -> None:
    """Each process runs, or is gone."""
    assert all(not p.alive or p.state is CudaState.RUNNING for p in cuda.processes.values())


@settings(max_examples=examples(300), deadline=None)
@given(
    faults=plan,
    latency=latencies,
    cancel=cancels,
    processes=st.integers(1, 3),
    dump_fails=st.booleans(),
)
def test_any_faults_on_the_way_out_end_running_or_killed_never_in_between(
    faults: dict[str, list[Fault | None]],
    latency: dict[str, float],
    cancel: tuple[float, float] | None,
    processes: int,
    dump_fails: bool,
) -> None:
    cuda = FakeCuda(*(FakeProcess(pid=pid) for pid in range(1, processes + 1)))
    cuda.faults, cuda.latency_s = dict(faults), latency
    seam = devices(cuda)

    async def story() -> None:
        outcome: Any = await called_off(seam.before_dump(list(cuda.processes)), at_s=times(cancel))
        if isinstance(outcome, Suspension):
            assert all(
                p.state is CudaState.CHECKPOINTED for p in cuda.processes.values() if p.alive
            )
            if not dump_fails:
                return
            suspension = outcome
            outcome = await called_off(
                seam.rollback(suspension, "the dump failed"), at_s=times(cancel)
            )
            await seam.rollback(suspension, "again")
        assert outcome is None or isinstance(
            outcome, CudaFailed | CudaLost | CudaRefused | asyncio.CancelledError
        ), outcome
        if isinstance(outcome, CudaLost):
            assert not any(p.alive for p in cuda.processes.values())
            assert str(outcome)
        assert_settled(cuda)

    run(story())
    assert_deadlines_held(cuda)
    assert all(
        p.history.count("unlock") <= 1 and p.history.count("restore") <= 1
        for p in cuda.processes.values()
    )


@settings(max_examples=examples(300), deadline=None)
@given(faults=plan, latency=latencies, cancel=cancels, processes=st.integers(1, 3))
def test_any_faults_on_the_way_back_end_running_or_killed_never_in_between(
    faults: dict[str, list[Fault | None]],
    latency: dict[str, float],
    cancel: tuple[float, float] | None,
    processes: int,
) -> None:
    cuda = FakeCuda(*(checkpointed(pid) for pid in range(1, processes + 1)))
    cuda.faults, cuda.latency_s = dict(faults), latency

    outcome = run(
        called_off(
            devices(cuda).after_restore(list(cuda.processes), record(processes)), at_s=times(cancel)
        )
    )

    if isinstance(outcome, dict):
        assert set(outcome) == {"cuda_restore", "cuda_unlock"}
        assert all(p.state is CudaState.RUNNING for p in cuda.processes.values() if p.alive)
    else:
        assert isinstance(outcome, CudaLost | asyncio.CancelledError), outcome
        # cancelled before its first step, it touched nothing
        started = cuda.longest_s or isinstance(outcome, CudaLost)
        assert not started or not any(p.alive for p in cuda.processes.values())
    assert_deadlines_held(cuda)
