"""What the controller's tests share: specs, a manual clock, a small node agent that answers over
the real wire."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from pilotlight.core.rpc import SendPart, serve_rpc
from pilotlight.protocol import CONTENT_PROBLEM, UsageRecord
from snapshotter.errors import InstanceUnknown, SnapshotterError, SnapshotUnknown
from snapshotter.types import (
    InstanceId,
    InstanceInfo,
    InstanceState,
    RevisionKey,
    SnapshotInfo,
    SnapshotState,
    StartKind,
    TemplateInfo,
)

BUNDLE = b"the source archive of an app"
BUNDLE_DIGEST = hashlib.sha256(BUNDLE).hexdigest()


A = TypeVar("A")
R = TypeVar("R")


def at_once(function: Callable[[A], R], arguments: Sequence[A]) -> list[R]:
    """Call a function with each of these, in threads that run at once; return what it returns, or
    raise what it raises."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(function, arguments))


class ManualClock:
    """Wall clock that moves when told."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


INJECTIONS = (
    "x'; DROP TABLE tenants;--",
    '" OR 1=1 --',
    "<script>alert(1)</script>",
    "{{7*7}}",
    "%",
    "_",
)
"""Names that are code elsewhere: SQL, HTML, templates, wildcards of LIKE."""


def refused(answer: httpx.Response, status: int) -> str:
    """The detail of the problem that an answer is."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, CONTENT_PROBLEM), (
        answer.text
    )
    return str(answer.json()["detail"])


def spec(name: str = "hello", **changes: Any) -> dict[str, Any]:
    """A FunctionSpec as JSON."""
    body = {
        "name": name,
        "module": "app",
        "qualname": name,
        "bundle": BUNDLE_DIGEST,
        "methods": [{"name": ""}],
    }
    return {**body, **changes}


def usage(record: str = "req-1/1", **changes: Any) -> UsageRecord:
    """A usage record."""
    values: dict[str, Any] = {
        "id": record,
        "kind": "CALL",
        "call": record.partition("/")[0],
        "attempt": 1,
        "tenant": "t-1",
        "environment": "main",
        "app": "search",
        "function": "embed",
        "function_id": "f-1",
        "method": "",
        "revision": "v1-abcdef",
        "instance": "i-1",
        "key": "k-1",
        "start_kind": "WARM",
        "started_at": 1_800_000_000.0,
        "queued_ms": 1,
        "start_ms": 2,
        "exec_ms": 3,
        "billed_ns": 3_000_000,
        "cpu": 1.0,
        "memory_bytes": 1024**3,
        "gpu": None,
        "gpu_count": 0,
        "status": 200,
        "price_version": "1",
        "rate_per_s": "0.00001532",
        "cost": "0.000000045960",
    }
    return UsageRecord(**{**values, **changes})


