"""Metadata of the store on the disk: manifests, leases, pins, and the scrubber's position.

Each record is one small file, replaced atomically. Records that must survive a power failure
(manifests, pins) are flushed; leases, which end with it, are not. Blocking, but fast."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pilotlight.core.durability import sync_directory
from pilotlight.core.pid_file import boot_id
from weight_cache.errors import ManifestInvalid
from weight_cache.manifest import Manifest, parse
from weight_cache.types import Lease

_MANIFESTS_KEPT = 64
"""Manifests kept of models not in the store, so that missing bytes are known and a fetch can begin
without a request to the origin."""
_MANIFESTS_BYTES = 128 * 1024**2
"""Limit of their size, except the newest: they are outside the budget."""
FOLDERS = ("manifests", "leases", "pins")


class StoreMetadata:
    """Metadata files of one store; `temp` returns new paths on the same file system."""

    def __init__(self, root: Path, temp: Callable[[], Path]) -> None:
        self._root = root
        self._temp = temp

    def write_manifest(self, name: str, raw: bytes) -> None:
        """Write a model's manifest, before any of its files is fetched."""
        note = self._temp()
        try:
            _write_durably(note, raw)
            note.rename(self._root / "manifests" / name)
        except OSError:
            note.unlink(missing_ok=True)
            raise

    def prune_manifests(self, keep: set[str]) -> None:
        """Remove old manifests of models not in the store. Safe to call concurrently."""
        others = []
        for note in (self._root / "manifests").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if note.name not in keep:
                    others.append((note.stat().st_mtime_ns, note.stat().st_size, note))
        room = _MANIFESTS_BYTES
        for kept, (_, size, note) in enumerate(sorted(others, reverse=True)):
            room -= size
            if kept >= _MANIFESTS_KEPT or (kept and room < 0):
                note.unlink(missing_ok=True)

    def manifests(self) -> list[str]:
        """All stored manifests, oldest first."""
        return [
            note.name
            for note in sorted(
                (self._root / "manifests").iterdir(), key=lambda n: n.stat().st_mtime_ns
            )
        ]

    def manifest(self, name: str) -> Manifest | None:
        """A model's manifest; None if it is missing, unreadable, or does not match its hash."""
        raw = self.raw_manifest(name)
        try:
            return parse(raw) if raw is not None else None
        except ManifestInvalid:
            return None

    def raw_manifest(self, name: str) -> bytes | None:
        """The bytes of a manifest; None if it is missing or does not match its hash."""
        try:
            raw = (self._root / "manifests" / name).read_bytes()
        except OSError:
            return None
        return raw if hashlib.sha256(raw).hexdigest() == name else None

    def write_pin(self, name: str) -> None:
        """Write a pin durably: no caller repeats the request after a power failure."""
        (self._root / "pins" / name).touch()
        sync_directory(self._root / "pins")

    def remove_pin(self, name: str) -> None:
        """Remove a pin."""
        (self._root / "pins" / name).unlink(missing_ok=True)

    def pins(self) -> list[str]:
        """All pins."""
        return sorted(pin.name for pin in (self._root / "pins").iterdir())

    def scrubbed(self) -> str:
        """The last checked file; empty at first."""
        try:
            return (self._root / "scrubbed").read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def write_scrub_position(self, digest: str) -> None:
        """Write the last checked file."""
        note = self._temp()
        note.write_text(digest)
        note.rename(self._root / "scrubbed")

    def write_lease(self, lease: Lease) -> None:
        """Write a lease for a restart of this process. Not flushed: a power failure ends its holder
        too."""
        note = self._temp()
        note.write_text(json.dumps({**lease.to_json(), "boot": boot_id()}))
        note.rename(self._root / "leases" / lease.id)

    def remove_lease(self, lease_id: str) -> None:
        """Remove a lease."""
        (self._root / "leases" / lease_id).unlink(missing_ok=True)

    def leases(self) -> Iterator[Lease]:
        """Leases of the current boot; invalid ones, and those of earlier boots, whose holders do
        not exist, are removed."""
        for note in sorted((self._root / "leases").iterdir()):
            try:
                body = json.loads(note.read_text())
                boot = body.pop("boot")
                lease = Lease.from_json(body)
            except (OSError, ValueError, KeyError, TypeError):
                note.unlink(missing_ok=True)
                continue
            if boot == boot_id():
                yield lease
            else:
                note.unlink(missing_ok=True)


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
