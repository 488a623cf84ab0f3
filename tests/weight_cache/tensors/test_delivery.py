"""Bytes on their way: from the file into a pool, and from there to a device."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.fakes.late_device import LateDevice
from tests.weight_cache.tensors.models_on_disk import EVERY_KIND, large, same, save
from weight_cache.errors import DeviceFailed, PoolFull, TensorsInvalid
from weight_cache.tensors.delivery import deliver, pool_bytes, read_into, room_bytes
from weight_cache.tensors.devices import CpuDevice, Device, resolve_device
from weight_cache.tensors.header import read_tensors
from weight_cache.tensors.parallel_read import PieceQueue, read_exactly, run_readers
from weight_cache.tensors.pool import Pool
from weight_cache.tensors.read_plan import PIECE_BYTES, ReadPiece

DEVICES: list[Callable[[], Device]] = [LateDevice, CpuDevice, lambda: CpuDevice(verify=True)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(5 * 2 * PIECE_BYTES) as one:
        yield one


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of more pieces than one thread has stages."""
    return large(tmp_path_factory.mktemp("larger"), mebibytes=70)


def reading_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("read tensors")
    ]


@pytest.mark.parametrize("make", DEVICES)
def test_every_kind_of_tensor_arrives_as_it_was(
    tmp_path: Path, pool: Pool, make: Callable[[], Device]
) -> None:
    file, device = save(tmp_path), make()
    tensors = deliver(file, [(tensor, device) for tensor in read_tensors(file)], pool=pool)
    assert all(same(tensors[name], expected) for name, expected in EVERY_KIND.items())
    assert pool.used_bytes == 0
    assert reading_threads() == []


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("make", DEVICES)
def test_stages_are_used_again_only_when_their_bytes_have_left(
    larger: tuple[Path, dict[str, torch.Tensor]],
    pool: Pool,
    make: Callable[[], Device],
    threads: int,
) -> None:
    file, state = larger
    device = make()
    tensors = deliver(
        file, [(tensor, device) for tensor in read_tensors(file)], pool=pool, threads=threads
    )
    assert all(same(tensors[name], expected) for name, expected in state.items())


def test_each_tensor_goes_to_its_own_device(tmp_path: Path, pool: Pool) -> None:
    file, state = large(tmp_path)
    one, two = LateDevice(), LateDevice()
    tensors = deliver(
        file, [(t, one if t.name == "t1" else two) for t in read_tensors(file)], pool=pool
    )
    assert all(same(tensors[name], expected) for name, expected in state.items())
    assert one.sent_bytes == state["t1"].numel()
    assert two.sent_bytes == sum(t.numel() for t in state.values()) - one.sent_bytes
    assert (one.settled, two.settled) == (1, 1)


def test_what_is_in_flight_is_bounded_by_the_pool(
    larger: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    file, state = larger
    with Pool(2 * PIECE_BYTES) as small:
        placed = [(tensor, LateDevice()) for tensor in read_tensors(file)]
        # one thread's stages are all that fit
        tensors = deliver(file, placed, pool=small, threads=4)
        assert all(same(tensors[name], expected) for name, expected in state.items())


def test_a_pool_too_small_for_one_thread_is_refused_with_both_numbers(tmp_path: Path) -> None:
    file, _ = large(tmp_path)
    device = LateDevice()
    with Pool(PIECE_BYTES) as small:
        with pytest.raises(
            PoolFull, match=f"{PIECE_BYTES} bytes do not fit into a pool of {PIECE_BYTES}"
        ):
            deliver(file, [(tensor, device) for tensor in read_tensors(file)], pool=small)
        assert small.used_bytes == 0
    assert device.settled == 1


def test_a_model_needs_no_more_of_a_pool_than_it_has_pieces(tmp_path: Path) -> None:
    file = save(tmp_path)
    assert pool_bytes(read_tensors(file), threads=8) == 2 * PIECE_BYTES
    assert pool_bytes([], threads=8) == 2 * PIECE_BYTES


def test_a_device_that_is_lost_ends_the_delivery_and_is_settled(tmp_path: Path, pool: Pool) -> None:
    file, _ = large(tmp_path)
    device = LateDevice(fails_after=2)
    with pytest.raises(DeviceFailed, match="was lost"):
        deliver(file, [(tensor, device) for tensor in read_tensors(file)], pool=pool)
    assert device.settled == 1
    assert reading_threads() == []
    assert pool.used_bytes == 0


def test_a_file_that_was_cut_off_is_named(tmp_path: Path, pool: Pool) -> None:
    file, _ = large(tmp_path)
    tensors = read_tensors(file)
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(
        TensorsInvalid,
        match=r"model\.safetensors has \d+ bytes, but its tensors end at \d+: it is cut off",
    ):
        deliver(file, [(tensor, LateDevice()) for tensor in tensors], pool=pool)


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(TensorsInvalid, match="file ends at byte 10"):
            read_exactly(descriptor, memoryview(bytearray(8)), 5, name="file")
    finally:
        os.close(descriptor)


def test_short_reads_are_gone_on_with() -> None:
    # proc(5) gives a page or so at once, however much is asked for
    descriptor = os.open("/proc/kallsyms", os.O_RDONLY)
    buffer, once = bytearray(50_000), bytearray(50_000)
    try:
        assert os.preadv(descriptor, [once], 0) < len(once)
        read_exactly(descriptor, memoryview(buffer), 0, name="kallsyms")
    finally:
        os.close(descriptor)
    with open("/proc/kallsyms", "rb") as whole:
        assert buffer == whole.read(50_000)


def test_the_first_failure_stops_the_other_threads() -> None:
    taken: list[ReadPiece] = []
    pieces = PieceQueue(
        ReadPiece(offset_bytes=n, length_bytes=1, parts=()) for n in range(1_000_000)
    )
    failed = threading.Event()

    def works(left: PieceQueue) -> None:
        while (piece := left.take()) is not None:
            taken.append(piece)
            failed.wait(30)

    def fails(left: PieceQueue) -> None:
        failed.set()
        raise DeviceFailed("at once")

    with pytest.raises(DeviceFailed):
        run_readers(pieces, [works, fails])
    assert len(taken) < 1_000_000
    assert pieces.take() is None


def test_an_interrupt_of_the_caller_stops_the_threads() -> None:
    class TimeIsUp(BaseException):
        pass

    def strike(*_: object) -> None:
        raise TimeIsUp

    def works(left: PieceQueue) -> None:
        while left.take() is not None:
            pass

    endless = PieceQueue(
        ReadPiece(offset_bytes=n, length_bytes=1, parts=()) for n in itertools.count()
    )
    before = signal.signal(signal.SIGALRM, strike)
    gc.disable()  # a callback of the collector would swallow what strikes inside it
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 20)
        with pytest.raises(TimeIsUp):
            run_readers(endless, [works, works])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert reading_threads() == []


