"""The header of a safetensors file: eight bytes of length (little endian), then JSON with the
position of each tensor.

Everything that can be checked is checked: tensors are adjacent, from the end of the header to the
end of the file, without overlaps and gaps, each as long as its shape and dtype require. The rules
are those of the format's specification (huggingface/safetensors, README "Format"); a file that
violates one is refused, never repaired."""

from __future__ import annotations

import contextlib
import json
import math
import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weight_cache.errors import TensorsInvalid
from weight_cache.types import Tensor

MAX_HEADER_BYTES = 100_000_000
"""The format's limit."""
MAX_TENSORS = 1_000_000
"""The largest models have about ten thousand."""
LENGTH_BYTES = 8
"""Size of the length field before the JSON."""
BITS_OF = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits of one element, by dtype."""
METADATA = "__metadata__"
_FIRST_READ_BYTES = 64 * 1024  # most headers are shorter
_MAX_DIMENSIONS = 64  # the limit of torch
_MAX_ELEMENTS = 2**63 - 1
_NONE = object()
"""No such tensor; distinct from all JSON values."""
_PLAIN = frozenset(string.ascii_letters + string.digits + "_.:/-")
_BACKSLASH = ord("\\")
_KEYS = {"dtype", "shape", "data_offsets"}
# limit of braces, brackets and commas (about seven per tensor): bounds the memory of the parser
_MAX_MARKS = 8 * MAX_TENSORS


def header_bytes(head: bytes, *, file_bytes: int) -> int:
    """How many bytes of a file of `file_bytes` bytes `parse_header` needs, from its first eight.
    Raises TensorsInvalid."""
    if len(head) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise TensorsInvalid(
            f"a file of {file_bytes} bytes is not a safetensors file: the length of the header "
            f"alone takes {LENGTH_BYTES}"
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise TensorsInvalid(
            f"the header claims {length} bytes; a safetensors header has at most {MAX_HEADER_BYTES}"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise TensorsInvalid(
            f"the header claims {length} bytes, but the file has {file_bytes}: it is cut off, or "
            f"not a safetensors file"
        )
    return LENGTH_BYTES + length


def parse_header(head: bytes, *, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors of a file of `file_bytes` bytes, in byte order; offsets count from the begin of
    the file.

    `head`: at least the first `header_bytes` of the file. Raises TensorsInvalid naming the tensor
    and the error."""
    return Header(head, file_bytes=file_bytes).tensors()


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors of the file at `path`. Raises TensorsInvalid naming the file; OSError if it
    cannot be read."""
    header = read_header(path)
    with _named(path):
        return header.tensors()


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises as `read_tensors`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, _FIRST_READ_BYTES, 0)
        with _named(path):
            end = header_bytes(head, file_bytes=size)
            while len(head) < end and (more := os.pread(descriptor, end - len(head), len(head))):
                head += more
            return Header(head, file_bytes=size)
    finally:
        os.close(descriptor)


class Header:
    """One file's header. A lookup parses and checks one tensor; `tensors` checks all of them, and
    their positions relative to each other.

    So the first tensor of a large model is found in a fraction of the time to parse the header, and
    a full iteration is fully checked. Raises TensorsInvalid. Immutable except for caches."""

    def __init__(self, head: bytes, *, file_bytes: int) -> None:
        self.begin_bytes = header_bytes(head, file_bytes=file_bytes)
        self.file_bytes = file_bytes
        if len(head) < self.begin_bytes:
            raise TensorsInvalid(
                f"the header has {self.begin_bytes} bytes, but only {len(head)} were given"
            )
        self._raw = bytes(head[LENGTH_BYTES : self.begin_bytes])
        if not self._raw.startswith(b"{"):
            raise TensorsInvalid("the header does not begin with '{': not a safetensors file")
        self._rows: dict[str, Any] | None = None
        self._tensors: tuple[Tensor, ...] | None = None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._row(name) is not _NONE

    def __getitem__(self, name: str) -> Tensor:
        row = self._row(name)
        if row is _NONE:
            raise KeyError(name)
        tensor = _tensor(name, row, base_bytes=self.begin_bytes)
        if tensor.offset_bytes + tensor.length_bytes > self.file_bytes:
            end = tensor.offset_bytes + tensor.length_bytes
            raise TensorsInvalid(
                f"tensor {_abbreviate(name)} ends at byte {end}, but the file at "
                f"{self.file_bytes}: it is cut off"
            )
        return tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in byte order."""
        if self._tensors is None:
            rows = self._all_rows()
            _check_keys(self._raw)
            tensors = [
                _tensor(name, body, base_bytes=self.begin_bytes)
                for name, body in rows.items()
                if name != METADATA
            ]
            tensors.sort(key=lambda t: (t.offset_bytes, t.length_bytes, t.name))
            _check_side_by_side(tensors, begin_bytes=self.begin_bytes, file_bytes=self.file_bytes)
            self._tensors = tuple(tensors)
        return self._tensors

    def _row(self, name: str) -> Any:
        if name == METADATA:
            return _NONE
        if self._rows is None and (row := _found(self._raw, name)) is not _NONE:
            return row
        return self._all_rows().get(name, _NONE)

    def _all_rows(self) -> dict[str, Any]:
        if self._rows is None:
            self._rows = _rows(self._raw)
        return self._rows


