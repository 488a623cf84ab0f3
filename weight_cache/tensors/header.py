"""The header of a safetensors file: eight bytes of length (little endian), then JSON that says where each tensor lies.

What it says is believed only as far as it can be checked: tensors lie side by side, from the end of the header to the end of the file, none
over another, none with a gap before it, each as long as its shape and dtype say. The rules are those of the format's own
description (huggingface/safetensors, README "Format"); a file that breaks one is refused, never repaired.
"""

from __future__ import annotations

import json
import math
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
_METADATA = "__metadata__"
_MAX_DIMENSIONS = 64  # torch has no more
_MAX_ELEMENTS = 2**63 - 1
_MAX_MARKS = 8 * MAX_TENSORS  # braces, brackets and commas: a tensor takes about seven. Bounds the memory that parsing may take


def header_bytes(head: bytes, *, file_bytes: int) -> int:
    """How many bytes of a file of `file_bytes` `parse_header` needs, told by its first eight. Raises TensorsInvalid."""
    if len(head) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise TensorsInvalid(f"a file of {file_bytes} bytes is no safetensors file: its header's length alone takes {LENGTH_BYTES}")
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise TensorsInvalid(f"the header claims {length} bytes; a safetensors header has at most {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_bytes:
        raise TensorsInvalid(f"the header claims {length} bytes, the whole file has {file_bytes}: it is cut off, or no safetensors file")
    return LENGTH_BYTES + length


def parse_header(head: bytes, *, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors of a file of `file_bytes`, in the order of their bytes; offsets count from the begin of the file.

    `head` is the file's begin, at least `header_bytes` of it. Raises TensorsInvalid naming the tensor and what is wrong with it.
    """
    end = header_bytes(head, file_bytes=file_bytes)
    if len(head) < end:
        raise TensorsInvalid(f"the header has {end} bytes, only {len(head)} of them are here")
    rows = _rows(bytes(head[LENGTH_BYTES:end]))
    tensors = [_tensor(name, body, base_bytes=end) for name, body in rows.items() if name != _METADATA]
    tensors.sort(key=lambda t: (t.offset_bytes, t.length_bytes, t.name))
    _check_side_by_side(tensors, begin_bytes=end, file_bytes=file_bytes)
    return tuple(tensors)


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors of the file at `path`. Raises TensorsInvalid naming the file; OSError where it cannot be read."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        try:
            head = file.read(LENGTH_BYTES)
            return parse_header(head + file.read(header_bytes(head, file_bytes=size) - LENGTH_BYTES), file_bytes=size)
        except TensorsInvalid as e:
            raise TensorsInvalid(f"{path}: {e}") from e


def _rows(raw: bytes) -> dict[str, Any]:
    """The JSON object, by tensor."""
    if not raw.startswith(b"{"):
        raise TensorsInvalid("the header does not begin with '{': no safetensors file")
    if sum(raw.count(mark) for mark in (b"{", b"[", b",")) > _MAX_MARKS:
        raise TensorsInvalid(f"the header has more parts than {MAX_TENSORS} tensors need")
    try:
        rows = json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:  # ValueError: not UTF-8, not JSON, or a number of thousands of digits
        raise TensorsInvalid(f"the header is not JSON: {e}") from e
    if len(rows) > MAX_TENSORS:
        raise TensorsInvalid(f"{len(rows)} tensors: at most {MAX_TENSORS} are read")
    metadata = rows.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorsInvalid(f"{_METADATA} holds something else than texts")
    return dict(rows)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are each there once: of two tensors with one name nobody could say which is meant."""
    rows: dict[str, Any] = {}
    for name, value in pairs:
        if name in rows:
            raise TensorsInvalid(f"{_say(name)} is there twice")
        rows[name] = value
    return rows


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _tensor(name: str, body: Any, *, base_bytes: int) -> Tensor:
    where = _say(name)
    if not _is_text(name):
        raise TensorsInvalid(f"tensor {where}: the name is not UTF-8")
    if not isinstance(body, dict) or set(body) != {"dtype", "shape", "data_offsets"}:
        raise TensorsInvalid(f"tensor {where}: expected dtype, shape and data_offsets, nothing else")
    dtype, shape, offsets = body["dtype"], body["shape"], body["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_OF:
        raise TensorsInvalid(f"tensor {where}: dtype {_say(dtype)} is none of {', '.join(BITS_OF)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise TensorsInvalid(f"tensor {where}: a shape is a list of at most {_MAX_DIMENSIONS} whole numbers from 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TensorsInvalid(f"tensor {where}: data_offsets are two whole numbers from 0, the lower one first")
    _check_length(where, dtype, shape, offsets[1] - offsets[0])
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), offset_bytes=base_bytes + offsets[0], length_bytes=offsets[1] - offsets[0])


def _check_length(where: str, dtype: str, shape: list[int], length_bytes: int) -> None:
    """As many bytes as the elements take, and no more elements than a tensor can count, even where one dimension is 0."""
    if math.prod(max(n, 1) for n in shape) > _MAX_ELEMENTS:
        raise TensorsInvalid(f"tensor {where}: shape {_say(shape)} has more elements than anybody can count")
    bits = math.prod(shape) * BITS_OF[dtype]
    if bits != length_bytes * 8:
        raise TensorsInvalid(f"tensor {where}: {dtype} {_say(shape)} takes {bits / 8:.12g} bytes, its data_offsets span {length_bytes}")


def _check_side_by_side(tensors: list[Tensor], *, begin_bytes: int, file_bytes: int) -> None:
    end, before = begin_bytes, "the header"
    for tensor in tensors:
        if tensor.offset_bytes != end:
            how = "overlaps" if tensor.offset_bytes < end else "leaves a gap after"
            raise TensorsInvalid(f"tensor {_say(tensor.name)} {how} {before}: it begins at byte {tensor.offset_bytes}, not at {end}")
        end, before = end + tensor.length_bytes, f"tensor {_say(tensor.name)}"
    if end != file_bytes:
        what = "it is cut off" if end > file_bytes else "the rest belongs to nobody"
        raise TensorsInvalid(f"the tensors end at byte {end}, the file at {file_bytes}: {what}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in values)  # `type`: True is an int too


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        return False
    return True


def _say(value: Any) -> str:
    """`value`, short enough for a message."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."
