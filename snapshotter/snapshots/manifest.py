"""The manifest of one snapshot, written last and signed: files with sizes and hashes, identity, and
how to restore it.

The file is canonical JSON with a `signature`: HMAC-SHA256 over everything else, with a key derived
from the platform's own. A process image is code that will run: only images written by this platform
are restored. The id is a hash of the content, excluding what the proof adds later."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from pilotlight.core.json_record import JsonRecord
from snapshotter.criu import working_set
from snapshotter.snapshots import readahead
from snapshotter.snapshots.identity import Identity
from snapshotter.types import RevisionKey

MANIFEST = "manifest.json"
FILES_TAR = "files.tar"
IMAGES = "images"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""A process with 300 images and 10,000 mapped files stays below 2 MB."""
EAGER, LAZY = "eager", "lazy"
_NAME = re.compile(rf"{re.escape(FILES_TAR)}|{IMAGES}/[A-Za-z0-9_][A-Za-z0-9._-]{{0,200}}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_AFTER_PROOF = ("id", "pages", "proof", "phases_ms")


class SnapshotInvalid(Exception):
    """Raised when a snapshot does not match its manifest, or the manifest is not ours; the message
    says which part and why."""


class SnapshotsOff(Exception):
    """Raised when snapshots cannot be signed here; the message says why and gives the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMark(JsonRecord):
    """Size and sha256 (hex) of one file."""

    bytes: int
    sha256: str

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Raises ValueError if it is not a size and a hash."""
        size, digest = body["bytes"], body["sha256"]
        if (
            body.keys() != {"bytes", "sha256"}
            or type(size) is not int
            or size < 0
            or not _SHA256.fullmatch(digest)
        ):
            raise ValueError(f"{body!r} is not a size and a sha256")
        return cls(bytes=size, sha256=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(JsonRecord):
    """The result of a trial restore that answered the example as before.

    Attributes:
        at: wall clock, seconds since the epoch.
        answer_ms: from the request to the first answer, by kind of pages tried (`eager`, `lazy`).
        restore_ms: until the process ran, with the chosen kind.
        working_set: what a lazy restore brings first (`working_set.encode`); "": unknown.
        file_parts: parts of files that it then uses (`readahead.encode`); "": unknown.
    """

    at: float
    answer_ms: Mapping[str, float]
    restore_ms: float
    working_set: str = ""
    file_parts: str = ""


@dataclass(frozen=True, kw_only=True)
class SnapshotManifest:
    """The manifest of one snapshot.

    Attributes:
        id: `sn-` and 16 hex digits of the content; "" in a draft, which has no `files` either.
        identity: the fields that must match.
        created_at: wall clock, seconds since the epoch.
        files: `images/<name>` and `files.tar` → size and hash.
        mapped: in-slot path → size and hash of every file that the process maps or holds open and
            that may change.
        pages: `eager` or `lazy`.
        in_place: a whole process tree, restored one to one.
        stdio: in-slot names of its stdout and stderr pipes (`pipe:[ino]`), None if released.
        point: the snapshot point: pid, threads, phases_ms, joins, listens, obstacles.
        network: it requires its own network namespace.
        heap_bytes: memory in the image, by cause (`memory_report.causes`).
        weights_bytes: size of weights mapped from their files, and thus not in the image.
        proof: None until it was restored once.
        phases_ms: durations of its creation.
        cold_ms: from nothing to the snapshot point; 0: the worker was booted by IMPORT.
        labels: of the launch.
    """

    id: str = ""
    identity: Identity
    created_at: float
    files: Mapping[str, FileMark] = field(default_factory=dict)
    mapped: Mapping[str, FileMark] = field(default_factory=dict)
    pages: str = EAGER
    in_place: bool
    stdio: Mapping[str, str] | None = None
    point: Mapping[str, Any]
    network: bool = False
    heap_bytes: Mapping[str, int] = field(default_factory=dict)
    weights_bytes: int = 0
    proof: Proof | None = None
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    cold_ms: float
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def revision(self) -> RevisionKey:
        """The revision it belongs to."""
        return RevisionKey(self.identity.revision)

    @functools.cached_property
    def identity_digest(self) -> str:
        """Digest of its identity."""
        return self.identity.digest()

    @property
    def image_bytes(self) -> int:
        """Disk space."""
        return sum(mark.bytes for mark in self.files.values())

    def completed(self, files: Mapping[str, FileMark]) -> Self:
        """The draft with its files and the resulting id."""
        full = replace(self, files=dict(files))
        return replace(full, id=full.content_id())

    def content_id(self) -> str:
        """The id of this content; a proof does not change it."""
        body = {k: v for k, v in self.to_json().items() if k not in _AFTER_PROOF}
        return f"sn-{hashlib.sha256(canonical(body)).hexdigest()[:16]}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values, without signature."""
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        body["identity"] = self.identity.to_json()
        for name in ("files", "mapped"):
            body[name] = {path: mark.to_json() for path, mark in body[name].items()}
        body["proof"] = None if self.proof is None else self.proof.to_json()
        for name in ("point", "heap_bytes", "phases_ms", "labels"):
            body[name] = dict(body[name])
        return body

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises ValueError, TypeError or KeyError, which the caller
        translates to SnapshotInvalid."""
        values = dict(body)
        for name in ("files", "mapped"):
            values[name] = {path: FileMark.from_json(mark) for path, mark in body[name].items()}
        for name in values["files"]:
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid file name in a snapshot")
        if body["pages"] not in (EAGER, LAZY):
            raise ValueError(f"pages must be {EAGER} or {LAZY}, not {body['pages']!r}")
        values["identity"] = Identity.from_json(body["identity"])
        values["proof"] = None if body["proof"] is None else Proof.from_json(body["proof"])
        if values["proof"] is not None:
            working_set.decode(values["proof"].working_set)
            readahead.decode(values["proof"].file_parts)
        return cls(**values)


def canonical(body: Mapping[str, Any]) -> bytes:
    """The canonical encoding: sorted keys, no spaces, ASCII. Raises ValueError on NaN."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signing_key(home: Path, key_file: Path | None = None) -> bytes:
    """A key derived from `key_file`, or `<home>/platform.key`, for this purpose only. Raises
    SnapshotsOff if the file is missing or not a key."""
    path = key_file or home / "platform.key"
    try:
        raw = base64.b64decode(path.read_bytes().strip(), altchars=b"-_", validate=True)
    except FileNotFoundError as e:
        raise SnapshotsOff(
            f"{path} is missing: it is needed to sign snapshots, and the platform creates it at "
            f"its first start"
        ) from e
    except (OSError, binascii.Error) as e:
        raise SnapshotsOff(
            f"{path} cannot be read as a key ({e}): it is needed to sign snapshots"
        ) from e
    if len(raw) != 32:
        raise SnapshotsOff(
            f"{path} has {len(raw)} bytes, a key has 32: it is needed to sign snapshots"
        )
    return hmac.new(raw, b"pilotlight snapshots", hashlib.sha256).digest()


def sealed(body: Mapping[str, Any], key: bytes) -> bytes:
    """Canonical JSON of `body` with its `signature`."""
    signature = hmac.new(key, canonical(body), hashlib.sha256).hexdigest()
    return canonical({**body, "signature": signature})


def opened(data: bytes, key: bytes, *, max_bytes: int = MAX_MANIFEST_BYTES) -> dict[str, Any]:
    """The body of the result of `sealed`. Raises SnapshotInvalid if it was changed or written by
    another platform."""
    if len(data) > max_bytes:
        raise SnapshotInvalid(f"the manifest has {len(data)} bytes, more than {max_bytes}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise SnapshotInvalid(f"the manifest is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise SnapshotInvalid("the manifest is not a JSON object")
    try:
        genuine = hmac.compare_digest(
            sealed({k: v for k, v in body.items() if k != "signature"}, key), data
        )
    except ValueError as e:
        raise SnapshotInvalid(f"the manifest is not canonical: {e}") from e
    if not genuine:
        raise SnapshotInvalid(
            "the manifest's signature is invalid: it was altered, or signed with another "
            "platform.key"
        )
    del body["signature"]
    return body


def parse(data: bytes, key: bytes) -> SnapshotManifest:
    """Parse a manifest file. Raises SnapshotInvalid."""
    return checked_manifest(opened(data, key))


def checked_manifest(body: Mapping[str, Any]) -> SnapshotManifest:
    """A manifest from JSON values with a verified signature. Raises SnapshotInvalid."""
    try:
        manifest = SnapshotManifest.from_json(body)
        content_id = manifest.content_id()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise SnapshotInvalid(f"this version cannot read the manifest: {e}") from e
    if manifest.id != content_id:
        raise SnapshotInvalid(
            f"the manifest's id is {manifest.id}, but its content is {content_id}"
        )
    return manifest
