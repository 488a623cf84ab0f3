"""Data types of the node agent: launch documents, instances, Templates and snapshots.

Wire format: every record has `to_json()` and `from_json()`; keys are the field names.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NewType, Self

from pilotlight.core.json_record import JsonRecord

InstanceId = NewType("InstanceId", str)
"""`i-` and 16 hex digits; chosen by the client of `start`, so that a retry denotes the same start.
"""

RevisionKey = NewType("RevisionKey", str)
"""Identifies one immutable revision on the whole platform: `<function id>@<revision name>`; opaque
here."""


ENVIRONMENT_PREFIX = "environment-"
"""Begins the key of an environment snapshot, in place of a function id: it has modules of an image,
and no function."""
_SNAPSHOT_ID = re.compile(r"sn-[A-Za-z0-9-]{1,80}")


VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the UUIDs of the GPUs that CUDA shows a process, in its order; "" shows
none (CUDA C++ Programming Guide, environment variables)."""


TENANT_LABEL = "tenant"
"""Label of a launch: id of its tenant."""
CONTAINER_IMAGE_LABEL = "container-image"
"""Label of a launch on a cluster: `LaunchSpec.container_image`."""


class StartKind(enum.StrEnum):
    """How an instance was started, fastest first; chosen in `starts.strategy`."""

    WARM = "WARM"
    WAKE = "WAKE"
    FORK = "FORK"
    RESTORE = "RESTORE"
    IMPORT = "IMPORT"
    COLD = "COLD"


