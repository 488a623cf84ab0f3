"""Manifests: a model's files and the hashes of their bytes. The sha256 of the manifest names the
model.

A manifest is canonical JSON (sorted keys, no spaces) with its files sorted by the bytes of their
paths, so the same directory gives the same manifest everywhere. Files are split into chunks of
16 MiB, each with its sha256, to be fetched and verified in parallel. A file's name in the origin
and in the store is its *digest*: a hash of its size and of its chunks' hashes. Verifying all chunks
therefore verifies the file without a second read, and a manifest cannot misstate it. Equal files of
two models are stored once. The digest is a keyed BLAKE2s (RFC 7693, `person`), so that no plain
blob, which is named by its sha256, can take a file's place."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weight_cache.errors import ManifestInvalid
from weight_cache.types import Chunk, Tensor

CHUNK_BYTES = 16 * 1024 * 1024
"""Large enough to amortize a request to an object store, small enough to verify and resume in
pieces."""
MAX_MANIFEST_BYTES = 32 * 1024 * 1024
"""A terabyte has 65,536 chunks, whose hashes take 4.4 MB; 250,000 tensors take about 25 MB."""
MAX_FILES = 100_000
MAX_FOLDERS = 10_000
"""Each directory is created and flushed separately, and takes an inode."""
MAX_DEPTH = 32
MAX_TENSORS = 250_000
"""In all files: a checkpoint of a trillion parameters with 384 experts in 61 layers has 210,000."""
MAX_TENSORS_OF_FILE = 100_000
"""A file is decoded in one step that blocks all other threads: about 0.2 s at this limit."""
_VALUES_OF_TENSOR = 12
"""Values per tensor: name, type, shape of up to eight dimensions, offset, length."""
_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255  # NAME_MAX of common file systems
_VERSION = 2
_HEX = re.compile(r"[0-9a-f]{64}\Z")
# a name that is empty, . or .., or contains the kernel's terminator
_NOT_PLAIN = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|\0")
_PERSON = b"plfile2"
_HEAD = f'{{"chunk_bytes":{CHUNK_BYTES},"files":['.encode()
_TAIL = f'],"version":{_VERSION}}}'.encode()
_FILE_HEAD = b'{"chunks":'
_BETWEEN = b"}," + _FILE_HEAD
"""Separator of two files. It cannot occur elsewhere: quotation marks inside a string are escaped,
and no string ends before a key."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file: its path below the model's directory, its size, the sha256 (hex) of each chunk.

    `tensors`: the tensors of a safetensors file, in byte order; empty for other files.
    """

    path: str
    size_bytes: int
    chunk_sha256s: tuple[str, ...]
    tensors: tuple[Tensor, ...] = ()

    @property
    def digest(self) -> str:
        """The file's name in the origin and in the store (64 hex digits)."""
        return file_digest(self.size_bytes, self.chunk_sha256s)

    def chunks(self) -> Iterator[Chunk]:
        """The file's chunks in order; an empty file has none."""
        for index, digest in enumerate(self.chunk_sha256s):
            offset = index * CHUNK_BYTES
            yield Chunk(
                offset_bytes=offset,
                length_bytes=min(CHUNK_BYTES, self.size_bytes - offset),
                sha256=digest,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A model's files, in the order of their paths' bytes."""

    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(f.size_bytes for f in self.files)

    @property
    def digest(self) -> str:
        """sha256 (hex) of `to_bytes()`: the model's name."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def blobs(self) -> dict[str, int]:
        """The distinct files as digest → size in bytes."""
        return {f.digest: f.size_bytes for f in self.files}

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        return _HEAD + b",".join(_file_bytes(f) for f in self.files) + _TAIL

    def folders(self) -> int:
        """Number of directories that contain the files, without the model's root."""
        return len(_folders(f.path for f in self.files))


def file_digest(size_bytes: int, chunk_sha256s: Sequence[str]) -> str:
    """The digest (hex) of a file of that size with these chunks."""
    whole = hashlib.blake2s(size_bytes.to_bytes(8, "little"), person=_PERSON)
    whole.update(bytes.fromhex("".join(chunk_sha256s)))
    return whole.hexdigest()


class FileHash:
    """Computes the digest of a file that is passed in pieces of any size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._chunks: list[str] = []
        self._chunk = hashlib.sha256()
        self._missing = CHUNK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece."""
        view = memoryview(data)
        self.size_bytes += len(view)
        while view:
            part, view = view[: self._missing], view[self._missing :]
            self._chunk.update(part)
            self._missing -= len(part)
            if not self._missing:
                self._chunks.append(self._chunk.hexdigest())
                self._chunk, self._missing = hashlib.sha256(), CHUNK_BYTES

    def chunk_sha256s(self) -> tuple[str, ...]:
        """Hashes of the chunks so far."""
        return (*self._chunks, *([self._chunk.hexdigest()] if self._missing < CHUNK_BYTES else []))

    def hexdigest(self) -> str:
        """The file's digest, as `file_digest` computes it."""
        return file_digest(self.size_bytes, self.chunk_sha256s())


def parse(raw: bytes) -> Manifest:
    """Parse a manifest's canonical JSON. Raises ManifestInvalid naming the error.

    Decodes file by file, so that other threads can run in between: decoding holds the GIL.
    """
    manifest = Manifest(files=tuple(_file(i, text) for i, text in enumerate(_file_texts(raw))))
    check_paths([f.path for f in manifest.files])
    check_tensors(manifest.files)
    return manifest


def _file_texts(raw: bytes) -> list[bytes]:
    """Split a manifest into the JSON of each file, checking size limits before decoding."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(f"a manifest of {len(raw)} bytes is longer than {MAX_MANIFEST_BYTES}")
    if raw.startswith(_HEAD) and raw.endswith(b'],"version":1}'):
        raise ManifestInvalid("manifest was written by an earlier pilotlight version: deploy again")
    if not (raw.startswith(_HEAD) and raw.endswith(_TAIL)):
        raise ManifestInvalid(
            f"not a manifest in canonical JSON: expected chunk_bytes {CHUNK_BYTES}, a list of "
            f"files and version {_VERSION}, with sorted keys and no whitespace"
        )
    inner = raw[len(_HEAD) : len(raw) - len(_TAIL)]
    if (count := inner.count(_BETWEEN) + 1) > MAX_FILES:
        raise ManifestInvalid(f"{count} files: a model has 1 to {MAX_FILES}")
    _check_few("the manifest", inner, files=count, most=MAX_TENSORS)
    first, *others = inner.split(_BETWEEN) if inner else [b""]
    texts = [first, *(_FILE_HEAD + other for other in others)] if inner else []
    texts[:-1] = [text + b"}" for text in texts[:-1]]
    for index, text in enumerate(texts):
        _check_few(f"files[{index}]", text, files=1, most=MAX_TENSORS_OF_FILE)
    return texts


def _check_few(where: str, text: bytes, *, files: int, most: int) -> None:
    """Refuse JSON with more values than `files` files with `most` tensors can have: decoding time
    grows with the number of values.

    Brackets and commas in names count too, beyond the allowance for a tensor of eight
    dimensions."""
    chunks = len(text) // 67  # a hash, its quotation marks, a comma
    is_much = (
        text.count(b"[") + text.count(b"{") > 2 * most + 3 * files
        or text.count(b",") > _VALUES_OF_TENSOR * most + 4 * files + chunks
    )
    if is_much:
        raise ManifestInvalid(
            f"{where} has more values than {most} tensors, the limit, can have: split the model"
        )


def _file(index: int, text: bytes) -> ManifestFile:
    where = f"files[{index}]"
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ManifestInvalid(f"{where}: not JSON: {e}") from e
    if not isinstance(body, Mapping) or set(body) - {"tensors"} != {"path", "size_bytes", "chunks"}:
        raise ManifestInvalid(
            f"{where}: expected path, size_bytes, chunks, and for a safetensors file tensors"
        )
    path, size, chunks = body["path"], body["size_bytes"], body["chunks"]
    if not isinstance(path, str) or not isinstance(chunks, list):
        raise ManifestInvalid(f"{where}: path must be a string, chunks a list")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ManifestInvalid(
            f"{where}.size_bytes = {size!r}: expected a whole number of at least 0"
        )
    if not all(isinstance(d, str) and _HEX.match(d) for d in chunks):
        raise ManifestInvalid(f"{where}: each hash must be the 64 hex digits of a sha256")
    if len(chunks) != -(-size // CHUNK_BYTES):
        raise ManifestInvalid(
            f"{where}: {size} bytes have {-(-size // CHUNK_BYTES)} chunks, not {len(chunks)}"
        )
    tensors = _tensors(f"{where}.tensors", body["tensors"], size) if "tensors" in body else ()
    file = ManifestFile(path=path, size_bytes=size, chunk_sha256s=tuple(chunks), tensors=tensors)
    if _file_bytes(file) != text:
        raise ManifestInvalid(
            f"{where}: not canonical JSON: keys must be sorted, without whitespace"
        )
    return file


def _tensors(where: str, rows: Any, size_bytes: int) -> tuple[Tensor, ...]:
    """Parse rows of [name, dtype, shape, offset, length]: sorted by offset, inside the file, not
    overlapping."""
    if not isinstance(rows, list) or not rows:
        raise ManifestInvalid(f"{where}: expected a non-empty list")
    tensors, end = [], 0
    for row in rows:
        if not (
            isinstance(row, list) and [type(value) for value in row] == [str, str, list, int, int]
        ):
            raise ManifestInvalid(
                f"{where}: a row must be [name, dtype, shape, offset_bytes, length_bytes], not "
                f"{str(row)[:100]}"
            )
        name, dtype, shape, offset, length = row
        if not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0
            for n in [*shape, offset, length]
        ):
            raise ManifestInvalid(
                f"{where}: {name[:100]!r} has a size or an offset that is not a whole number of at "
                f"least 0"
            )
        if not end <= offset <= offset + length <= size_bytes:
            raise ManifestInvalid(
                f"{where}: {name[:100]!r} is at {offset} to {offset + length}, but must be within "
                f"{size_bytes} bytes and after byte {end}"
            )
        tensors.append(
            Tensor(
                name=name, dtype=dtype, shape=tuple(shape), offset_bytes=offset, length_bytes=length
            )
        )
        end = offset + length
    if len({t.name for t in tensors}) != len(tensors):
        raise ManifestInvalid(f"{where}: two tensors have the same name")
    try:
        "".join([*(t.name for t in tensors), *(t.dtype for t in tensors)]).encode()
    except UnicodeEncodeError as e:  # a lone surrogate, which JSON can express
        raise ManifestInvalid(f"{where}: {e.object[e.start]!r} is not valid Unicode text") from e
    return tuple(tensors)


def _file_bytes(file: ManifestFile) -> bytes:
    """Encode one file as canonical JSON. Raises ManifestInvalid for a path that is not UTF-8."""
    body: dict[str, Any] = {
        "path": file.path,
        "size_bytes": file.size_bytes,
        "chunks": list(file.chunk_sha256s),
    }
    if file.tensors:
        body["tensors"] = [
            [t.name, t.dtype, list(t.shape), t.offset_bytes, t.length_bytes] for t in file.tensors
        ]
    try:
        return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise ManifestInvalid(f"path {file.path!r} is not UTF-8: rename the file") from e


def check_tensors(files: Sequence[ManifestFile]) -> None:
    """Refuse more tensors than a manifest may have. Raises ManifestInvalid."""
    for file in files:
        if len(file.tensors) > MAX_TENSORS_OF_FILE:
            raise ManifestInvalid(
                f"{file.path!r} has {len(file.tensors)} tensors: a file has at most "
                f"{MAX_TENSORS_OF_FILE}"
            )
    if (total := sum(len(file.tensors) for file in files)) > MAX_TENSORS:
        raise ManifestInvalid(
            f"{total} tensors: a model has at most {MAX_TENSORS}; split the model"
        )


def _folders(paths: Iterable[str]) -> set[str]:
    """The directories that contain these files; stops at one more than a model may have."""
    found: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
        if len(found) > MAX_FOLDERS:
            break
    return found


def check_paths(paths: list[str]) -> None:
    """Refuse paths that leave the model's directory, occur twice, or are both a file and a
    directory, and too many directories."""
    if not 0 < len(paths) <= MAX_FILES:
        raise ManifestInvalid(f"{len(paths)} files: a model has 1 to {MAX_FILES}")
    for path in paths:
        try:
            raw = path.encode()
        except UnicodeEncodeError as e:
            raise ManifestInvalid(f"path {path!r} is not UTF-8: rename the file") from e
        if (
            len(raw) > _MAX_PATH_BYTES
            or _NOT_PLAIN.search(raw)
            or max(map(len, raw.split(b"/"))) > _MAX_NAME_BYTES
        ):
            raise ManifestInvalid(
                f"path {path!r} is not a plain relative path of at most {_MAX_PATH_BYTES} bytes"
            )
        if (depth := path.count("/")) > MAX_DEPTH:
            raise ManifestInvalid(
                f"path {path[:100]!r} is {depth} directories deep: at most {MAX_DEPTH}"
            )
    if len(_folders(paths)) > MAX_FOLDERS:
        raise ManifestInvalid(
            f"more than {MAX_FOLDERS} directories: pack their contents as .tar or .zip"
        )
    if any(b.encode() <= a.encode() for a, b in itertools.pairwise(paths)):
        raise ManifestInvalid("files must be sorted by path, without duplicates")
    # "\0" sorts first, so that a directory is followed directly by its contents
    by_folder = sorted(path.replace("/", "\0") for path in paths)
    if both := [a for a, b in itertools.pairwise(by_folder) if b.startswith(f"{a}\0")]:
        path = min(both).replace("\0", "/")
        raise ManifestInvalid(f"path {path!r} is both a file and a directory")
