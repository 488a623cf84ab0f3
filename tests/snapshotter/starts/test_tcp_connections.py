"""Which TCP connections leave a tree of processes, of real sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from snapshotter.starts.tcp_connections import has_outside

CONNECT = """
import socket, sys
kept = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(flush=True)
sys.stdin.read()
"""
SERVE = """
import socket, sys
host = sys.argv[1]
family = socket.AF_INET6 if ":" in host else socket.AF_INET
server = socket.create_server((host, 0), family=family, dualstack_ipv6=":" in host)
print(server.getsockname()[1], flush=True)
kept = server.accept()
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def child(code: str, argument: object) -> Iterator[tuple[int, IO[bytes]]]:
    """A process that runs this code while the context lasts; its pid, and what it prints."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, str(argument)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield process.pid, process.stdout
        process.stdin.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_connection_is_outside_unless_both_ends_are_ours(host: str) -> None:
    """A server at all addresses of IPv6 sees the addresses of IPv4 in another form."""
    with child(SERVE, host) as (server, said):
        port = int(said.readline())
        with child(CONNECT, port) as (client, _):
            said.readline()
            assert has_outside([client])
            assert has_outside([server])
            assert not has_outside([server, client])


def test_a_listener_is_no_connection_and_a_process_that_is_gone_has_none() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        child = subprocess.Popen(["/bin/sleep", "60"])
        assert not has_outside([child.pid])
        child.kill()
        child.wait()
    assert not has_outside([child.pid])
    assert not has_outside([])
