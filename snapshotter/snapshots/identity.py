"""What must be the same for a snapshot to be restored: the revision's parts and the machine's, by
field.

A process image holds addresses of libraries, choices made for this processor, kernel structures.
One different field and it is no candidate; the first one that differs is named, because an operator
wants to know which upgrade cost the snapshots."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from snapshotter.slots.launch_plan import Layout
from snapshotter.types import LaunchSpec

SCHEMA = "3"
"""Goes up when the layout of a slot or of a snapshot changes, so that no older one is restored into
it."""
_SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Fields in the order in which a difference is reported: what users change first, then what
    operators change.

    Attributes:
        schema: of slots and snapshots. revision, bundle, image, entry, env, uid, weights, limits:
        of the launch; `image` of the platform's own environment is a
            hash of what is installed in it.
        rootfs: kind of the root file system, `host` or `image`, and which packages of the
        distribution an image's has. Of the host's, each
            file that the process maps is looked at (`mapped_files`).
        runtime: our own packages' sources.
        python: the interpreter's name and a hash of its executable and library.
        kernel, machine, cpu: release, architecture, hash of the processor's flags.
        criu: version and hash of the binary.
        driver, gpu: of the GPUs, and which one the launch asks for.
    """

    schema: str
    revision: str
    bundle: str
    image: str
    rootfs: str
    entry: str
    env: str
    uid: str
    weights: str
    limits: str
    runtime: str
    python: str
    kernel: str
    machine: str
    cpu: str
    criu: str
    driver: str
    gpu: str

    def digest(self) -> str:
        """sha256 (hex) of all fields."""
        return _digest(self.to_json())

    def first_difference(self, other: Identity) -> str | None:
        """Name of the first field that differs; None when they are the same."""
        return next(
            (f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), None
        )

    def to_json(self) -> dict[str, str]:
        """As JSON values."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises ValueError on a missing, unknown or non-text field."""
        names = {f.name for f in fields(cls)}
        if body.keys() != names or not all(isinstance(v, str) for v in body.values()):
            raise ValueError(f"an identity has the text fields {', '.join(sorted(names))}")
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The machine's part, which does not change while the agent runs; fields as in Identity."""

    runtime: str
    kernel: str
    machine: str
    cpu: str
    criu: str
    driver: str
    gpus: str


def node_identity(
    *,
    runtime: Mapping[str, Path],
    criu_version: str,
    criu_sha256: str,
    gpus: Iterable[Mapping[str, Any]] = (),
    cpuinfo: Path = Path("/proc/cpuinfo"),
) -> NodeIdentity:
    """Of this machine. `runtime`: package name → directory; `gpus`: rows of `capabilities()`.
    Blocking, some 30 ms: once per agent."""
    name, cards = os.uname(), list(gpus)
    return NodeIdentity(
        runtime=source_digest(runtime),
        kernel=name.release,
        machine=name.machine,
        cpu=cpu_digest(cpuinfo.read_text()),
        criu=f"{criu_version} {criu_sha256[:_SHORT]}",
        driver=",".join(sorted({str(card["driver"]) for card in cards})),
        gpus=",".join(sorted(str(card["name"]) for card in cards)),
    )


def identity_of(launch: LaunchSpec, node: NodeIdentity, layout: Layout) -> Identity:
    """Of `launch` on this machine. `layout`: the interpreter and the packages that it boots with.
    Some stat(2) calls once warm.

    Raises OSError when the interpreter is not there.
    """
    return Identity(
        schema=SCHEMA,
        revision=launch.revision,
        bundle=launch.bundle,
        image=launch.image or f"own {site_digest(layout.site)}",
        rootfs="host" if layout.rootfs is None else f"image {layout.rootfs_digest}",
        entry=_digest(launch.entry),
        env=_digest(launch.env),
        uid="" if launch.uid is None else str(launch.uid),
        weights=_digest([[w.name, w.manifest] for w in launch.weights]),
        limits=f"memory={launch.memory_bytes} cpu={launch.cpu}",
        runtime=node.runtime,
        python=python_digest(layout),
        kernel=node.kernel,
        machine=node.machine,
        cpu=node.cpu,
        criu=node.criu,
        driver=node.driver,
        gpu=f"{launch.gpu or ''} of {node.gpus}" if launch.gpu else "",
    )


def cpu_digest(cpuinfo: str) -> str:
    """Of the processor's feature flags, whatever their order. Source: proc_cpuinfo(5)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return _digest(sorted(value.split()))[:_SHORT]
    return _digest(cpuinfo)[:_SHORT]


def source_digest(packages: Mapping[str, Path]) -> str:
    """Of every Python source below each directory, by relative name and content."""
    total = hashlib.sha256()
    for name, directory in sorted(packages.items()):
        for path in sorted(directory.rglob("*.py")):
            total.update(f"{name}/{path.relative_to(directory)}\n".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:_SHORT]


def python_digest(layout: Layout) -> str:
    """The interpreter's name and a hash of its executable and shared library; read again when one
    of them changed."""
    libraries = sorted((layout.prefix / "lib").glob("libpython*.so*"))
    return f"{layout.python.name} {_files_digest(tuple(_stamps([layout.python, *libraries])))}"


def site_digest(directories: Iterable[Path]) -> str:
    """Of the distributions installed in `directories`. Read again when a directory changed, as pip
    changes it."""
    return _distributions_digest(tuple(_stamps(directories)))


Stamp = tuple[str, int, int, int]


def _stamps(paths: Iterable[Path]) -> Iterator[Stamp]:
    for path in paths:
        status = path.stat()
        yield str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns


@functools.lru_cache(maxsize=64)
def _files_digest(stamps: tuple[Stamp, ...]) -> str:
    total = hashlib.sha256()
    for path, *_ in stamps:
        with open(path, "rb") as f:
            total.update(hashlib.file_digest(f, "sha256").digest())
    return total.hexdigest()[:_SHORT]


@functools.lru_cache(maxsize=64)
def _distributions_digest(stamps: tuple[Stamp, ...]) -> str:
    """RECORD lists every file of a distribution with its hash (PEP 376); one without it counts by
    its name, which has the version."""
    total = hashlib.sha256()
    for directory, *_ in stamps:
        for info in sorted(Path(directory).glob("*.dist-info")):
            record = info / "RECORD"
            total.update(f"{info.name}\n".encode())
            total.update(record.read_bytes() if record.exists() else b"")
    return total.hexdigest()[:_SHORT]


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    """Mappings that are no dict."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
