"""Files in chunks of 16 MiB, each compressed, encrypted and hashed separately, so that they can be
sent, resumed and verified one by one in bounded memory.

Chunks are encrypted because they are a tenant's memory, and the store may be one that others read:
AES-256-GCM (NIST SP 800-38D) with a key per tenant. The nonce is derived from the content, so equal
content of a tenant is the same chunk, and a nonce is not used for two contents."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from pilotlight.core.json_record import JsonRecord
from snapshotter.snapshots.remote_objects import RemoteError

CHUNK_BYTES = 16 * 1024 * 1024
_LEVEL = 3
"""zstd's default: process images shrink to a quarter, at 200 MB/s per core."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NONCE_BYTES = 12


class ChunkCipher:
    """Encrypts the chunks of one tenant. Immutable."""

    def __init__(self, key: bytes, tenant: str) -> None:
        """`key`: the key that signs manifests, from which this tenant's keys are derived."""
        own = _hmac(key, b"pilotlight chunks of " + tenant.encode())
        self._nonces = _hmac(own, b"nonces")
        self._cipher = AESGCM(_hmac(own, b"content"))

    def seal(self, data: bytes) -> bytes:
        """Nonce and ciphertext; the same for the same data."""
        nonce = _hmac(self._nonces, data)[:_NONCE_BYTES]
        return nonce + self._cipher.encrypt(nonce, data, None)

    def open(self, sealed: bytes) -> bytes:
        """The reverse of `seal`. Raises RemoteError."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (InvalidTag, ValueError) as e:
            raise RemoteError("a chunk was encrypted with another platform's key") from e


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(JsonRecord):
    """A chunk of a file: `plain_bytes` with hash `plain`, compressed and encrypted to
    `packed_bytes` with hash `packed` (sha256, hex), which names the chunk."""

    plain: str
    packed: str
    plain_bytes: int
    packed_bytes: int

    def key(self, tenant: str) -> str:
        """Its key in the store."""
        return f"chunks/{tenant}/{self.packed[:2]}/{self.packed}"

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Raises ValueError, TypeError."""
        chunk = cls(**body)
        sizes = (chunk.plain_bytes, chunk.packed_bytes)
        if not (_SHA256.fullmatch(chunk.plain) and _SHA256.fullmatch(chunk.packed)):
            raise ValueError("a chunk must have two sha256 values")
        if not all(type(size) is int and 0 < size <= 2 * CHUNK_BYTES for size in sizes):
            raise ValueError(f"a chunk must have up to {CHUNK_BYTES} bytes, not {sizes}")
        return chunk


def offsets(size: int, chunk_bytes: int) -> range:
    """The offsets of the chunks of a file of `size` bytes."""
    return range(0, size, chunk_bytes)


def pack(path: Path, offset: int, chunk_bytes: int, cipher: ChunkCipher) -> tuple[Chunk, bytes]:
    """Read, compress and encrypt one chunk of a file. Blocking. Raises OSError."""
    with path.open("rb") as f:
        f.seek(offset)
        plain = f.read(chunk_bytes)
    packed = cipher.seal(zstandard.ZstdCompressor(level=_LEVEL).compress(plain))
    chunk = Chunk(
        plain=_sha256(plain),
        packed=_sha256(packed),
        plain_bytes=len(plain),
        packed_bytes=len(packed),
    )
    return chunk, packed


def unpack(chunk: Chunk, packed: bytes, path: Path, offset: int, cipher: ChunkCipher) -> None:
    """Verify a chunk and write it at its offset of an existing file. Blocking. Raises RemoteError,
    OSError."""
    if len(packed) != chunk.packed_bytes:
        raise RemoteError(
            f"chunk {chunk.packed[:12]}… has {len(packed)} bytes, but its record says "
            f"{chunk.packed_bytes}"
        )
    if _sha256(packed) != chunk.packed:
        raise RemoteError(f"chunk {chunk.packed[:12]}… does not match the hash in its record")
    compressed = cipher.open(packed)
    try:
        if zstandard.frame_content_size(compressed) != chunk.plain_bytes:
            raise RemoteError(
                f"chunk {chunk.packed[:12]}… does not unpack to {chunk.plain_bytes} bytes"
            )
        plain = zstandard.ZstdDecompressor().decompress(compressed)
    except zstandard.ZstdError as e:
        raise RemoteError(f"cannot unpack chunk {chunk.packed[:12]}…: {e}") from e
    if _sha256(plain) != chunk.plain:
        raise RemoteError(
            f"the unpacked content of chunk {chunk.packed[:12]}… does not match its record"
        )
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        view = memoryview(plain)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()
