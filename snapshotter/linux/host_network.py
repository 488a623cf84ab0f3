"""The host's side of the slots' networks: one table of rules for all slots, forwarding where it is
needed, and unique addresses.

All functions are called within `turn`: one agent of the machine at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.errors import Unsupported
from snapshotter.linux import net_commands
from snapshotter.linux.egress_policy import EgressRules

PREFIX = "pls"
TABLE = "pilotlight_slots"
_BLOCKS = [ipaddress.IPv4Network(f"100.{second}.0.0/16") for second in range(127, 63, -1)]
"""Shared address space (RFC 6598), highest block first; blocks that overlap a route of the host are
skipped."""
_CONF = Path("/proc/sys/net/ipv4/conf")
_LOCK = "/run/pilotlight-network.lock"

_RULES = f"""
table ip {TABLE} {{
  set opened {{ type ifname; }}
  map to_host {{ type devgroup : verdict; }}
  map beyond {{ type devgroup : verdict; }}
  chain input {{
    type filter hook input priority filter - 10; policy accept;
    iifname != "{PREFIX}*" accept
    iifgroup vmap @to_host
    reject
  }}
  chain forward {{
    type filter hook forward priority filter - 10; policy accept;
    iifname "{PREFIX}*" oifname "{PREFIX}*" reject
    oifname "{PREFIX}*" ct state established,related accept
    oifname "{PREFIX}*" reject
    iifname "{PREFIX}*" iifgroup vmap @beyond
    iifname "{PREFIX}*" reject
    iifname @opened oifname != "{PREFIX}*" ct state new,invalid,untracked ct status & dnat != dnat drop
  }}
  chain output {{ type filter hook output priority filter; policy accept; oifname "{PREFIX}*" ct state new reject; }}
  chain postrouting {{ type nat hook postrouting priority srcnat; policy accept; iifname "{PREFIX}*" masquerade; }}
}}
"""


def interfaces() -> list[str]:
    """Host interfaces of the live slots' networks."""
    return sorted(
        name
        for name in os.listdir("/sys/class/net")
        if name.startswith(PREFIX) and name[len(PREFIX) :].isdecimal()
    )


def choose_block(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """The first block that does not overlap the networks `taken`. Raises Unsupported."""
    networks = list(taken)
    for block in _BLOCKS:
        if not any(block.overlaps(network) for network in networks):
            return block
    raise Unsupported(
        "the host has routes in every /16 of 100.64.0.0/10: no addresses are left for networks of "
        "workers"
    )


def block(routes: Sequence[Mapping[str, Any]]) -> ipaddress.IPv4Network:
    """A block that the host's routes leave free. Our own routes are ignored: the number alone makes
    an address unique, in any block."""
    known = (
        r["dst"]
        for r in routes
        if r["dst"] != "default" and not str(r.get("dev", "")).startswith(PREFIX)
    )
    return choose_block(
        network for network in map(ipaddress.IPv4Network, known) if network.prefixlen > 10
    )


async def _routes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        await net_commands.run("ip", "-4", "-j", "route", "show", "table", "all") or "[]"
    )
    return found


def mtu(routes: Sequence[Mapping[str, Any]]) -> int:
    """MTU of the default route: a larger packet would have to be fragmented."""
    devices = [r["dev"] for r in routes if r["dst"] == "default" and "dev" in r]
    return min(
        [1500, *(int(Path(f"/sys/class/net/{device}/mtu").read_text()) for device in devices)]
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    """State found or created by this process, and when: with many slots at once, only the first
    checks the host. `last_close_ns`: when any agent of the machine last removed the table."""

    rules: EgressRules
    routes: list[dict[str, Any]]
    at: float
    last_close_ns: int


_opened: _Opened | None = None
_FRESH_S = 1.0


async def open_host(rules: EgressRules) -> list[dict[str, Any]]:
    """Create the table with these rules, and enable forwarding on every interface on which answers
    may arrive. Returns the host's routes.

    The table must not be removed while a slot has an interface; without our rules in it a slot has
    no access. Raises Unsupported.
    """
    global _opened
    if _is_fresh(rules) and _opened is not None and interfaces():
        return _opened.routes
    known: list[dict[str, Any]]
    chains, known = await asyncio.gather(net_commands.nft("list chains ip"), _routes())
    if f"table ip {TABLE} {{" not in chains:
        await net_commands.nft(_RULES + rules.orders(TABLE, PREFIX))
    elif f"chain {rules.chain} {{" not in chains:  # another agent may have created the table
        await net_commands.nft(rules.orders(TABLE, PREFIX))
    devices = {
        str(r["dev"]) for r in known if "dev" in r and r.get("type") not in ("local", "broadcast")
    }
    closed = [
        d
        for d in sorted(devices)
        if d != "lo" and not d.startswith(PREFIX) and _read(d, "forwarding") == "0"
    ]
    if closed:
        names = ", ".join(f'"{device}"' for device in closed)
        await net_commands.nft(
            f"add element ip {TABLE} opened {{ {names} }}"
        )  # add the guard first
        for device in closed:
            write(device, "forwarding", "1")
    await _pass_firewalls()
    _opened = _Opened(rules, known, time.monotonic(), _last_close_ns())
    return known


def _is_fresh(rules: EgressRules) -> bool:
    """Whether these rules were in the table a moment ago, and it was not removed since."""
    if _opened is None or _opened.rules != rules:
        return False
    return time.monotonic() - _opened.at < _FRESH_S and _opened.last_close_ns == _last_close_ns()


def _last_close_ns() -> int:
    return os.stat(_LOCK).st_mtime_ns


def forget() -> None:
    """Discard cached state: the next `open_host` checks the host again."""
    global _opened
    _opened = None


async def close_host() -> None:
    """Restore the original forwarding settings, and remove the table. Raises Unsupported."""
    global _opened
    _opened = None
    if not await _has_table():
        return
    listed = json.loads(await net_commands.nft(f"list set ip {TABLE} opened", as_json=True))
    opened = [
        name
        for entry in listed["nftables"]
        if "set" in entry
        for name in entry["set"].get("elem", [])
    ]
    # otherwise forwarding was enabled globally in the meantime
    if (_CONF / "all" / "forwarding").read_text().strip() == "0":
        for device in opened:
            with contextlib.suppress(Unsupported):  # the interface no longer exists
                write(device, "forwarding", "0")
    await _restore_firewalls()
    await net_commands.nft(f"delete table ip {TABLE}")
    os.utime(_LOCK)


async def _has_table() -> bool:
    return f"table ip {TABLE}\n" in await net_commands.nft("list tables")


def _read(device: str, key: str) -> str:
    try:
        return (_CONF / device / key).read_text().strip()
    except OSError:
        return ""


def write(device: str, key: str, value: str) -> None:
    """Set net.ipv4.conf.<device>.<key>. Raises Unsupported."""
    try:
        (_CONF / device / key).write_text(value)
    except OSError as e:
        raise Unsupported(
            f"net.ipv4.conf.{device}.{key} cannot be set ({e.strerror}): a separate network "
            f"requires a writable /proc/sys"
        ) from e


@contextlib.asynccontextmanager
async def turn() -> AsyncIterator[None]:
    """Lock changes of the host: no other agent can create a slot between the check for live slots
    and the removal of the table."""
    lock = os.open(_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


async def _forward_chains() -> list[dict[str, Any]]:
    """Base chains of other programs that filter forwarded packets."""
    listed = json.loads(await net_commands.nft("list chains", as_json=True))
    chains = [entry["chain"] for entry in listed["nftables"] if "chain" in entry]
    return [
        c
        for c in chains
        if c.get("hook") == "forward" and c["family"] in ("ip", "inet") and c["table"] != TABLE
    ]


def _where(chain: Mapping[str, Any]) -> str:
    return f"{chain['family']} {chain['table']} {chain['name']}"


async def _pass_firewalls() -> None:
    """Make firewalls that drop forwarded packets by policy (Docker's, ufw's) accept packets of
    slots, and the answers.

    The rules are appended to their chains, where only the policy is left: packets that a rule
    rejects remain rejected, as do those that our own table rejects, which is evaluated first.
    """
    for where in [
        _where(chain) for chain in await _forward_chains() if chain.get("policy") == "drop"
    ]:
        if f'comment "{TABLE}"' not in await net_commands.nft(f"list chain {where}"):
            passed = (f'oifname "{PREFIX}*" ct state established,related', f'iifname "{PREFIX}*"')
            await net_commands.nft(
                "\n".join(f'add rule {where} {match} accept comment "{TABLE}"' for match in passed)
            )


async def _restore_firewalls() -> None:
    """Undo `_pass_firewalls`."""
    for where in [_where(chain) for chain in await _forward_chains()]:
        listed = json.loads(await net_commands.nft(f"list chain {where}", as_json=True))
        rules = [entry["rule"] for entry in listed["nftables"] if "rule" in entry]
        for rule in rules:
            if rule.get("comment") == TABLE:
                await net_commands.nft(f"delete rule {where} handle {rule['handle']}")
