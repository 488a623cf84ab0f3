"""Element types of safetensors and torch. Bytes are never converted."""

from __future__ import annotations

import torch

from weight_cache.errors import TensorsInvalid
from weight_cache.types import Tensor

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, theirs) for name, theirs in _TORCH_NAMES.items() if hasattr(torch, theirs)
}


def tensor_layout(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Torch dtype and shape of `tensor`. Raises TensorsInvalid if torch has no such type."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TensorsInvalid(
            f"tensor {tensor.name!r:.120} has type {tensor.dtype}, which torch "
            f"{torch.__version__} does not support"
        )
    if tensor.dtype != "F4":
        return dtype, tensor.shape
    if not tensor.shape or tensor.shape[-1] % 2:  # two elements in a byte
        raise TensorsInvalid(
            f"tensor {tensor.name!r:.120}: rows of {tensor.shape} four-bit elements do not end at "
            f"a byte boundary"
        )
    return dtype, (*tensor.shape[:-1], tensor.shape[-1] // 2)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor in row-major order."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))
