"""NVMe → pool → device: several threads read pieces of a file into memory while earlier pieces are
copied to the device.

Each thread owns two stages of the pool: one is filled while the other is copied. So the bytes in
flight are bounded by the pool, whatever the model's size, and disk and device work in parallel."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from weight_cache.tensors.devices import Device, Wait, as_bytes, flatten_to_bytes
from weight_cache.tensors.dtypes import tensor_layout
from weight_cache.tensors.parallel_read import (
    PieceQueue,
    default_reader_threads,
    open_tensor_file,
    read_exactly,
    run_readers,
)
from weight_cache.tensors.pool import ALIGNMENT_BYTES, Pool
from weight_cache.tensors.read_plan import PIECE_BYTES, ReadPiece, contiguous_runs, plan_reads
from weight_cache.types import Tensor

STAGES_PER_THREAD = 2
_READER_BYTES = STAGES_PER_THREAD * PIECE_BYTES


def pool_bytes(tensors: Sequence[Tensor], *, threads: int | None = None) -> int:
    """The pool size that `deliver` can use; it needs at least the share of one thread."""
    pieces = sum(1 for _ in plan_reads(tensors))
    return min(threads or default_reader_threads(), max(1, pieces)) * _READER_BYTES


def deliver(
    path: Path,
    placed: Sequence[tuple[Tensor, Device]],
    *,
    pool: Pool,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Load these tensors of the file at `path`, each to its device; return them by name. Their
    bytes are as in the file.

    Takes at most `pool_bytes` from `pool` during the call. Raises TensorsInvalid (cut off, no
    dtype), DeviceFailed, PoolFull, OSError; then nothing is left on any device."""
    targets = {tensor.name: device.allocate(*tensor_layout(tensor)) for tensor, device in placed}
    flats = {
        tensor.name: flatten_to_bytes(targets[tensor.name])
        for tensor, _ in placed
        if tensor.length_bytes
    }
    devices = {tensor.name: device for tensor, device in placed}
    wanted = [tensor for tensor, _ in placed if tensor.length_bytes]
    if not wanted:
        return targets
    with contextlib.ExitStack() as stack:
        descriptor = _open(path, wanted, stack)
        readers: list[_Reader] = []
        # return their stages to the pool, even while a traceback refers to the readers
        stack.callback(readers.clear)
        for device in {id(device): device for device in devices.values()}.values():
            # in any case: before the memory that is copied from, or to, is released
            stack.callback(device.settle)
        fit = (pool.size_bytes - pool.used_bytes) // _READER_BYTES
        count = max(1, min(pool_bytes(wanted, threads=threads) // _READER_BYTES, fit))
        readers += [_Reader(descriptor, path.name, pool, flats, devices) for _ in range(count)]
        run_readers(PieceQueue(plan_reads(wanted)), readers)
    return targets


def read_into(
    path: Path,
    tensors: Sequence[Tensor],
    *,
    pool: Pool,
    threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Read these tensors of the file at `path` into `pool`, without a further copy. They occupy the
    pool as long as they exist.

    Raises as `deliver` does.
    """
    layouts = {tensor.name: tensor_layout(tensor) for tensor in tensors}
    rooms = _TargetBuffers(tensors, pool)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as undo:
        undo.callback(rooms.clear)
        descriptor = _open(path, [t for t in tensors if t.length_bytes], stack)

        def read(pieces: PieceQueue) -> None:
            while (piece := pieces.take()) is not None:
                read_exactly(
                    descriptor,
                    as_bytes(rooms.at(piece.offset_bytes, piece.length_bytes)),
                    piece.offset_bytes,
                    name=path.name,
                )

        run_readers(
            PieceQueue(plan_reads(tensors)),
            [read] * (threads or default_reader_threads()),
        )
        undo.pop_all()
    return {tensor.name: _shaped(rooms, tensor, *layouts[tensor.name]) for tensor in tensors}


def room_bytes(tensors: Sequence[Tensor]) -> int:
    """The bytes that `read_into` takes from a pool."""
    return sum(
        -(-(_end(run) - _begin(run)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for run in contiguous_runs(tensors)
    )


class _Reader:
    """One thread's work and its two stages. Owned by that thread once it runs."""

    def __init__(
        self,
        descriptor: int,
        name: str,
        pool: Pool,
        flats: Mapping[str, torch.Tensor],
        devices: Mapping[str, Device],
    ) -> None:
        self._descriptor = descriptor
        self._name = name
        self._flats = flats
        self._devices = devices
        self._stages = [_Stage(pool.take(PIECE_BYTES)) for _ in range(STAGES_PER_THREAD)]

    def __call__(self, pieces: PieceQueue) -> None:
        try:
            while (piece := pieces.take()) is not None:
                stage = self._stages[0]
                stage.wait()
                read_exactly(
                    self._descriptor,
                    stage.view[: piece.length_bytes],
                    piece.offset_bytes,
                    name=self._name,
                )
                self._send(stage, piece)
                self._stages.reverse()
        finally:
            # before their memory returns to the pool, copies from it must have ended
            for stage in self._stages:
                stage.wait()

    def _send(self, stage: _Stage, piece: ReadPiece) -> None:
        used: dict[int, Device] = {}
        try:
            for part in piece.parts:
                name, end = part.tensor.name, part.from_bytes + part.length_bytes
                device = self._devices[name]
                used[id(device)] = device
                device.send(
                    stage.memory[part.at_bytes : part.at_bytes + part.length_bytes],
                    self._flats[name][part.from_bytes : end],
                )
        finally:
            stage.waits = [device.mark() for device in used.values()]


class _Stage:
    """A pool buffer for one piece, and the copies to wait for before it is reused."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.view = as_bytes(memory)
        self.waits: list[Wait] = []

    def wait(self) -> None:
        """Wait until its bytes have been copied."""
        waits, self.waits = self.waits, []
        for wait in waits:
            wait()


class _TargetBuffers:
    """The pool buffer of each run of tensors. Created before any thread reads, immutable then."""

    def __init__(self, tensors: Sequence[Tensor], pool: Pool) -> None:
        found = list(contiguous_runs(tensors))
        self._begins = [_begin(run) for run in found]
        self._memory = [pool.take(_end(run) - _begin(run)) for run in found]

    def clear(self) -> None:
        """Return all buffers to the pool."""
        self._memory.clear()

    def at(self, offset_bytes: int, length_bytes: int) -> torch.Tensor:
        """The buffer for the file's bytes from `offset_bytes`."""
        index = bisect.bisect_right(self._begins, offset_bytes) - 1
        begin = offset_bytes - self._begins[index]
        return self._memory[index][begin : begin + length_bytes]


def _shaped(
    rooms: _TargetBuffers, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if not tensor.length_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    raw = rooms.at(tensor.offset_bytes, tensor.length_bytes)
    # unaligned in the file: this tensor gets memory of its own
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def _open(path: Path, tensors: Sequence[Tensor], stack: contextlib.ExitStack) -> int:
    descriptor = open_tensor_file(path, least_bytes=_end(tensors))
    stack.callback(os.close, descriptor)
    return descriptor


def _begin(run: Sequence[Tensor]) -> int:
    """Begin of its buffer: rounded down to the alignment, so that the buffer is aligned as the file
    is."""
    return run[0].offset_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _end(tensors: Sequence[Tensor]) -> int:
    return max((t.offset_bytes + t.length_bytes for t in tensors), default=0)
