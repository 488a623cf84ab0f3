"""Checkpoints as language models have them: some hundred bf16 tensors of a few sizes, in one
safetensors file and in one of torch's own.

Their shapes are those of decoders of 0.5 and 2 thousand million parameters; their bytes are noise.
Made once, kept in `.bench`."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import BENCH_HOME, phase

_NOISE_BYTES = 64 * 1024**2
_NOISE_STEP = 1_048_583  # a prime: every tensor begins elsewhere in the noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What decides a decoder's size; `kv` is the width of keys and values together with all their
    heads."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    kv: int
    vocabulary: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the file."""
        h, i = self.hidden, self.intermediate
        yield "model.embed_tokens.weight", (self.vocabulary, h)
        for n in range(self.layers):
            layer = f"model.layers.{n}"
            yield f"{layer}.input_layernorm.weight", (h,)
            yield f"{layer}.mlp.down_proj.weight", (h, i)
            yield f"{layer}.mlp.gate_proj.weight", (i, h)
            yield f"{layer}.mlp.up_proj.weight", (i, h)
            yield f"{layer}.post_attention_layernorm.weight", (h,)
            yield f"{layer}.self_attn.k_proj.weight", (self.kv, h)
            yield f"{layer}.self_attn.o_proj.weight", (h, h)
            yield f"{layer}.self_attn.q_proj.weight", (h, h)
            yield f"{layer}.self_attn.v_proj.weight", (self.kv, h)
        yield "model.norm.weight", (h,)


TINY = Shape(name="tiny", layers=2, hidden=64, intermediate=128, kv=16, vocabulary=256)
SMALL = Shape(name="0.25GB", layers=12, hidden=768, intermediate=2048, kv=256, vocabulary=49152)
ONE_GB = Shape(name="1GB", layers=24, hidden=896, intermediate=4864, kv=128, vocabulary=151936)
FOUR_GB = Shape(name="4GB", layers=28, hidden=2048, intermediate=8192, kv=512, vocabulary=128256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        directory: holds the safetensors file and nothing else.
        file, pickle: the same tensors as safetensors, and as `torch.save` writes them.
        first: name of the first tensor.
    """

    name: str
    directory: Path
    file: Path
    pickle: Path
    first: str

    @property
    def size_bytes(self) -> int:
        """Of the safetensors file."""
        return self.file.stat().st_size


def checkpoint(
    shape: Shape, *, seed: int = 0, home: Path = BENCH_HOME / "checkpoints"
) -> Checkpoint:
    """Make it, unless it is there. Another seed gives other bytes. The pickle is only named: see
    `pickled`."""
    directory = home / (shape.name if not seed else f"{shape.name}-{seed}")
    file = directory / "model.safetensors"
    if not file.exists():
        with phase(f"making a checkpoint of {shape.name}"):
            directory.mkdir(parents=True, exist_ok=True)
            unfinished = home / f"{directory.name}.unfinished"
            _write(unfinished, shape, seed)
            unfinished.rename(file)
    first = next(shape.tensors())[0]
    return Checkpoint(
        name=shape.name,
        directory=directory,
        file=file,
        pickle=home / f"{directory.name}.pt",
        first=first,
    )


def pickled(made: Checkpoint) -> Checkpoint:
    """Make its pickle too, unless it is there. Imports torch."""
    if not made.pickle.exists():
        import torch
        from safetensors.torch import load_file

        with phase(f"pickling {made.name}"):
            unfinished = made.pickle.with_suffix(".unfinished")
            torch.save(load_file(made.file), unfinished)
            unfinished.rename(made.pickle)
    return made


def _write(file: Path, shape: Shape, seed: int) -> None:
    """The format's own layout: length of the header, the header, the tensors' bytes."""
    noise = memoryview(os.urandom(_NOISE_BYTES))
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name, dimensions in shape.tensors():
        begin, end = end, end + 2 * _product(dimensions)
        entries[name] = {"dtype": "BF16", "shape": list(dimensions), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb", buffering=0) as out:
        _all(out.fileno(), memoryview(struct.pack("<Q", len(header)) + header))
        position = seed * _NOISE_STEP
        while end:
            position = (position + _NOISE_STEP) % _NOISE_BYTES
            piece = noise[position : position + min(end, _NOISE_BYTES - position)]
            _all(out.fileno(), piece)
            end -= len(piece)
        os.fsync(out.fileno())


def _all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _product(dimensions: tuple[int, ...]) -> int:
    product = 1
    for dimension in dimensions:
        product *= dimension
    return product
