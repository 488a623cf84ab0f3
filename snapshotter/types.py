"""The node agent's nouns: how an instance comes up, what is launched, what is running.

Wire shape: every record has `to_json()` and `from_json()`; keys are the field names.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NewType, Self

InstanceId = NewType("InstanceId", str)
"""`i-` and 16 hex digits; chosen by whoever asks for the start, so that a repeated ask is the same
start."""

RevisionKey = NewType("RevisionKey", str)
"""Names one immutable revision on the whole platform: `<function id>@<revision name>`; opaque
here."""


NODES_PATH = "/internal/nodes"
"""Of the controller: `POST` NodeReport with the platform's token."""


class StartKind(enum.StrEnum):
    """How an instance came up: the rungs of the ladder, fastest first."""

    WARM = "WARM"
    WAKE = "WAKE"
    FORK = "FORK"
    RESTORE = "RESTORE"
    COLD = "COLD"


class InstanceState(enum.StrEnum):
    """Where an instance is in its life. ASLEEP: it stands still, and is ready as soon as it is
    woken."""

    STARTING = "STARTING"
    READY = "READY"
    ASLEEP = "ASLEEP"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Whose a start is, and what that tenant may have of the node.

    Attributes:
        tenant: id, as label `tenant` of a launch; "" = nobody's in particular. name: the tenant's
        name; a node that is dedicated to one tenant knows it by that. weight: its share of what
        several want at once, 1 or more. is_dedicated: it has nodes of its own, and runs on no
        other. reserved: memory (bytes) that is kept free for tenants, by id: what one of them does
        not use is nobody else's. log_bytes: of its logs that are kept on the node; None = no bound
        of its own.
    """

    tenant: str = ""
    name: str = ""
    weight: int = 1
    is_dedicated: bool = False
    reserved: Mapping[str, int] = field(default_factory=dict)
    log_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: who sends it need not be root, and what it says is counted with."""
        numbers = (
            self.weight,
            *((self.log_bytes,) if self.log_bytes is not None else ()),
            *self.reserved.values(),
        )
        if not all(type(number) is int and number >= 0 for number in numbers) or self.weight < 1:
            raise ValueError(
                f"a share of weight {str(self.weight)[:40]}: weight must be 1 or more, bytes 0 or more"
            )
        if not all(isinstance(text, str) for text in (self.tenant, self.name, *self.reserved)):
            raise ValueError("a share's tenant, name and reserved tenants must be texts")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMount:
    """Weights that a worker finds at `<slot root>/weights/<name>`.

    Attributes:
        name: the mount's name, unique within the launch.
        manifest: sha256 (hex) of the manifest's canonical JSON.
    """

    name: str
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Everything the node needs to boot a worker of one revision; immutable like the revision.

    Attributes:
        revision: the revision's platform-wide key; one Template per key. trust_domain: opaque;
        processes of different trust domains never share a slot (a tenant, above). uid: uid and gid
        to run as when the agent is root; None keeps the agent's own. bundle: sha256 (hex) of the
        source archive, a `.tar.gz` in the blob store. image: digest of a built image, or None for
        the platform's own interpreter and packages. entry: what the worker runs; opaque here,
        written to the worker as JSON (`pilotlight.spec`). env: environment variables that are not
        secret. weights: weights to be on the node before boot. memory_bytes: memory limit of one
        instance. cpu: cores of one instance (a share, not a pin). engine: name of an environment
        that the operator installed on the node (`snapshotter.engines`), in place of an image; None
        = none. offline: True gives each of its slots a network namespace with nothing but a
        loopback interface, where there is root. egress: networks that it reaches beside those open
        to all (`snapshotter.egress_on_request`). gpu: accelerator wanted, e.g. "H100"; None for
        none. `gpu_count`: how many, on this node, or not at all. startup_timeout_s: budget from
        start to ready. forkable: False asks for a process of its own for each instance. snapshot:
        False keeps it off the disk: no snapshot is made of it, and none is restored.
        secret_variables: names of the environment variables that its secrets set after every start;
        read before the snapshot
            they are missing, and whoever reads them there is told so by name. Not part of what is
            launched.
        labels: copied to every instance, log and event (app, function, …); opaque here.
    """

    revision: RevisionKey
    trust_domain: str
    uid: int | None
    bundle: str
    image: str | None
    entry: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[WeightsMount, ...] = ()
    memory_bytes: int
    cpu: float
    engine: str | None = None
    offline: bool = False
    egress: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_count: int = 0
    startup_timeout_s: float
    forkable: bool = True
    snapshot: bool = True
    secret_variables: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["weights"] = [{"name": w.name, "manifest": w.manifest} for w in self.weights]
        return out

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`; unknown keys are an error (TypeError names them)."""
        values = dict(body)
        values["weights"] = tuple(WeightsMount(**w) for w in body.get("weights", ()))
        values["secret_variables"] = tuple(body.get("secret_variables", ()))
        values["egress"] = tuple(body.get("egress", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInfo:
    """One instance as the agent sees it.

    Attributes:
        socket: host path of the Unix socket on which its worker serves HTTP/1.1. start_kind: how it
        came up. phases_ms: duration of each phase of its start, in order (`slot, weights, boot,
        import, enter, warmup, fork, wake, …`). lessee: id of the activator that owns its slots and
        its bill; None when nobody does. started_at: wall clock, seconds since the epoch. pid: host
        pid; 0 once it is gone. exit_reason: None while it lives; else `stopped`, `exited`,
        `killed`, `out_of_memory`, `template_lost`, … weights: mount's name → tier that its start
        had them from: `origin, nvme, dram, hbm` (`weight_cache.types.Tier`). gpu_count: GPUs of the
        node that are its own. cpu_file: of its cgroup, on its node: counts the CPU time that it
        uses (`cpu_counter`); "" where nothing counts. cpu_from_ns: where that counter stood when
        the instance began, less the CPU time that its start used elsewhere (the boot of the
            Template that it caused): counter - cpu_from_ns is what the instance has used. Below 0
            when that boot is the most of it.
    """

    id: InstanceId
    revision: RevisionKey
    state: InstanceState
    socket: str
    start_kind: StartKind
    phases_ms: Mapping[str, float]
    lessee: str | None
    started_at: float
    pid: int
    memory_bytes: int
    cpu: float
    labels: Mapping[str, str]
    exit_reason: str | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    gpu_count: int = 0
    cpu_file: str = ""
    cpu_from_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        values = dict(body)
        values["state"] = InstanceState(body["state"])
        values["start_kind"] = StartKind(body["start_kind"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInfo:
    """A Template resident on this node.

    Attributes:
        pss_bytes: proportional set size: what it costs to keep it, parked forks included. parked:
        forks that wait behind it for an instance to become. threads: names of surplus threads found
        at the snapshot point; non-empty means it cannot be forked. forks: children born of it so
        far.
    """

    revision: RevisionKey
    pid: int
    pss_bytes: int
    threads: tuple[str, ...]
    phases_ms: Mapping[str, float]
    forks: int
    last_used_at: float
    labels: Mapping[str, str]
    parked: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{**body, "threads": tuple(body["threads"])})


class SnapshotState(enum.StrEnum):
    """Where a snapshot is in its life: only a READY one is restored for a caller."""

    PROVING = "PROVING"
    READY = "READY"
    QUARANTINED = "QUARANTINED"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """A snapshot on this node.

    Attributes:
        id: `sn-` and 16 hex digits, of its content. in_place: a server snapshot: a whole process
        tree, restored one to one. pages: `eager` or `lazy`: how its memory comes back, chosen by
        measurement when it was proven. image_bytes: on disk. reason: why it is quarantined, ""
        otherwise. phases_ms: what making it took: `quiesce, dump, publish, prove`. cold_ms: from
        nothing to the snapshot point, when it was booted for this. restore_ms: to the first answer,
        when it was proven. created_at, last_used_at: wall clock, seconds since the epoch. restores:
        instances and Templates born of it on this node. remote: whether a copy is in the object
        store. identity: what must be the same for it to be restored, by field. heap_bytes: memory
        that the image carries by value: what restoring it has to read. heap_why: where that is
        much: of what it consists, for people.
    """

    id: str
    revision: RevisionKey
    state: SnapshotState
    in_place: bool
    pages: str
    image_bytes: int
    reason: str
    phases_ms: Mapping[str, float]
    cold_ms: float
    restore_ms: float
    created_at: float
    last_used_at: float
    restores: int
    remote: bool
    identity: Mapping[str, str]
    labels: Mapping[str, str]
    heap_bytes: int = 0
    heap_why: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{**body, "state": SnapshotState(body["state"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvent:
    """Something that happened to an instance or a Template.

    Attributes:
        kind: `instance_stopping` (it was asked to stop, and gets SIGTERM a moment later: send it
        nothing more), `instance_gone`,
            `template_ready`, `template_gone`, `room_wanted` (a start was refused for want of
            memory; `detail`: `tenant`, those of NoCapacity, and `claims`, bytes by tenant).
        subject: the instance's id, or the revision's key. reason: why, one word; see
        InstanceInfo.exit_reason. message: for people. detail: `exit_status`, `signal`, `log_tail`,
        …; of `instance_gone` also `cpu_ns`, where its counter of CPU time stood at its end.
    """

    kind: str
    subject: str
    reason: str
    message: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """A proven snapshot on a node: of which revision, and what must be the same for it to be
    restored."""

    revision: str
    identity: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGpu:
    """A GPU of a node. `is_free`: nobody uses its memory."""

    product: str
    uuid: str
    total_bytes: int
    is_free: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What the agent of a node says of it.

    Attributes:
        node: its name in the cluster.
        version: of the platform there.
        weights: manifests of the weights that are here, the last used first.
        snapshots: those that are proven, the last used first.
        memory_free_bytes: what new processes could have.
        pods: function pods that the agent serves.
    """

    node: str
    version: str
    weights: tuple[str, ...] = ()
    snapshots: tuple[NodeSnapshot, ...] = ()
    memory_bytes: int = 0
    memory_free_bytes: int = 0
    gpus: tuple[NodeGpu, ...] = ()
    pods: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["snapshots"] = [
            {"revision": s.revision, "identity": dict(s.identity)} for s in self.snapshots
        ]
        out["gpus"] = [{f.name: getattr(gpu, f.name) for f in fields(gpu)} for gpu in self.gpus]
        return {**out, "weights": list(self.weights)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises TypeError, KeyError or ValueError for what is none."""
        values = dict(body)
        values["weights"] = tuple(str(manifest) for manifest in body.get("weights", ()))
        values["snapshots"] = tuple(
            NodeSnapshot(**snapshot) for snapshot in body.get("snapshots", ())
        )
        values["gpus"] = tuple(NodeGpu(**gpu) for gpu in body.get("gpus", ()))
        return cls(**values)
