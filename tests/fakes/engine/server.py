"""The fake engine as a program: vLLM's command line, a child process (the core), one Unix socket or
port.

Environment: `FAKE_ENGINE_TOKEN_S`, `FAKE_ENGINE_PREFILL_S` (seconds), `FAKE_ENGINE_START_S` (before
it listens), `FAKE_ENGINE_START_MIB` (of memory that it takes first); once it was frozen for a while
it answers otherwise than before if there is a file `wrong-after-restore` beside the model."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import uvicorn
from starlette.types import Receive, Scope, Send

from tests.fakes.engine.app import make_app
from tests.fakes.engine.engine import EngineFake, crash, take_all_memory

WRONG_AFTER_RESTORE = "wrong-after-restore"
FROZEN_S = 0.05
"""The wall clock went on for so long without the monotonic one: it was in a snapshot."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of vLLM's server that mean something here; others are taken and left aside."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--uds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--kv-cache-memory-bytes", default="8M")
    parser.add_argument("--lora-modules", nargs="*", default=[])
    parser.add_argument("--enable-sleep-mode", action="store_true")
    known, _ = parser.parse_known_args(list(argv))
    return known


def make_engine(options: argparse.Namespace) -> EngineFake:
    """The engine that the flags ask for."""
    return EngineFake(
        model=(options.served_model_name or [os.path.basename(options.model)])[0],
        adapters=tuple(module.partition("=")[0] for module in options.lora_modules),
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_tokens=max(1024, _bytes(options.kv_cache_memory_bytes) // 1024),
        token_s=float(os.environ.get("FAKE_ENGINE_TOKEN_S", "0")),
        prefill_s=float(os.environ.get("FAKE_ENGINE_PREFILL_S", "0")),
        crash=crash,
        take_all_memory=take_all_memory,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM; the core goes with the server, and the server with the core."""
    options = parse(sys.argv[1:] if argv is None else argv)
    if not os.path.isdir(options.model):
        sys.exit(f"Can't load the configuration of {options.model!r}")
    time.sleep(float(os.environ.get("FAKE_ENGINE_START_S", "0")))
    # set aside and touched, as the real one does
    cache = bytearray(b"\0") * _bytes(options.kv_cache_memory_bytes)
    taken = b"." * (int(os.environ.get("FAKE_ENGINE_START_MIB", "0")) << 20)
    core = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        asyncio.run(_serve(options, core))
    finally:
        core.kill()
        core.wait()
        del cache
        del taken


async def _serve(options: argparse.Namespace, core: subprocess.Popen[bytes]) -> None:
    engine = make_engine(options)
    app = _Aging(engine, os.path.join(options.model, WRONG_AFTER_RESTORE))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(core.pid)
    loop.add_reader(pidfd, os._exit, 1)  # as vLLM's server does when its core died
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        await server.serve(sockets=[_listener(options)])
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class _Aging:
    """Notices before each request whether it was frozen since it was made, and whether it is to be
    wrong then."""

    def __init__(self, engine: EngineFake, mark: str) -> None:
        self._engine, self._app, self._mark = engine, make_app(engine), mark
        self._difference = _difference()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._engine.wrong = abs(_difference() - self._difference) > FROZEN_S and os.path.exists(
            self._mark
        )
        await self._app(scope, receive, send)


def _difference() -> float:
    return time.time() - time.monotonic()


def _listener(options: argparse.Namespace) -> socket.socket:
    if options.uds:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(options.uds)
    else:
        listener = socket.create_server((options.host, options.port))
        print(f"http://{options.host}:{listener.getsockname()[1]}", flush=True)
    return listener


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return (
        int(float(text[:-1]) * units[text[-1].upper()]) if text[-1].upper() in units else int(text)
    )
