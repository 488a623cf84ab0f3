"""Completion of a declared language model from its files: maximum length, cache size, and
memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pilotlight.errors import InvalidInput
from pilotlight.packaging.memory_estimate import (
    BLOCK_TOKENS,
    CPU_OVERHEAD_BYTES,
    GPU_OVERHEAD_BYTES,
    GPU_SHARE,
    MemoryEstimate,
    ModelShape,
    format_gib,
    gpu_memory_bytes,
    weights_bytes,
)
from pilotlight.sdk.llm import EngineDeclaration, parse_whole_number
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import GIB, MIB, Resources

if TYPE_CHECKING:
    from weight_cache.manifest import Manifest, ManifestFile

Read = Callable[["ManifestFile"], bytes]
"""Function that returns the content of a file of the model."""
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that the engine accepts for `--max-lora-rank`."""
_MOST_AT_ONCE = 8
"""Maximum adapters in one batch: each needs GPU memory; others are swapped in from main memory."""
_MAX_CONFIG_BYTES = 16 * MIB
_GPU_MEMORY_BYTES = 8 * GIB
"""Main memory of an engine on GPUs, besides that for loading weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """The engine and resources of a declaration, and notes for the user."""

    engine: EngineSpec
    resources: Resources
    notes: tuple[str, ...] = ()


def resolve_engine(
    declaration: EngineDeclaration, manifest: Manifest, read: Read, adapters: Mapping[str, Manifest]
) -> ResolvedEngine:
    """Return the record to deploy. Raises InvalidInput if the model cannot be served, or, with the
    numbers, if it does not fit into memory."""
    shape = _shape(declaration, manifest, read)
    longest = _length(declaration, shape)
    where = "gpu" if declaration.resources.gpu else "cpu"
    block = parse_whole_number(
        "block-size", declaration.arguments.get("block-size") or BLOCK_TOKENS[where]
    )
    cache_dtype = str(declaration.arguments.get("kv-cache-dtype", "auto"))
    kv = declaration.max_num_seqs * shape.kv_bytes(
        longest, cache_dtype=cache_dtype, block_tokens=block
    )
    weights = sum(
        weights_bytes((f.path, f.size_bytes) for f in m.files)
        for m in (manifest, *adapters.values())
    )
    if not weights:
        raise InvalidInput(
            f"weights {declaration.model.name!r} contain no model: expected *.safetensors next to "
            f"{CONFIG}",
            parameter="weights",
        )
    size = {
        "shape": shape,
        "max_model_len": longest,
        "max_num_seqs": declaration.max_num_seqs,
        "block_tokens": block,
    }
    if where == "gpu":
        notes, gpu_bytes = _on_gpus(declaration, weights, kv, size)
        memory = declaration.memory_bytes or _GPU_MEMORY_BYTES + weights
        kv_bytes = declaration.kv_bytes
    else:
        notes, gpu_bytes = (), 0
        kv_bytes = declaration.kv_bytes or max(16 * MIB, -(-kv // MIB) * MIB)
        memory = _memory_on_cpu(declaration, weights, kv_bytes, size)
    engine = declaration.engine(
        max_model_len=longest, kv_bytes=kv_bytes, more=_for_adapters(declaration, adapters, read)
    )
    engine = replace(engine, gpu_bytes=gpu_bytes)
    return ResolvedEngine(
        engine=engine, resources=replace(declaration.resources, memory_bytes=memory), notes=notes
    )


def _shape(declaration: EngineDeclaration, manifest: Manifest, read: Read) -> ModelShape:
    lacking = "pass the directory of a Hugging Face model with its tokenizer"
    config = _document(declaration.model.name, manifest, CONFIG, read, lacking=lacking)
    shape = ModelShape.from_config(config)
    dtype = str(declaration.arguments.get("dtype", "auto"))
    return shape if dtype == "auto" else replace(shape, dtype=dtype)


def _document(
    name: str, manifest: Manifest, path: str, read: Read, *, lacking: str
) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises InvalidInput."""
    file = next((f for f in manifest.files if f.path == path), None)
    if file is None or file.size_bytes > _MAX_CONFIG_BYTES:
        raise InvalidInput(f"weights {name!r} have no {path}: {lacking}", parameter="weights")
    try:
        found = json.loads(read(file))
    except ValueError as e:
        raise InvalidInput(
            f"{path} of weights {name!r} is not valid JSON: {e}", parameter="weights"
        ) from e
    if not isinstance(found, dict):
        raise InvalidInput(f"{path} of weights {name!r} is not a JSON object", parameter="weights")
    return found


