"""What the start benchmarks start: the examples themselves, and functions made for the purpose, of
any size.

A synthetic model is a stack of square float32 layers in one safetensors file. *By reference* its
tensors stay mapped from the weight cache's file, so that a snapshot does not carry them; *by value*
they are copied to the heap, which is what a library that loads with `torch.load` does. A call
multiplies one row by every layer: it touches every byte."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import BENCH_HOME, ROOT

MIB = 1024**2
_SIDE = 4096
_LAYER_BYTES = _SIDE * _SIDE * 4

TORCH_SOURCE = '''"""Imports torch and adds up."""

import pilotlight

app = pilotlight.App("torch")


@app.cls(cpu=1, memory="1GiB", max_instances=8, scaledown_window=60)
class Adder:
    """One tiny layer."""

    @pilotlight.enter()
    def load(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.layer = torch.ones(4, 4)

    @pilotlight.method(example=[2.0])
    def add(self, value: float) -> float:
        return float((self.layer * value).sum())

    @pilotlight.method()
    def hold(self, seconds: float) -> float:
        import time

        time.sleep(seconds)
        return self.add(seconds)
'''
HOLD_S = 1.0
"""Calls that arrive at once stay this long, so that each needs an instance of its own."""

MODEL_SOURCE = '''"""A stack of layers, mapped or copied."""

import pilotlight

weights = pilotlight.Weights({directory!r}, name="layers")
app = pilotlight.App("{app}")


@app.cls(weights=weights, cpu=1, memory="{memory_mib}MiB", max_instances=8, scaledown_window=60, timeout=120)
class Model:
    """Every call touches every layer."""

    @pilotlight.enter()
    def load(self) -> None:
        import torch
        from safetensors import safe_open

        torch.set_num_threads(1)
        with safe_open(weights.path / "model.safetensors", framework="pt") as tensors:
            self.layers = [tensors.get_tensor(name){copy} for name in sorted(tensors.keys())]

    @pilotlight.method(example=[1.0])
    def run(self, value: float) -> float:
        import torch

        row = torch.full((1, {side}), value)
        with torch.inference_mode():
            return float(sum((row @ layer).sum() for layer in self.layers))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is started: an app's source, how it is called, and the name under which its rows
    appear."""

    name: str
    source: Path
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


HELLO = Subject(
    name="hello", source=ROOT / "examples" / "hello.py", function="hello", arguments={"name": "Ada"}
)
EMBED = Subject(
    name="embed",
    source=ROOT / "examples" / "embed.py",
    function="Embedder.embed",
    arguments={"text": "a happy person"},
)


def torch_only(directory: Path) -> Subject:
    """A function that imports torch and holds next to nothing."""
    return _written(directory, "torch", TORCH_SOURCE, "Adder.add", {"value": 2.0})


def model(directory: Path, *, mib: int, by: str) -> Subject:
    """A synthetic model of `mib` MiB (a multiple of 64), `by` "reference" or "value"; its file is
    made once and kept in `.bench`."""
    source = MODEL_SOURCE.format(
        directory=str(layers(mib)),
        app=f"model-{mib}-{by}",
        copy=".clone()" if by == "value" else "",
        memory_mib=2 * mib + 1024,
        side=_SIDE,
    )
    return _written(directory, f"model {mib} MiB by {by}", source, "Model.run", {"value": 1.0})


def _written(
    directory: Path, name: str, source: str, function: str, arguments: dict[str, Any]
) -> Subject:
    folder = directory / "subjects" / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "app.py"
    file.write_text(source)
    return Subject(name=name, source=file, function=function, arguments=arguments)


def layers(mib: int) -> Path:
    """A directory with a safetensors file of that size, written without holding it in memory.
    Raises ValueError."""
    count, rest = divmod(mib * MIB, _LAYER_BYTES)
    if rest or not count:
        raise ValueError(f"{mib} MiB: give a multiple of {_LAYER_BYTES // MIB}")
    directory = BENCH_HOME / "models" / str(mib)
    file = directory / "model.safetensors"
    if not file.exists():
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / "unfinished"
        _write_safetensors(unfinished, count)
        unfinished.rename(file)
    return directory


def _write_safetensors(file: Path, count: int) -> None:
    """The format's own layout: length of the header, the header, the tensors' bytes. Every layer
    has other values."""
    spans = ((n * _LAYER_BYTES, (n + 1) * _LAYER_BYTES) for n in range(count))
    entries = {
        f"layer-{n:04}": {"dtype": "F32", "shape": [_SIDE, _SIDE], "data_offsets": list(span)}
        for n, span in enumerate(spans)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        for n in range(count):
            f.write(struct.pack("<f", 1.0 / (n + 1)) * (_SIDE * _SIDE))
