"""Converts a LaunchSpec to the shim's order: paths in the slot, environment, limits, the worker's
launch file.

With namespaces every path is the same on every node (`mounts.ROOT`); without them the paths are
those of the host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pilotlight.core.image_steps import ABSOLUTE
from pilotlight.core.settings import FUNCTIONS_SOCKET
from pilotlight.core.transport.calls_socket import CALLS_DIRECTORY, CALLS_VARIABLE
from snapshotter.errors import Unsupported
from snapshotter.shim.child import CONTROL_FD
from snapshotter.shim.sandbox import mounts
from snapshotter.slots.slot_devices import NO_DEVICES, DeviceLayout, SlotDevices
from snapshotter.types import VISIBLE_DEVICES, LaunchSpec
from weight_cache.types import ModelInfo, OpenedLease, Prediction, WeightsLease

THREADS_OFF = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Disables thread pools of numeric libraries before the snapshot point: a process with threads
cannot be forked."""
RUNTIME_PACKAGES = ("pilotlight", "snapshotter", "weight_cache")
"""Our packages that a worker imports; each imports only the public modules of the next one."""
_PLATFORM_URL = "PILOTLIGHT_URL"
"""Tells the SDK in a function where the platform is (`pilotlight.profile`); the function's own
environment takes precedence."""
_MAX_OPEN_FILES = 65536
_MAX_PROCESSES_OF_UID = 4096
_WRITABLE_FLOOR_BYTES = 64 * 1024**2


class Layout(Protocol):
    """The parts of an image that a launch needs (`snapshotter.images.images.ImageLayout`)."""

    @property
    def python(self) -> Path: ...
    @property
    def prefix(self) -> Path: ...
    @property
    def site(self) -> tuple[Path, ...]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def files(self) -> Path | None: ...
    @property
    def links(self) -> tuple[str, ...]: ...
    @property
    def rootfs(self) -> Path | None: ...
    @property
    def rootfs_digest(self) -> str: ...