def test_only_some_tensors_are_read_when_only_some_are_wanted(tmp_path: Path, pool: Pool) -> None:
    file, state = large(tmp_path)
    device = LateDevice()
    tensors = deliver(
        file, [(t, device) for t in read_tensors(file) if t.name in ("t0", "t3")], pool=pool
    )
    assert set(tensors) == {"t0", "t3"}
    assert device.sent_bytes == state["t0"].numel() + state["t3"].numel()


def test_a_verifying_device_notices_bytes_that_changed_behind_it() -> None:
    device = CpuDevice(verify=True)
    source, target = torch.arange(8, dtype=torch.uint8), device.allocate(torch.uint8, (8,))
    device.send(source, target)
    target[3] = 99
    with pytest.raises(DeviceFailed, match="other bytes than were copied in 1 of 1 transfers"):
        device.settle()
    device.settle()  # what was told once is not told again


@pytest.mark.parametrize("where", ["meta", "nonsense:7", "mps"])
def test_a_device_that_nothing_is_delivered_to_is_named(where: str) -> None:
    with pytest.raises(DeviceFailed, match=where.partition(":")[0]):
        resolve_device(where)


# -- into the pool, to stay ------------------------------------------------------------------------
def test_read_into_a_pool_tensors_stay_there_without_another_copy(
    tmp_path: Path, pool: Pool
) -> None:
    file = save(tmp_path)
    tensors = read_into(file, read_tensors(file), pool=pool)
    assert all(same(tensors[name], expected) for name, expected in EVERY_KIND.items())
    assert all(t.data_ptr() % t.element_size() == 0 for t in tensors.values() if t.numel())
    assert 0 < pool.used_bytes <= room_bytes(read_tensors(file))
    tensors.clear()
    assert pool.used_bytes == 0


def test_large_ones_are_read_by_several_threads(tmp_path: Path, pool: Pool) -> None:
    file, state = large(tmp_path)
    tensors = read_into(
        file, [t for t in read_tensors(file) if t.name != "t2"], pool=pool, threads=3
    )
    assert all(same(tensors[name], state[name]) for name in tensors)
    assert len(tensors) == len(state) - 1
    assert reading_threads() == []


def test_a_model_larger_than_the_pool_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file, _ = large(tmp_path)
    with Pool(PIECE_BYTES) as small:
        with pytest.raises(PoolFull, match="do not fit"):
            read_into(file, read_tensors(file), pool=small)
        assert small.used_bytes == 0


def test_the_pool_is_read_into_directly(tmp_path: Path) -> None:
    file, state = large(tmp_path)
    with Pool(64 * 1024**2) as pool:
        probe = pool.take(1)
        begin = probe.data_ptr()
        del probe
        tensors = read_into(file, read_tensors(file), pool=pool)
        inside = [
            begin <= tensor.data_ptr() < begin + pool.size_bytes for tensor in tensors.values()
        ]
        assert all(inside)
        assert ctypes.string_at(tensors["t0"].data_ptr(), 5) == state["t0"].numpy().tobytes()
        tensors.clear()
