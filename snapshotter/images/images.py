"""Images: environments built once per node from a description, and identified by its digest.

An image is `<home>/node/images/<digest>-<uid>/` (without root `<digest>/`; images are not shared
between tenants, because their content depends on what the building tenant's steps did) with `env/`
(a virtual environment of a real interpreter), `files/` (copied files) and `image.json`. An image
that installs Debian packages also has `rootfs/`, the root file system that its workers see
(`base_rootfs`), if this node can create one: as root, on Debian or Ubuntu, with debootstrap. So has
one that begins with a container image (`oci.registry_base`; as root, with skopeo).
Workers do not run the environment's own `python`: they run the underlying interpreter with the
image's `site` directories on `sys.path`, so an image works wherever it is bound."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import math
import os
import re
import sysconfig
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pilotlight.core.object_store import DirectoryStore, ObjectStore
from pilotlight.core.openat2 import check_directory_beneath
from snapshotter.engines import Engines
from snapshotter.errors import BundleUnavailable, ImageBuildFailed, Unsupported
from snapshotter.images.base_rootfs import (
    BaseRootfs,
    OnLines,
    package_proxies,
    package_sources,
)
from snapshotter.images.build_limits import NO_CGROUPS, BuildLimits, limited_group
from snapshotter.images.build_log import prune_logs
from snapshotter.images.build_network import BuildNetworkPolicy, Joined, joined
from snapshotter.images.build_sandbox import BuildSandbox, run_on_machine
from snapshotter.images.builder import ImageBuild
from snapshotter.images.image_layout import ImageLayout
from snapshotter.images.interpreters import find_interpreter, own_interpreter
from snapshotter.images.oci import registry_base
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.images.pip_cache import pip_of
from snapshotter.images.pip_config import (
    build_config,
    build_variables,
    has_credentials,
    index_settings,
    named_paths,
)
from snapshotter.images.sealing import seal_image
from snapshotter.images.spec import ImagePlan, image_digest, parse_image
from snapshotter.linux.atomic_directory import (
    delete_atomically,
    staged_in_thread,
    sweep,
)
from snapshotter.linux.cgroups import Cgroups, Group
from snapshotter.slots.launch_plan import Layout
from snapshotter.types import LaunchSpec

RUNTIME_PACKAGES = ("cloudpickle", "uvicorn", "httptools", "uvloop", "wsproto")
"""The worker's imports (the extra `worker` in pyproject.toml), installed into every image at the
platform's own versions."""
_MAX_BACKLOG = 1000
USED_EVERY_S = 2.0
"""Interval of a build's usage reports, and thus the most wall time whose usage a disconnecting
client avoids."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_KEY = re.compile(r"[0-9a-f]{64}(-[0-9]+)?\Z")

Part = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Sends progress to a client: `{"step": "pip install numpy", "index": 2, "of": 4, "text": line}`,
and, periodically and at the end, `{"build": id, "cpu_ns": n}`: the CPU time of its commands so far,
where the kernel counts it. Clients that share a build get the same id."""


@dataclass(slots=True, eq=False)
class _RunningBuild:
    """A build in progress and its listeners, which change between awaits only."""

    task: asyncio.Task[None]
    listeners: list[asyncio.Queue[Mapping[str, Any] | None]] = field(default_factory=list)

    def tell(self, body: Mapping[str, Any] | None) -> None:
        """Send to every listener; a slow one loses its oldest lines (the log keeps them)."""
        for inbox in self.listeners:
            if inbox.full():
                inbox.get_nowait()
            inbox.put_nowait(body)


