"""Networks of slots: what a worker reaches, what reaches it, and that nothing of it is left,
whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import Unsupported
from snapshotter.linux import dns_servers, host_network, net_commands, slot_network
from snapshotter.linux.dns_servers import DnsServers, FoundServers, NetworkAccess
from snapshotter.linux.egress_policy import (
    DENIED,
    EVERYWHERE,
    GATEWAY,
    INSIDE,
    METADATA,
    PUBLIC,
    EgressPolicy,
    resolvers,
)
from snapshotter.linux.slot_network import Network
from snapshotter.settings import SnapshotterSettings
from snapshotter.shim.sandbox import netns
from snapshotter.slots.pool import SlotPool
from snapshotter.slots.slot import Slot
from tests.fakes.host_address import host_address

TOOLS = ("ip", "nft", "nsenter", "unshare")
CONNECT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3) as s:
        s.settimeout(30)
        print("reached", s.makefile().readline().strip())
except OSError as e:
    print("refused", type(e).__name__)
"""
LISTEN = """
import select, socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as s:
    print("listening", flush=True)
    s.settimeout(20)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if select.select([sys.stdin, s], [], [])[0] == [s]:
            s.accept()[0].close()
"""
TELL = """
import socket, sys
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as s:
    print("listening", flush=True)
    with s.accept()[0] as connection:
        connection.sendall(connection.getpeername()[0].encode())
"""


# -- pure


def test_true_is_a_network_of_its_own() -> None:
    assert [Network.of(value) for value in (True, False, Network.NONE)] == [
        Network.OWN,
        Network.HOST,
        Network.NONE,
    ]


def test_the_block_is_one_where_the_host_has_no_route() -> None:
    assert str(host_network.choose_block([])) == "100.127.0.0/16"
    taken = [ipaddress.IPv4Network("100.127.3.4/32"), ipaddress.IPv4Network("100.120.0.0/13")]
    assert str(host_network.choose_block(taken)) == "100.119.0.0/16"


def test_no_room_for_addresses_is_said() -> None:
    with pytest.raises(Unsupported, match="no addresses are left"):
        host_network.choose_block([ipaddress.IPv4Network("100.64.0.0/10")])


@pytest.mark.parametrize(
    "host, behind, expected, relayed",
    [
        pytest.param(
            "nameserver 10.0.0.2\nsearch a.b\n", "", None, (), id="the host's own file will do"
        ),
        pytest.param(
            "# stub\nnameserver 127.0.0.53\nsearch a.b\noptions edns0\n",
            "nameserver 10.0.0.2\nnameserver 10.0.0.3\nsearch a.b\n",
            "nameserver 10.0.0.2\nnameserver 10.0.0.3\nsearch a.b\noptions edns0\n",
            (),
            id="servers behind a local stub",
        ),
        pytest.param(
            "nameserver 127.0.0.1\nnameserver fd00::1\nnameserver 9.9.9.9\n",
            "",
            "nameserver 9.9.9.9\n",
            (),
            id="one in reach",
        ),
        pytest.param(
            "nameserver ::1\nnameserver 127.0.0.11\nsearch a.b\n",
            "",
            f"nameserver {GATEWAY}\nsearch a.b\n",
            ("::1", "127.0.0.11"),
            id="nobody in reach",
        ),
    ],
)
def test_name_servers_are_in_reach(
    tmp_path: Path, host: str, behind: str, expected: str | None, relayed: tuple[str, ...]
) -> None:
    (tmp_path / "host").write_text(host)
    (tmp_path / "behind").write_text(behind)
    found = dns_servers.find(tmp_path / "host", tmp_path / "behind")
    assert found.text == expected
    assert found.relayed == relayed


def test_without_a_resolv_conf_there_is_nothing_to_replace(tmp_path: Path) -> None:
    assert dns_servers.find(tmp_path / "none", tmp_path / "none") == FoundServers(None, ())


