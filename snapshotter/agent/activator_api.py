"""Operations of the node agent that a non-root activator may call, and the checks on their
arguments.

The agent is root, and activators parse untrusted input. An activator therefore starts only what the
controller wrote: each launch document carries the controller's signature
(`snapshotter.agent.launch_signature`), whose key activators do not have. Activators cannot run
commands beside instances, read logs, or build and delete images and snapshots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotlight.core.rpc import RpcGuest, RpcOperation, SendPart
from pilotlight.core.settings import Paths
from snapshotter.agent.agent import Agent
from snapshotter.agent.controller_api import check_tenant
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.agent.node_report import raw_key
from snapshotter.errors import OrderRefused
from snapshotter.types import LaunchSpec, TenantShare

OPEN = (
    "stop",
    "sleep",
    "wake",
    "adopt",
    "instances",
    "templates",
    "drop_template",
    "usage",
    "watch",
)
"""Operations on existing instances and revisions; they start nothing."""
SEALED = ("start", "prepare", "checkpoint")
_INSTANCE = re.compile(r"i-[0-9a-f]{16}\Z")
_LESSEE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z")


def guest(agent: Agent, paths: Paths, *, key_file: Path | None, uid_base: int) -> RpcGuest | None:
    """API of activators that have their own uid. `key_file`: the platform's key; None:
    <home>/platform.key."""
    if paths.activator_uid is None:
        return None
    found = operations(
        agent.operations(), key_file or paths.home / "platform.key", uid_base=uid_base
    )
    return RpcGuest(uid=paths.activator_uid, operations=found)


def operations(
    of_root: Mapping[str, RpcOperation], key_file: Path, *, uid_base: int
) -> Mapping[str, RpcOperation]:
    """The subset of `of_root` that an activator may call. The key is read when the first launch
    document is checked.

    `uid_base`: first uid of tenants. A compromised controller can sign anything, and must not be
    able to start anything under another uid.
    """
    seals = _Seals(key_file, uid_base)
    return {
        **{name: of_root[name] for name in OPEN},
        **{name: _with_check(of_root[name], seals) for name in SEALED},
    }


def _with_check(operation: RpcOperation, seals: _Seals) -> RpcOperation:
    async def run(args: Mapping[str, Any], part: SendPart) -> Mapping[str, Any]:
        _check_names(args)
        seals.check(args)
        return await operation(args, part)

    return run


def _check_names(args: Mapping[str, Any]) -> None:
    # the values become file names and parts of log lines
    for name, pattern in (("instance_id", _INSTANCE), ("lessee", _LESSEE)):
        if name in args and not (isinstance(args[name], str) and pattern.match(args[name])):
            raise OrderRefused(
                f"{name} {str(args[name])[:80]!r} is invalid: expected {pattern.pattern[:-2]}"
            )
    env = args.get("secret_env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise OrderRefused("secret_env must be an object with string values")
    try:
        if args.get("share") is not None:
            TenantShare.from_json(args["share"])
    except (ValueError, TypeError, AttributeError) as e:
        raise OrderRefused(f"share: {e}") from e


class _Seals:
    """Verifies signatures; reads the key on first use. Owner: the event loop."""

    def __init__(self, key_file: Path, uid_base: int) -> None:
        self._key_file = key_file
        self._uid_base = uid_base
        self._grants: LaunchSigner | None = None

    def check(self, args: Mapping[str, Any]) -> None:
        """Raises OrderRefused, SettingsInvalid."""
        if self._grants is None:
            self._grants = LaunchSigner.of_raw(raw_key(self._key_file))
        try:
            launch = LaunchSpec.from_json(args["launch"])
            is_valid = self._grants.verify(launch)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise OrderRefused(
                f"the launch document does not match this version of the platform: "
                f"{type(e).__name__}: {e}"
            ) from e
        if not is_valid:
            raise OrderRefused(
                f"the launch document of {str(launch.revision)[:300]!r} was not written by the "
                f"controller: its signature is missing or invalid. "
                "If platform.key was replaced, remove <home>/activator/*/routes.ndjson while "
                "the platform is stopped"
            )
        check_tenant(launch.uid, uid_base=self._uid_base)