class Images:
    """The images of this node. Owner: one event loop; `_flights` changes between awaits only.

    Attributes:
        container_images: of functions of a cluster; None: this node pulls none.
    """

    def __init__(
        self,
        home: Path,
        *,
        environ: Mapping[str, str],
        requirements: Sequence[str],
        blobs: ObjectStore | None = None,
        bounds: BuildLimits | None = None,
        cgroups: Cgroups = NO_CGROUPS,
        engines: Engines | None = None,
        network: BuildNetworkPolicy | None = None,
    ) -> None:
        """`blobs`: where copy steps find their archives; None: the directory `<home>/blobs`.
        `engines`: None: only those of the home."""
        self.container_images: ContainerImages | None = None
        self._engines = Engines(home) if engines is None else engines
        self._blobs = DirectoryStore(home / "blobs") if blobs is None else blobs
        self._root = home / "node" / "images"
        self._environ = environ
        self._requirements = tuple(requirements)
        self._bounds = bounds or BuildLimits()
        self._cgroups = cgroups
        self._base_rootfs = BaseRootfs(home / "node" / "rootfs", run=self._run_on_machine)
        self._network = network or BuildNetworkPolicy()
        self._flights: dict[str, _RunningBuild] = {}
        self._swept = False

    def __repr__(self) -> str:
        return f"<Images {self._root} building={len(self._flights)}>"

    def layout_of(self, launch: LaunchSpec) -> Layout:
        """The layout of what a launch runs in: its container image, if it names one, else as
        `layout`. Raises BundleUnavailable, Unsupported."""
        reference, pulled = launch.container_image, self.container_images
        if launch.image is None or reference is None or pulled is None:
            return self.layout(launch.image, launch.engine, uid=launch.uid)
        return pulled.layout(reference, tenant=launch.tenant)

    def layout(
        self, digest: str | None, engine: str | None = None, *, uid: int | None = None
    ) -> Layout:
        """The layout of image `digest` as built by `uid`.

        Without a digest, the engine environment of that name; without either, the platform's own
        interpreter with its packages.

        Raises BundleUnavailable if it is not on this node, Unsupported if its interpreter has been
        removed."""
        if digest is None and engine is not None:
            return self._engines.get(engine)
        if digest is None:
            return own_layout()
        found = self._find(digest, uid) if _DIGEST.match(digest) else None
        if found is None:
            raise BundleUnavailable(
                f"image {digest[:12]} is not on this node: deploy the app again to build it"
            )
        image, body = found
        python, prefix = image / body["python"], image / body["prefix"]
        if not python.exists():
            raise Unsupported(
                f"image {digest[:12]} was built for {python}, which no longer exists: reinstall "
                f"it, or run `pilotlight deploy` again"
            )
        try:
            site = tuple(check_directory_beneath(image, s) for s in body["site"])
        except OSError as e:
            raise Unsupported(
                f"image {digest[:12]} cannot be used: {e.strerror}. Change one of its steps and "
                f"deploy again"
            ) from e
        rootfs = image / "rootfs" if "rootfs" in body else None
        digest = body.get("rootfs", "")
        return ImageLayout(
            python=python,
            prefix=prefix,
            site=site,
            env=body["env"],
            files=image / "files",
            links=tuple(body.get("links", ())),
            rootfs=rootfs,
            rootfs_digest=digest,
        )

    async def build(self, spec: Mapping[str, Any], *, uid: int | None, part: Part) -> str:
        """Build the image that `spec` describes unless it exists; returns its digest.

        Concurrent callers share one build and all receive its progress; when the last of them is
        cancelled, so is the build. Raises ImageBuildFailed (`detail`: step, log_tail, log),
        Unsupported."""
        digest = image_digest(spec)
        key = _key(digest, uid)
        if (self._root / key).exists():
            return digest
        plan = parse_image(spec)
        flight = self._flights.get(key) or self._start_build(key, plan, uid)
        inbox: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(_MAX_BACKLOG)
        flight.listeners.append(inbox)
        try:
            while (body := await inbox.get()) is not None:
                await part(body)
            await asyncio.shield(flight.task)
        finally:
            flight.listeners.remove(inbox)
            if not flight.listeners and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()
                await asyncio.wait([flight.task])
        return digest

    def prune(self, keep: set[str]) -> list[str]:
        """Remove images whose digests are not in `keep` and that are not being built; returns their
        digests."""
        present = (
            [d.name for d in self._root.iterdir() if _KEY.match(d.name)]
            if self._root.exists()
            else []
        )
        gone = sorted(key for key in set(present) - self._flights.keys() if key[:64] not in keep)
        for key in gone:
            delete_atomically(self._root / key)
            (self._root / f"{key}.log").unlink(missing_ok=True)
        return sorted({key[:64] for key in gone})

    def size_bytes(self, digest: str, *, uid: int | None = None) -> int:
        """Disk space of an image built by `uid`; 0 if it is not on this node. Blocking."""
        if not _DIGEST.match(digest):
            return 0
        return disk_bytes(self._root / _key(digest, uid))

    def delete(self, digest: str, *, uid: int | None = None) -> int:
        """Remove an image built by `uid`, and its log; returns its bytes, 0 if there is none. An
        image that is being built stays. Blocking."""
        size_bytes = self.size_bytes(digest, uid=uid)
        key = _key(digest, uid)
        if key in self._flights or not _DIGEST.match(digest):
            return 0
        if size_bytes:
            delete_atomically(self._root / key)
        (self._root / f"{key}.log").unlink(missing_ok=True)
        return size_bytes

    def prune_logs(self, *, keep_s: float, now: float, missing: tuple[int, int] = (0, 0)) -> int:
        """Remove logs of failed builds (`build_log.prune_logs`); returns how many were removed.
        Blocking."""
        return prune_logs(self._failed_logs(), keep_s=keep_s, now=now, missing=missing)

    def _failed_logs(self) -> Iterator[Path]:
        """Logs without an image or a running build."""
        for log in self._root.glob("*.log"):
            has_image = log.with_suffix("").exists()
            if _KEY.match(log.stem) and log.stem not in self._flights and not has_image:
                yield log

    def _find(self, digest: str, uid: int | None) -> tuple[Path, Mapping[str, Any]] | None:
        image = self._root / _key(digest, uid)
        with contextlib.suppress(FileNotFoundError):
            return image, json.loads((image / "image.json").read_bytes())
        return None

    def _start_build(self, key: str, plan: ImagePlan, uid: int | None) -> _RunningBuild:
        flight = _RunningBuild(
            task=asyncio.create_task(self._fly(key, plan, uid), name=f"build image {key[:12]}")
        )
        self._flights[key] = flight

        def land(task: asyncio.Task[None]) -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.tell(None)
            # every listener raises the failure; with none left there is nothing to report
            if task.cancelled() or task.exception() is not None:
                self.prune_logs(keep_s=math.inf, now=0.0)

        flight.task.add_done_callback(land)
        return flight

    async def _fly(self, key: str, plan: ImagePlan, uid: int | None) -> None:
        async def report(body: Mapping[str, Any]) -> None:
            if (flight := self._flights.get(key)) is not None:
                flight.tell(body)

        if not self._swept:
            self._swept = True
            await asyncio.to_thread(sweep, self._root)
        if plan.container_image and (why := self._why_no_container_image(uid)) is not None:
            raise Unsupported(f"cannot begin with {plan.container_image}: {why}")
        interpreter = (
            await find_interpreter(plan.python, self._environ) if plan.python else own_interpreter()
        )
        pip = await pip_of(interpreter, self._environ)
        try:
            async with (
                asyncio.timeout(self._bounds.timeout_s),
                staged_in_thread(self._root / key) as temp,
                limited_group(
                    f"b-{key[:16]}{key[64:]}", bounds=self._bounds, cgroups=self._cgroups
                ) as enclosure,
                self._joined(uid, await self._addresses(plan)) as network,
            ):
                variables, config = build_variables(self._environ), build_config(self._environ)
                with self._ids(plan, uid) as ids:
                    box = BuildSandbox(
                        interpreter=interpreter,
                        image=temp,
                        uid=uid,
                        ids=ids,
                        lent=()
                        if uid is None
                        else tuple(named_paths([*variables.values(), config])),
                        enclosure=enclosure,
                        network=network,
                    )
                    build = ImageBuild(
                        plan,
                        box,
                        blobs=self._blobs,
                        log=self._root / f"{key}.log",
                        variables={name: box.as_seen(value) for name, value in variables.items()},
                        report=report,
                        pip=pip,
                        base=self._base_rootfs,
                    )
                    steps = build.run(
                        self._requirements,
                        pip_config=box.as_seen(config),
                        has_credentials=has_credentials(self._environ),
                    )
                    async with _usage_told(enclosure.group, report):
                        env = await self._bounds.floor.guard(steps)
                    await asyncio.to_thread(
                        seal_image, build.box, env, self._bounds.entries, build.base_digest
                    )
        except TimeoutError as e:
            raise _failed(key, f"it took longer than {self._bounds.timeout_s:g} s") from e
        except (OSError, ValueError) as e:
            raise _failed(key, str(e)) from e

    @contextlib.contextmanager
    def _ids(self, plan: ImagePlan, uid: int | None) -> Iterator[range | None]:
        """Ids of the root file system of an image that begins with a container image, or installs
        Debian packages, if this node can create one."""
        if uid is None or not (
            plan.container_image
            or (
                any(step.op == "apt" for step in plan.steps) and self._base_rootfs.why_not() is None
            )
        ):
            yield None
            return
        ids = self._base_rootfs.acquire_ids()
        try:
            yield ids
        finally:
            self._base_rootfs.release_ids(ids)

    @staticmethod
    def _why_no_container_image(uid: int | None) -> str | None:
        if uid is None:
            return "the platform runs functions without users of their own: run it as root"
        return registry_base.why_not()

    async def _run_on_machine(self, argv: Sequence[str], on_lines: OnLines) -> int:
        proxies = {
            name: value for name, value in self._environ.items() if name.lower().endswith("_proxy")
        }
        return await run_on_machine(argv, variables=proxies, on_lines=on_lines)

    async def _addresses(self, plan: ImagePlan) -> list[str]:
        """Texts that name package sources and proxies."""
        texts = index_settings(self._environ)
        if any(step.op == "apt" for step in plan.steps):
            texts += [*(source.uri for source in await package_sources()), await package_proxies()]
        return texts

    def _joined(
        self, uid: int | None, addresses: Iterable[str]
    ) -> contextlib.AbstractAsyncContextManager[Joined]:
        if uid is None:
            return contextlib.nullcontext(Joined())
        return joined(self._network, addresses)


