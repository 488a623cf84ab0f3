"""Cache of manifests of unchanged sources in the user's cache directory, so that nothing is hashed
or fetched twice.

An entry is a file keyed by the source and the versions of its files; it begins with the sha256 of
the rest. It is written to a temporary file and renamed; a corrupt entry counts as absent. If the
cache cannot be written, nothing is stored."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weight_cache.manifest import Manifest
    from weight_cache.sources import SourceFile

_FORMAT = "pilotlight manifest 2"
"""Part of every key. Increment it when the same source would result in another manifest."""
_MAX_ENTRIES = 256
_MAX_BYTES = 256 * 1024 * 1024
_MAX_LENGTH = 65 * 1024 * 1024
"""Maximum size of one entry: the largest manifest and its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestCache:
    """A directory of entries, which several processes may use concurrently."""

    directory: Path
    max_entries: int = _MAX_ENTRIES
    max_bytes: int = _MAX_BYTES

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> ManifestCache:
        """Return the cache of the user, below `$XDG_CACHE_HOME` (XDG base directory
        specification)."""
        base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/root")) / ".cache"
        return cls(directory=Path(base) / "pilotlight" / "manifests")

    def get(self, source: str, files: Sequence[SourceFile]) -> Manifest | None:
        """Return the manifest of exactly these files, None if not cached."""
        from weight_cache.errors import ManifestInvalid
        from weight_cache.manifest import parse

        path = self._path(source, files)
        try:
            with path.open("rb") as entry:
                digest, _, raw = entry.read(_MAX_LENGTH).partition(b"\n")
            if hashlib.sha256(raw).hexdigest().encode() != digest:
                return None
            manifest = parse(raw)
            os.utime(path)
        except (OSError, ManifestInvalid):
            return None
        described = [(f.path, f.size_bytes) for f in manifest.files]
        return manifest if described == [(f.path, f.size_bytes) for f in files] else None

    def put(self, source: str, files: Sequence[SourceFile], manifest: Manifest) -> None:
        """Store a manifest if all files have lasting versions, and evict the least recently used
        entries beyond the limits."""
        if not all(f.is_lasting for f in files):
            return
        raw = manifest.to_bytes()
        with contextlib.suppress(OSError):  # the cache is optional
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(
                self._path(source, files), hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw
            )
            self._shrink()

    def forget(self, source: str, files: Sequence[SourceFile]) -> None:
        """Delete an entry that turned out to be wrong."""
        with contextlib.suppress(OSError):
            self._path(source, files).unlink(missing_ok=True)

    def _path(self, source: str, files: Sequence[SourceFile]) -> Path:
        key = json.dumps([_FORMAT, source, [[f.path, f.size_bytes, f.version] for f in files]])
        return self.directory / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()

    def _shrink(self) -> None:
        entries = []
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # evicted by another process
                info = path.stat()
                entries.append((info.st_mtime_ns, info.st_size, path))
        room, kept_bytes = self.max_entries, 0
        for _, size, path in sorted(entries, reverse=True):
            room, kept_bytes = room - 1, kept_bytes + size
            if room < 0 or kept_bytes > self.max_bytes:
                path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).rename(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
