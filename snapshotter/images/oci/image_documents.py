"""What the documents of a container image say: its layers, its variables, and where its Python
is. They come from a registry, and describe what a tenant made: nothing in them is trusted.

Sources: OCI Image Format Specification 1.1, manifest.md, config.md, layer.md."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pilotlight.core.openat2 import check_directory_beneath, open_file_beneath
from pilotlight.core.tar_stream import ReadableStream
from snapshotter.errors import BundleUnavailable
from snapshotter.images.interpreters import Interpreter
from snapshotter.images.spec import OLDEST_PYTHON

MAX_LAYERS = 127
"""What overlayfs, and with it a container runtime, can stack."""
MAX_DOCUMENT_BYTES = 4 * 1024**2
DIGEST = re.compile(r"[0-9a-f]{64}\Z")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_VARIABLES_BYTES = 64 * 1024
_NEWEST_MINOR = 30
_PROGRAMS = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+/bin\Z")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


def layers_of(manifest: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Digest (`sha256:…`) and packed size of each layer, oldest first. Raises
    BundleUnavailable."""
    layers = [blob_of(layer) for layer in manifest["layers"]]
    if len(layers) > MAX_LAYERS:
        raise BundleUnavailable(f"the image has {len(layers)} layers, more than {MAX_LAYERS}")
    return layers


def blob_of(descriptor: Any) -> tuple[str, int]:
    """Digest and size of a descriptor. Raises BundleUnavailable."""
    try:
        digest, size = str(descriptor["digest"]), int(descriptor["size"])
    except (TypeError, KeyError, ValueError) as e:
        raise BundleUnavailable(f"the image's manifest has an invalid descriptor: {e!r}") from e
    if not digest.startswith("sha256:") or not DIGEST.match(digest[7:]) or size < 0:
        raise BundleUnavailable(f"the image's manifest has an invalid digest {digest[:80]!a}")
    return digest, size


@contextlib.contextmanager
def uncompressed(packed: IO[bytes]) -> Iterator[ReadableStream]:
    """The uncompressed layer. Raises BundleUnavailable for an unknown compression."""
    magic = packed.read(4)
    packed.seek(0)
    if magic == _ZSTD:
        raise BundleUnavailable("a layer is compressed by zstd, only gzip is supported")
    if magic[:2] != _GZIP:
        yield packed
        return
    with gzip.GzipFile(fileobj=packed) as plain:
        yield plain


def variables_of(lines: Any) -> dict[str, str]:
    """The image's environment variables (`config.Env`). Raises BundleUnavailable."""
    if not isinstance(lines, list) or not all(
        isinstance(line, str) and "=" in line[1:] and "\0" not in line for line in lines
    ):
        raise BundleUnavailable("the image's variables are invalid")
    if sum(map(len, lines)) > _MAX_VARIABLES_BYTES:
        raise BundleUnavailable(f"the image's variables exceed {_MAX_VARIABLES_BYTES} bytes")
    return dict(line.split("=", 1) for line in lines)


def find_python(rootfs: Path, path: str) -> Interpreter | None:
    """The newest Python in the first directory of `path` (as in $PATH) that has one; links are not
    followed. None if there is none that workers can use."""
    for folder in path.split(":"):
        if not _PROGRAMS.match(folder) or ".." in PurePosixPath(folder).parts:
            continue
        prefix = str(PurePosixPath(folder).parent).lstrip("/")
        for minor in range(_NEWEST_MINOR, OLDEST_PYTHON[1] - 1, -1):
            version = f"3.{minor}"
            program = f"{folder.lstrip('/')}/python{version}"
            with contextlib.suppress(OSError):
                os.close(open_file_beneath(rootfs, program))
                check_directory_beneath(rootfs, f"{prefix}/lib/python{version}")
                return Interpreter(
                    version=version, prefix=rootfs / prefix, executable=rootfs / program
                )
    return None


def package_directories(rootfs: Path, prefix: str, version: str) -> list[str]:
    """Directories of the image's own packages that exist, in their order on sys.path, relative to
    the root. Raises OSError if one leads through a link."""
    places = [
        f"{prefix}/lib/python{version}/site-packages",
        f"usr/local/lib/python{version}/dist-packages",
        "usr/lib/python3/dist-packages",
    ]
    return [place for place in dict.fromkeys(places) if is_directory(rootfs, place)]


def is_directory(rootfs: Path, name: str) -> bool:
    """Whether the image has that directory. Raises OSError if it leads through a link."""
    try:
        check_directory_beneath(rootfs, name)
    except OSError as e:
        if e.errno == errno.ENOENT:
            return False
        raise
    return True
