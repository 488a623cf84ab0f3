"""Finds the safetensors files of a model directory and the file of each tensor. Standard library
only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weight_cache.errors import TensorsInvalid
from weight_cache.tensors.header import MAX_HEADER_BYTES, Header, read_header
from weight_cache.types import Tensor

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Index of a model in several files: `{"weight_map": {tensor: file}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """One file and its header."""

    path: Path
    header: Header


def find_files(path: Path) -> list[Path]:
    """The safetensors files of `path`: a file itself; for a directory `model.safetensors`, else the
    files in its index, else all.

    Raises TensorsInvalid if there are none, or the index names a file that is not in the
    directory."""
    if not path.is_dir():
        return [path]
    if (path / WHOLE).is_file():
        return [path / WHOLE]
    if (path / INDEX).is_file():
        return _indexed(path / INDEX)
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise TensorsInvalid(
            f"{path} contains no *.safetensors: save the model with safetensors (`save_pretrained`)"
        )
    return found


def read_files(path: Path) -> list[TensorFile]:
    """`find_files`, each with its header, whose tensors are not checked yet. Raises TensorsInvalid,
    OSError."""
    return [TensorFile(path=file, header=read_header(file)) for file in find_files(path)]


def tensor_locations(files: Sequence[TensorFile]) -> dict[str, tuple[TensorFile, Tensor]]:
    """All tensors by name, with their file. Raises TensorsInvalid for an invalid tensor, and for a
    tensor in two files."""
    found: dict[str, tuple[TensorFile, Tensor]] = {}
    for file in files:
        try:
            tensors = file.header.tensors()
        except TensorsInvalid as e:
            raise TensorsInvalid(f"{file.path}: {e}") from e
        for tensor in tensors:
            if tensor.name in found:
                raise TensorsInvalid(
                    f"tensor {tensor.name!r:.120} is in {found[tensor.name][0].path.name} and in "
                    f"{file.path.name}: select one of the files"
                )
            found[tensor.name] = file, tensor
    return found


def _indexed(index: Path) -> list[Path]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise TensorsInvalid(f"{index} is longer than {MAX_HEADER_BYTES} bytes")
    try:
        body: Any = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as e:
        raise TensorsInvalid(f"{index} is not JSON: {e}") from e
    names = body.get("weight_map") if isinstance(body, Mapping) else None
    if (
        not isinstance(names, Mapping)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise TensorsInvalid(f"{index}: expected weight_map, an object of tensor: file name")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise TensorsInvalid(f"{index} names {name!r:.120}, which is not a file beside it")
    return [index.parent / name for name in files]