class ImageStore(Protocol):
    """The methods of `snapshotter.images.images.Images` that the agent uses."""

    def layout_of(self, launch: LaunchSpec) -> Layout: ...

    async def build(
        self,
        spec: Mapping[str, Any],
        *,
        uid: int | None,
        part: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> str: ...

    def size_bytes(self, digest: str, *, uid: int | None = None) -> int: ...

    def delete(self, digest: str, *, uid: int | None = None) -> int: ...

    def prune_logs(
        self, *, keep_s: float, now: float, missing: tuple[int, int] = (0, 0)
    ) -> int: ...


class BundleStore(Protocol):
    """The methods of `snapshotter.images.code_bundles.Bundles` that the agent uses."""

    async def ensure(self, digest: str) -> Path: ...

    def needed_by(self, needed: Callable[[], Collection[str]]) -> None: ...

    async def make_room(self) -> int: ...


class WeightSource(Protocol):
    """The methods of `weight_cache.client.WeightCacheClient` that the agent uses."""

    async def open(self, manifest: str, *, holder: str, pid: int | None = None) -> OpenedLease: ...

    async def wait(self, lease_id: str) -> WeightsLease: ...

    async def close(self, lease_id: str) -> bool: ...

    async def predict(self, manifest: str) -> Prediction: ...

    async def models(self) -> list[ModelInfo]: ...


class VolumeSource(Protocol):
    """The methods of `snapshotter.volumes.node_volumes.NodeVolumes` that slots use."""

    async def prepare(self, launch: LaunchSpec) -> dict[str, Path]: ...


@dataclass(frozen=True, kw_only=True)
class NodeFiles:
    """Where the files of this node come from that slots show their workers.

    Attributes:
        runtime, criu, platform: as in `Sources`; a `platform` that does not exist is None.
        volumes: None: this node has none.
        gpus: where the device nodes and driver files of GPUs are.
    """

    bundles: BundleStore
    images: ImageStore
    weights: WeightSource
    runtime: Mapping[str, Path]
    volumes: VolumeSource | None = None
    platform: Path | None = None
    criu: Path | None = None
    gpus: DeviceLayout = field(default_factory=DeviceLayout)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Host paths of the parts of a slot.

    Attributes:
        layout: interpreter and site-packages.
        code: the unpacked bundle.
        weights: mount name → directory.
        runtime: package name → directory of the package.
        criu: directory of a CRIU for slots with an image's root file system (`criu.bundle`); None =
            no restore.
        platform: directory with the socket of the platform's API for functions
            (`Paths.for_functions`); None = no access.
        calls: directory of the sockets by which instances of the slot call other functions; None =
            they cannot.
        volumes: mount path in the slot → working directory of the volume.
    """

    layout: Layout
    code: Path
    weights: Mapping[str, Path]
    runtime: Mapping[str, Path]
    volumes: Mapping[str, Path] = field(default_factory=dict)
    criu: Path | None = None
    platform: Path | None = None
    calls: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shim's boot order and the worker's launch file.

    Attributes:
        order: the `boot` message without its cgroup.
        launch_file: content of launch.json.
    """

    order: Mapping[str, Any]
    launch_file: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _WorkerPaths:
    """Paths as the worker sees them. `programs`: first directory of PATH, where `python` and
    `python3` are this interpreter: Debian's has neither name, or other versions have."""

    python: Path
    programs: Path
    site: list[Path]
    runtime: Path
    code: Path
    work: Path
    temporary: Path
    launch_file: Path
    weights: Mapping[str, Path]


def _in_namespaces(sources: Sources) -> _WorkerPaths:
    root, layout = Path(mounts.ROOT), sources.layout
    return _WorkerPaths(
        python=root / "python" / layout.python.relative_to(layout.prefix),
        programs=Path(mounts.PROGRAMS),
        site=[root / "env" / str(i) for i in range(len(layout.site))],
        runtime=root / "runtime",
        code=root / "code",
        work=root / "work",
        temporary=Path("/tmp"),
        launch_file=root / "launch.json",
        weights={name: root / "weights" / name for name in sources.weights},
    )


def _on_host(sources: Sources, directory: Path) -> _WorkerPaths:
    return _WorkerPaths(
        python=sources.layout.python,
        programs=directory / "bin",
        site=list(sources.layout.site),
        runtime=directory / "runtime",
        code=sources.code,
        work=directory / "work",
        temporary=directory / "tmp",
        launch_file=directory / "launch.json",
        weights=sources.weights,
    )


def plan(
    launch: LaunchSpec,
    sources: Sources,
    *,
    directory: Path,
    uid: int | None,
    namespaced: bool,
    limits: Mapping[str, int],
    devices: SlotDevices = NO_DEVICES,
    log_refused: bool = False,
    records_imports: bool = False,
) -> Plan:
    """How to boot `launch` in the slot whose directory is `directory`, with these devices. Pure: no
    I/O. Raises Unsupported for an image with files at absolute paths where slots share the
    machine's root directory."""
    layout = sources.layout
    if layout.links and not namespaced:
        raise Unsupported(
            f"the image has files in /{layout.links[0]}, but functions of this platform share the "
            f"machine's root directory, because it does not run as root: copy them to a relative "
            f"path"
        )
    paths = _in_namespaces(sources) if namespaced else _on_host(sources, directory)
    files = "" if layout.files is None else str(paths.site[layout.site.index(layout.files)])
    env = _environment(launch, layout, paths, namespaced=namespaced)
    env[VISIBLE_DEVICES] = devices.visible_devices
    if namespaced and sources.platform is not None:
        env.setdefault(_PLATFORM_URL, f"unix://{mounts.ROOT}/platform/{FUNCTIONS_SOCKET}")
    if sources.calls is not None:
        env[CALLS_VARIABLE] = str(
            Path(mounts.ROOT) / CALLS_DIRECTORY if namespaced else sources.calls
        )
    order = {
        "op": "boot",
        "argv": [
            str(paths.python),
            "-I",
            "-S",
            "-B",
            str(paths.runtime / "pilotlight/worker/boot.py"),
            str(paths.launch_file),
        ],
        "python": str(paths.python),
        "env": env,
        "work": str(paths.work),
        "uid": uid,
        "limits": dict(limits),
        "log_refused": log_refused,
        "snapshot": launch.snapshot,
        "devices": [list(node) for node in devices.nodes],
        "driver_files": [list(file) for file in devices.driver_files],
        "rootfs": "" if layout.rootfs is None else str(layout.rootfs),
        "writable_bytes": max(_WRITABLE_FLOOR_BYTES, launch.memory_bytes),
        "binds": _binds(sources, directory) if namespaced else [],
        "volumes": [[str(path), at] for at, path in sorted(sources.volumes.items())],
        "links": {name: f"{files}/{ABSOLUTE}/{name}" for name in layout.links},
    }
    content = {
        "entry": launch.entry,
        "revision": launch.revision,
        "code": str(paths.code),
        "site": [str(s) for s in paths.site],
        "runtime": [str(paths.runtime)],
        "records_imports": records_imports,
        "files": files,
        "weights": {name: str(path) for name, path in paths.weights.items()},
        "volumes": sorted(sources.volumes),
        "env": dict(launch.env),
        "secret_variables": list(launch.secret_variables),
        "control_fd": CONTROL_FD,
        "work": str(paths.work),
    }
    return Plan(order=order, launch_file=content)


def limits(
    launch: LaunchSpec, *, uid: int | None, limits_memory: bool, limits_pids: bool
) -> dict[str, int]:
    """RLIMIT_* of every process in the slot; memory and processes only if no cgroup limits them."""
    out = {"CORE": 0, "NOFILE": _MAX_OPEN_FILES}
    if not limits_memory:
        out["DATA"] = launch.memory_bytes
    if not limits_pids and uid is not None:
        out["NPROC"] = _MAX_PROCESSES_OF_UID
    return out


def _binds(sources: Sources, directory: Path) -> list[tuple[str, str]]:
    binds = [
        (sources.layout.prefix, "python"),
        (sources.code, "code"),
        (directory / "launch.json", "launch.json"),
    ]
    binds += [(path, f"env/{i}") for i, path in enumerate(sources.layout.site)]
    binds += [(path, f"runtime/{name}") for name, path in sources.runtime.items()]
    binds += [(path, f"weights/{name}") for name, path in sources.weights.items()]
    binds += (
        [(sources.criu, "criu")]
        if sources.criu is not None and sources.layout.rootfs is not None
        else []
    )
    binds += [(sources.platform, "platform")] if sources.platform is not None else []
    binds += [(sources.calls, CALLS_DIRECTORY)] if sources.calls is not None else []
    return [(str(path), name) for path, name in binds]


def _environment(
    launch: LaunchSpec,
    layout: Layout,
    paths: _WorkerPaths,
    *,
    namespaced: bool,
) -> dict[str, str]:
    env = {
        "PATH": f"{paths.programs}:{paths.python.parent}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **layout.env,
        **launch.env,
        **THREADS_OFF,
    }
    if str(paths.programs) not in env["PATH"].split(":"):  # an image's, or the function's own
        env["PATH"] = f"{env['PATH']}:{paths.programs}"
    env.update(HOME=str(paths.work), TMPDIR=str(paths.temporary))
    if namespaced and any((layout.prefix / "lib").glob("libpython*.so*")):
        # The interpreter names its library by the prefix that it was built for, which does not
        # exist in the slot.
        env["LD_LIBRARY_PATH"] = ":".join(
            filter(None, [f"{mounts.ROOT}/python/lib", env.get("LD_LIBRARY_PATH")])
        )
    if launch.gpu and layout.rootfs is not None:
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [mounts.DRIVER, env.get("LD_LIBRARY_PATH")]))
    return env
