"""Which TCP connections leave a tree of processes, of real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from snapshotter.starts.tcp_connections import has_outside


@contextmanager
def connected_child(port: int) -> Iterator[int]:
    """A process that has connected to the port, while the context lasts; its pid."""
    code = (
        "import socket, sys\n"
        f"kept = socket.create_connection(('127.0.0.1', {port}))\n"
        "print(flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        yield child.pid
        child.stdin.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_connection_is_outside_unless_both_ends_are_ours(host: str) -> None:
    """A server at all addresses of IPv6 sees the addresses of IPv4 in another form."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family, dualstack_ipv6=":" in host) as server,
        connected_child(server.getsockname()[1]) as child,
        server.accept()[0],
    ):
        assert has_outside([child])
        assert not has_outside([os.getpid(), child])


def test_a_listener_is_no_connection_and_a_process_that_is_gone_has_none() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        child = subprocess.Popen(["/bin/sleep", "60"])
        assert not has_outside([child.pid])
        child.kill()
        child.wait()
    assert not has_outside([child.pid])
    assert not has_outside([])
