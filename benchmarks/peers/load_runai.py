"""runai-model-streamer from a local file to CPU tensors that stay. Run by its own interpreter, with
the project's torch.

Orders: {"file", "first", "tiny": {"file", …}}; answers as `benchmarks/loader.py`, and likewise each
in a fork of its own."""

import gc
import json
import os
import sys
import time
import traceback
from typing import Any

sys.path.append(os.environ["BENCH_PROJECT_SITE"])

import torch
from runai_model_streamer import SafetensorsStreamer

PAGE_BYTES = 4096


def load(order: dict[str, Any]) -> dict[str, float]:
    """All tensors of one file; the first one counts when it is handed out, whichever it is."""
    began, first = time.perf_counter(), 0.0
    tensors: dict[str, torch.Tensor] = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(order["file"])
        for name, tensor in streamer.get_tensors():
            if not tensors:
                float(tensor.view(-1)[0])
                first = time.perf_counter()
            tensors[name] = tensor
    loaded = time.perf_counter()
    for tensor in tensors.values():
        int(tensor.view(-1).view(torch.uint8)[::PAGE_BYTES].sum())
    return {
        "first_s": first - began,
        "loaded_s": loaded - began,
        "total_s": time.perf_counter() - began,
    }


def in_fork(order: dict[str, Any]) -> dict[str, Any]:
    """Do one order in a process that ends with it."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            load(order["tiny"])
            os.write(sending, json.dumps(load(order)).encode())
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return (
        json.loads(told)
        if told
        else {"error": f"it ended with status {os.waitstatus_to_exitcode(status)}"}
    )


def main() -> None:
    """Take orders until there are no more."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    gc.collect()
    gc.freeze()  # as benchmarks/loader.py
    for line in sys.stdin:
        order = json.loads(line)
        print("answer " + json.dumps({} if "ready" in order else in_fork(order)), flush=True)


if __name__ == "__main__":
    main()
