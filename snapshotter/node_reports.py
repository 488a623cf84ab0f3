"""What node agents of a cluster report to the controller, and the orders that it answers.

Wire format as in `snapshotter.types`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from pilotlight.core.json_record import JsonRecord
from snapshotter.types import SnapshotInfo, SnapshotState

NODES_PATH = "/internal/nodes"
"""Path on the controller: `POST` a NodeReport with the platform's token."""
MAX_NODE_SNAPSHOTS = 500
"""Snapshots of one node in a report, most recently used first."""
_DIGEST = re.compile(r"([0-9a-f]{64})?")
_NAMES_OF_REPORT = ("weights", "tenants", "forgotten", "images", "engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """A snapshot on a node: its revision, and the identity that a restore requires.

    Attributes:
        digest: of the identity; "" if the snapshot cannot be restored.
        copy: sha256 of the record of its copy in the object store; "" without one.
        copy_bytes: size of the copy.
        info: everything else that the agent knows of it, without `identity`; None in reports of
            earlier versions.
    """

    revision: str
    identity: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    copy: str = ""
    copy_bytes: int = 0
    info: SnapshotInfo | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may be restored. Earlier versions report no others."""
        return self.info is None or self.info.state is SnapshotState.READY

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        info = None if self.info is None else {**self.info.to_json(), "identity": {}}
        return {**out, "identity": dict(self.identity), "info": info}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises TypeError, KeyError or ValueError for invalid input."""
        found = cls(**{**body, "info": None})
        texts = (found.digest, found.copy)
        if not all(isinstance(text, str) and _DIGEST.fullmatch(text) for text in texts):
            raise ValueError("digests of a snapshot must be 64 hex digits")
        if type(found.copy_bytes) is not int or found.copy_bytes < 0:
            raise ValueError("copy_bytes must be a number of bytes")
        if (info := body.get("info")) is None:
            return found
        info = SnapshotInfo.from_json({**info, "identity": found.identity})
        return replace(found, info=info.require_valid())


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovedCopy(JsonRecord):
    """A copy in the object store that the controller of a cluster recorded.

    Attributes:
        tenant: id, whose snapshot it is.
        identity: digest of its identity.
        record: sha256 (hex) of its record in the store.
    """

    snapshot: str
    tenant: str
    identity: str
    record: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOrders:
    """The controller's answer to a NodeReport. Orders are repeated until a report shows their
    effect.

    Attributes:
        version: of the list `approved`.
        approved: the copies that this node may restore, as far as nodes of its kind made them; None
            if it has this version.
        delete: ids of snapshots to delete on this node.
        quarantine: ids of snapshots to quarantine on this node, and the reason.
        forget: copies that this node is to remove from the store.
        prefetch: ids of approved copies to receive before a start needs them, most important first.
    """

    version: str = ""
    approved: tuple[ApprovedCopy, ...] | None = None
    delete: tuple[str, ...] = ()
    quarantine: Mapping[str, str] = field(default_factory=dict)
    forget: tuple[ApprovedCopy, ...] = ()
    prefetch: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        approved = None if self.approved is None else [copy.to_json() for copy in self.approved]
        return {
            "version": self.version,
            "approved": approved,
            "delete": list(self.delete),
            "quarantine": dict(self.quarantine),
            "forget": [copy.to_json() for copy in self.forget],
            "prefetch": list(self.prefetch),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises TypeError, KeyError or ValueError for invalid input."""
        approved = body["approved"]
        return cls(
            version=str(body["version"]),
            approved=None
            if approved is None
            else tuple(ApprovedCopy.from_json(copy) for copy in approved),
            delete=tuple(map(str, body["delete"])),
            quarantine={str(name): str(why) for name, why in dict(body["quarantine"]).items()},
            forget=tuple(ApprovedCopy.from_json(copy) for copy in body["forget"]),
            prefetch=tuple(map(str, body["prefetch"])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """A GPU of a node.

    Attributes:
        is_free: no process uses its memory.
        used_bytes, sm_utilisation: its memory in use, and the share of the last sample period in
            which a kernel ran (NVML); None if not known.
        holder: labels of the function that it is granted to; {} = of none.
    """

    product: str
    uuid: str
    total_bytes: int
    is_free: bool
    used_bytes: int | None = None
    sm_utilisation: float | None = None
    holder: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """State of a node as its agent reports it.

    Attributes:
        node: its name in the cluster.
        version: version of the platform there.
        weights: manifests of the weights on the node, most recently used first.
        snapshots: validated snapshots, most recently used first.
        others: snapshots that are not validated yet, or quarantined.
        memory_free_bytes: memory available to new processes.
        pods: number of function pods that the agent serves.
        tenants: ids of the tenants that have, or had, pods there.
        images: `<tenant id>/<sha256>` of the container images whose files it shows to pods, most
            recently used first.
        engines: names of the environments of engines that it shows to pods.
        kind: what nodes must have in common to restore each other's snapshots; "" if none are made.
        orders: version of the approved copies that it knows (`SnapshotOrders.version`).
        forgotten: ids of snapshots whose copies it has removed from the store.
    """

    node: str
    version: str
    weights: tuple[str, ...] = ()
    snapshots: tuple[NodeSnapshot, ...] = ()
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    gpus: tuple[NodeGpu, ...] = ()
    pods: int = 0
    others: tuple[NodeSnapshot, ...] = ()
    tenants: tuple[str, ...] = ()
    kind: str = ""
    orders: str = ""
    forgotten: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("snapshots", "others"):
            out[name] = [snapshot.to_json() for snapshot in out[name]]
        out["gpus"] = [{f.name: getattr(gpu, f.name) for f in fields(gpu)} for gpu in self.gpus]
        for name in _NAMES_OF_REPORT:
            out[name] = list(out[name])
        return out

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises TypeError, KeyError or ValueError for invalid input."""
        values = dict(body)
        for name in _NAMES_OF_REPORT:
            values[name] = tuple(map(str, body.get(name, ())))
        for name in ("snapshots", "others"):
            if len(body.get(name, ())) > MAX_NODE_SNAPSHOTS:
                raise ValueError(f"more than {MAX_NODE_SNAPSHOTS} {name}")
            values[name] = tuple(map(NodeSnapshot.from_json, body.get(name, ())))
        values["gpus"] = tuple(NodeGpu(**gpu) for gpu in body.get("gpus", ()))
        return cls(**values)
