"""The identity of a snapshot: the fields of revision and machine that must match for a restore.

A process image contains addresses of libraries, choices made for this processor, and kernel
structures. A snapshot with a different field is not a candidate. The first differing field is
reported, so that operators can see which upgrade invalidated the snapshots."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from pilotlight.core.json_record import JsonRecord
from snapshotter.slots.launch_plan import Layout
from snapshotter.types import GpuGrant, LaunchSpec

SCHEMA = "3"
"""Increment when the layout of a slot or a snapshot changes, so that older snapshots are not
restored."""
_SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity(JsonRecord):
    """The fields, in the order in which a difference is reported: first those that users change,
    then those that operators change.

    Attributes:
        schema: of slots and snapshots.
        revision, bundle, image, entry, env, uid, weights, limits: of the launch; `image` of the
            platform's own environment is a hash of its installed packages.
        rootfs: kind of the root file system, `host` or `image`, and for an image its distribution
            packages. On the host's, each mapped file is checked (`mapped_files`).
        runtime: the sources of our own packages.
        python: the interpreter's name and a hash of its executable and library.
        kernel, machine, cpu: release, architecture, hash of the processor's flags.
        criu: version and hash of the binary.
        driver, gpu: of the GPUs; number and model of those that the launch has, beside those of
            the node.
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
        """Name of the first field that differs; None if all are equal."""
        return next(
            (f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), None
        )

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises ValueError on a missing, unknown or non-text field."""
        names = {f.name for f in fields(cls)}
        if body.keys() != names or not all(isinstance(v, str) for v in body.values()):
            raise ValueError(f"an identity must have the text fields {', '.join(sorted(names))}")
        return cls(**body)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """The machine's fields of an Identity, constant while the agent runs."""

    runtime: str
    kernel: str
    machine: str
    cpu: str
    criu: str
    driver: str
    gpus: str

    def kind(self) -> str:
        """sha256 (hex) of all fields: nodes of one kind restore each other's snapshots."""
        return _digest([SCHEMA, *(getattr(self, f.name) for f in fields(self))])


def node_identity(
    *,
    runtime: Mapping[str, Path],
    criu_version: str,
    criu_sha256: str,
    gpus: Iterable[Mapping[str, Any]] = (),
) -> NodeIdentity:
    """The identity of this machine. `runtime`: package name → directory; `gpus`: rows of
    `capabilities()`. Blocking, some 30 ms: once per agent."""
    name, cards = os.uname(), list(gpus)
    return NodeIdentity(
        runtime=source_digest(runtime),
        kernel=name.release,
        machine=name.machine,
        cpu=cpu_digest(Path("/proc/cpuinfo").read_text()),
        criu=f"{criu_version} {criu_sha256[:_SHORT]}",
        driver=",".join(sorted({str(card["driver"]) for card in cards})),
        gpus=",".join(sorted(str(card["name"]) for card in cards)),
    )


def identity_of(
    launch: LaunchSpec, node: NodeIdentity, layout: Layout, gpus: GpuGrant | None = None
) -> Identity:
    """The identity of `launch` on this machine, with these GPUs. `layout`: the interpreter and
    packages that it boots with. Costs a few stat(2) calls once warm.

    Raises OSError if the interpreter does not exist.
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
        gpu=f"{_granted(gpus)} of {node.gpus}" if launch.gpu else "",
    )


def _granted(gpus: GpuGrant | None) -> str:
    """Number and model of the GPUs: `2 NVIDIA H100 80GB HBM3`."""
    if gpus is None:
        return "none"
    first = gpus.devices[0]
    return f"{len(gpus.devices)} {first.kind if first.is_mig else first.model}"


def cpu_digest(cpuinfo: str) -> str:
    """Hash of the processor's feature flags, independent of their order. Source:
    proc_cpuinfo(5)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return _digest(sorted(value.split()))[:_SHORT]
    return _digest(cpuinfo)[:_SHORT]


def source_digest(packages: Mapping[str, Path]) -> str:
    """Hash of every Python source below each directory, by relative name and content."""
    total = hashlib.sha256()
    for name, directory in sorted(packages.items()):
        for path in sorted(directory.rglob("*.py")):
            total.update(f"{name}/{path.relative_to(directory)}\n".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:_SHORT]


def python_digest(layout: Layout) -> str:
    """The interpreter's name and a hash of its executable and shared library; read again when one
    of them changes."""
    if layout.rootfs is not None and layout.python.is_relative_to(layout.rootfs):
        return (
            f"{layout.python.name} {layout.rootfs_digest}"  # a tenant's: its links are not followed
        )
    libraries = sorted((layout.prefix / "lib").glob("libpython*.so*"))
    return f"{layout.python.name} {_files_digest(tuple(_stamps([layout.python, *libraries])))}"


def site_digest(directories: Iterable[Path]) -> str:
    """Hash of the distributions installed in `directories`. Read again when a directory changes, as
    pip changes it."""
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
    """RECORD lists every file of a distribution with its hash (PEP 376); a distribution without it
    counts by its name, which includes the version."""
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
    """JSON values for mappings that are not dicts."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")
