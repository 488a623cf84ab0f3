"""Estimate of whether a language model fits into memory: its weights, its KV cache, and the
available memory. Pure arithmetic.

The KV cache of a token holds a key and a value per layer and KV head (Vaswani et al. 2017; grouped
heads: Ainslie et al. 2023), or one compressed vector per layer for models with latent attention
(DeepSeek-V2 2024, §2.1). Layers with a sliding window keep at most the window. The engine allocates
the cache in blocks (Kwon et al. 2023), so a sequence takes whole blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pilotlight.errors import InvalidInput
from pilotlight.spec.function import GIB, MIB

GPU_BYTES: Mapping[str, int] = {
    "T4": 16 * GIB,
    "V100": 16 * GIB,
    "P100": 16 * GIB,
    "L4": 24 * GIB,
    "A10": 24 * GIB,
    "A10G": 24 * GIB,
    "RTX3090": 24 * GIB,
    "RTX4090": 24 * GIB,
    "RTX5090": 32 * GIB,
    "A100-40GB": 40 * GIB,
    "L40": 48 * GIB,
    "L40S": 48 * GIB,
    "A6000": 48 * GIB,
    "A100": 80 * GIB,
    "A100-80GB": 80 * GIB,
    "H100": 80 * GIB,
    "RTX-PRO-6000": 96 * GIB,
    "H200": 141 * GIB,
    "B200": 180 * GIB,
}
"""Memory of one card as stated by its maker. Other cards are not checked."""
_MIG_MEMORY = re.compile(r"-MIG-.*?(\d+)gb", re.IGNORECASE)
GPU_SHARE = 0.9
"""Share of a card that the engine uses by default (`--gpu-memory-utilization`)."""
GPU_OVERHEAD_BYTES = 2 * GIB
"""Memory per card besides weights and cache: context, activations, graphs. An estimate; large
batches need more."""
CPU_OVERHEAD_BYTES = 3 * GIB
"""Memory of the engine processes on a CPU: 2.1 to 2.6 GiB measured for vLLM 0.32 with a tiny
model."""
BLOCK_TOKENS = {"cpu": 128, "gpu": 16}
"""Default size of a cache block, in tokens."""
_MODEL_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
_DEFAULT_DTYPE_BYTES = 2


def gpu_memory_bytes(kind: str) -> int | None:
    """Memory of one GPU of this kind, or of the MIG instance that it names (`H100-MIG-3g.40gb`);
    None if unknown."""
    mig = _MIG_MEMORY.search(kind)
    return int(mig[1]) * GIB if mig is not None else GPU_BYTES.get(kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model, from its `config.json`, that determine the size of its cache.

    Attributes:
        max_position: maximum sequence length; None = not stated.
        layers: number of attention layers, of which `sliding_layers` look back at most `window`
            tokens.
        values_per_token: numbers that one layer stores per token.
        dtype: type of weights and cache, as in the configuration.
        is_known: whether the cache can be computed; not for models with other kinds of layers."""

    max_position: int | None
    layers: int
    values_per_token: int
    dtype: str
    sliding_layers: int = 0
    window: int = 0
    is_known: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read the configuration of a model; for one with several parts (vision, text), that of the
        text part. Raises InvalidInput."""
        text = config.get("text_config")
        body: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
        try:
            return cls._from(body)
        except (KeyError, TypeError, ValueError, ArithmeticError) as e:
            raise InvalidInput(
                f"config.json of the model does not define its dimensions: {type(e).__name__}: {e}",
                parameter="weights",
            ) from e

    @classmethod
    def _from(cls, body: Mapping[str, Any]) -> Self:
        layers, heads = int(body["num_hidden_layers"]), int(body["num_attention_heads"])
        kinds = body.get("layer_types")
        window = int(body.get("sliding_window") or 0) if body.get("use_sliding_window", True) else 0
        sliding = layers if window else 0
        if isinstance(kinds, list | tuple):
            sliding = sum(kind == "sliding_attention" for kind in kinds) if window else 0
        is_mixed = any(
            name in body
            for name in ("layers_block_type", "hybrid_override_pattern", "ssm_cfg", "mamba_d_state")
        )
        is_mixed = is_mixed or (
            isinstance(kinds, list | tuple)
            and not {"full_attention", "sliding_attention"}.issuperset(kinds)
        )
        if body.get("kv_lora_rank"):
            values = int(body["kv_lora_rank"]) + int(body.get("qk_rope_head_dim") or 0)
        else:
            head = int(body.get("head_dim") or int(body["hidden_size"]) // heads)
            values = 2 * int(body.get("num_key_value_heads") or heads) * head
        longest = body.get("max_position_embeddings")
        if min(layers, values, int(longest or 1)) < 1 or window < 0:
            raise ValueError("a dimension is less than 1")
        dtype = str(body.get("dtype") or body.get("torch_dtype") or "bfloat16").removeprefix(
            "torch."
        )
        return cls(
            max_position=int(longest) if longest else None,
            layers=layers,
            values_per_token=values,
            dtype=dtype,
            sliding_layers=sliding,
            window=window,
            is_known=not is_mixed,
        )

    def kv_bytes(self, tokens: int, *, cache_dtype: str = "auto", block_tokens: int = 16) -> int:
        """Return the size of the cache of one sequence of `tokens` tokens."""
        size = _DTYPE_BYTES.get(
            self.dtype if cache_dtype == "auto" else cache_dtype, _DEFAULT_DTYPE_BYTES
        )

        def kept(length: int) -> int:
            return math.ceil(length / block_tokens) * block_tokens * self.values_per_token * size

        return (self.layers - self.sliding_layers) * kept(tokens) + self.sliding_layers * kept(
            min(tokens, self.window or tokens)
        )


def weights_bytes(files: Iterable[tuple[str, int]]) -> int:
    """Return the total size of the weights among the files of a model, given as (path, bytes). If
    there are several formats, that of the largest."""
    by_format: dict[str, int] = {}
    for path, size in files:
        suffix = next((s for s in _MODEL_FILES if path.endswith(s)), None)
        if suffix is not None:
            by_format[suffix] = by_format.get(suffix, 0) + size
    return max(by_format.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The memory that a model needs, in bytes for all GPUs together.

    Attributes:
        overhead: memory of the engine besides weights and cache.
        room: available memory; None = unknown."""

    weights: int
    kv: int
    overhead: int
    room: int | None

    @property
    def needed(self) -> int:
        """The total."""
        return self.weights + self.kv + self.overhead

    def demand(
        self,
        *,
        name: str,
        where: str,
        shape: ModelShape,
        max_model_len: int,
        max_num_seqs: int,
        block_tokens: int,
    ) -> None:
        """Raise InvalidInput with the numbers and possible solutions if the model does not fit."""
        if self.room is None or self.needed <= self.room:
            return
        left = self.room - self.weights - self.overhead
        one = shape.kv_bytes(max_model_len, block_tokens=block_tokens)
        ways = []
        if (
            left > 0
            and (tokens := _longest(shape, left // max_num_seqs, block_tokens)) >= block_tokens
        ):
            ways.append(f"shorter sequences: max_model_len={tokens}")
        if left > 0 and (seqs := left // max(one, 1)) >= 1:
            ways.append(f"fewer concurrent sequences: max_num_seqs={seqs}")
        if left > 0:
            ways.append('half the cache size: engine_args={"kv-cache-dtype": "fp8"}')
        ways.append(
            f"quantised weights or a smaller model: the weights alone take "
            f"{format_gib(self.weights)}"
        )
        if where.startswith("a CPU"):
            ways.append(f'more memory: memory="{format_gib(self.needed, whole=True)}"')
        else:
            ways.append('a larger GPU or several: gpu="H100:2"')
            ways.append('part of the weights in DRAM (slower): engine_args={"cpu-offload-gb": 8}')
        raise InvalidInput(
            f"{name} does not fit on {where}: weights {format_gib(self.weights)} + KV cache "
            f"{format_gib(self.kv)} (max_num_seqs={max_num_seqs} sequences of "
            f"max_model_len={max_model_len} tokens, {format_gib(one)} each) + engine "
            f"{format_gib(self.overhead)} = {format_gib(self.needed)}, "
            f"but {format_gib(self.room)} are available. Possible solutions: {'; '.join(ways)}.",
            parameter="max_model_len",
            needed_bytes=self.needed,
            room_bytes=self.room,
        )


def _longest(shape: ModelShape, room: int, block_tokens: int) -> int:
    """Return the longest sequence, in whole blocks, whose cache fits into `room`."""
    low, high = 0, (shape.max_position or 1 << 22) // block_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high)
            if shape.kv_bytes(middle * block_tokens, block_tokens=block_tokens) <= room
            else (low, middle - 1)
        )
    return low * block_tokens


def format_gib(size: int, *, whole: bool = False) -> str:
    """Format a size for display."""
    if whole:
        return f"{math.ceil(size / GIB)}GiB"
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
