"""Tensors mapped from files: one private mapping per file, without a copy.

A tensor's memory is the page cache, shared by all processes of the machine, and read from disk on
first access or by prefetch. The mapping is private and writable (mmap(2), MAP_PRIVATE): a write
copies the page for this process only. A snapshot stores such memory by reference, as path and
offset. A file must not change or shrink while it is mapped; files in the weight cache never do."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from weight_cache.errors import TensorsInvalid
from weight_cache.tensors.dtypes import contiguous_strides, tensor_layout
from weight_cache.tensors.files import TensorFile, tensor_locations
from weight_cache.tensors.prefetch import FilePrefetcher, is_in_memory
from weight_cache.tensors.read_plan import contiguous_runs
from weight_cache.types import Tensor


class MappedTensors(Mapping[str, torch.Tensor]):
    """The tensors of some files by name, created and checked on access; iteration checks all first.

    The tensors keep the mapping alive, independent of this object. `names`: only these tensors.
    Access raises TensorsInvalid if the file is invalid or was truncated. Not thread-safe.
    """

    def __init__(
        self, files: Sequence[TensorFile], *, names: Collection[str] | None = None
    ) -> None:
        self._files = files
        self._names = None if names is None else set(names)
        self._where: dict[str, tuple[TensorFile, Tensor]] | None = None
        self._mappings: dict[Path, torch.UntypedStorage] = {}
        self._made: dict[str, torch.Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"<MappedTensors of {', '.join(file.path.name for file in self._files)}, "
            f"{len(self._made)} in use>"
        )

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __contains__(self, name: object) -> bool:
        return (self._names is None or name in self._names) and any(
            name in file.header for file in self._files
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = self._make(*self._find(name))
        return self._made[name]

    def _all(self) -> dict[str, tuple[TensorFile, Tensor]]:
        if self._where is None:
            where = tensor_locations(self._files)
            self._where = (
                where
                if self._names is None
                else {name: place for name, place in where.items() if name in self._names}
            )
        return self._where

    def _find(self, name: str) -> tuple[TensorFile, Tensor]:
        if self._where is not None or len(self._files) > 1:
            return self._all()[name]
        if self._names is not None and name not in self._names:
            raise KeyError(name)
        (file,) = self._files
        try:
            return file, file.header[name]
        except TensorsInvalid as e:
            raise TensorsInvalid(f"{file.path}: {e}") from e

    def _make(self, file: TensorFile, tensor: Tensor) -> torch.Tensor:
        dtype, shape = tensor_layout(tensor)
        if not tensor.length_bytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        storage = self._mappings.get(file.path)
        if storage is None:
            storage = self._mappings[file.path] = _map(file, tensor, self._names)
        # misaligned for its type: the only case that is copied
        if tensor.offset_bytes % dtype.itemsize:
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
                storage, tensor.offset_bytes, (tensor.length_bytes,), (1,)
            )
            return raw.clone().view(dtype).view(shape)
        return torch.empty(0, dtype=dtype, device="cpu").set_(
            storage, tensor.offset_bytes // dtype.itemsize, shape, contiguous_strides(shape)
        )


def _map(file: TensorFile, first: Tensor, names: Collection[str] | None) -> torch.UntypedStorage:
    """Map the whole file, and prefetch what is not in memory, beginning with `first`."""
    size = file.header.file_bytes
    try:
        storage = torch.UntypedStorage.from_file(str(file.path), shared=False, nbytes=size)
    except RuntimeError as e:  # torch has a single error type: the message contains errno
        raise TensorsInvalid(f"{file.path} cannot be mapped: {e}") from e
    if not _is_in_memory(file.path, size):
        FilePrefetcher(storage.data_ptr(), _ranges(file, first, names), keep=storage).start()
    return cast(torch.UntypedStorage, storage)


def _ranges(
    file: TensorFile, first: Tensor, names: Collection[str] | None
) -> list[tuple[int, int]]:
    """The ranges to prefetch: from `first` to the end, then the part before it; with `names` only
    those tensors."""
    begin, size = first.offset_bytes, file.header.file_bytes
    if names is None:
        return [(begin, size - begin), (0, begin)]
    found = [
        (run[0].offset_bytes, run[-1].offset_bytes + run[-1].length_bytes)
        for run in contiguous_runs(file.header[n] for n in names if n in file.header)
    ]
    return [
        (start, end - start)
        for start, end in sorted(found, key=lambda stretch: (stretch[1] <= begin, stretch))
    ]


def _is_in_memory(path: Path, size: int) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return is_in_memory(descriptor, size)
    finally:
        os.close(descriptor)
