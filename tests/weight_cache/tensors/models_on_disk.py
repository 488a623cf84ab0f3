"""Small safetensors files with tensors of every kind."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

EVERY_KIND = {
    "float32": torch.arange(1000, dtype=torch.float32).reshape(10, 100),
    "bfloat16": torch.arange(300, dtype=torch.float32).to(torch.bfloat16),
    "float8": torch.linspace(-2, 2, 64).to(torch.float8_e4m3fn),
    "int64": torch.arange(7),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.complex(torch.ones(3), torch.arange(3.0)),
    "scalar": torch.tensor(42.0),
    "empty": torch.empty(0, 3),
}


def save(
    directory: Path, state: dict[str, torch.Tensor] = EVERY_KIND, *, name: str = "model.safetensors"
) -> Path:
    """One file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / name)
    return directory / name


def save_in_two(directory: Path) -> Path:
    """The same in two files, with the index that names them."""
    names = sorted(EVERY_KIND)
    halves = {
        "model-00001-of-00002.safetensors": names[:4],
        "model-00002-of-00002.safetensors": names[4:],
    }
    for file, half in halves.items():
        save(directory, {name: EVERY_KIND[name] for name in half}, name=file)
    body = {
        "metadata": {},
        "weight_map": {name: file for file, half in halves.items() for name in half},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(body))
    return directory


def large(directory: Path, *, mebibytes: int = 40) -> tuple[Path, dict[str, torch.Tensor]]:
    """Several pieces, with tensors that lie across their bounds and some tiny ones between."""
    values = torch.randint(
        0,
        256,
        (mebibytes * 1024**2,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(7),
    )
    cuts = [0, 5, 17 * 1024**2 + 3, 17 * 1024**2 + 4, 33 * 1024**2, mebibytes * 1024**2]
    state = {f"t{n}": values[a:b].clone() for n, (a, b) in enumerate(itertools.pairwise(cuts))}
    return save(directory, state), state


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )
