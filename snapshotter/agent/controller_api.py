"""Operations of the node agent that a non-root controller may call, and the checks on their
arguments.

The agent is root, and the controller processes requests of tenants. It may inspect, stop and delete
what is on the node, have images built, and have commands run as tenants: names must be valid, and
uids must belong to tenants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.core.rpc import RpcGuest, RpcOperation, SendPart
from pilotlight.core.settings import Paths
from snapshotter.errors import OrderRefused
from snapshotter.volumes import api as volumes

PLAIN = ("instances", "templates", "drop_template", "snapshots", "capabilities", "gpus")
"""Operations whose arguments are only looked up among existing objects."""
_INSTANCE = re.compile(r"i-[0-9a-f]{16}\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Check = Callable[[Mapping[str, Any]], None]


def guest(of_root: Mapping[str, RpcOperation], paths: Paths, *, uid_base: int) -> RpcGuest | None:
    """API of a controller that has its own uid."""
    if paths.controller_uid is None:
        return None
    return RpcGuest(uid=paths.controller_uid, operations=operations(of_root, uid_base=uid_base))


def operations(of_root: Mapping[str, RpcOperation], *, uid_base: int) -> Mapping[str, RpcOperation]:
    """The subset of `of_root` that a controller may call. `uid_base`: first uid of tenants."""

    def tenant(args: Mapping[str, Any]) -> None:
        check_tenant(args.get("uid"), uid_base=uid_base)

    def image(args: Mapping[str, Any]) -> None:
        tenant(args)
        _check_name(args, "digest", _DIGEST)

    checks: Mapping[str, Check] = {
        "stop": lambda args: _check_name(args, "instance_id", _INSTANCE),
        "usage": lambda args: _check_name(args, "instance_id", _INSTANCE),
        "exec": lambda args: _check_name(args, "instance_id", _INSTANCE),
        "logs": lambda args: _check_name(args, "instance_id", _NAME, optional=True),
        "prove_snapshot": lambda args: _check_name(args, "snapshot_id", _NAME),
        "quarantine_snapshot": lambda args: _check_name(args, "snapshot_id", _NAME),
        "delete_snapshots": lambda args: _check_name(args, "snapshot_id", _NAME, optional=True),
        "build_image": tenant,
        "delete_image": image,
        **volumes.checks(),
    }
    return {
        **{name: of_root[name] for name in PLAIN},
        **{name: _with_check(of_root[name], check) for name, check in checks.items()},
    }


def check_tenant(uid: object, *, uid_base: int) -> None:
    """Raises OrderRefused unless `uid` is in the range of tenants: never root or another user of
    this machine."""
    if not isinstance(uid, int) or isinstance(uid, bool) or uid < uid_base:
        raise OrderRefused(
            f"uid {str(uid)[:20]} is not a tenant's uid: they start at snapshotter.uid_base = "
            f"{uid_base}"
        )


def _with_check(operation: RpcOperation, check: Check) -> RpcOperation:
    async def run(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        check(args)
        return await operation(args, part)

    return run


def _check_name(
    args: Mapping[str, Any], key: str, pattern: re.Pattern[str], *, optional: bool = False
) -> None:
    value = args.get(key)
    if value is None and optional:
        return
    if not (isinstance(value, str) and pattern.match(value)):
        raise OrderRefused(f"{key} {str(value)[:80]!r} is invalid: expected {pattern.pattern[:-2]}")
