"""A manifest names a model's files and the hashes of their bytes; its own sha256 names the model.

Canonical JSON (sorted keys, no spaces), files in the order of their paths' bytes: the same
directory gives the same manifest everywhere. Files are cut into chunks of 16 MiB, each with its
sha256, so that they can be fetched and verified in parallel. A file's name in the origin and in the
store is its *digest*: a hash of its size and its chunks' hashes. Who verified the chunks has
verified the file, without reading it twice, and a manifest cannot lie about it. Equal files of two
models are one. The digest is a keyed BLAKE2s (RFC 7693, `person`), so that no plain blob, which
sha256 names, can take a file's place."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weight_cache.errors import ManifestInvalid
from weight_cache.types import Chunk, Tensor

if TYPE_CHECKING:
    pass

CHUNK_BYTES = 16 * 1024 * 1024
"""Large enough that a request to an object store pays for itself, small enough to verify and resume
in pieces."""
MAX_MANIFEST_BYTES = 32 * 1024 * 1024
"""A terabyte has 65,536 chunks, whose hashes take 4.4 MB, and 250,000 tensors take some 25 MB."""
MAX_FILES = 100_000
MAX_FOLDERS = 10_000
"""Each is made and flushed by itself, and takes an inode."""
MAX_DEPTH = 32
MAX_TENSORS = 250_000
"""Of all files: a checkpoint of a trillion parameters with 384 experts in 61 layers has 210,000."""
MAX_TENSORS_OF_FILE = 100_000
"""A file is decoded in one go, in which no other thread runs: some 0.2 s for so many."""
_VALUES_OF_TENSOR = 12
"""Name, type, shape of up to eight dimensions, offset, length."""
_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255  # NAME_MAX of every file system that matters
_VERSION = 2
_HEX = re.compile(r"[0-9a-f]{64}\Z")
# a name that is empty, . or .., or ends early for the kernel
_NOT_PLAIN = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|\0")
_PERSON = b"plfile2"
_HEAD = f'{{"chunk_bytes":{CHUNK_BYTES},"files":['.encode()
_TAIL = f'],"version":{_VERSION}}}'.encode()
_FILE_HEAD = b'{"chunks":'
_BETWEEN = b"}," + _FILE_HEAD
"""What stands between two files, and nowhere else: a quotation mark inside a string is escaped, and
none ends before a name."""

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """One file: its path below the model's directory, its size, the sha256 (hex) of each chunk.

    `tensors`: what a safetensors file holds, in the order of its bytes; of other files nothing.
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
        """Bytes of all files together."""
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
        """How many directories the files lie in, without the model's own."""
        return len(_folders(f.path for f in self.files))


def file_digest(size_bytes: int, chunk_sha256s: Sequence[str]) -> str:
    """The digest (hex) of a file of that size with these chunks."""
    whole = hashlib.blake2s(size_bytes.to_bytes(8, "little"), person=_PERSON)
    whole.update(bytes.fromhex("".join(chunk_sha256s)))
    return whole.hexdigest()


