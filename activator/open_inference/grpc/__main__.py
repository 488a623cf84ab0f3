"""The process for gRPC: `python -m activator.open_inference.grpc <listening descriptor>…`.

The first line of standard input is what it needs (`GrpcTerms`) as JSON; the end of standard input
ends it. Its parts: the relay accepts connections, the server of grpcio behind it speaks HTTP/2, and
the service sends requests to the activator."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import grpc.aio
import uvloop

from activator.open_inference.grpc.activator_client import ActivatorClient
from activator.open_inference.grpc.process import GrpcTerms
from activator.open_inference.grpc.relay import ABSTRACT, Relay
from activator.open_inference.grpc.service import MAX_READING, Service
from pilotlight.core import logging_config

log = logging.getLogger("activator.grpc")

MAX_STREAMS = 100
"""Concurrent calls of a connection, as HTTP/2 servers usually allow."""
OWN_BYTES = 4 * 1024**3
"""Address space of the process without messages, most of which it never touches."""
_PR_SET_DUMPABLE = 4
GRACE_S = 2.0
"""How long running calls may continue after the end of standard input: the activator has answered
those that it knows."""
_OPTIONS = (
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.absolute_max_metadata_size", 32 * 1024),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # a client may ask each 10 s whether the connection lives; one that asks more often is cut off
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    # windows do not grow with the bandwidth: they bound what is received before it is read
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.so_reuseport", 0),
)


async def _serve(terms: GrpcTerms, listeners: list[socket.socket]) -> None:
    name = f"pilotlight-grpc-{os.getpid()}-{os.urandom(8).hex()}"
    relay = Relay(name, max_per_address=terms.max_connections_per_address)
    client = ActivatorClient(Path(terms.activator), token=terms.token)
    service = Service(
        client,
        caller_of=relay.caller_of,
        read_timeout_s=terms.read_timeout_s,
        waiting_bytes=terms.waiting_bytes,
    )
    sizes = (
        ("grpc.max_receive_message_length", terms.max_message_bytes),
        ("grpc.max_send_message_length", -1),
    )
    server = grpc.aio.server(options=(*_OPTIONS, *sizes))
    server.add_generic_rpc_handlers((service.handler(),))
    server.add_insecure_port(f"{ABSTRACT}{name}")
    await server.start()
    try:
        accepting = [await relay.accept(listener) for listener in listeners]
        log.info("grpc serves address=%s:%d", *listeners[0].getsockname()[:2])
        gc.collect()
        gc.freeze()  # collections are frequent, and look at what was made since
        await _end_of_input()
        for each in accepting:
            each.close()
    finally:
        await server.stop(GRACE_S)
        await client.aclose()


def _memory_bytes(terms: GrpcTerms) -> int:
    """Return the bound of this process's address space: messages twice, as they arrive and as they
    are sent on, and as much again for the messages that are read."""
    return OWN_BYTES + 2 * terms.waiting_bytes + 2 * MAX_READING * terms.max_message_bytes


async def _end_of_input() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def look() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            ended.set()

    loop.add_reader(0, look)
    await ended.wait()


def main() -> None:
    """Serve until standard input ends."""
    # processes of the same uid must not read this one's memory
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    os.umask(0o077)
    logging_config.configure_logging("%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the activator handles it
    terms = GrpcTerms(**json.loads(os.fdopen(0, "rb", buffering=0, closefd=False).readline()))
    resource.setrlimit(resource.RLIMIT_AS, (_memory_bytes(terms),) * 2)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listeners = [socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:]]
    uvloop.run(_serve(terms, listeners))


if __name__ == "__main__":
    main()