def _for_adapters(
    declaration: EngineDeclaration, adapters: Mapping[str, Manifest], read: Read
) -> dict[str, int]:
    """Return engine arguments with room for all adapters at once and for their largest rank. The
    defaults of the engine are one adapter, of rank 16 at most."""
    ranks = [
        _document(
            declaration.adapters[name].name,
            manifest,
            ADAPTER_CONFIG,
            read,
            lacking="pass the directory of a LoRA adapter",
        ).get("r")
        for name, manifest in adapters.items()
    ]
    if not ranks:
        return {}
    most = max((rank for rank in ranks if isinstance(rank, int)), default=0)
    rank = next((size for size in _RANKS if size >= most), most)
    return {
        "max-loras": min(len(ranks), _MOST_AT_ONCE),
        **({"max-lora-rank": rank} if most > _RANKS[1] else {}),
    }


def _length(declaration: EngineDeclaration, shape: ModelShape) -> int:
    asked = declaration.max_model_len
    if asked is None:
        if shape.max_position is None:
            raise InvalidInput(
                f"{declaration.name}: the model does not state its maximum length: pass "
                f"max_model_len=",
                parameter="max_model_len",
            )
        return shape.max_position
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise InvalidInput(
            f"max_model_len = {asked!r}: must be a number of tokens, at least 1",
            parameter="max_model_len",
        )
    if (
        shape.max_position is not None
        and asked > shape.max_position
        and "hf-overrides" not in declaration.arguments
    ):
        raise InvalidInput(
            f"max_model_len = {asked}: the model supports at most {shape.max_position} tokens "
            f"(max_position_embeddings)",
            parameter="max_model_len",
        )
    return asked


def _on_gpus(
    declaration: EngineDeclaration, weights: int, kv: int, size: Mapping[str, Any]
) -> tuple[tuple[str, ...], int]:
    """Raise InvalidInput if the model fits on none of the acceptable GPU types. Unknown types or
    models are not checked; the returned notes say so.

    Also returns the memory that its GPUs must have together (`EngineSpec.gpu_bytes`), which a node
    checks against the GPUs that it has; 0 if the size of the cache is not known."""
    count, kinds = declaration.resources.gpu_count, declaration.resources.gpu
    share = _number(declaration, "gpu-memory-utilization", GPU_SHARE, most=1.0)
    memory = {kind: gpu_memory_bytes(kind) or 0 for kind in kinds}
    unknown = [kind for kind in kinds if not memory[kind]]
    if not size["shape"].is_known:
        what = f"the memory of {unknown[0]}" if unknown else "the cache size of such a model"
        return (f"{declaration.name}: memory use was not checked, because {what} is unknown",), 0
    offloaded = int(_number(declaration, "cpu-offload-gb", 0.0, most=1e6) * GIB) * count
    need = {
        "weights": max(0, weights - offloaded),
        "kv": declaration.kv_bytes or kv,
        "overhead": GPU_OVERHEAD_BYTES * count,
    }
    gpu_bytes = math.ceil(sum(need.values()) / share) if share else 0
    if unknown:
        note = f"the memory of {unknown[0]} is unknown; nodes check it at each start"
        return (f"{declaration.name}: memory use was not checked, because {note}",), gpu_bytes
    largest = max(kinds, key=memory.__getitem__)
    fit = MemoryEstimate(**need, room=int(memory[largest] * share) * count)
    place = f"{largest}:{count}" if count > 1 else f"one {largest} GPU"
    fit.demand(
        name=declaration.name,
        where=f"{place} ({share:g} of {format_gib(memory[largest] * count)})",
        **size,
    )
    return (), gpu_bytes


def _number(declaration: EngineDeclaration, name: str, default: float, *, most: float) -> float:
    given = declaration.arguments.get(name, default)
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= most:
        raise InvalidInput(
            f"engine_args: {name} = {given!r}: must be a number between 0 and {most:g}",
            parameter="engine_args",
        )
    return number


def _memory_on_cpu(
    declaration: EngineDeclaration, weights: int, kv_bytes: int, size: Mapping[str, Any]
) -> int:
    """Return the memory of one instance. On a CPU the engine copies the weights into its memory,
    and allocates the cache at its start."""
    fit = MemoryEstimate(
        weights=weights, kv=kv_bytes, overhead=CPU_OVERHEAD_BYTES, room=declaration.memory_bytes
    )
    fit.demand(
        name=declaration.name,
        where=f"a CPU with memory={format_gib(declaration.memory_bytes or 0)}",
        **size,
    )
    return declaration.memory_bytes or math.ceil(fit.needed / GIB) * GIB