def _found(raw: bytes, name: str) -> Any:
    """The JSON value of key `name`, if `name` is plain and the JSON is formatted as usual; _NONE if
    only a full parse can tell.

    A quote inside a string is escaped: a match without a backslash before it, and with a colon
    after it, is a key."""
    if not _PLAIN.issuperset(name):
        return _NONE
    for colon in ("", " "):
        key = f'"{name}":{colon}{{'.encode()
        at = raw.find(key)
        if at > 0 and raw[at - 1] != _BACKSLASH:
            begin = at + len(key) - 1
            try:
                return json.loads(raw[begin : raw.index(b"}", begin) + 1].decode())
            except (ValueError, RecursionError):
                return _NONE
    return _NONE


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except TensorsInvalid as e:
        raise TensorsInvalid(f"{path}: {e}") from e


def _rows(raw: bytes) -> dict[str, Any]:
    """Parse the JSON object by tensor; of duplicate keys the last value (see `_check_keys`)."""
    if len(raw) > _MAX_MARKS and sum(raw.count(mark) for mark in (b"{", b"[", b",")) > _MAX_MARKS:
        raise TensorsInvalid(f"the header has more values than {MAX_TENSORS} tensors can have")
    try:
        rows = dict(json.loads(raw.decode()))
    except (ValueError, RecursionError) as e:
        # ValueError: not UTF-8, not JSON, or a number with thousands of digits
        raise TensorsInvalid(f"the header is not JSON: {e}") from e
    if len(rows) > MAX_TENSORS:
        raise TensorsInvalid(f"{len(rows)} tensors: at most {MAX_TENSORS} are supported")
    metadata = rows.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise TensorsInvalid(f"{METADATA} has values that are not strings")
    return rows


def _check_keys(raw: bytes) -> None:
    """Refuse duplicate keys, which would be ambiguous, and constants that are not JSON."""
    try:
        json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except ValueError as e:
        raise TensorsInvalid(f"the header is not JSON: {e}") from e


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise TensorsInvalid(f"{_abbreviate(name)} occurs twice")
        names.add(name)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _tensor(name: str, body: Any, *, base_bytes: int) -> Tensor:
    if not isinstance(body, dict) or body.keys() != _KEYS:
        raise _refused(name, "expected dtype, shape and data_offsets only")
    if not name.isascii() and not _is_text(name):
        raise _refused(name, "the name is not UTF-8")
    dtype, shape, offsets = body["dtype"], body["shape"], body["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_OF:
        raise _refused(name, f"dtype {_abbreviate(dtype)} is none of {', '.join(BITS_OF)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _refused(name, f"a shape is a list of at most {_MAX_DIMENSIONS} whole numbers from 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _refused(name, "data_offsets are two whole numbers from 0, the lower one first")
    begin, end = offsets
    # dimensions of 0 count as 1: other readers multiply in 64 bits
    if math.prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise _refused(name, f"shape {_abbreviate(shape)} has more than {_MAX_ELEMENTS} elements")
    bits = math.prod(shape) * BITS_OF[dtype]
    if bits != (end - begin) * 8:
        raise _refused(
            name,
            f"{dtype} {_abbreviate(shape)} takes {bits / 8:.12g} bytes, but its data_offsets span "
            f"{end - begin}",
        )
    return Tensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset_bytes=base_bytes + begin,
        length_bytes=end - begin,
    )


def _refused(name: str, why: str) -> TensorsInvalid:
    return TensorsInvalid(f"tensor {_abbreviate(name)}: {why}")


def _check_side_by_side(tensors: list[Tensor], *, begin_bytes: int, file_bytes: int) -> None:
    end, before = begin_bytes, None
    for tensor in tensors:
        if tensor.offset_bytes != end:
            how = "overlaps" if tensor.offset_bytes < end else "leaves a gap after"
            what = "the header" if before is None else f"tensor {_abbreviate(before.name)}"
            raise TensorsInvalid(
                f"tensor {_abbreviate(tensor.name)} {how} {what}: it begins at byte "
                f"{tensor.offset_bytes}, not at {end}"
            )
        end, before = end + tensor.length_bytes, tensor
    if end != file_bytes:
        why = "it is cut off" if end > file_bytes else "the rest belongs to no tensor"
        raise TensorsInvalid(f"the tensors end at byte {end}, the file at {file_bytes}: {why}")


def _are_sizes(values: Any) -> bool:
    # `type`: True is an instance of int
    return isinstance(values, list) and all(
        type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in values
    )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can express
        return False
    return True


def _abbreviate(value: Any) -> str:
    """`value`, short enough for a message."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."
