"""A slot's network: the host's, one of its own with a way out, or none.

HOST: the namespace that the agent is in. NONE: a namespace of its own with nothing but a loopback interface. OWN: that, and a pair of
virtual interfaces (veth(4)) to the host, which forwards and translates addresses (nftables). So several clones of one server listen on
the same ports and never meet.

What a worker in OWN reaches: itself on 127.0.0.1, the internet, and servers on the host by the host's address (those that listen on
the host's 127.0.0.1 are out of its reach). What reaches it: answers only. Nothing on the host, in another slot or outside opens a
connection into it; its Unix socket is the way in. IPv4 only.

Every OWN slot sees the same addresses (`INSIDE`, `GATEWAY`) on every node: an image of a server that bound its own address, or told
it to its parts, restores in any slot. Its own rule translates them to the one address that the host knows it by.

The kernel keeps the books. An interface `pln<n>` on the host stands for the address n of the block; making it is atomic, so no two
living slots have one address, whichever agent made them. It is made straight into the slot's namespace, and ends with it, when the
last process in it does: no agent, spawner or shim has to live for that. One table holds the rules of all slots. Forwarding is switched
on for the interfaces that need it, never for the host as a whole; where it was off, a rule keeps the host from passing on what it did
not before, and names these interfaces, so that `sweep` can switch it off again when no slot is left.

Not pasta (passt): that is a process of 20 MiB beside every worker, it does not want to be root, and its versions differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import ipaddress
import json
import os
import random
import shutil
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from snapshotter.errors import Unsupported

INSIDE, GATEWAY = "169.254.77.2", "169.254.77.1"
"""Of the slot, and of the host as the slot sees it: link-local, so they name nothing anywhere else (RFC 3927)."""
_PREFIX = "pln"
_TABLE = "pilotlight"
_LAST = 65533
"""Of a /16, without the ends: nothing may send to either."""
_BLOCKS = [ipaddress.IPv4Network(f"100.{second}.0.0/16") for second in range(127, 63, -1)]
"""Shared address space (RFC 6598), the far end first; a block in which the host has a route is passed over."""
_SLOT_MAC, _HOST_MAC = "02:00:00:00:4d:02", "02:00:00:00:4d:01"
"""Locally administered, and known beforehand: no neighbour has to be asked for."""
_CONF = Path("/proc/sys/net/ipv4/conf")
_RESOLVED = Path("/run/systemd/resolve/resolv.conf")
"""The real servers behind a local stub, as systemd-resolved writes them."""
_PATIENCE_S = 10.0
_ATTEMPTS = 64

_RULES = f"""
table ip {_TABLE} {{
  set opened {{ type ifname; }}
  chain forward {{
    type filter hook forward priority filter - 10; policy accept;
    iifname "{_PREFIX}*" oifname "{_PREFIX}*" reject
    oifname "{_PREFIX}*" ct state established,related accept
    oifname "{_PREFIX}*" reject
    iifname @opened oifname != "{_PREFIX}*" ct state new,invalid,untracked ct status & dnat != dnat drop
  }}
  chain output {{ type filter hook output priority filter; policy accept; oifname "{_PREFIX}*" ct state new reject; }}
  chain postrouting {{ type nat hook postrouting priority srcnat; policy accept; iifname "{_PREFIX}*" masquerade; }}
}}
"""


class Network(enum.StrEnum):
    """Which network a slot is in."""

    HOST = "host"
    OWN = "own"
    NONE = "none"

    @classmethod
    def of(cls, value: Network | bool) -> Network:
        """True is OWN, False HOST."""
        if isinstance(value, Network):
            return value
        return cls.OWN if value else cls.HOST


async def connect(namespace: int) -> str:
    """Give the network namespace behind this descriptor its way out; the name of its interface on the host. Raises Unsupported."""
    _check_tools()
    async with _turn():
        routes = await _routes()
        await _open_host(routes)
        mtu = await _mtu(routes)
        number, name = await _make_pair(namespace, mtu)
        address = str(_block(routes)[number])
        await _join_host(name, address)
    await _furnish(namespace, address)
    return name


async def sweep() -> None:
    """Take the host back to what it was, unless a slot with a network of its own lives. Where it cannot, it does nothing."""
    if os.geteuid() != 0 or shutil.which("nft") is None:
        return
    with contextlib.suppress(Unsupported, OSError):
        async with _turn():
            if not interfaces():
                await _close_host()


def interfaces() -> list[str]:
    """The host's ends of the living slots' networks."""
    return sorted(name for name in os.listdir("/sys/class/net") if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdecimal())


async def probe() -> tuple[bool, str]:
    """Whether OWN works here, tried with a namespace that is gone afterwards; why not, or what to know about it."""
    if os.geteuid() != 0:
        return False, "needs root (CAP_SYS_ADMIN and CAP_NET_ADMIN): servers that listen on TCP share the host's network"
    try:
        async with _fresh_namespace() as namespace:
            await remove([await connect(namespace)])
        remark = await _remark()
    except Unsupported as e:
        return False, str(e)
    finally:
        await sweep()
    return True, remark


async def remove(names: Iterable[str]) -> None:
    """End these networks now: that of a slot which has ended goes by itself, but when the kernel finds the time."""
    for name in names:
        with contextlib.suppress(Unsupported):  # it was faster
            await _run("ip", "link", "delete", name)


def name_servers(host_file: Path = Path("/etc/resolv.conf"), behind: Path = _RESOLVED) -> str | None:
    """What /etc/resolv.conf must say in a namespace of its own; None when the host's own file will do.

    A server on 127.0.0.1 is out of reach there: those behind it are taken, where systemd-resolved tells them.
    """
    lines = _lines(host_file)
    if not any(_is_local(line) for line in lines):
        return None
    kept = [line for line in lines if not _is_local(line)]
    servers = [line for line in [*kept, *_lines(behind)] if line.startswith("nameserver") and not _is_local(line)]
    return "\n".join([*servers, *(line for line in kept if not line.startswith("nameserver")), ""])


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip() and line[0] not in "#;"]
    except OSError:
        return []


def _is_local(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and words[0] == "nameserver" and (words[1].startswith("127.") or words[1] == "::1")


# -- the host


def choose_block(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """The first block that shares nothing with the networks `taken`. Raises Unsupported."""
    networks = list(taken)
    for block in _BLOCKS:
        if not any(block.overlaps(network) for network in networks):
            return block
    raise Unsupported("the host has routes in every /16 of 100.64.0.0/10: no addresses are left for networks of workers")


def _block(routes: Sequence[dict[str, Any]]) -> ipaddress.IPv4Network:
    """Where the host's routes leave room. Ours do not count: the number alone makes an address unique, in any block."""
    known = (r["dst"] for r in routes if r["dst"] != "default" and not str(r.get("dev", "")).startswith(_PREFIX))
    return choose_block(network for network in map(ipaddress.IPv4Network, known) if network.prefixlen > 10)