@dataclass
class SmallAgent:
    """A node agent with the operations that the controller asks for. Owner: the test's loop."""

    instances: list[InstanceInfo] = field(default_factory=list)
    templates: list[TemplateInfo] = field(default_factory=list)
    snapshots: list[SnapshotInfo] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    gpus: list[Mapping[str, Any]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    logs_failure: SnapshotterError | None = None
    asked: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    build_failure: SnapshotterError | None = None
    building: asyncio.Event = field(default_factory=asyncio.Event)
    build_may_end: asyncio.Event | None = None
    image: str = "ab" * 32
    prove_failure: SnapshotterError | None = None
    prove_ns: int = 0
    image_bytes: int = 0
    build_id: str = "b-1"
    build_cpu_ns: tuple[int, ...] = ()
    volume_failure: SnapshotterError | None = None
    follow_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, path: Path) -> asyncio.Server:
        """Answer on the socket at `path`."""
        operations = {
            "instances": self._instances,
            "templates": self._templates,
            "capabilities": self._capabilities,
            "stop": self._stop,
            "logs": self._logs,
            "exec": self._exec,
            "build_image": self._build_image,
            "drop_template": self._drop_template,
            "snapshots": self._snapshots,
            "prove_snapshot": self._prove,
            "quarantine_snapshot": self._quarantine,
            "delete_snapshots": self._delete,
            "usage": self._usage,
            "gpus": self._gpus,
            "delete_image": self._delete_image,
            "drop_volume": self._drop_volume,
        }
        return await serve_rpc(path, operations, _describe)

    async def _instances(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("instances", args))
        wanted = args["labels"].items()
        return {
            "instances": [i.to_json() for i in self.instances if wanted <= dict(i.labels).items()]
        }

    async def _usage(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        if args["instance_id"] not in self.memory:
            raise InstanceUnknown(f"no instance {args['instance_id']}")
        return {"cpu_ns": 0, "memory_bytes": self.memory[args["instance_id"]], "pss_bytes": 0}

    async def _gpus(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        return {"gpus": self.gpus}

    async def _templates(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        return {"templates": [t.to_json() for t in self.templates]}

    async def _drop_template(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.templates = [t for t in self.templates if t.revision != args["revision"]]
        return {}

    async def _snapshots(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        wanted = args["labels"].items()
        return {
            "snapshots": [s.to_json() for s in self.snapshots if wanted <= dict(s.labels).items()]
        }

    async def _prove(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        if self.prove_ns:
            await part({"build": f"proof-{args['snapshot_id']}-0", "cpu_ns": self.prove_ns})
        if self.prove_failure is not None:
            raise self.prove_failure
        for n, found in enumerate(self.snapshots):
            if found.id == args["snapshot_id"]:
                self.snapshots[n] = replace(found, state=SnapshotState.READY, reason="")
                return self.snapshots[n].to_json()
        raise SnapshotUnknown(f"no snapshot {args['snapshot_id']}")

    async def _quarantine(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        for n, found in enumerate(self.snapshots):
            if found.id == args["snapshot_id"]:
                self.snapshots[n] = replace(
                    found, state=SnapshotState.QUARANTINED, reason=args["reason"]
                )
                return self.snapshots[n].to_json()
        raise SnapshotUnknown(f"no snapshot {args['snapshot_id']}")

    async def _delete(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("delete_snapshots", args))
        before = len(self.snapshots)
        self.snapshots = [s for s in self.snapshots if not _is_meant(s, args)]
        return {"deleted": before - len(self.snapshots)}

    async def _capabilities(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        snapshots = {"on": True, "ready": 1, "last_refusal": {"revision": "another's"}}
        return {
            "features": [{"name": "fork", "on": True, "why": "tried"}],
            "node": {"name": "here", "snapshots": snapshots},
        }

    async def _stop(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("stop", args))
        if args["instance_id"] not in [i.id for i in self.instances]:
            raise InstanceUnknown(f"no instance {args['instance_id']}")
        self.instances = [i for i in self.instances if i.id != args["instance_id"]]
        return {}

    async def _logs(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("logs", args))
        if self.logs_failure is not None:
            raise self.logs_failure
        await part({})
        for line in self.lines:
            await part(line)
        if args["follow"]:
            try:
                await asyncio.Event().wait()
            finally:
                self.follow_ended.set()
        return {}

    async def _exec(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("exec", args))
        await part({"stream": "stdout", "text": " ".join(args["argv"])})
        return {"exit_status": 0}

    async def _build_image(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("build_image", args))
        await part({"step": "pip install", "text": "one moment"})
        for used in self.build_cpu_ns:
            await part({"build": self.build_id, "cpu_ns": used})
        if self.build_failure is not None:
            raise self.build_failure
        self.building.set()
        if self.build_may_end is not None:
            await self.build_may_end.wait()
            for used in self.build_cpu_ns[-1:]:  # the last report comes at the end
                await part({"build": self.build_id, "cpu_ns": used})
        return {"image": self.image, "size_bytes": self.image_bytes}

    async def _delete_image(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("delete_image", args))
        return {"size_bytes": self.image_bytes}

    async def _drop_volume(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        self.asked.append(("drop_volume", args))
        if self.volume_failure is not None:
            raise self.volume_failure
        return {}


def instance(
    tenant: str,
    *,
    environment: str = "main",
    app: str = "search",
    function: str = "embed",
    name: str = "i-1",
    revision: str = "f-1@v1-abcdef",
) -> InstanceInfo:
    """A running instance of a tenant."""
    return InstanceInfo(
        id=InstanceId(name),
        revision=RevisionKey(revision),
        state=InstanceState.READY,
        socket="/nowhere",
        start_kind=StartKind.FORK,
        phases_ms={"fork": 8.0},
        lessee="a-1",
        started_at=1.0,
        pid=7,
        memory_bytes=1024**3,
        cpu=1.0,
        weights={"minilm": "dram"},
        labels={
            "tenant": tenant,
            "environment": environment,
            "app": app,
            "function": function,
            "revision": revision.partition("@")[2],
        },
    )


def snapshot(
    tenant: str, revision: str = "f-1@v1-abcdef", *, name: str = "sn-1", **changes: Any
) -> SnapshotInfo:
    """A proven snapshot of a tenant's `search/hello`."""
    values: dict[str, Any] = {
        "id": name,
        "revision": revision,
        "state": SnapshotState.READY,
        "in_place": False,
        "pages": "eager",
        "image_bytes": 61_000_000,
        "reason": "",
        "phases_ms": {"dump": 100.0},
        "cold_ms": 5400.0,
        "restore_ms": 120.0,
        "created_at": 1.0,
        "last_used_at": 2.0,
        "restores": 3,
        "remote": False,
        "identity": {"kernel": "6.1"},
        "labels": {
            "tenant": tenant,
            "environment": "main",
            "app": "search",
            "function": "hello",
            "revision": revision.partition("@")[2],
        },
    }
    return SnapshotInfo(**{**values, **changes})


def _is_meant(found: SnapshotInfo, args: Mapping[str, Any]) -> bool:
    function = found.revision.partition("@")[0]
    return (
        args["snapshot_id"] == found.id
        or bool(found.revision == args["revision"])
        or bool(function == args["function"])
    )


def _describe(error: Exception) -> tuple[str, str, Mapping[str, Any]] | None:
    return (error.code, str(error), error.detail) if isinstance(error, SnapshotterError) else None