class InstanceState(enum.StrEnum):
    """Lifecycle state of an instance. ASLEEP: suspended; ready as soon as it is resumed."""

    STARTING = "STARTING"
    READY = "READY"
    ASLEEP = "ASLEEP"
    DRAINING = "DRAINING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare(JsonRecord):
    """The tenant of a start, and its share of the node.

    Attributes:
        tenant: id, as label `tenant` of a launch; "" = no particular tenant.
        name: the tenant's name; a dedicated node identifies its tenant by it.
        weight: weight among tenants that compete for capacity, 1 or more.
        is_dedicated: the tenant has dedicated nodes and runs on no others.
        reserved: memory (bytes) reserved for tenants, by id; other tenants cannot use it.
        log_bytes: limit of its logs on the node; None = no separate limit.
    """

    tenant: str = ""
    name: str = ""
    weight: int = 1
    is_dedicated: bool = False
    reserved: Mapping[str, int] = field(default_factory=dict)
    log_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: the sender need not be root, and the values enter calculations."""
        numbers = (
            self.weight,
            *((self.log_bytes,) if self.log_bytes is not None else ()),
            *self.reserved.values(),
        )
        if not all(type(number) is int and number >= 0 for number in numbers) or self.weight < 1:
            raise ValueError(
                f"invalid share of weight {str(self.weight)[:40]}: weight must be 1 or more, bytes 0 or more"
            )
        if not all(isinstance(text, str) for text in (self.tenant, self.name, *self.reserved)):
            raise ValueError("a share's tenant, name and reserved tenants must be strings")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMount:
    """Weights mounted for a worker at `<slot root>/weights/<name>`.

    Attributes:
        name: the mount's name, unique within the launch.
        manifest: sha256 (hex) of the manifest's canonical JSON.
    """

    name: str
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMount:
    """A volume of the launch's tenant and environment, mounted writable at `path` in its slot."""

    name: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice(JsonRecord):
    """A whole GPU, or a MIG instance of one.

    Attributes:
        uuid: `GPU-…`, or `MIG-…` of a MIG instance; "" if not known, as of the GPUs that the
            device plugin of a cluster assigned to a pod.
        kind: as users write it: `H100`, `H100-MIG-3g.40gb`.
        model: the driver's name, `NVIDIA H100 80GB HBM3`; of a MIG instance that of its GPU.
        minor: number of `/dev/nvidia<minor>`; -1 if not known.
        capabilities: numbers of `/dev/nvidia-caps/nvidia-cap<n>` that open a MIG instance; () for a
            whole GPU.
        memory_bytes: its memory, also of a MIG instance its own.
    """

    uuid: str
    kind: str
    model: str = ""
    minor: int = -1
    capabilities: tuple[int, ...] = ()
    memory_bytes: int = 0

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance."""
        return self.uuid.startswith("MIG-")

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{**body, "capabilities": tuple(body.get("capabilities", ()))})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuGrant(JsonRecord):
    """The GPUs of one slot, and of the instance in it: no other slot has them.

    Attributes:
        kind: the requested kind that they satisfy, by which they are priced; of a request for
            `any` that of the devices; "" if not known.
        devices: in the order in which CUDA numbers them.
    """

    kind: str
    devices: tuple[GpuDevice, ...]

    @property
    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the devices, in order."""
        return tuple(device.uuid for device in self.devices if device.uuid)

    @property
    def visible_devices(self) -> str:
        """Value of CUDA_VISIBLE_DEVICES (`VISIBLE_DEVICES`)."""
        return ",".join(self.uuids)

    @classmethod
    def unidentified(cls, kinds: tuple[str, ...], count: int) -> GpuGrant | None:
        """The grant of a pod, whose GPUs its cluster assigned: kind (if only one is acceptable) and
        count; None without GPUs."""
        kind = kinds[0] if len(kinds) == 1 else ""
        return cls(kind=kind, devices=(GpuDevice(uuid="", kind=kind),) * count) if count else None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"kind": self.kind, "devices": [device.to_json() for device in self.devices]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(
            kind=body["kind"],
            devices=tuple(GpuDevice.from_json(device) for device in body["devices"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """Everything that the node needs to start a worker of one revision; immutable like the
    revision.

    Attributes:
        revision: the revision's platform-wide key; one Template per key.
        trust_domain: opaque; processes of different trust domains never share a slot (upper layers:
            a tenant).
        uid: uid and gid of the worker when the agent is root; None keeps the agent's own. bundle:
        sha256 (hex) of the source archive, a `.tar.gz` in the blob store; "" = no code. image: digest of a built
        image, or None for the platform's own interpreter and packages. entry: what the worker runs;
        opaque here, passed to the worker as JSON (`pilotlight.spec.function`). env: environment
        variables that are not secret. weights: weights that must be on the node before boot. volumes:
        what it mounts writable; of one machine only.
        memory_bytes: memory limit of one instance. cpu: cores of one instance (a share, not a pin).
        engine: name of an environment that the operator installed on the node
            (`snapshotter.engines`), in place of an image; None = none.
        offline: True gives each slot a network namespace with only a loopback interface, if the
            agent is root.
        egress: networks that it may reach in addition to those open to all
            (`snapshotter.egress_on_request`).
        gpu: acceptable kinds of GPUs, best first, e.g. ("H100", "A100-MIG-3g.40gb"); () for none.
            All GPUs of an instance are of one kind.
        gpu_count: how many; all of them must be on this node.
        gpu_memory_bytes: memory that they must have together; 0 = any.
        startup_timeout_s: budget from start to ready.
        forkable: False boots a separate process for each instance.
        snapshot: False disables snapshots: none is made or restored.
        secret_variables: names of the environment variables that its secrets set after every start.
            They are missing before the snapshot; code that reads them then gets an error with the
            name. Not part of the launch's identity.
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
    volumes: tuple[VolumeMount, ...] = ()
    memory_bytes: int
    cpu: float
    engine: str | None = None
    offline: bool = False
    egress: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    gpu_count: int = 0
    gpu_memory_bytes: int = 0
    startup_timeout_s: float
    forkable: bool = True
    snapshot: bool = True
    secret_variables: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def container_image(self) -> str | None:
        """Reference, by digest, of the container image that was made of `image`; None: none is
        named. A label, as launchers in images of earlier versions know no further field."""
        return self.labels.get(CONTAINER_IMAGE_LABEL)

    @property
    def image_of_node(self) -> str | None:
        """That image as nodes report it (`NodeReport.images`)."""
        reference = self.container_image
        return f"{self.tenant}/{reference.rpartition('@sha256:')[2]}" if reference else None

    @property
    def tenant(self) -> str:
        """Id of the tenant; "" without one."""
        return self.labels.get(TENANT_LABEL, "")

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["weights"] = [{"name": w.name, "manifest": w.manifest} for w in self.weights]
        volumes = [{"name": v.name, "path": v.path} for v in self.volumes]
        del out["volumes"]  # launchers in images of earlier versions know no such key
        return out | ({"volumes": volumes} if volumes else {})

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`; unknown keys are an error (TypeError names them). Documents of
        earlier versions name one kind of GPU as a string, or null."""
        values = dict(body)
        gpu = body.get("gpu") or ()
        values["gpu"] = (gpu,) if isinstance(gpu, str) else tuple(gpu)
        values["weights"] = tuple(WeightsMount(**w) for w in body.get("weights", ()))
        values["volumes"] = tuple(VolumeMount(**v) for v in body.get("volumes", ()))
        values["secret_variables"] = tuple(body.get("secret_variables", ()))
        values["egress"] = tuple(body.get("egress", ()))
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceInfo(JsonRecord):
    """State of one instance as the agent knows it.

    Attributes:
        socket: host path of the Unix socket on which its worker serves HTTP/1.1.
        start_kind: how it was started.
        phases_ms: duration of each phase of its start, in order (`slot, weights, boot, import,
            enter, warmup, fork, wake, …`).
        lessee: id of the activator that owns its slots and its billing; None when there is none.
        started_at: wall clock, seconds since the epoch.
        pid: host pid; 0 once it has exited.
        exit_reason: None while it lives; else `stopped`, `exited`, `killed`, `out_of_memory`,
            `template_lost`, …
        weights: mount's name → tier from which its start loaded them: `origin, nvme, dram, hbm`
            (`weight_cache.types.Tier`).
        gpus: the GPUs that it alone has until it has ended; None without.
        cpu_file: CPU time counter of its cgroup, on its node (`cpu_counter`); "" without one.
        cpu_from_ns: value of that counter when the instance began, minus the CPU time that its
            start used elsewhere (the boot of the Template that it caused): counter - cpu_from_ns is
            what the instance has used. Negative when that boot exceeds the counter's value.
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
    gpus: GpuGrant | None = None
    cpu_file: str = ""
    cpu_from_ns: int = 0

    @property
    def gpu_count(self) -> int:
        """Number of its GPUs and MIG instances."""
        return len(self.gpus.devices) if self.gpus is not None else 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "gpus": self.gpus.to_json() if self.gpus is not None else None}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. `gpu_count` of earlier versions, which did not record the GPUs,
        is ignored."""
        values = {name: value for name, value in body.items() if name != "gpu_count"}
        values["gpus"] = GpuGrant.from_json(body["gpus"]) if body.get("gpus") else None
        values["state"] = InstanceState(body["state"])
        values["start_kind"] = StartKind(body["start_kind"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInfo(JsonRecord):
    """A Template resident on this node.

    Attributes:
        pss_bytes: proportional set size: its memory, parked forks included.
        parked: forks that wait for an assignment.
        threads: names of surplus threads at the snapshot point; if there are any, it cannot be
            forked.
        forks: children forked from it so far.
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

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{**body, "threads": tuple(body["threads"])})


class SnapshotState(enum.StrEnum):
    """Lifecycle state of a snapshot: only a READY one is restored for a caller."""

    PROVING = "PROVING"
    READY = "READY"
    QUARANTINED = "QUARANTINED"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo(JsonRecord):
    """A snapshot on this node.

    Attributes:
        id: `sn-` and 16 hex digits, derived from its content.
        in_place: a server snapshot: a whole process tree, restored one to one.
        pages: `eager` or `lazy`: how its memory is restored, chosen by measurement during
            validation.
        image_bytes: its size on disk.
        reason: why it is quarantined, "" otherwise.
        phases_ms: duration of each phase of making it: `quiesce, dump, publish, prove`.
        cold_ms: boot to snapshot point, when it was booted for this snapshot.
        restore_ms: time to the first answer during validation.
        created_at, last_used_at: wall clock, seconds since the epoch.
        restores: instances and Templates restored from it on this node.
        remote: whether a copy is in the object store.
        node: the node that has it on its disk; "" on one machine, and if only the store has it.
        where: `disk`, `disk, store` or `store`.
        identity: what must match for it to be restored, by field.
        heap_bytes: memory that the image contains by value: what a restore has to read.
        heap_why: if that is much: its composition, for people.
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
    node: str = ""
    where: str = "disk"

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(**{**body, "state": SnapshotState(body["state"])})

    def require_valid(self) -> Self:
        """Raises ValueError or TypeError if members that others compute with are not what they
        should be: a report of a node is not trusted to be well-formed."""
        if not _SNAPSHOT_ID.fullmatch(self.id):
            raise ValueError(f"{self.id[:40]!r} is not a snapshot's id")
        texts = (self.revision, self.reason, self.pages, *self.labels, *self.labels.values())
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("names and labels of a snapshot must be strings")
        numbers = (self.image_bytes, self.created_at, self.last_used_at, self.restores)
        times = (*self.phases_ms.values(), self.cold_ms, self.restore_ms)
        if not all(
            type(n) in (int, float) and math.isfinite(n) and n >= 0 for n in (*numbers, *times)
        ):
            raise ValueError("sizes and times of a snapshot must be finite and not negative")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvent(JsonRecord):
    """Something that happened to an instance or a Template.

    Attributes:
        kind: `instance_stopping` (a stop was requested and SIGTERM follows: send it no more calls),
            `instance_gone`, `template_ready`, `template_gone`, `room_wanted` (a start was refused
            for lack of memory; `detail`: `tenant`, those of NoCapacity, and `claims`, bytes by
            tenant).
        subject: the instance's id, or the revision's key.
        reason: one word; InstanceInfo.exit_reason lists them.
        message: for people.
        detail: `exit_status`, `signal`, `log_tail`, …; of `instance_gone` also `cpu_ns`, the final
            value of its CPU time counter.
    """

    kind: str
    subject: str
    reason: str
    message: str
    detail: Mapping[str, Any] = field(default_factory=dict)