async def _routes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await _run("ip", "-4", "-j", "route", "show", "table", "all") or "[]")
    return found


async def _mtu(routes: Sequence[dict[str, Any]]) -> int:
    """That of the way out: a larger packet than it takes would have to be sent twice."""
    devices = [r["dev"] for r in routes if r["dst"] == "default" and "dev" in r]
    return min([1500, *(int(Path(f"/sys/class/net/{device}/mtu").read_text()) for device in devices)])


async def _open_host(routes: Sequence[dict[str, Any]]) -> None:
    """The table, and forwarding on every interface on which answers may come."""
    if not await _has_table():
        await _run("nft", "-f", "-", stdin=_RULES)
    devices = {str(r["dev"]) for r in routes if "dev" in r and r.get("type") not in ("local", "broadcast")}
    closed = [d for d in sorted(devices) if d != "lo" and not d.startswith(_PREFIX) and _read(d, "forwarding") == "0"]
    if closed:
        names = ", ".join(f'"{device}"' for device in closed)
        await _run("nft", "-f", "-", stdin=f"add element ip {_TABLE} opened {{ {names} }}\n")  # the guard first
        for device in closed:
            _write(device, "forwarding", "1")


async def _close_host() -> None:
    if not await _has_table():
        return
    listed = json.loads(await _run("nft", "-j", "list", "set", "ip", _TABLE, "opened"))
    opened = [name for entry in listed["nftables"] if "set" in entry for name in entry["set"].get("elem", [])]
    if (_CONF / "all" / "forwarding").read_text().strip() == "0":  # else somebody has switched it on for everything meanwhile
        for device in opened:
            with contextlib.suppress(Unsupported):  # the interface is gone
                _write(device, "forwarding", "0")
    await _run("nft", "delete", "table", "ip", _TABLE)


async def _has_table() -> bool:
    return f"table ip {_TABLE}\n" in await _run("nft", "list", "tables")


def _read(device: str, key: str) -> str:
    try:
        return (_CONF / device / key).read_text().strip()
    except OSError:
        return ""


def _write(device: str, key: str, value: str) -> None:
    try:
        (_CONF / device / key).write_text(value)
    except OSError as e:
        raise Unsupported(
            f"net.ipv4.conf.{device}.{key} cannot be set ({e.strerror}): a network of its own needs a writable /proc/sys"
        ) from e


# -- one slot


