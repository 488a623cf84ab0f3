"""The public port belongs to the platform on every loopback family, for as long as something of it
is held."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from pilotlight.core.rpc import peer_uid
from pilotlight.core.transport.public_listener import (
    AddressInUse,
    open_functions_socket,
    open_listeners,
    public_addresses,
    reserve_addresses,
)
from tests.fakes.ports import free_port

OTHER_UID = 54321
ATTACK = """
import itertools, json, socket, sys
port, done = int(sys.argv[1]), []
for host, reuse, share, only in itertools.product(("127.0.0.1", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"), (0, 1), (0, 1), (0, 1)):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        try:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share)
            if ":" in host:
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            s.bind((host, port))
            s.listen()
            done.append([host, reuse, share, only])
        except OSError:
            pass
print(json.dumps(done))
"""


@contextmanager
def opened(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(each) for each in sockets]


def attack(port: int) -> list[list[object]]:
    """What a process of another user gets to listen at, whatever options it sets."""
    done = subprocess.run(
        ["python3", "-c", ATTACK, str(port)],
        user=OTHER_UID,
        group=OTHER_UID,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "listen, addresses",
    [
        ("127.0.0.1:8700", ["127.0.0.1:8700", "[::1]:8700"]),
        ("[::1]:8700", ["[::1]:8700", "127.0.0.1:8700"]),
        ("localhost:8700", ["127.0.0.1:8700", "[::1]:8700"]),
        ("0.0.0.0:8700", ["0.0.0.0:8700", "[::1]:8700"]),
        ("[::]:8700", ["[::]:8700"]),
        ("10.1.2.3:8700", ["10.1.2.3:8700"]),
    ],
)
def test_a_loopback_address_stands_for_both_families(listen: str, addresses: list[str]) -> None:
    assert [str(each) for each in public_addresses(listen)] == addresses


def test_a_free_port_is_the_same_on_both_families() -> None:
    with opened(open_listeners("127.0.0.1:0", is_shared=False)) as listeners:
        assert {each.getsockname()[0] for each in listeners} == {"127.0.0.1", "::1"}
        assert len({each.getsockname()[1] for each in listeners}) == 1


@pytest.mark.parametrize("listen", ["127.0.0.1", "[::1]", "localhost", "0.0.0.0", "[::]"])
@pytest.mark.root
def test_another_user_listens_at_no_loopback_address_of_the_port(listen: str) -> None:
    address = f"{listen}:{free_port()}"
    port = int(address.rpartition(":")[2])
    with opened(reserve_addresses(address)):
        assert attack(port) == [], "no activator runs yet"
        with (
            opened(open_listeners(address, is_shared=True)) as first,
            opened(open_listeners(address, is_shared=True)) as second,
        ):
            assert attack(port) == [], "activators have bound"
            for each in [*first, *second]:
                each.listen()
            assert attack(port) == [], "activators listen"
        assert attack(port) == [], "activators restart"
    assert attack(port), "the attack works where nothing is held"


def test_connections_are_refused_and_not_queued_while_no_activator_runs() -> None:
    port = free_port()
    with opened(reserve_addresses(f"127.0.0.1:{port}")):
        for host in ("127.0.0.1", "::1"):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port), timeout=5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_second_platform_is_refused_the_port_by_name_of_the_address(host: str) -> None:
    port = free_port()
    with socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ):
        for attempt in (reserve_addresses, partial(open_listeners, is_shared=False)):
            with pytest.raises(AddressInUse, match="Address already in use") as refused:
                attempt(f"127.0.0.1:{port}")
            assert host in str(refused.value)


def test_two_platforms_of_one_user_do_not_share_a_port() -> None:
    address = f"127.0.0.1:{free_port()}"
    with opened(reserve_addresses(address)), pytest.raises(AddressInUse):
        reserve_addresses(address)
    with (
        opened(reserve_addresses(address)),
        opened(open_listeners(address, is_shared=True)) as listeners,
    ):
        for each in listeners:
            each.listen()
        with pytest.raises(AddressInUse):
            reserve_addresses(address)


def test_a_platform_starts_again_at_once_where_connections_of_its_former_life_linger() -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        with (
            opened(reserve_addresses(address)),
            opened(open_listeners(address, is_shared=True)) as listeners,
        ):
            for each in listeners:
                each.setblocking(True)
                each.listen()
                with socket.create_connection(each.getsockname()[:2]) as caller:
                    each.accept()[0].close()  # we close first: TIME_WAIT is on our side
                    assert caller.recv(1) == b""


CALL = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    "print(s.recv(9).decode())"
)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_every_user_connects_to_the_socket_of_functions_and_what_was_there_is_replaced(
    short_tmp: Path,
) -> None:
    path = short_tmp / "http.sock"
    open_functions_socket(path).close()
    with open_functions_socket(path) as listener:
        caller = subprocess.Popen(
            ["python3", "-c", CALL, str(path)],
            user=OTHER_UID,
            group=OTHER_UID,
            extra_groups=[],
            stdout=subprocess.PIPE,
        )
        listener.setblocking(True)
        with listener.accept()[0] as connection:
            assert peer_uid(connection) == OTHER_UID
            connection.sendall(b"welcome")
        assert caller.communicate()[0] == b"welcome\n"
