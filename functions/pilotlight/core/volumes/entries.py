"""Entries of a volume's manifest: files, directories and symbolic links, by path.

A file is a list of chunks of CHUNK_BYTES (the last one is shorter), each named by its sha256 and
stored once per tenant. Standard library only; shared by the node agent, the controller and clients.
"""

from __future__ import annotations

import enum
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

CHUNK_BYTES = 16 * 1024 * 1024
MAX_PATH_BYTES = 1024
MAX_DEPTH = 64
"""Most parts of a path: a scan holds one descriptor for each."""
MAX_FILE_BYTES = 1024**4
_MAX_NAME_BYTES = 255
_MODES = 0o777
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_TENANT = re.compile(r"[A-Za-z0-9-]{1,64}\Z")
VOLUME_ID = re.compile(r"vol-[0-9a-f]{16}\Z")


class EntryInvalid(ValueError):
    """Raised for an entry that no volume can have; the message names its path."""


class EntryKind(enum.StrEnum):
    """The kind of an entry."""

    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One path of a volume.

    Attributes:
        path: relative, parts separated by `/`, UTF-8.
        mode: permission bits; of a link 0.
        modified_ns: modification time of a file, since the epoch; of others 0.
        chunks: sha256 (hex) of each chunk of a file, in order.
        target: of a link: a relative path that does not leave the volume.
    """

    path: str
    kind: EntryKind
    size_bytes: int = 0
    mode: int = 0
    modified_ns: int = 0
    chunks: tuple[str, ...] = ()
    target: str = ""

    def __post_init__(self) -> None:
        check_path(self.path)
        if not 0 <= self.mode <= _MODES:
            raise EntryInvalid(f"{self.path}: mode {self.mode:o} is not within 0 to 777")
        if not -(2**62) < self.modified_ns < 2**62:
            raise EntryInvalid(f"{self.path}: its modification time is out of range")
        if self.kind is EntryKind.FILE:
            self._check_file()
        elif self.chunks or self.size_bytes:
            raise EntryInvalid(f"{self.path}: a {self.kind} has no content")
        if self.kind is EntryKind.LINK:
            check_target(self.path, self.target)
        elif self.target:
            raise EntryInvalid(f"{self.path}: only a link has a target")

    def _check_file(self) -> None:
        if not 0 <= self.size_bytes <= MAX_FILE_BYTES:
            raise EntryInvalid(
                f"{self.path}: {self.size_bytes} bytes; a file of a volume has at most "
                f"{MAX_FILE_BYTES}"
            )
        if len(self.chunks) != -(-self.size_bytes // CHUNK_BYTES):
            raise EntryInvalid(
                f"{self.path}: {len(self.chunks)} chunks do not make {self.size_bytes} bytes"
            )
        if not all(_DIGEST.match(digest) for digest in self.chunks):
            raise EntryInvalid(f"{self.path}: a chunk is not named by a sha256")

    def chunk_bytes(self, index: int) -> int:
        """Size of a chunk in bytes."""
        return min(CHUNK_BYTES, self.size_bytes - index * CHUNK_BYTES)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without what has its default."""
        out: dict[str, Any] = {"path": self.path, "kind": self.kind.value}
        if self.kind is not EntryKind.LINK:
            out["mode"] = self.mode
        if self.kind is EntryKind.FILE:
            out |= {
                "size_bytes": self.size_bytes,
                "modified_ns": self.modified_ns,
                "chunks": list(self.chunks),
            }
        return out | ({"target": self.target} if self.target else {})

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """The reverse of `to_json`. Raises EntryInvalid."""
        if not isinstance(body, Mapping):
            raise EntryInvalid(f"an entry is {type(body).__name__}: it must be an object")
        known = {"path", "kind", "size_bytes", "mode", "modified_ns", "chunks", "target"}
        if unknown := sorted(str(key)[:40] for key in set(body) - known):
            raise EntryInvalid(f"an entry has an unknown key {unknown[0]!r}")
        path, chunks = body.get("path"), body.get("chunks", ())
        numbers = {n: body.get(n, 0) for n in ("size_bytes", "mode", "modified_ns")}
        if not isinstance(path, str) or not isinstance(body.get("target", ""), str):
            raise EntryInvalid("an entry's path and target must be strings")
        if not all(type(number) is int for number in numbers.values()):
            raise EntryInvalid(f"{path[:200]!a}: its numbers must be whole")
        if not isinstance(chunks, list | tuple) or not all(isinstance(c, str) for c in chunks):
            raise EntryInvalid(f"{path[:200]!a}: chunks must be a list of strings")
        try:
            kind = EntryKind(body.get("kind", ""))
        except ValueError:
            raise EntryInvalid(
                f"{path[:200]!a}: its kind must be file, directory or link"
            ) from None
        return cls(
            path=path, kind=kind, chunks=tuple(chunks), target=body.get("target", ""), **numbers
        )


def check_path(path: str) -> str:
    """Return `path` if a volume may have it. Raises EntryInvalid."""
    shown = f"{path[:200]!a}"
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        raise EntryInvalid(f"{shown}: a volume's paths must be UTF-8: rename it") from None
    if not raw or len(raw) > MAX_PATH_BYTES:
        raise EntryInvalid(f"{shown}: a path has 1 to {MAX_PATH_BYTES} bytes, not {len(raw)}")
    parts = raw.split(b"/")
    if len(parts) > MAX_DEPTH:
        raise EntryInvalid(f"{shown}: {len(parts)} directories deep; at most {MAX_DEPTH}")
    for part in parts:
        if part in (b"", b".", b"..") or b"\0" in part or len(part) > _MAX_NAME_BYTES:
            raise EntryInvalid(
                f"{shown}: every part must be a name of 1 to {_MAX_NAME_BYTES} bytes"
            )
    return path


def check_target(path: str, target: str) -> str:
    """Return the target of the link at `path` if it stays in the volume. Raises EntryInvalid."""
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= MAX_PATH_BYTES or "\0" in target:
        raise EntryInvalid(
            f"{path}: a link's target must be UTF-8 of 1 to {MAX_PATH_BYTES} bytes: remove it"
        )
    if target.startswith("/"):
        raise EntryInvalid(
            f"{path} -> {target[:200]}: a link in a volume must be relative, and stay in it"
        )
    depth = path.count("/")
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            raise EntryInvalid(f"{path} -> {target[:200]}: the link leads out of the volume")
    return target


def by_path(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Entries by path. Raises EntryInvalid for one that is named twice, or below a file or link."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.path in found:
            raise EntryInvalid(f"{entry.path} is named twice")
        found[entry.path] = entry
    require_tree(found, found)
    return found


def require_tree(found: Mapping[str, Entry], of: Iterable[str]) -> None:
    """Raise EntryInvalid if one of the paths `of` is below something that is no directory."""
    for path in of:
        parent = posixpath.dirname(path)
        while parent:
            above = found.get(parent)
            if above is not None and above.kind is not EntryKind.DIRECTORY:
                raise EntryInvalid(f"{path} is below {parent}, which is a {above.kind}")
            parent = posixpath.dirname(parent)


def chunk_key(tenant: str, digest: str) -> str:
    """Key of a chunk in the blob store. Raises ValueError."""
    if not _TENANT.match(tenant) or not _DIGEST.match(digest):
        raise ValueError(f"volumes/{tenant[:64]}/{digest[:64]}: is no chunk of a volume")
    return f"volumes/{tenant}/{digest[:2]}/{digest}"