async def _make_pair(namespace: int, mtu: int) -> tuple[int, str]:
    """Interfaces with a number that no living slot has, nor had a moment ago: late answers of its connections find nobody."""
    taken, refusal = set(interfaces()), ""
    start = random.SystemRandom().randrange(_LAST)
    free = (n for n in ((start + step) % _LAST + 1 for step in range(_LAST)) if f"{_PREFIX}{n}" not in taken)
    for _, number in zip(range(_ATTEMPTS), free, strict=False):
        name = f"{_PREFIX}{number}"
        peer = f"type veth peer name eth0 address {_SLOT_MAC} mtu {mtu} netns /proc/self/fd/{namespace}"
        try:
            await _run("ip", *f"link add {name} address {_HOST_MAC} mtu {mtu} {peer}".split(), fds=(namespace,))
        except Unsupported as e:
            if "File exists" not in str(e):
                raise
            refusal = str(e)
            continue
        return number, name
    raise Unsupported(refusal or f"all {_LAST} addresses for networks of workers are in use")


async def _join_host(name: str, address: str) -> None:
    _write(name, "forwarding", "1")
    _write(name, "rp_filter", "1")  # a worker sends under its own address only
    orders = f"""
        {_without_ipv6(name)}
        link set {name} up
        neigh replace {address} lladdr {_SLOT_MAC} dev {name} nud permanent
        route add {address}/32 dev {name}
    """
    await _run("ip", "-batch", "-", stdin=orders)


async def _furnish(namespace: int, address: str) -> None:
    """From within: addresses, the way out, and the translation of the slot's address to the one that the host knows."""
    orders = f"""
        {_without_ipv6("eth0")}
        link set eth0 up
        addr add {INSIDE}/30 dev eth0
        neigh replace {GATEWAY} lladdr {_HOST_MAC} dev eth0 nud permanent
        route add default via {GATEWAY}
    """
    inside = ("nsenter", f"--net=/proc/self/fd/{namespace}")
    rules = f"table ip {_TABLE} {{ chain out {{ type nat hook postrouting priority srcnat; oifname eth0 snat to {address}; }}; }}\n"
    await _run(*inside, "ip", "-batch", "-", stdin=orders, fds=(namespace,))
    await _run(*inside, "nft", "-f", "-", stdin=rules, fds=(namespace,))


def _without_ipv6(device: str) -> str:
    """No link-local address: over it a slot would reach what the host has on [::], past the rules of table ip."""
    return f"link set {device} addrgenmode none" if os.path.exists("/proc/sys/net/ipv6") else ""


# -- tools


def _check_tools() -> None:
    packages = {"ip": "iproute2", "nft": "nftables", "nsenter": "util-linux", "unshare": "util-linux"}
    missing = sorted({package for tool, package in packages.items() if shutil.which(tool) is None})
    if missing:
        raise Unsupported(f"a network of its own needs {' and '.join(missing)}; on Debian: apt-get install {' '.join(missing)}")


async def _remark() -> str:
    """A firewall of the host's that drops what is forwarded leaves the workers the host alone."""
    listed = json.loads(await _run("nft", "-j", "list", "chains"))
    chains = [entry["chain"] for entry in listed["nftables"] if "chain" in entry]
    for chain in chains:
        if chain.get("hook") == "forward" and chain.get("policy") == "drop" and chain["family"] in ("ip", "inet"):
            where = f"{chain['family']} {chain['table']} {chain['name']}"
            return f'the host\'s firewall drops what is forwarded: allow `iifname "{_PREFIX}*"` and its answers in chain {where}'
    return ""


@contextlib.asynccontextmanager
async def _fresh_namespace() -> AsyncIterator[int]:
    """A network namespace that nobody is in. Raises Unsupported."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("unshare", "--net", "sh", "-c", "echo; read _", stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        if not await child.stdout.readline():
            said = (await child.stderr.read()).decode(errors="replace").strip()
            raise Unsupported(f"{said or 'unshare ended'}; a network namespace needs CAP_SYS_ADMIN and a kernel with CONFIG_NET_NS")
        namespace = os.open(f"/proc/{child.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield namespace
        finally:
            os.close(namespace)
    finally:
        await child.communicate(b"")


@contextlib.asynccontextmanager
async def _turn() -> AsyncIterator[None]:
    """One agent at a time changes the host: between its look for living slots and the table's end no other makes one."""
    lock = os.open("/run/lock/pilotlight-network", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


async def _run(*argv: str, stdin: str = "", fds: Sequence[int] = ()) -> str:
    """Run a short command; what it printed. Raises Unsupported with what it complained about."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=fds)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            out, errors = await child.communicate(stdin.encode())
    except TimeoutError as e:
        raise Unsupported(f"{argv[0]} did not answer in {_PATIENCE_S:g} s") from e
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        said = " ".join(errors.decode(errors="replace").split())
        raise Unsupported(f"{' '.join(argv[:3])}: {said[-300:]}; a network of its own needs CAP_NET_ADMIN, veth and nftables in the kernel")
    return out.decode()