class FileHash:
    """The digest of a file that goes by in pieces of any size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._chunks: list[str] = []
        self._chunk = hashlib.sha256()
        self._missing = CHUNK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """The next piece."""
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
        """Of what went by until now."""
        return (*self._chunks, *([self._chunk.hexdigest()] if self._missing < CHUNK_BYTES else []))

    def hexdigest(self) -> str:
        """As `file_digest`."""
        return file_digest(self.size_bytes, self.chunk_sha256s())


def parse(raw: bytes) -> Manifest:
    """Read a manifest's canonical JSON. Raises ManifestInvalid naming what is wrong.

    File by file, so that other threads run between two: decoding lets none of them.
    """
    manifest = Manifest(files=tuple(_file(i, text) for i, text in enumerate(_file_texts(raw))))
    check_paths([f.path for f in manifest.files])
    check_tensors(manifest.files)
    return manifest


def _file_texts(raw: bytes) -> list[bytes]:
    """The JSON of each file. What there is too much of is refused before any of it is decoded."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ManifestInvalid(f"a manifest of {len(raw)} bytes is longer than {MAX_MANIFEST_BYTES}")
    if raw.startswith(_HEAD) and raw.endswith(b'],"version":1}'):
        raise ManifestInvalid("this manifest was written by an earlier pilotlight: deploy again")
    if not (raw.startswith(_HEAD) and raw.endswith(_TAIL)):
        raise ManifestInvalid(
            f"not a manifest in canonical JSON: expected chunk_bytes {CHUNK_BYTES}, a list of "
            f"files and version {_VERSION}, "
            "sorted, with nothing between them"
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
    """Refuse JSON with more values than `files` files with `most` tensors can have: decoding takes
    as long as there are values.

    Brackets and commas in names count, too, as far as they are more than a tensor of eight
    dimensions leaves room for."""
    chunks = len(text) // 67  # a hash, its quotation marks, a comma
    is_much = (
        text.count(b"[") + text.count(b"{") > 2 * most + 3 * files
        or text.count(b",") > _VALUES_OF_TENSOR * most + 4 * files + chunks
    )
    if is_much:
        raise ManifestInvalid(
            f"{where} has more values than {most} tensors, which is the most: deploy the model in parts"
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
        raise ManifestInvalid(f"{where}: path must be a text, chunks a list")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ManifestInvalid(
            f"{where}.size_bytes = {size!r}: expected a whole number of at least 0"
        )
    if not all(isinstance(d, str) and _HEX.match(d) for d in chunks):
        raise ManifestInvalid(f"{where}: hashes are 64 hex digits of a sha256")
    if len(chunks) != -(-size // CHUNK_BYTES):
        raise ManifestInvalid(
            f"{where}: {size} bytes have {-(-size // CHUNK_BYTES)} chunks, not {len(chunks)}"
        )
    tensors = _tensors(f"{where}.tensors", body["tensors"], size) if "tensors" in body else ()
    file = ManifestFile(path=path, size_bytes=size, chunk_sha256s=tuple(chunks), tensors=tensors)
    if _file_bytes(file) != text:
        raise ManifestInvalid(
            f"{where}: not canonical: keys must be sorted, and nothing may stand between them"
        )
    return file


def _tensors(where: str, rows: Any, size_bytes: int) -> tuple[Tensor, ...]:
    """Rows of [name, dtype, shape, offset, length]: in the order of their bytes, inside the file,
    none overlapping another."""
    if not isinstance(rows, list) or not rows:
        raise ManifestInvalid(f"{where}: expected a list that is not empty")
    tensors, end = [], 0
    for row in rows:
        if not (
            isinstance(row, list) and [type(value) for value in row] == [str, str, list, int, int]
        ):
            raise ManifestInvalid(
                f"{where}: a row is [name, dtype, shape, offset_bytes, length_bytes], not "
                f"{str(row)[:100]}"
            )
        name, dtype, shape, offset, length = row
        if not all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0
            for n in [*shape, offset, length]
        ):
            raise ManifestInvalid(
                f"{where}: {name[:100]!r} has a size or an offset that is no whole number of at "
                f"least 0"
            )
        if not end <= offset <= offset + length <= size_bytes:
            raise ManifestInvalid(
                f"{where}: {name[:100]!r} lies at {offset} to {offset + length}, of {size_bytes} "
                f"bytes with {end} taken"
            )
        tensors.append(
            Tensor(
                name=name, dtype=dtype, shape=tuple(shape), offset_bytes=offset, length_bytes=length
            )
        )
        end = offset + length
    if len({t.name for t in tensors}) != len(tensors):
        raise ManifestInvalid(f"{where}: two tensors share a name")
    try:
        "".join([*(t.name for t in tensors), *(t.dtype for t in tensors)]).encode()
    except UnicodeEncodeError as e:  # half a surrogate pair, which JSON can spell
        raise ManifestInvalid(f"{where}: {e.object[e.start]!r} is no text") from e
    return tuple(tensors)


def _file_bytes(file: ManifestFile) -> bytes:
    """The canonical JSON of one file. Raises ManifestInvalid for a path that is not UTF-8."""
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
    """Refuse more tensors than a manifest may name. Raises ManifestInvalid."""
    for file in files:
        if len(file.tensors) > MAX_TENSORS_OF_FILE:
            raise ManifestInvalid(
                f"{file.path!r} has {len(file.tensors)} tensors: a file has at most "
                f"{MAX_TENSORS_OF_FILE}"
            )
    if (total := sum(len(file.tensors) for file in files)) > MAX_TENSORS:
        raise ManifestInvalid(
            f"{total} tensors: a model has at most {MAX_TENSORS}; deploy it in parts"
        )


def _folders(paths: Iterable[str]) -> set[str]:
    """The directories that these files lie in: all, or one more than a model may have."""
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
    """Refuse what could leave the model's directory, exist twice, or be a file and a directory at
    once, and too many directories."""
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
                f"path {path[:100]!r} lies {depth} directories deep: at most {MAX_DEPTH}"
            )
    if len(_folders(paths)) > MAX_FOLDERS:
        raise ManifestInvalid(
            f"more than {MAX_FOLDERS} directories: pack what is in them, as .tar or .zip"
        )
    if any(b.encode() <= a.encode() for a, b in itertools.pairwise(paths)):
        raise ManifestInvalid("files must be sorted by path, each once")
    # so that nothing comes between a directory and what is in it
    by_folder = sorted(path.replace("/", "\0") for path in paths)
    if both := [a for a, b in itertools.pairwise(by_folder) if b.startswith(f"{a}\0")]:
        path = min(both).replace("\0", "/")
        raise ManifestInvalid(f"path {path!r} is a file and a directory at once")