def test_rules_name_what_is_open_and_closed_and_have_a_number_of_their_own() -> None:
    rules = EgressPolicy.of(["10.0.0.0/8"], ["10.0.0.7", "192.168.0.0/24"]).rules(
        ["10.0.0.1", "10.0.0.1"]
    )
    assert rules.to_host == (
        "ct state established,related accept",
        "meta l4proto { tcp, udp } th dport 53 ip daddr { 10.0.0.1 } accept",
        "ip daddr 169.254.169.254 reject",
        "ip daddr { 10.0.0.7/32, 192.168.0.0/24 } accept",
        "reject",
    )
    assert rules.beyond == (*rules.to_host[:-1], "ip daddr { 10.0.0.0/8 } reject", "accept")
    assert (
        rules.group
        == EgressPolicy.of(["10.0.0.0/8"], ["192.168.0.0/24", "10.0.0.7"]).rules(["10.0.0.1"]).group
        != EgressPolicy().rules([]).group
    )
    assert EgressPolicy.of([], []).rules([]).beyond == (
        "ct state established,related accept",
        "ip daddr 169.254.169.254 reject",
        "accept",
    )


def test_a_function_reaches_what_it_asks_for_where_the_operator_lets_it() -> None:
    egress = EgressPolicy.of(["10.0.0.0/8"], ["192.168.0.0/24"], ["10.1.0.0/16"])
    asked = egress.requested(["10.1.2.3", "10.1.2.2", "192.168.0.7"])
    assert [str(slot_network) for slot_network in asked.allowed] == [
        "10.1.2.2/31",
        "192.168.0.0/24",
    ]
    assert egress.requested([]).rules([]) == egress.rules([])
    for closed in ("10.2.0.0/16", "10.0.0.0/8", "8.8.8.8"):
        with pytest.raises(
            ValueError,
            match=r"egress: .* is not available to functions; snapshotter.egress_on_request allows "
            r"10.1.0.0/16",
        ):
            egress.requested([closed])


@pytest.mark.parametrize(
    "text", ["10.0.0.1/8", "::1/128", "example.test", "10.0.0.0/33", 7, None, ""]
)
def test_what_is_no_network_is_named_with_its_key(text: Any) -> None:
    with pytest.raises(ValueError, match=r"egress_allowed: .*write IPv4 networks or addresses"):
        SnapshotterSettings(egress_allowed=[text])


def test_name_servers_of_a_file_are_its_ipv4_ones() -> None:
    assert resolvers(
        ["nameserver 10.0.0.1", "nameserver ::1", "search a", "nameserver", "options x"]
    ) == ["10.0.0.1"]


# -- real


@pytest.fixture
def tools(require_or_skip: object) -> None:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        assert callable(require_or_skip)
        require_or_skip(
            f"{', '.join(missing)} are not installed (scripts/install-system-packages test)"
        )


@contextlib.asynccontextmanager
async def opened(
    directory: Path, egress: EgressPolicy = EVERYWHERE, servers: DnsServers | None = None
) -> AsyncIterator[SlotPool]:
    (directory / "logs").mkdir(exist_ok=True)
    slot_pool = SlotPool(
        directory / "slots",
        directory / "logs",
        log_max_bytes=4096,
        namespaced=True,
        access=NetworkAccess(egress=egress, name_servers=servers or DnsServers()),
    )
    try:
        yield slot_pool
    finally:
        await slot_pool.aclose()


@pytest.fixture
async def slot_pool(short_tmp: Path, tools: None) -> AsyncIterator[SlotPool]:
    async with opened(short_tmp) as slot_pool:
        yield slot_pool


@contextlib.asynccontextmanager
async def taken(slot_pool: SlotPool, kind: Network) -> AsyncIterator[Slot]:
    slot = await slot_pool.acquire(kind)
    try:
        yield slot
    finally:
        await slot.end()


