"""The launch of an environment snapshot: modules of an image, imported in a slot of its own without
code, weights and secrets. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from snapshotter.types import ENVIRONMENT_PREFIX, LaunchSpec, RevisionKey

_MEMORY_BYTES = 8 * 1024**3
"""Limit of its slot where control groups limit memory: what a function gets is set on its own
slot."""
_STARTUP_S = 120.0
_LABELS = ("tenant", "environment")


def why_not(launch: LaunchSpec) -> str:
    """Why this launch uses no environment snapshot, as a phrase; "" if it may."""
    if not launch.snapshot:
        return "the function sets snapshot=False"
    if launch.gpu:
        return "the function has GPUs"
    if launch.engine is not None or launch.entry.get("engine") is not None:
        return "the function runs an engine"
    if launch.entry.get("web_server") is not None:
        return "the function starts a web server"
    if launch.uid is None:
        return "the function has no uid"
    return ""


def scope_of(launch: LaunchSpec) -> str:
    """16 hex digits of what an environment snapshot and a launch must have in common beyond the
    machine and the image's contents (`snapshots.identity`): nothing is shared between tenants, nor
    between their environments."""
    labels = [launch.labels.get(name, "") for name in _LABELS]
    network = [launch.offline, sorted(launch.egress)]
    return _digest(
        [launch.trust_domain, launch.uid, *labels, launch.image, dict(launch.env), *network]
    )


def environment_launch(
    launch: LaunchSpec, modules: Sequence[str], *, limits_memory: bool
) -> LaunchSpec:
    """The launch that imports `modules` for launches like this one. `limits_memory`: by control
    groups; a limit of the process itself would be part of the image."""
    labels = {name: value for name, value in launch.labels.items() if name in _LABELS}
    scope, content = scope_of(launch), _digest(list(modules))
    return replace(
        launch,
        revision=RevisionKey(f"{ENVIRONMENT_PREFIX}{scope}@{content}"),
        bundle="",
        entry={"imports": list(modules)},
        weights=(),
        memory_bytes=_MEMORY_BYTES if limits_memory else launch.memory_bytes,
        cpu=1.0,
        startup_timeout_s=_STARTUP_S,
        forkable=False,
        secret_variables=(),
        labels=labels,
    )


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
