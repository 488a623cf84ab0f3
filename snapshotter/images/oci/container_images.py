"""Container images of functions on this node: pulled from the registry, unpacked, and shown to
workers as their root file system.

    <home>/node/container-images/<tenant id>/<sha256 of the manifest>/
        rootfs/         read-only
        image.json      how a worker runs in it

A deploy pushes the image (`pilotlight.packaging.container_images`), and the controller names it by
digest in the signed launch document. The node's container runtime has such images, too, but shows
them to no other process. Here each layer is verified by its digest before it is unpacked
(`layers`), and a directory under its final name is complete (`atomic_directory`). Each tenant has
directories of its own, also where two pushed the same image: no tenant's root is shown in another
one's pod.

Images stay until there are more than `max_bytes`, or the disk is short: then those that no pod and
no slot uses are removed, least recently requested first. Nothing is pulled while a pod waits."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import re
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.oci.image_reference import Repository, parse_reference
from pilotlight.core.oci.registry_login import Login, read_logins, stored_login
from pilotlight.core.openat2 import check_directory_beneath, open_file_beneath
from pilotlight.core.threads import LowPriorityThreads
from snapshotter.errors import BundleUnavailable, Unsupported
from snapshotter.images.image_layout import ImageLayout
from snapshotter.images.oci.image_documents import (
    DIGEST,
    blob_of,
    is_directory,
    layers_of,
    package_directories,
    uncompressed,
    variables_of,
)
from snapshotter.images.oci.layers import RootFilesystem
from snapshotter.images.oci.registry import Registry
from snapshotter.images.spec import OLDEST_PYTHON
from snapshotter.linux.atomic_directory import (
    freeze,
    remove_tree,
    rename_for_deletion,
    staging_directory,
    sweep,
)
from snapshotter.shim.sandbox import root_directory
from snapshotter.types import LaunchSpec

_log = logging.getLogger(__name__)
MAX_ENTRIES = 500_000
"""Entries of one image: the container image of a GPU framework has some 100,000."""
KEPT_S = 60.0
"""An image requested more recently, or whose pods had no time yet to announce themselves after our
start, is about to be used."""
RETRY_S = 300.0
"""Pause after a pull that failed."""
PULLING = LowPriorityThreads(1)
"""One at a time: a node starts pods meanwhile."""
_POD_PLACES = ("pilotlight", "scratch")
"""Mount points of a pod, which a base image need not have."""
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_PYTHON = re.compile(r"/((?:usr/local|usr|opt(?:/[\w-][\w.-]*)+)/bin)/(python(3\.[0-9]+))\Z")
_CHECK_EVERY = 64
"""Pieces of a download between two checks."""
_LAUNCHER = ["-m", "pilotlight.launcher"]
_OURS = "opt/pilotlight"


@dataclass(frozen=True, slots=True)
class _Key:
    """One image of one tenant."""

    tenant: str
    digest: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.digest}"


FILES = "opt/pilotlight/files"
"""Directory of the files of `Image.copy` in images that `pilotlight` makes."""


class ContainerImages:
    """The container images of this node. Owner: one event loop; `_pulls` changes between awaits
    only, so that requests for one image share a pull."""

    def __init__(
        self,
        home: Path,
        *,
        login_file: Path | None = None,
        max_bytes: int = 0,
        floor: DiskFloor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`login_file`: logins to registries, read at each pull; None: registries ask for none.
        `max_bytes`: of all images; 0: none is pulled. `floor`: free disk that they must leave."""
        self._root = home / "node" / "container-images"
        self._login_file = login_file
        self._max_bytes = max_bytes
        self._floor = floor or no_floor()
        self._clock = clock
        self._began_at = clock()
        self._pulls: dict[_Key, asyncio.Task[None]] = {}
        self._not_before: dict[_Key, float] = {}
        self._asked_at: dict[_Key, float] = {}
        self._needed: list[Callable[[], Collection[str]]] = []
        self._stopping = threading.Event()
        self._swept = False

    def __repr__(self) -> str:
        return f"<ContainerImages {self._root} pulling={len(self._pulls)}>"

    def layout(self, reference: str, *, tenant: str) -> ImageLayout:
        """How a worker runs in the image. Raises BundleUnavailable if it is not on this node (yet),
        or cannot be used."""
        key, _ = _parsed(reference, tenant)
        self._asked_at[key] = self._clock()
        place = self._place(key)
        try:
            body = json.loads((place / "image.json").read_bytes())
        except FileNotFoundError:
            raise BundleUnavailable(
                f"container image {key.digest[:12]} is not on this node"
            ) from None
        rootfs = place / "rootfs"
        site = tuple(rootfs / site for site in body["site"])
        files = rootfs / FILES
        return ImageLayout(
            python=rootfs / body["python"],
            prefix=rootfs / body["prefix"],
            site=site,
            env=body["env"],
            files=files if files in site else None,
            rootfs=rootfs,
            rootfs_digest=f"sha256:{key.digest}",
        )

    def needed_by(self, needed: Callable[[], Collection[str]]) -> None:
        """Add `needed`, which returns the images in use (as `present`). Until there is one, none is
        removed."""
        self._needed.append(needed)

    def present(self) -> tuple[str, ...]:
        """`<tenant id>/<digest>` of the images here, most recently requested first. Blocking, one
        directory per tenant."""
        found = sorted(self._scan(), key=lambda key: -self._asked_at.get(key, 0.0))
        return tuple(str(key) for key in found)

    async def ensure(self, reference: str, *, tenant: str) -> None:
        """Pull the image unless it is there. Cancelling a caller does not cancel the pull. Raises
        BundleUnavailable, also for RETRY_S after a failure."""
        key, repository = _parsed(reference, tenant)
        self._asked_at[key] = self._clock()
        if (self._place(key) / "image.json").exists():
            return
        pull = self._pulls.get(key)
        if pull is None:
            if self._not_before.get(key, 0.0) > self._clock():
                raise BundleUnavailable(f"the pull of {key.digest[:12]} failed a moment ago")
            pull = asyncio.create_task(self._pull(key, repository), name=f"pull {key}")
            self._pulls[key] = pull
            pull.add_done_callback(lambda done: self._on_pulled(key, done))
        await asyncio.shield(pull)

    async def aclose(self) -> None:
        """End the running pull."""
        self._stopping.set()
        if self._pulls:
            await asyncio.wait(list(self._pulls.values()))

    def _on_pulled(self, key: _Key, pull: asyncio.Task[None]) -> None:
        self._pulls.pop(key, None)
        if not pull.cancelled() and (error := pull.exception()) is not None:
            self._not_before[key] = self._clock() + RETRY_S
            _log.warning("images.not_pulled image=%s error=%s", key, error)
        self._not_before = {key: at for key, at in self._not_before.items() if at > self._clock()}

    async def _pull(self, key: _Key, repository: Repository) -> None:
        if self._max_bytes == 0:
            raise BundleUnavailable("snapshotter.container_images_max_bytes is 0")
        try:
            if not self._swept:
                self._swept = True
                await PULLING.run(self._sweep)
            needed = {name for ask in self._needed for name in ask()}
            began = time.monotonic()
            size_bytes = await PULLING.run(self._fetch, key, repository, needed)
        except (OSError, ValueError) as e:
            raise BundleUnavailable(
                f"container image {key.digest[:12]} cannot be put on this node: {e}"
            ) from e
        took_s = time.monotonic() - began
        _log.info("images.pulled image=%s bytes=%d took_s=%.1f", key, size_bytes, took_s)

    # -- in a thread -------------------------------------------------------------------------------
    def _fetch(self, key: _Key, repository: Repository, needed: Collection[str]) -> int:
        """Pull and unpack; returns the bytes on disk. Raises BundleUnavailable, OSError."""
        with Registry(repository, self._login(repository)) as registry:
            manifest = registry.manifest(f"sha256:{key.digest}")
            layers, config = layers_of(manifest), registry.document(blob_of(manifest["config"])[0])
            self._make_room(sum(size for _, size in layers), needed)
            place = self._place(key)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with staging_directory(place.parent, label=key.digest[:16]) as work:
                (rootfs := work.directory / "rootfs").mkdir(mode=0o755)
                made = RootFilesystem(
                    rootfs,
                    max_bytes=self._max_bytes,
                    max_entries=MAX_ENTRIES,
                    floor=self._floor,
                )
                for digest, size in layers:
                    self._apply(registry, digest, size, made, work.directory / "layer")
                for name in _POD_PLACES:
                    made.make_directory(name)
                body = _described(config, rootfs) | {"size_bytes": made.size_bytes}
                freeze(rootfs)
                self._make_room(made.size_bytes, needed, is_written=True)
                (work.directory / "image.json").write_text(json.dumps(body, sort_keys=True))
                work.directory.chmod(0o755)
                work.publish(place)
        return made.size_bytes

    def _apply(
        self, registry: Registry, digest: str, size: int, made: RootFilesystem, file: Path
    ) -> None:
        def check() -> None:
            if self._stopping.is_set():
                raise BundleUnavailable("the node agent ends")
            self._floor.require()

        check()
        registry.fetch(digest, size, file, check=_every_few(check))
        try:
            with file.open("rb") as packed, uncompressed(packed) as layer:
                made.apply(layer)
        except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as e:
            raise BundleUnavailable(f"layer {digest[:19]} is no archive: {e}") from e
        finally:
            file.unlink()

    def _login(self, repository: Repository) -> Login | None:
        if self._login_file is None:
            return None
        try:
            return stored_login(read_logins(self._login_file), repository)
        except (OSError, ValueError) as e:
            raise BundleUnavailable(f"snapshotter.registry_login: {e}") from e

    def _make_room(
        self, more_bytes: int, needed: Collection[str], *, is_written: bool = False
    ) -> None:
        """Remove unused images until `more_bytes` fit; `is_written`: they are on the disk already.
        Raises BundleUnavailable."""
        unwritten = 0 if is_written else more_bytes
        idle = [key for key in self._scan() if self._is_idle(key, needed)]
        idle.sort(key=lambda key: self._asked_at.get(key, 0.0), reverse=True)
        while self._used_bytes() + more_bytes > self._max_bytes or any(
            self._floor.missing(unwritten)
        ):
            if not idle:
                raise BundleUnavailable(
                    f"an image of {more_bytes} bytes does not fit: the limit is "
                    f"{self._max_bytes} bytes (snapshotter.container_images_max_bytes), "
                    f"{self._used_bytes()} are used"
                )
            key = idle.pop()
            remove_tree(rename_for_deletion(self._place(key)))
            _log.info("images.removed image=%s", key)

    def _is_idle(self, key: _Key, needed: Collection[str]) -> bool:
        asked_at = self._asked_at.get(key, self._began_at)
        return str(key) not in needed and bool(self._needed) and self._clock() - asked_at > KEPT_S

    def _used_bytes(self) -> int:
        total = 0
        for key in self._scan():
            with contextlib.suppress(OSError, ValueError, KeyError):
                body = json.loads((self._place(key) / "image.json").read_bytes())
                total += int(body["size_bytes"])
        return total

    def _scan(self) -> list[_Key]:
        if not self._root.is_dir():
            return []
        return [
            _Key(folder.name, image.name)
            for folder in self._root.iterdir()
            if _TENANT.match(folder.name) and folder.is_dir()
            for image in folder.iterdir()
            if DIGEST.match(image.name)
        ]

    def _sweep(self) -> None:
        """Remove what an agent that was killed left behind."""
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            sweep(folder)

    def _place(self, key: _Key) -> Path:
        return self._root / key.tenant / key.digest