@contextlib.contextmanager
def greeting(host: str) -> Iterator[int]:
    """A server that says hello to everybody; its port."""
    server = socket.create_server((host, 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, peer = server.accept()
                with connection:
                    connection.sendall(f"{peer[0]}\n".encode())

    thread = threading.Thread(target=serve, name="greeting")
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        server.close()


def beside(slot: Slot, *argv: str) -> list[str]:
    return ["nsenter", f"--net=/proc/{slot.shim_pid}/ns/net", *argv]


def in_its_root(slot: Slot) -> list[str]:
    """For `beside`: with the files that it sees."""
    return [f"--mount=/proc/{slot.shim_pid}/ns/mnt"]


async def reach(slot: Slot, host: str, port: int) -> str:
    return await answer(*beside(slot, sys.executable, "-c", CONNECT, host, str(port)))


async def answer(*argv: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, timeout=60, check=False
    )
    return (done.stdout + done.stderr).strip()


@contextlib.contextmanager
def listening(slot: Slot, port: int) -> Iterator[None]:
    command = beside(slot, sys.executable, "-c", LISTEN, str(port))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        try:
            yield
        finally:
            server.communicate("")


def interface(slot: Slot) -> str:
    return (slot.directory / "network").read_text()


def known_as(slot: Slot) -> str:
    """The address under which the host knows the slot."""
    routes = json.loads(
        subprocess.run(
            ["ip", "-4", "-j", "route", "show", "dev", interface(slot)],
            check=True,
            capture_output=True,
        ).stdout
    )
    return str(routes[0]["dst"])


async def vanished(name: str) -> bool:
    """The kernel ends namespaces in its own time."""
    async with asyncio.timeout(30):
        while name in host_network.interfaces():
            await asyncio.sleep(0.01)
    return True


@pytest.mark.slow  # six connections that wait to be refused, in three networks
@pytest.mark.root
async def test_a_worker_reaches_the_host_only_where_it_is_allowed_and_never_its_loopback(
    short_tmp: Path, tools: None
) -> None:
    for egress, answers in (
        (PUBLIC, "refused"),
        (EgressPolicy.of([], [host_address()]), "reached 100."),
        (EVERYWHERE, "reached 100."),
    ):
        async with opened(short_tmp, egress) as slot_pool, taken(slot_pool, Network.OWN) as slot:
            with greeting("0.0.0.0") as port:
                assert (await reach(slot, host_address(), port)).startswith(answers)
                assert (await reach(slot, GATEWAY, port)).startswith("refused")
            with greeting("127.0.0.1") as port:
                assert (await reach(slot, "127.0.0.1", port)).startswith("refused")
                assert (await reach(slot, GATEWAY, port)).startswith("refused")


@pytest.mark.root
@pytest.mark.parametrize(
    "address", ["10.99.0.2", "172.31.0.2", "192.168.99.2", "100.64.0.2", "169.254.5.2"]
)
async def test_private_networks_are_closed_unless_they_are_allowed(
    short_tmp: Path, tools: None, address: str
) -> None:
    with machine_behind_the_host() as there:
        await answer(*there, "ip", "addr", "add", f"{address}/32", "dev", "eth0")
        await answer("ip", "route", "add", address, "via", "198.51.100.2")  # goes with the link
        async with opened(short_tmp, PUBLIC) as slot_pool, taken(slot_pool, Network.OWN) as slot:
            with telling_peers(there, 7):
                assert (await answer(sys.executable, "-c", CONNECT, address, "7")).startswith(
                    "reached"
                )
            with telling_peers(there, 7):
                assert (await reach(slot, address, 7)).startswith("refused")
        async with (
            opened(short_tmp, EgressPolicy.of(DENIED, [address])) as slot_pool,
            taken(slot_pool, Network.OWN) as slot,
        ):
            with telling_peers(there, 7):
                assert (await reach(slot, address, 7)).startswith("reached")


@pytest.mark.root
async def test_name_servers_in_private_networks_are_open_at_their_port_alone(
    short_tmp: Path, tools: None
) -> None:
    (short_tmp / "resolv.conf").write_text("nameserver 10.99.0.2\nsearch x.test\n")
    servers = DnsServers(short_tmp / "resolv.conf", short_tmp / "none")
    with machine_behind_the_host() as there:
        await answer(*there, "ip", "addr", "add", "10.99.0.2/32", "dev", "eth0")
        await answer("ip", "route", "add", "10.99.0.2", "via", "198.51.100.2")
        async with (
            opened(short_tmp, PUBLIC, servers) as slot_pool,
            taken(slot_pool, Network.OWN) as slot,
        ):
            with telling_peers(there, 53):
                assert (await reach(slot, "10.99.0.2", 53)).startswith("reached")
            with telling_peers(there, 7):
                assert (await reach(slot, "10.99.0.2", 7)).startswith("refused")


@contextlib.contextmanager
def machine_behind_the_host() -> Iterator[list[str]]:
    """198.51.100.2, whose way to everywhere is this host; the command that runs something there."""
    link = f"plt{os.getpid() % 100000}"
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; read _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        there = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        try:
            for command in (
                [
                    "ip",
                    "link",
                    "add",
                    link,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    str(holder.pid),
                ],
                ["ip", "addr", "add", "198.51.100.1/30", "dev", link],
                ["ip", "link", "set", link, "up"],
                [*there, "ip", "addr", "add", "198.51.100.2/30", "dev", "eth0"],
                [*there, "ip", "link", "set", "eth0", "up"],
                [*there, "ip", "route", "add", "default", "via", "198.51.100.1"],
            ):
                subprocess.run(command, check=True)
            yield there
        finally:
            subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True)
            holder.communicate(b"")


@contextlib.contextmanager
def telling_peers(there: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(
        [*there, sys.executable, "-c", TELL, str(port)], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield
        finally:
            server.kill()  # it waits for a peer, that may never have come


@pytest.mark.root
async def test_a_worker_reaches_what_lies_behind_the_host_and_nobody_there_reaches_it(
    slot_pool: SlotPool,
) -> None:
    with machine_behind_the_host() as there:
        async with taken(slot_pool, Network.OWN) as slot:
            with telling_peers(there, 7):
                assert await reach(slot, "198.51.100.2", 7) == "reached 198.51.100.1"
            with listening(slot, 8):
                assert (
                    await answer(*there, sys.executable, "-c", CONNECT, known_as(slot), "8")
                ).startswith("refused")


@pytest.mark.root
async def test_the_machines_own_credentials_are_out_of_reach(slot_pool: SlotPool) -> None:
    with machine_behind_the_host() as there:
        await answer(*there, "ip", "addr", "add", f"{METADATA}/32", "dev", "eth0")
        await answer("ip", "route", "add", METADATA, "via", "198.51.100.2")  # goes with the link
        async with taken(slot_pool, Network.OWN) as slot:
            with telling_peers(there, 7):
                assert (await answer(sys.executable, "-c", CONNECT, METADATA, "7")).startswith(
                    "reached"
                )
            with telling_peers(there, 7):
                assert (await reach(slot, METADATA, 7)).startswith("refused")


@pytest.mark.root
async def test_slots_see_the_same_addresses_and_not_each_other(slot_pool: SlotPool) -> None:
    async with taken(slot_pool, Network.OWN) as one, taken(slot_pool, Network.OWN) as other:
        addresses = (
            "import socket; s = socket.socket(type=socket.SOCK_DGRAM); "
            "s.connect(('192.0.2.99', 1)); print(s.getsockname()[0])"
        )
        for slot in (one, other):
            assert (
                await answer(*beside(slot, sys.executable, "-W", "ignore", "-c", addresses))
                == INSIDE
            )
        assert known_as(one) != known_as(other)
        with listening(one, 4711), listening(other, 4711):
            assert (await reach(one, "127.0.0.1", 4711)).startswith("reached")
            assert (await reach(one, known_as(other), 4711)).startswith("refused")
            assert (
                await answer(sys.executable, "-c", CONNECT, known_as(other), "4711")
            ).startswith("refused")


@pytest.mark.root
async def test_without_a_network_there_is_the_loopback_alone(slot_pool: SlotPool) -> None:
    async with taken(slot_pool, Network.NONE) as slot:
        links = json.loads(await answer(*beside(slot, "ip", "-j", "link")))
        assert [(link["ifname"], "UP" in link["flags"]) for link in links] == [("lo", True)]
        with listening(slot, 4711), greeting("0.0.0.0") as port:
            assert (await reach(slot, "127.0.0.1", 4711)).startswith("reached")
            assert (await reach(slot, host_address(), port)).startswith("refused")


@pytest.mark.root
async def test_addresses_of_living_slots_differ(slot_pool: SlotPool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(taken(slot_pool, Network.OWN)) for _ in range(6)]
        assert (
            len({interface(slot) for slot in found}) == len({known_as(slot) for slot in found}) == 6
        )


@pytest.mark.root
async def test_a_slot_with_a_network_is_kept_ready_once_one_was_asked_for(
    slot_pool: SlotPool,
) -> None:
    async with taken(slot_pool, Network.HOST):
        assert "spare: host>" in repr(slot_pool)
    async with taken(slot_pool, Network.OWN):
        assert "spare: host, own>" in repr(slot_pool)


@pytest.mark.root
async def test_the_network_goes_with_a_shim_that_is_killed(slot_pool: SlotPool) -> None:
    slot = await slot_pool.acquire(Network.OWN)
    name = interface(slot)
    assert name in host_network.interfaces()
    os.kill(slot.shim_pid, signal.SIGKILL)
    assert await vanished(name)
    await slot.end()


@pytest.mark.root
@pytest.mark.parametrize(
    "is_kept", [True, False], ids=["the next agent opens it, too", "the next agent does not"]
)
async def test_what_a_function_asked_for_is_open_in_its_slot_alone(
    short_tmp: Path, tools: None, is_kept: bool
) -> None:
    here = host_address()
    left = SlotPool(
        short_tmp / "slots",
        short_tmp,
        log_max_bytes=4096,
        namespaced=True,
        access=NetworkAccess(egress=EgressPolicy.of([], [], [here])),
    )
    asking, other = await left.acquire(Network.OWN), await left.acquire(Network.OWN)
    with pytest.raises(Unsupported, match=r"192\.0\.2\.9/32 is not available to functions"):
        await left.open_egress(asking, ["192.0.2.9"])
    await left.open_egress(asking, [here])
    with greeting("0.0.0.0") as port:
        assert [(await reach(slot, here, port)).split()[0] for slot in (asking, other)] == [
            "reached",
            "refused",
        ]
    for slot in (asking, other):
        slot.close()
    kill_spawner(left)
    async with opened(short_tmp, EgressPolicy.of([], [], [here] if is_kept else [])) as slot_pool:
        adopted = {s.id: s for s in await slot_pool.adopt()}
        await slot_pool.open()
        with greeting("0.0.0.0") as port:
            assert (await reach(adopted[asking.id], here, port)).split()[0] == (
                "reached" if is_kept else "refused"
            )
            assert (await reach(adopted[other.id], here, port)).startswith("refused")
        for found in adopted.values():
            await found.end()
    await left.aclose()


@pytest.mark.root
async def test_a_slot_without_a_network_of_its_own_opens_nothing(slot_pool: SlotPool) -> None:
    slot = await slot_pool.acquire(Network.NONE)
    with pytest.raises(Unsupported, match="requires function networks"):
        await slot_pool.open_egress(slot, ["10.0.0.8"])
    await slot.end()


FLOWS = """
import socket, sys
host, ports = sys.argv[1], range(20001, 20001 + int(sys.argv[2]))
sent = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(int(sys.argv[3]))]
for udp in sent:
    udp.setblocking(False)
    for port in ports:
        try:
            udp.sendto(b"", (host, port))
        except OSError:
            pass
print(open("/proc/sys/net/netfilter/nf_conntrack_count").read())
"""


@pytest.mark.slow  # as many flows as a slot may have, and again as many
@pytest.mark.root
async def test_a_slot_takes_a_part_of_the_connections_that_the_host_can_track(
    slot_pool: SlotPool,
) -> None:
    most, address = slot_network.max_connections(), host_address()
    async with taken(slot_pool, Network.OWN) as slot:

        async def tracked(host: str, flows: int) -> int:
            send = (sys.executable, "-c", FLOWS, host, str(flows // 4), "4")
            return int(await answer(*beside(slot, *send)))

        assert await tracked("127.0.0.1", 2 * most) < most // 8
        assert most // 2 < await tracked(address, 2 * most) < most + 200
        with greeting(address) as port:
            assert (await reach(slot, address, port)).startswith("refused")
            async with taken(slot_pool, Network.OWN) as other:
                assert (await reach(other, address, port)).startswith("reached")


@pytest.mark.root
async def test_a_kernel_that_cannot_count_connections_has_slots_with_networks(
    slot_pool: SlotPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = net_commands.nft_here

    def without_count(orders: str, *, as_json: bool = False) -> str:
        if "ct count" in orders:
            raise Unsupported("nft: Could not process rule: No such file or directory")
        return real(orders, as_json=as_json)

    monkeypatch.setattr(net_commands, "nft_here", without_count)
    with greeting(host_address()) as port:
        async with taken(slot_pool, Network.OWN) as slot:
            assert (await reach(slot, host_address(), port)).startswith("reached")
    assert "network.connections_unlimited" in caplog.text


FLOOD = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
    for _ in range(5000):
        try:
            udp.sendto(b"who?", (HOST, 53))
        except OSError:
            pass
"""


@pytest.mark.root
async def test_a_slot_that_floods_the_relay_of_names_is_dropped_before_it(
    short_tmp: Path, tools: None
) -> None:
    host_file = short_tmp / "resolv.conf"
    host_file.write_text("nameserver 127.0.0.77\n")
    servers = DnsServers(host_file, short_tmp / "none")
    async with contextlib.aclosing(servers), opened(short_tmp, PUBLIC, servers) as slot_pool:
        slot = await slot_pool.acquire(Network.OWN)
        before = received(interface(slot))
        await answer(*beside(slot, sys.executable, "-c", FLOOD.replace("HOST", repr(GATEWAY))))
        assert 0 < received(interface(slot)) - before < 1000
        await slot.end()


def received(name: str) -> int:
    """Packets that the host got from a slot."""
    return int(Path(f"/sys/class/net/{name}/statistics/rx_packets").read_text())


ASK = """
import socket, sys
text = open("/etc/resolv.conf").read()
server = text.split("nameserver ")[1].split()[0]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
    udp.settimeout(20)
    udp.sendto(b"who?", (server, 53))
    print(udp.recv(100).decode())
with socket.create_connection((server, 53), timeout=20) as tcp:
    tcp.sendall(b"who?")
    tcp.shutdown(socket.SHUT_WR)
    print(tcp.makefile().read())
for port in map(int, sys.argv[1:]):
    try:
        socket.create_connection((server, port), timeout=3)
    except OSError as e:
        print(type(e).__name__)
"""


@contextlib.contextmanager
def names_on_loopback(address: str) -> Iterator[None]:
    """A name server at port 53 there; it answers any question with its own address."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.create_server((address, 53)) as tcp,
    ):
        udp.bind((address, 53))

        def answer_datagrams() -> None:
            with contextlib.suppress(OSError):
                while caller := udp.recvfrom(100)[1]:
                    udp.sendto(address.encode(), caller)

        def answer_connections() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with tcp.accept()[0] as connection:
                        connection.recv(100)
                        connection.sendall(address.encode())

        threads = [
            threading.Thread(target=each, daemon=True)
            for each in (answer_datagrams, answer_connections)
        ]
        for thread in threads:
            thread.start()
        yield
        for each in (udp, tcp):
            each.shutdown(socket.SHUT_RDWR) if each is tcp else each.sendto(b"", udp.getsockname())
        udp.close()
        for thread in threads:
            thread.join(20)


@pytest.mark.root
async def test_a_name_server_on_loopback_is_asked_through_the_gateway(
    short_tmp: Path, tools: None
) -> None:
    host_file = short_tmp / "resolv.conf"
    host_file.write_text("nameserver 127.0.0.77\n")
    servers = DnsServers(host_file, short_tmp / "none")
    async with contextlib.aclosing(servers), opened(short_tmp, PUBLIC, servers) as slot_pool:
        slot = await slot_pool.acquire(Network.OWN)
        port = servers.relay_port()
        assert port is not None
        with names_on_loopback("127.0.0.77"), greeting("127.0.0.1") as other:
            asked = beside(
                slot, *in_its_root(slot), sys.executable, "-c", ASK, str(port), str(other)
            )
            assert (await answer(*asked)).split() == [
                "127.0.0.77",
                "127.0.0.77",
                "ConnectionRefusedError",
                "ConnectionRefusedError",
            ]
            servers.close_relay()  # as if it had been killed
            again = await slot_pool.acquire(Network.OWN)
            assert (
                await answer(*beside(again, *in_its_root(again), sys.executable, "-c", ASK))
            ).split() == ["127.0.0.77", "127.0.0.77"]
            assert (await reach(slot, "127.0.0.1", other)).startswith("refused")
        for each in (slot, again):
            await each.end()


@pytest.mark.root
async def test_the_next_agent_keeps_living_networks_and_leaves_the_host_as_it_was(
    short_tmp: Path, tools: None
) -> None:
    before = forwarding()
    left = SlotPool(
        short_tmp / "slots",
        short_tmp,
        log_max_bytes=4096,
        namespaced=True,
        access=NetworkAccess(egress=PUBLIC),
    )
    slot = await left.acquire(Network.OWN)
    name = interface(slot)
    slot.close()
    kill_spawner(left)
    async with opened(short_tmp, EgressPolicy.of([], [host_address()])) as slot_pool:
        with greeting("0.0.0.0") as port:
            assert (await reach(slot, host_address(), port)).startswith("refused")
        adopted = {s.id: s for s in await slot_pool.adopt()}
        await slot_pool.open()
        with greeting("0.0.0.0") as port:
            assert (await reach(adopted[slot.id], host_address(), port)).startswith("reached")
        for found in adopted.values():
            await found.end()
    await left.aclose()
    assert await vanished(name)
    if not host_network.interfaces():  # another agent on this machine may have some
        assert forwarding() <= before, (
            "it was on before where it is on: an agent of another test may have switched it off "
            "meanwhile"
        )
        assert host_network.TABLE not in await answer("nft", "list", "tables")


def forwarding() -> set[str]:
    """Interfaces of the host that forward."""
    devices = Path("/proc/sys/net/ipv4/conf").iterdir()
    return {
        d.name
        for d in devices
        if not d.name.startswith("pl") and (d / "forwarding").read_text() == "1\n"
    }


def kill_spawner(slot_pool: SlotPool) -> None:
    """As when the agent and everything but the shims is killed."""
    pid = int(repr(slot_pool).split("pid ")[1].split(",")[0])
    os.kill(pid, signal.SIGKILL)


FIREWALLED = """
import asyncio, sys
from snapshotter.linux import host_network, net_commands
from snapshotter.linux.egress_policy import PUBLIC

async def main() -> None:
    await net_commands.nft(sys.argv[1])
    before = await net_commands.nft("list ruleset")
    for _ in range(2):
        async with host_network.turn():
            await host_network.open_host(PUBLIC.rules([]))
        print(await net_commands.nft("list chain ip filter FORWARD"), await net_commands.nft("list chain inet other FORWARD"))
    async with host_network.turn():
        await host_network.close_host()
    assert await net_commands.nft("list ruleset") == before

asyncio.run(main())
"""
DOCKERS = """
table ip filter { chain FORWARD { type filter hook forward priority filter; policy drop; ip daddr 192.0.2.1 drop; }; }
table inet other { chain FORWARD { type filter hook forward priority filter; policy accept; }; }
"""


@pytest.mark.root
async def test_a_firewall_that_drops_what_is_forwarded_passes_what_slots_send_and_is_left_as_it_was(
    tools: None,
) -> None:
    """In a network namespace that stands for a host's."""
    said = await answer("unshare", "--net", sys.executable, "-c", FIREWALLED, DOCKERS)
    chain = [
        line.strip()
        for line in said.splitlines()
        if "accept comment" in line or "192.0.2.1" in line
    ]
    assert chain == 2 * [
        "ip daddr 192.0.2.1 drop",
        'oifname "pls*" ct state established,related accept comment "pilotlight_slots"',
        'iifname "pls*" accept comment "pilotlight_slots"',
    ], said
    assert "Error" not in said


FLUSHED = """
import asyncio, sys
from pathlib import Path
from snapshotter.linux import host_network, net_commands
from snapshotter.linux.dns_servers import NetworkAccess
from snapshotter.linux.egress_policy import EgressPolicy
from snapshotter.linux.slot_network import Network
from snapshotter.slots.pool import SlotPool

async def main() -> None:
    home, egress = Path(sys.argv[1]), EgressPolicy.of(["10.0.0.0/8"], [], ["10.0.0.0/24"])
    slot_pool = SlotPool(home / "slots", home, log_max_bytes=4096, namespaced=True, access=NetworkAccess(egress=egress), usual=Network.OWN)
    await slot_pool.open()
    slots = [await slot_pool.acquire(Network.OWN) for _ in range(2)]
    await slot_pool.open_egress(slots[0], ["10.0.0.7"])
    before = await net_commands.nft("list ruleset")
    chains = {line for line in before.splitlines() if "chain" in line}
    assert len(chains) > 4, before
    for _ in range(2):
        await net_commands.nft("flush ruleset")
        async with asyncio.timeout(30):
            while not chains <= set((await net_commands.nft("list ruleset")).splitlines()):
                pass
        print("they are back")
    for slot in slots:
        await slot.end()
    await slot_pool.aclose()
    print("left", repr(await net_commands.nft("list ruleset")))

asyncio.run(main())
"""


@pytest.mark.root
async def test_rules_that_another_program_flushes_are_back_for_every_living_slot(
    short_tmp: Path, tools: None
) -> None:
    """In a network namespace that stands for a host's."""
    # the interfaces that are there, not the host's
    begin = 'mount -t sysfs sysfs /sys && exec "$@"'
    said = await answer(
        "unshare",
        "--net",
        "--mount",
        "sh",
        "-c",
        begin,
        "sh",
        sys.executable,
        "-c",
        FLUSHED,
        str(short_tmp),
    )
    printed = [
        line for line in said.splitlines() if line.startswith(("they are", "left", "Traceback"))
    ]
    assert printed == ["they are back", "they are back", "left ''"], said
    assert said.count("another program removed the rules") == 2


TWO_AGENTS = """
import asyncio, dataclasses, subprocess, sys, time
from snapshotter.linux.egress_policy import PUBLIC, EgressPolicy
from snapshotter.linux import host_network, net_commands

OTHER = '''
import asyncio
from snapshotter.linux.egress_policy import PUBLIC
from snapshotter.linux import host_network
async def main():
    async with host_network.turn():
        await host_network.close_host()
    async with host_network.turn():
        await host_network.open_host(PUBLIC.rules([]))
asyncio.run(main())
'''

async def main() -> None:
    rules = EgressPolicy.of([], ["10.0.0.7"], []).rules([])
    await net_commands.run("ip", "link", "add", "pls1", "type", "veth", "peer", "name", "slot1")
    for _ in range(2):
        async with host_network.turn():
            await host_network.open_host(rules)
        assert f"chain {rules.chain} {{" in await net_commands.nft("list chains ip")
        subprocess.run([sys.executable, "-c", OTHER], check=True)
        host_network._opened = host_network._opened and dataclasses.replace(host_network._opened, at=time.monotonic())
    print("both have their rules")

asyncio.run(main())
"""


@pytest.mark.root
async def test_rules_that_another_agent_removed_a_moment_ago_are_made_again(tools: None) -> None:
    """In a network namespace that stands for a host's."""
    begin = 'mount -t sysfs sysfs /sys && exec "$@"'
    said = await answer(
        "unshare", "--net", "--mount", "sh", "-c", begin, "sh", sys.executable, "-c", TWO_AGENTS
    )
    assert said.splitlines()[-1:] == ["both have their rules"], said


async def test_rules_that_went_with_the_last_slot_are_not_made_again(
    short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot_pool = SlotPool(short_tmp / "slots", short_tmp, log_max_bytes=4096, namespaced=False)
    slot_pool._networks["pls0"] = ()  # no slot has it: numbers begin with 1
    slot_pool._rules_removed()
    await asyncio.sleep(0)
    assert "another program" not in caplog.text


@pytest.mark.root
async def test_the_probe_tries_it_and_leaves_nothing(tools: None) -> None:
    on, why = await slot_network.probe()
    assert on, why


@pytest.mark.root
@pytest.mark.parametrize("package", ["iproute2", "nftables"])
async def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: None, package: str
) -> None:
    for tool in ("ip", "nsenter", "unshare", "sh"):
        if (tool, package) != ("ip", "iproute2"):
            (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", str(tmp_path))
    if package == "nftables":
        monkeypatch.setattr(
            net_commands, "_library", functools.cache(lambda: ctypes.CDLL("libnobody.so.1"))
        )
    assert await slot_network.probe() == (
        False,
        f"a separate network requires {package}; on Debian: apt-get install {package}",
    )


@pytest.mark.root
async def test_rules_that_cannot_be_are_refused_with_the_librarys_words(tools: None) -> None:
    with pytest.raises(Unsupported, match=r"nft: .*syntax error.*nonsense"):
        await net_commands.nft("nonsense")


async def test_functions_get_no_network_rather_than_the_hosts_where_none_of_their_own_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [await slot_network.of_functions(kind) for kind in Network] == [
        Network.HOST,
        Network.NONE,
        Network.NONE,
    ]


async def test_plain_slots_have_the_hosts_network_only(short_tmp: Path) -> None:
    slot_pool = SlotPool(short_tmp / "slots", short_tmp, log_max_bytes=4096, namespaced=False)
    with pytest.raises(Unsupported, match="needs namespaces: the agent is not root"):
        await slot_pool.acquire(Network.OWN)
    await slot_pool.aclose()


@pytest.mark.root
def test_name_servers_are_shown_in_that_mount_namespace_only(tmp_path: Path, tools: None) -> None:
    before = Path(netns.RESOLVER).read_text()
    script = (
        "import sys; from snapshotter.shim.sandbox import netns; "
        "netns.use_name_servers(*sys.argv[1:]); print(open(netns.RESOLVER).read())"
    )
    command = [
        "unshare",
        "--mount",
        sys.executable,
        "-c",
        script,
        "nameserver 10.9.8.7\n",
        str(tmp_path / "resolv.conf"),
    ]
    shown = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    ).stdout
    assert shown.strip() == "nameserver 10.9.8.7"
    assert Path(netns.RESOLVER).read_text() == before
