"""A node with volumes, in this process: real directories and movers, asking a controller that is in
this process as well."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from pilotlight.controller.context import Context
from pilotlight.core.disk_floor import no_floor
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.core.transport.endpoint import Endpoint
from snapshotter.linux.cgroups import Cgroups
from snapshotter.types import LaunchSpec, RevisionKey, VolumeMount
from snapshotter.volumes.heads import VolumeHeads
from snapshotter.volumes.node_volumes import NodeVolumes, StoreAddress

TENANT_UID = 20_001 if os.geteuid() == 0 else os.geteuid()


class HeadsOf(VolumeHeads):
    """Asks an application in place of a socket."""

    def __init__(self, transport: httpx.AsyncBaseTransport, token: str) -> None:
        super().__init__(Endpoint.at(Path("/nowhere")), lambda: token)
        self._made = httpx.AsyncClient(
            transport=transport,
            base_url="http://controller",
            headers={HEADER_PLATFORM_TOKEN: token},
        )


class VolumeNode:
    """One node: what the controller asks of an agent for volumes, and what slots do.

    Attributes:
        volumes: its directories.
        floor: of its disk.
        running: volumes that live instances use.
    """

    def __init__(self, home: Path, blobs: Path, heads: VolumeHeads) -> None:
        self.floor = no_floor()
        self.volumes = NodeVolumes(
            home,
            heads=heads,
            store=StoreAddress(where=str(blobs), client="auto", uid=None),
            floor=self.floor,
        )
        self._heads = heads
        self.running: set[tuple[str, str, str]] = set()
        self.volumes.attach(
            Cgroups(bases={}, version=0),
            in_slots=lambda: self.running,
            in_instances=lambda: self.running,
        )

    async def mount(self, tenant: str, name: str, *, environment: str = "main") -> Path:
        """The directory that a slot mounts, as a start provides it."""
        launch = LaunchSpec(
            revision=RevisionKey("f-1@v1"),
            trust_domain=tenant,
            uid=TENANT_UID,
            bundle="",
            image=None,
            entry={},
            memory_bytes=1 << 28,
            cpu=1.0,
            startup_timeout_s=10.0,
            volumes=(VolumeMount(name=name, path="/data"),),
            labels={"tenant": tenant, "environment": environment},
        )
        return (await self.volumes.prepare(launch))["/data"]

    async def scan_volume(self, volume: str, *, max_entries: int) -> AsyncIterator[Any]:
        """As `AgentClient.scan_volume`."""
        async for part in self.volumes.scan(volume, max_entries=max_entries):
            yield part

    async def upload_volume(self, volume: str, digests: Sequence[str]) -> None:
        """As `AgentClient.upload_volume`."""
        await self.volumes.upload(volume, digests)

    async def commit_volume(self, volume: str, *, version: int) -> None:
        """As `AgentClient.commit_volume`."""
        await self.volumes.committed(volume, version=version)

    async def reload_volume(self, volume: str) -> Any:
        """As `AgentClient.reload_volume`."""
        return await self.volumes.reload(volume)

    async def aclose(self) -> None:
        """Close what it asks the controller with."""
        await self._heads.aclose()

    async def drop_volume(self, volume: str) -> None:
        """As `AgentClient.drop_volume`."""
        await self.volumes.drop(volume)


def serve_by(context: Context, node: object) -> None:
    """Make `node` the agent of a controller."""
    object.__setattr__(context, "agent", node)


def write(directory: Path, path: str, content: bytes | str) -> None:
    """Write a file as a function does: as the tenant."""
    target = directory / path
    for parent in reversed(target.relative_to(directory).parents[:-1]):
        if not (directory / parent).exists():
            (directory / parent).mkdir()
            os.chown(directory / parent, TENANT_UID, TENANT_UID)
    target.write_bytes(content.encode() if isinstance(content, str) else content)
    target.chmod(0o644)
    os.chown(target, TENANT_UID, TENANT_UID)
