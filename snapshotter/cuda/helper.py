"""The program of the helper process: one line of JSON in, one out. Runs in its own process
(standard library and cuda-python), never in the agent.

    {"id": 1, "op": "lock", "pid": 123, "timeout_ms": 10000}
        →  {"id": 1, "ok": true, "value": null}  or  {"id": 1, "ok": false, "error": "…"}

Its first line is `{"ready": true, "version": "…"}`, or `{"ready": false, "why": "…"}`, after which
it exits. It also exits at the end of its standard input. The process is persistent so that `cuInit`
runs only once."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Operation = Callable[[Any, Mapping[str, Any]], Any]

OPERATIONS: Mapping[str, Operation] = {
    "state": lambda process, _: str(process.state),
    "restore_thread": lambda process, _: process.restore_thread_id,
    "lock": lambda process, order: process.lock(timeout_ms=order["timeout_ms"]),
    "checkpoint": lambda process, _: process.checkpoint(),
    "restore": lambda process, order: process.restore(gpu_mapping=order["gpu_mapping"] or None),
    "unlock": lambda process, _: process.unlock(),
}


def main() -> int:
    """Serve standard input until its end."""
    # private: output of libraries goes to standard error
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        checkpoint, version = _cuda()
    except (ImportError, RuntimeError, AttributeError) as e:
        _send(answers, {"ready": False, "why": f"{type(e).__name__}: {e}"})
        return 1
    _send(answers, {"ready": True, "version": version})
    for line in sys.stdin:
        order = json.loads(line)
        _send(answers, {"id": order["id"], **_answer(checkpoint, order)})
    return 0


def _cuda() -> tuple[Any, str]:
    """The module `cuda.core.checkpoint`, with the driver initialised, and the version of
    cuda-core."""
    driver = importlib.import_module("cuda.bindings.driver")
    checkpoint = importlib.import_module("cuda.core.checkpoint")
    (status,) = driver.cuInit(0)
    if int(status) != 0:
        raise RuntimeError(f"cuInit failed: {status!s}")
    try:
        version = importlib.metadata.version("cuda-core")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return checkpoint, version


def _answer(checkpoint: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        value = OPERATIONS[order["op"]](checkpoint.Process(order["pid"]), order)
    except Exception as e:  # noqa: BLE001 - cuda-python raises what it likes (CUDAError derives from Exception): it is the answer
        return {"ok": False, "error": f"{type(e).__name__}: {e}"}
    return {"ok": True, "value": value}


def _send(answers: TextIO, body: Mapping[str, Any]) -> None:
    answers.write(json.dumps(body) + "\n")


if __name__ == "__main__":
    sys.exit(main())
