"""Small models for tests of the store."""

from __future__ import annotations

import hashlib

from tests.fakes.origins import MemoryOrigin
from weight_cache.manifest import CHUNK_BYTES, FileHash, Manifest, ManifestFile


def manifest_of(files: dict[str, bytes]) -> Manifest:
    """The manifest of a directory with these files."""
    return Manifest(
        files=tuple(
            ManifestFile(
                path=path,
                size_bytes=len(content),
                chunk_sha256s=tuple(
                    hashlib.sha256(content[i : i + CHUNK_BYTES]).hexdigest()
                    for i in range(0, len(content), CHUNK_BYTES)
                ),
            )
            for path, content in sorted(files.items())
        )
    )


def put_model(origin: MemoryOrigin, files: dict[str, bytes]) -> str:
    """Upload a model; returns its manifest's name."""
    for content in files.values():
        origin.blobs[digest_of(content)] = content
    return origin.put(manifest_of(files).to_bytes())


def digest_of(content: bytes) -> str:
    """The name of a file with that content."""
    whole = FileHash()
    whole.update(content)
    return whole.hexdigest()


def chunked(*letters: bytes, tail: bytes = b"tail") -> bytes:
    """A file of one chunk per letter, and a short one."""
    return b"".join(letter * CHUNK_BYTES for letter in letters) + tail
