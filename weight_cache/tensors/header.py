"""The header of a safetensors file: eight bytes of length (little endian), then JSON that says
where each tensor lies.

What it says is believed only as far as it can be checked: tensors lie side by side, from the end of
the header to the end of the file, none over another, none with a gap before it, each as long as its
shape and dtype say. The rules are those of the format's own description (huggingface/safetensors,
README "Format"); a file that breaks one is refused, never repaired."""

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
"""The format's own bound."""
MAX_TENSORS = 1_000_000
"""The largest models have some ten thousand."""
LENGTH_BYTES = 8
"""What stands before the JSON: its length."""
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
_MAX_DIMENSIONS = 64  # torch has no more
_MAX_ELEMENTS = 2**63 - 1
_NONE = object()
"""No such tensor: JSON has values for everything else."""
_PLAIN = frozenset(string.ascii_letters + string.digits + "_.:/-")
_BACKSLASH = ord("\\")
_KEYS = {"dtype", "shape", "data_offsets"}
# braces, brackets and commas: a tensor takes about seven. Bounds the memory that parsing may take
_MAX_MARKS = 8 * MAX_TENSORS


def header_bytes(head: bytes, *, file_bytes: int) -> int:
    """How many bytes of a file of `file_bytes` `parse_header` needs, told by its first eight.
    Raises TensorsInvalid."""
    if len(head) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise TensorsInvalid(
            f"a file of {file_bytes} bytes is no safetensors file: its header's length alone "
            f"takes {LENGTH_BYTES}"
        )
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise TensorsInvalid(
            f"the header claims {length} bytes; a safetensors header has at most {MAX_HEADER_BYTES}"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise TensorsInvalid(
            f"the header claims {length} bytes, the whole file has {file_bytes}: it is cut off, "
            f"or no safetensors file"
        )
    return LENGTH_BYTES + length


def parse_header(head: bytes, *, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors of a file of `file_bytes`, in the order of their bytes; offsets count from the
    begin of the file.

    `head` is the file's begin, at least `header_bytes` of it. Raises TensorsInvalid naming the
    tensor and what is wrong with it."""
    return Header(head, file_bytes=file_bytes).tensors()


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors of the file at `path`. Raises TensorsInvalid naming the file; OSError where it
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
    """One file's header. Looking up one tensor reads and checks that one; `tensors` checks all of
    them, and how they lie to each other.

    So the first tensor of a large model is there in a fraction of the time that its whole header
    takes, and whoever goes through all of them trusts nothing. Raises TensorsInvalid. Immutable but
    for what it remembers."""

    def __init__(self, head: bytes, *, file_bytes: int) -> None:
        self.begin_bytes = header_bytes(head, file_bytes=file_bytes)
        self.file_bytes = file_bytes
        if len(head) < self.begin_bytes:
            raise TensorsInvalid(
                f"the header has {self.begin_bytes} bytes, only {len(head)} of them are here"
            )
        self._raw = bytes(head[LENGTH_BYTES : self.begin_bytes])
        if not self._raw.startswith(b"{"):
            raise TensorsInvalid("the header does not begin with '{': no safetensors file")
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
                f"tensor {_abbreviate(name)} ends at byte {end}, the file at {self.file_bytes}: "
                f"it is "
                f"cut off"
            )
        return tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All, in the order of their bytes."""
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
    """What stands behind a plain `name`, in JSON as it is usually written; _NONE where it takes
    reading all of it to know.

    A quote inside a text has a backslash before it: what begins with another one, and ends with a
    colon, is a key."""
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
    """The JSON object, by tensor; of a key that is there twice the last value, see
    `_check_keys`."""
    if len(raw) > _MAX_MARKS and sum(raw.count(mark) for mark in (b"{", b"[", b",")) > _MAX_MARKS:
        raise TensorsInvalid(f"the header has more parts than {MAX_TENSORS} tensors need")
    try:
        rows = dict(json.loads(raw.decode()))
    except (ValueError, RecursionError) as e:
        # ValueError: not UTF-8, not JSON, or a number of thousands of digits
        raise TensorsInvalid(f"the header is not JSON: {e}") from e
    if len(rows) > MAX_TENSORS:
        raise TensorsInvalid(f"{len(rows)} tensors: at most {MAX_TENSORS} are read")
    metadata = rows.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise TensorsInvalid(f"{METADATA} holds something else than texts")
    return rows


def _check_keys(raw: bytes) -> None:
    """Every key once: of two tensors with one name, or two shapes, nobody could say which is meant.
    And no constants JSON does not have."""
    try:
        json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except ValueError as e:
        raise TensorsInvalid(f"the header is not JSON: {e}") from e


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise TensorsInvalid(f"{_abbreviate(name)} is there twice")
        names.add(name)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _tensor(name: str, body: Any, *, base_bytes: int) -> Tensor:
    if not isinstance(body, dict) or body.keys() != _KEYS:
        raise _refused(name, "expected dtype, shape and data_offsets, nothing else")
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
    # counted as if no dimension were 0: other readers multiply in 64 bits
    if math.prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise _refused(name, f"shape {_abbreviate(shape)} has more elements than anybody can count")
    bits = math.prod(shape) * BITS_OF[dtype]
    if bits != (end - begin) * 8:
        raise _refused(
            name,
            f"{dtype} {_abbreviate(shape)} takes {bits / 8:.12g} bytes, its data_offsets span "
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
        why = "it is cut off" if end > file_bytes else "the rest belongs to nobody"
        raise TensorsInvalid(f"the tensors end at byte {end}, the file at {file_bytes}: {why}")


def _are_sizes(values: Any) -> bool:
    # `type`: True is an int too
    return isinstance(values, list) and all(
        type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in values
    )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        return False
    return True


def _abbreviate(value: Any) -> str:
    """`value`, short enough for a message."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."
