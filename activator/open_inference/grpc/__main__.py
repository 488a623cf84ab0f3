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

import uvloop

from activator.open_inference.grpc.activator_client import ActivatorClient
from activator.open_inference.grpc.admission import MAX_READING, Admission
from activator.open_inference.grpc.process import GrpcTerms
from activator.open_inference.grpc.relay import ABSTRACT, Relay
from activator.open_inference.grpc.server import new_server
from activator.open_inference.grpc.service import Service
from pilotlight.core import logging_config

log = logging.getLogger("activator.grpc")

OWN_BYTES = 4 * 1024**3
"""Address space of the process without messages, most of which it never touches."""
_PR_SET_DUMPABLE = 4
GRACE_S = 2.0
"""How long running calls may continue after the end of standard input: the activator has answered
those that it knows."""


async def _serve(terms: GrpcTerms, listeners: list[socket.socket]) -> None:
    name = f"pilotlight-grpc-{os.getpid()}-{os.urandom(8).hex()}"
    relay = Relay(name, max_per_address=terms.max_connections_per_address)
    client = ActivatorClient(Path(terms.activator), token=terms.token)
    service = Service(
        client,
        connections=relay,
        admission=Admission(max_bytes=terms.waiting_bytes),
        pause_s=terms.read_timeout_s,
    )
    server = new_server(service.handler(), max_message_bytes=terms.max_message_bytes)
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