def _parsed(reference: str, tenant: str) -> tuple[_Key, Repository]:
    """Raises BundleUnavailable."""
    try:
        repository, digest = parse_reference(reference)
    except ValueError as e:
        raise BundleUnavailable(str(e)) from e
    if not _TENANT.match(tenant):
        raise BundleUnavailable(f"{tenant[:80]!r} is no tenant")
    return _Key(tenant, digest.removeprefix("sha256:")), repository


def images_of(launches: Iterable[LaunchSpec]) -> set[str]:
    """The images of launches, as `ContainerImages.present`."""
    return {launch.image_of_node for launch in launches if launch.image_of_node is not None}


def _every_few(check: Callable[[], None]) -> Callable[[], None]:
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1
        if count % _CHECK_EVERY == 0:
            check()

    return counted


def _described(config: Mapping[str, Any], rootfs: Path) -> dict[str, Any]:
    """What `layout` needs, of an image that `pilotlight image` made; paths relative to its root,
    none of which leads through a link. Raises BundleUnavailable, Unsupported."""
    settings = config.get("config")
    entrypoint = settings.get("Entrypoint") if isinstance(settings, dict) else None
    if (
        not isinstance(settings, dict)
        or not isinstance(entrypoint, list)
        or entrypoint[1:] != _LAUNCHER
        or (match := _PYTHON.match(str(entrypoint[0]))) is None
    ):
        raise Unsupported("the image was not made by `pilotlight image push` or a deploy")
    folder, name, version = match.groups()
    if tuple(int(part) for part in version.split(".")) < OLDEST_PYTHON:
        raise Unsupported(f"the image has Python {version}, which is too old")
    prefix = str(PurePosixPath(folder).parent)
    try:
        root_directory.complete(str(rootfs), uid=None)
        os.close(open_file_beneath(rootfs, f"{folder}/{name}"))
        check_directory_beneath(rootfs, f"{prefix}/lib")
        ours = [site for site in (f"{_OURS}/site", f"{_OURS}/files") if is_directory(rootfs, site)]
        sites = [*ours, *package_directories(rootfs, prefix, version)]
    except (OSError, ValueError) as e:
        raise BundleUnavailable(f"the image cannot be shown: {e}") from e
    return {
        "python": f"{folder}/{name}",
        "prefix": prefix,
        "site": sites,
        "env": variables_of(settings.get("Env")),
    }