@contextlib.asynccontextmanager
async def _usage_told(group: Group, report: Part) -> AsyncIterator[None]:
    """Report the CPU time of a build periodically while the block runs, and at its end."""
    build = f"b-{os.urandom(8).hex()}"

    async def tell() -> None:
        if (used := group.cpu_ns()) is not None:
            await report({"build": build, "cpu_ns": used})

    async def tell_on() -> None:
        while True:
            await asyncio.sleep(USED_EVERY_S)
            await tell()

    telling = asyncio.create_task(tell_on(), name=f"usage of {build}")
    try:
        yield
    finally:
        telling.cancel()
        await tell()


def disk_bytes(directory: Path) -> int:
    """Disk space of a directory's files; hard links counted once, symlinks not followed."""
    return _disk_bytes(directory, set())


def _disk_bytes(directory: str | Path, seen: set[int]) -> int:
    """`seen`: counted inodes with several names. No image is more than 100 directories deep."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    total += status.st_blocks * 512 + _disk_bytes(entry.path, seen)
                elif status.st_nlink == 1 or status.st_ino not in seen:
                    if status.st_nlink > 1:
                        seen.add(status.st_ino)
                    total += status.st_blocks * 512
    return total


def _key(digest: str, uid: int | None) -> str:
    """Directory name of an image: per tenant, if tenants have uids."""
    return digest if uid is None else f"{digest}-{uid}"


def own_layout() -> ImageLayout:
    """The platform's own interpreter, with the packages that this process sees."""
    own = own_interpreter()
    paths = dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    return ImageLayout(
        python=own.executable, prefix=own.prefix, site=tuple(p for p in paths if p.is_dir()), env={}
    )


def runtime_requirements() -> list[str]:
    """The worker's requirements, pinned to the versions that the platform itself uses. Raises
    PackageNotFoundError."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in RUNTIME_PACKAGES]


def _failed(digest: str, message: str) -> ImageBuildFailed:
    return ImageBuildFailed(
        f"cannot build image {digest[:12]}: {message}", {"step": "image", "log_tail": []}
    )
