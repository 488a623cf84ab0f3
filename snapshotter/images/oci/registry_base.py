"""The root file system of an image that begins with a container image of a registry.

skopeo(1) copies the image to a directory, in the build's sandbox: as the tenant's uid, with the
build's network and limits, and without credentials of this machine. Then the node agent unpacks its
layers (`layers`): nothing of the image is executed, and no link in it followed. The image's
entrypoint, user and working directory have no effect."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlight.core.disk_floor import DiskFloor
from pilotlight.core.oci.image_reference import is_on_loopback
from pilotlight.core.openat2 import open_file_beneath
from pilotlight.core.threads import LowPriorityThreads
from snapshotter.errors import BundleUnavailable
from snapshotter.images.base_rootfs import why_no_root_of_its_own
from snapshotter.images.interpreters import Interpreter
from snapshotter.images.oci.image_documents import (
    MAX_DOCUMENT_BYTES,
    SYSTEM_PATH,
    blob_of,
    find_python,
    layers_of,
    uncompressed,
    variables_of,
)
from snapshotter.images.oci.layers import RootFilesystem

MAX_UNPACKED_BYTES = 32 * 1024**3
"""Limit for the unpacked image: those of GPU frameworks have up to 20 GB."""
UNPACKING = LowPriorityThreads(1)
"""Of all tenants: a large image takes minutes, and delays only other images that begin with one."""
_PLACES = ("dev", "etc", "proc", "run", "sys", "tmp", "var/tmp")
"""Mount points and directories that programs expect, which an image need not have."""
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryBase:
    """A container image that was unpacked.

    Attributes:
        digest: of its manifest, `sha256:…`.
        variables: its environment variables.
        interpreter: its own Python; None: it has none that workers can use.
    """

    digest: str
    variables: Mapping[str, str]
    interpreter: Interpreter | None


def why_not() -> str | None:
    """Why images cannot begin with a container image on this machine, and the remedy; None if they
    can."""
    if (why := why_no_root_of_its_own()) is not None:
        return why
    if shutil.which("skopeo", path=SYSTEM_PATH) is None:
        return "skopeo is not installed: apt-get install skopeo"
    return None


def pull_command(reference: str, to: Path) -> list[str]:
    """The command that copies an image to the OCI layout `to`. `reference`: as checked by
    `parse_image`."""
    tls = ["--src-tls-verify=false"] if is_on_loopback(reference) else []
    return [
        shutil.which("skopeo", path=SYSTEM_PATH) or "skopeo",
        *("--insecure-policy", "--tmpdir", str(to.parent), "--override-os", "linux"),
        *("copy", "--src-no-creds", "--retry-times", str(_ATTEMPTS), *tls),
        *(f"docker://{reference}", f"oci:{to}:base"),
    ]


def unpack(
    beside: Path,
    layout: str,
    rootfs: Path,
    *,
    max_entries: int,
    floor: DiskFloor,
    stopped: threading.Event | None = None,
) -> RegistryBase:
    """Unpack the image in the OCI layout `beside / layout`, which a tenant's process wrote, to the
    new directory `rootfs`. Blocking; soon after `stopped` is set it raises. Raises
    BundleUnavailable, OSError."""

    def check() -> None:
        if stopped is not None and stopped.is_set():
            raise BundleUnavailable("the build has ended")

    index = _document(beside, f"{layout}/index.json")
    manifests = index.get("manifests")
    if not isinstance(manifests, list) or len(manifests) != 1:
        raise BundleUnavailable("the registry sent no image for one platform")
    digest, _ = blob_of(manifests[0])
    manifest = _document(beside, _blob(layout, digest))
    if not isinstance(manifest.get("layers"), list):
        raise BundleUnavailable("the registry sent no image for one platform")
    config = _document(beside, _blob(layout, blob_of(manifest.get("config"))[0]))
    settings = config.get("config")
    lines = settings.get("Env") if isinstance(settings, dict) else None
    variables = variables_of(lines or [])
    rootfs.mkdir(mode=0o755)
    made = RootFilesystem(
        rootfs, max_bytes=MAX_UNPACKED_BYTES, max_entries=max_entries, floor=floor, check=check
    )
    for layer, _ in layers_of(manifest):
        with open(open_file_beneath(beside, _blob(layout, layer)), "rb") as packed:
            try:
                with uncompressed(packed) as plain:
                    made.apply(plain)
            except (tarfile.TarError, zlib.error, EOFError) as e:
                raise BundleUnavailable(f"layer {layer[:19]} is no archive: {e}") from e
    for name in _PLACES:
        made.make_directory(name)
    for name in ("tmp", "var/tmp"):
        (rootfs / name).chmod(0o1777)
    return RegistryBase(
        digest=digest,
        variables=variables,
        interpreter=find_python(rootfs, variables.get("PATH", SYSTEM_PATH)),
    )


def _blob(layout: str, digest: str) -> str:
    return f"{layout}/blobs/sha256/{digest.removeprefix('sha256:')}"


def _document(beside: Path, name: str) -> Mapping[str, Any]:
    with open(open_file_beneath(beside, name), "rb") as file:
        if os.fstat(file.fileno()).st_size > MAX_DOCUMENT_BYTES:
            raise BundleUnavailable(f"{name[-19:]} is too large for a document")
        raw = file.read(MAX_DOCUMENT_BYTES)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BundleUnavailable(f"{name[-19:]} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise BundleUnavailable(f"{name[-19:]} is not a JSON object")
    return found
