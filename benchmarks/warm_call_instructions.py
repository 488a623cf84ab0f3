"""What one warm call costs in the activator's process, its sockets left out: bytecode instructions
of each function, which are the same on every machine, and CPU time.

The objects are those of a whole activator, with a real journal; what the kernel would carry is given
to both connections by hand: a request to the caller's, an answer to the worker's. Python counts no
instructions inside of C, so a function that calls more of it costs more than is seen here.

python -m benchmarks.warm_call_instructions [--calls N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

from uvicorn.server import ServerState

from activator.http.server import ClientConnection
from activator.lifecycle import server_config
from activator.settings import ActivatorSettings
from activator.worker_client.connection import WorkerConnection
from benchmarks.harness import ROOT
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, Edge, served
from tests.fakes.fake_worker import echo
from tests.fakes.routes import TENANT, route_of, spec_of

PLAIN, QUOTAS = "plain", "with quotas"
PLENTY: Mapping[str, Any] = MappingProxyType(
    {"requests_per_s": 1_000_000, "burst": 1_000_000, "concurrent": 100_000}
)
"""Bounds of tenant, function and key that nobody reaches (as in `benchmarks.gateway`)."""
NOT_COUNTED = (__file__, str(Path(asyncio.__file__).parent))
"""This module, and the event loop: an activator's (uvloop) is not of Python."""
CALLS = 50
"""Calls of which the cheapest counts: some make a timer, read random bits or meet a new second."""
BODY = b'{"x":1}'
REQUEST = (
    b"POST /v1/functions/shop/hello:invoke HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer %b"
    b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (KEY.encode(), len(BODY), BODY)
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\npilotlight-outcome: ok\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class MemoryTransport(asyncio.Transport):
    """Keeps the last bytes that are written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1)})
        self.written = b""

    def write(self, data: Any) -> None:
        """Keep them."""
        self.written = data

    def is_closing(self) -> bool:
        """It stays open."""
        return False

    def close(self) -> None:
        """There is nothing to close."""


class WarmCaller:
    """Makes warm calls, one at a time."""

    def __init__(self, client: ClientConnection, worker: WorkerConnection) -> None:
        self._client = client
        self._worker = worker

    def call(self) -> None:
        """Make one call, from the bytes of its request to those of its answer."""
        self._client.data_received(REQUEST)
        self._worker.data_received(ANSWER)

    def instructions(self) -> Counter[CodeType]:
        """The bytecode instructions of a call by function: of the cheapest of CALLS."""
        return min((self._traced() for _ in range(CALLS)), key=Counter.total)

    def _traced(self) -> Counter[CodeType]:
        counts: Counter[CodeType] = Counter()

        def count(frame: FrameType, event: str, _: object) -> Any:
            if event == "opcode":
                counts[frame.f_code] += 1
            return count

        def enter(frame: FrameType, _event: str, _: object) -> Any:
            if frame.f_code.co_filename.startswith(NOT_COUNTED):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return count

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            self.call()
        finally:
            sys.settrace(before)
        return counts

    def cpu_us(self, calls: int) -> float:
        """CPU time of a call in microseconds, the mean of `calls`."""
        began = time.thread_time_ns()
        for _ in range(calls):
            self.call()
        return (time.thread_time_ns() - began) / calls / 1000


@asynccontextmanager
async def warm_caller(directory: Path, kind: str) -> AsyncIterator[WarmCaller]:
    """A caller of a function that is warm, in an activator of its own."""
    settings = ActivatorSettings()
    async with served(Edge(directory, settings, echo)) as edge:
        if kind == QUOTAS:
            edge.add_tenant("acme", **PLENTY)
            edge.add_key(KEY, quotas=dict(PLENTY))
            edge.tell("quota", f"{TENANT}/main/shop/hello", dict(PLENTY))
        edge.add(route_of(spec_of(scaling=Scaling(max_inputs=8))))
        assert (await edge.call(json={"x": 0})).is_success
        worker = WorkerConnection()
        worker.connection_made(MemoryTransport())
        (scaled,) = edge.scaler.revisions.values()
        (instance,) = scaled.throttler.instances.values()
        instance.connections.release(worker, time.monotonic())  # the next call takes it
        client, transport = _client(edge, settings), MemoryTransport()
        client.connection_made(transport)
        caller = WarmCaller(client, worker)
        for _ in range(3):  # heads of the request and of the answer are known from now on
            caller.call()
            assert transport.written.startswith(b"HTTP/1.1 200 OK\r\n"), transport.written
            assert (b"ratelimit: " in transport.written) == (kind == QUOTAS)
        yield caller
        client.connection_lost(None)


def _client(edge: Edge, settings: ActivatorSettings) -> ClientConnection:
    config = server_config(edge.gateway, edge.limits, settings)
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"Tue, 01 Dec 2026 00:00:00 GMT")]
    made = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
    assert isinstance(made, ClientConnection)
    return made


def instructions(directory: Path, kind: str) -> Counter[CodeType]:
    """The bytecode instructions of a warm call by function. `directory`: empty, with a short
    path."""

    async def run() -> Counter[CodeType]:
        async with warm_caller(directory, kind) as caller:
            return caller.instructions()

    return asyncio.run(run())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_call_instructions")
    parser.add_argument(
        "--calls", type=int, default=0, help="measure the CPU time of so many calls instead"
    )
    calls = parser.parse_args().calls
    found: dict[str, Counter[str]] = {}
    for kind in (PLAIN, QUOTAS):
        with tempfile.TemporaryDirectory(prefix="pl") as directory:
            if calls:
                print(f"{kind}: {asyncio.run(_cpu_us(Path(directory), kind, calls)):.2f} µs a call")
            else:
                found[kind] = _by_name(instructions(Path(directory), kind))
    if found:
        _print(found)


async def _cpu_us(directory: Path, kind: str, calls: int) -> float:
    async with warm_caller(directory, kind) as caller:
        gc.collect()
        gc.freeze()  # as `activator.lifecycle`
        runs = []
        for _ in range(9):
            runs.append(caller.cpu_us(calls // 9))
            await asyncio.sleep(0)
        return statistics.median(runs)


def _by_name(counts: Counter[CodeType]) -> Counter[str]:
    named: Counter[str] = Counter()
    for code, count in counts.items():
        named[f"{code.co_filename.removeprefix(f'{ROOT}/')} {code.co_qualname}"] += count
    return named


def _print(found: Mapping[str, Counter[str]]) -> None:
    kinds = list(found)
    print("".join(f"{kind:>13}" for kind in kinds), f" Python {sys.version.split()[0]}")
    names = sorted(set().union(*found.values()), key=lambda name: -found[kinds[-1]][name])
    for name in names:
        print("".join(f"{found[kind][name]:>13,}" for kind in kinds), "", name)
    print("".join(f"{found[kind].total():>13,}" for kind in kinds), " in all")


if __name__ == "__main__":
    main()
