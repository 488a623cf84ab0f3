"""Files of weights made usable, in ways that compete: a script that takes orders
(`benchmarks/orders.py`), run by our own interpreter.

Every order runs in a fork of its own, so that no memory that an earlier one faulted in helps the
next; libraries are warmed up on a tiny file, and pools and buffers are faulted in, before the clock
runs. `first_s`: until one value of the first tensor was read. `loaded_s`: until the call returned.
`total_s`: until one value of every page of every tensor was read."""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from pilotlight import weights

PIECE_BYTES = 16 * 1024**2
MANY, SMALL_PIECE_BYTES = 16, 2 * 1024**2
"""A queue as deep as runai-model-streamer keeps by default."""
GPU, POOL_BYTES = "cuda:0", 512 * 1024**2
ROOM_BYTES = 16 * 1024**2
"""Beside the tensors, for what lies between them when each begins at a page."""

Order = Mapping[str, Any]
Times = dict[str, float]


def load_file(order: Order, *, backend: str) -> Times:
    """safetensors' own, all tensors."""
    began = time.perf_counter()
    return _dictionary(began, order, safetensors.torch.load_file(order["file"], backend=backend))


def open_one(order: Order) -> Times:
    """safetensors' own, the first tensor only: nothing else is there afterwards."""
    began = time.perf_counter()
    with safetensors.safe_open(order["file"], framework="pt") as tensors:
        first = tensors.get_tensor(order["first"])
    loaded = time.perf_counter()
    _value(first)
    return {"loaded_s": loaded - began, "first_s": time.perf_counter() - began}


def unpickle(order: Order) -> Times:
    """`torch.load(mmap=True)` of the same tensors."""
    began = time.perf_counter()
    return _dictionary(began, order, torch.load(order["pickle"], mmap=True, weights_only=True))


def mapped(order: Order) -> Times:
    """Ours, where the file lies."""
    began = time.perf_counter()
    return _dictionary(began, order, weights.load(Path(order["file"]), device="cpu", mode="mapped"))


def pooled(order: Order) -> Times:
    """Ours, into memory that was faulted in before."""
    made = time.perf_counter()
    with weights.pool(os.stat(order["file"]).st_size + ROOM_BYTES) as pool:
        began = time.perf_counter()
        times = _dictionary(
            began, order, weights.load(Path(order["file"]), device="cpu", mode="pool", pool=pool)
        )
    return {"pool_s": began - made, **times}


def preadv(
    order: Order, *, threads: int, faulted: bool = True, piece_bytes: int = PIECE_BYTES
) -> Times:
    """The limit: bytes into memory, nothing made of them."""
    size = os.stat(order["file"]).st_size
    buffer = mmap.mmap(-1, size)
    if faulted:
        buffer.madvise(mmap.MADV_HUGEPAGE)
        _fault(buffer, size)
    descriptor = os.open(order["file"], os.O_RDONLY | os.O_CLOEXEC)
    with memoryview(buffer) as view, ThreadPoolExecutor(threads) as pool:

        def read(offset: int) -> None:
            end = min(offset + piece_bytes, size)
            while offset < end:
                offset += os.preadv(descriptor, [view[offset:end]], offset)

        list(pool.map(time.sleep, [0.001] * threads))  # the threads are there now
        began = time.perf_counter()
        list(pool.map(read, range(0, size, piece_bytes)))
        elapsed = time.perf_counter() - began
    return {"loaded_s": elapsed}


def devices(_: Order) -> Times:
    """How many GPUs there are; asked in a fork, because CUDA cannot be used in a fork of a process
    that has used it."""
    return {"cuda": float(torch.cuda.device_count() if torch.cuda.is_available() else 0)}


def cuda_ours(order: Order) -> Times:
    """Ours to the GPU, through a pinned pool that was made before."""
    with weights.pool(POOL_BYTES, device=GPU) as pool:
        began = time.perf_counter()
        tensors = weights.load(Path(order["file"]), device=GPU, pool=pool)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
        return {
            "loaded_s": elapsed,
            "tensors": float(len(tensors)),
            "pinned": float(pool.is_pinned),
        }


def cuda_load_file(order: Order) -> Times:
    """safetensors' own to the GPU."""
    began = time.perf_counter()
    tensors = safetensors.torch.load_file(order["file"], device=GPU)
    torch.cuda.synchronize()
    return {"loaded_s": time.perf_counter() - began, "tensors": float(len(tensors))}


def cuda_memcpy(order: Order) -> Times:
    """The limit: as many bytes from pinned memory, in one copy."""
    size = os.stat(order["file"]).st_size
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=GPU)
    torch.cuda.synchronize()
    began = time.perf_counter()
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return {"loaded_s": time.perf_counter() - began}


def _fault(buffer: mmap.mmap, size: int) -> None:
    for offset in range(0, size, mmap.PAGESIZE):
        buffer[offset] = 0


def _dictionary(began: float, order: Order, tensors: Mapping[str, torch.Tensor]) -> Times:
    loaded = time.perf_counter()
    _value(tensors[order["first"]])
    first = time.perf_counter()
    touch(tensors.values())
    return {
        "loaded_s": loaded - began,
        "first_s": first - began,
        "total_s": time.perf_counter() - began,
    }


def touch(tensors: Iterable[torch.Tensor]) -> int:
    """Read one byte of every page: what is mapped is in memory afterwards."""
    return sum(int(tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()) for tensor in tensors)


def _value(tensor: torch.Tensor) -> float:
    return float(tensor.view(-1)[0])


CORES = len(os.sched_getaffinity(0))
ARMS: Mapping[str, Callable[[Order], Times]] = {
    "load_file": lambda order: load_file(order, backend="mmap"),
    "load_file_pread": lambda order: load_file(order, backend="pread"),
    "safe_open": open_one,
    "torch_load": unpickle,
    "mapped": mapped,
    "pool": pooled,
    "preadv_1": lambda order: preadv(order, threads=1),
    "preadv_cores": lambda order: preadv(order, threads=CORES),
    "preadv_many": lambda order: preadv(order, threads=MANY, piece_bytes=SMALL_PIECE_BYTES),
    "preadv_fresh": lambda order: preadv(order, threads=CORES, faulted=False),
    "devices": devices,
    "cuda_ours": cuda_ours,
    "cuda_load_file": cuda_load_file,
    "cuda_memcpy": cuda_memcpy,
}


def in_fork(order: Order) -> dict[str, Any]:
    """Do one order in a process that ends with it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            ARMS[order["arm"]](
                {
                    **order,
                    "file": order["tiny"]["file"],
                    "pickle": order["tiny"]["pickle"],
                    "first": order["tiny"]["first"],
                }
            )
            os.write(sending, json.dumps(ARMS[order["arm"]](order)).encode())
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)  # what the parent has open and registered is the parent's
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return (
        json.loads(told)
        if told
        else {"error": f"{order['arm']} ended with status {os.waitstatus_to_exitcode(status)}"}
    )


def main() -> None:
    """Take orders until there are no more."""
    torch.set_num_threads(CORES)
    gc.collect()
    # else a collection in a fork walks over all that was imported and copies its pages: 2 ms that
    # are nobody's loading
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        print("answer " + json.dumps({} if "ready" in order else in_fork(order)), flush=True)


if __name__ == "__main__":
    main()
