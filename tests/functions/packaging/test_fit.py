"""Whether a model fits, by arithmetic that can be done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.packaging.memory_estimate import MemoryEstimate, ModelShape, weights_bytes
from pilotlight.spec.function import GIB, MIB

LLAMA_3_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def test_a_token_of_grouped_heads_takes_two_vectors_for_each_layer_and_kv_head() -> None:
    shape = ModelShape.from_config(LLAMA_3_8B)

    assert shape.kv_bytes(16) == 16 * 32 * (2 * 8 * 128) * 2  # 128 KiB a token


def test_a_sequence_takes_whole_blocks() -> None:
    shape = ModelShape.from_config(LLAMA_3_8B)

    assert shape.kv_bytes(17) == shape.kv_bytes(32) == 2 * shape.kv_bytes(16)
    assert shape.kv_bytes(1, block_tokens=128) == shape.kv_bytes(128, block_tokens=128)


def test_without_grouped_heads_every_head_has_its_own() -> None:
    shape = ModelShape.from_config(
        {name: value for name, value in LLAMA_3_8B.items() if name != "num_key_value_heads"}
    )

    assert shape.values_per_token == 2 * 32 * 128


def test_an_eight_bit_cache_takes_half() -> None:
    shape = ModelShape.from_config(LLAMA_3_8B)

    assert shape.kv_bytes(160, cache_dtype="fp8") * 2 == shape.kv_bytes(160)


def test_latent_attention_keeps_one_compressed_vector_for_each_layer() -> None:
    shape = ModelShape.from_config({**LLAMA_3_8B, "kv_lora_rank": 512, "qk_rope_head_dim": 64})

    assert shape.values_per_token == 576


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    kinds = ["sliding_attention"] * 31 + ["full_attention"]
    shape = ModelShape.from_config({**LLAMA_3_8B, "sliding_window": 1024, "layer_types": kinds})
    per_layer_token = 2 * 8 * 128 * 2

    assert shape.kv_bytes(8192) == per_layer_token * (8192 + 31 * 1024)


def test_a_window_that_is_switched_off_is_none() -> None:
    shape = ModelShape.from_config(
        {**LLAMA_3_8B, "sliding_window": 1024, "use_sliding_window": False}
    )

    assert shape.sliding_layers == 0


def test_the_text_part_of_a_model_with_vision_counts() -> None:
    assert (
        ModelShape.from_config(
            {"vision_config": {"num_hidden_layers": 99}, "text_config": LLAMA_3_8B}
        ).layers
        == 32
    )


def test_models_with_other_kinds_of_layers_are_known_to_be_unknown() -> None:
    assert not ModelShape.from_config(
        {**LLAMA_3_8B, "layers_block_type": ["mamba", "attention"]}
    ).is_known
    assert not ModelShape.from_config(
        {**LLAMA_3_8B, "layer_types": ["linear_attention", "full_attention"]}
    ).is_known


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"num_hidden_layers": "many", "num_attention_heads": 1},
        {**LLAMA_3_8B, "num_attention_heads": 0},
    ],
)
def test_a_configuration_without_a_shape_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="does not define its dimensions"):
        ModelShape.from_config(broken)


def test_of_two_formats_side_by_side_one_is_loaded() -> None:
    files = [
        ("model-1.safetensors", 10),
        ("model-2.safetensors", 10),
        ("pytorch_model.bin", 19),
        ("tokenizer.json", 1000),
    ]

    assert weights_bytes(files) == 20
    assert weights_bytes([("README.md", 5)]) == 0


def demand(
    fit: MemoryEstimate, *, where: str = "one L4 GPU", length: int = 8192, seqs: int = 64
) -> None:
    fit.demand(
        name="assistant",
        where=where,
        shape=ModelShape.from_config(LLAMA_3_8B),
        max_model_len=length,
        max_num_seqs=seqs,
        block_tokens=16,
    )


def test_what_fits_is_let_through_to_the_byte() -> None:
    demand(MemoryEstimate(weights=10, kv=10, overhead=10, room=30))
    demand(MemoryEstimate(weights=10, kv=10, overhead=10, room=None))
    with pytest.raises(InvalidInput):
        demand(MemoryEstimate(weights=10, kv=10, overhead=10, room=29))


def test_a_refusal_has_the_numbers_and_ways_out_that_fit() -> None:
    """64 sequences of 8192 tokens of 128 KiB are 64 GiB; beside 15 GiB of weights an L4 has some 5
    GiB left for them."""
    with pytest.raises(InvalidInput) as refused:
        demand(MemoryEstimate(weights=15 * GIB, kv=64 * GIB, overhead=2 * GIB, room=22 * GIB))

    message = str(refused.value)
    assert "weights 15.0 GiB + KV cache 64.0 GiB" in message
    assert "= 81.0 GiB, but 22.0 GiB are available" in message
    assert "max_num_seqs=5" in message  # 5 GiB of 1 GiB each
    assert "max_model_len=640" in message  # 5 GiB / 64 / 128 KiB
    assert 'gpu="H100:2"' in message


def test_weights_that_do_not_fit_alone_leave_no_shorter_way() -> None:
    with pytest.raises(InvalidInput) as refused:
        demand(MemoryEstimate(weights=30 * GIB, kv=MIB, overhead=2 * GIB, room=22 * GIB))

    assert "max_model_len=" not in str(refused.value).partition("Possible solutions")[2]
    assert "quantised" in str(refused.value)


def test_on_a_cpu_the_way_out_is_memory() -> None:
    with pytest.raises(InvalidInput, match='memory="4GiB"'):
        demand(
            MemoryEstimate(weights=GIB // 2, kv=GIB // 4, overhead=3 * GIB, room=GIB),
            where="a CPU with memory=1.0 GiB",
        )


@pytest.mark.parametrize(
    "odd",
    [
        {"num_hidden_layers": -5},
        {"num_hidden_layers": float("inf")},
        {"num_key_value_heads": -3},
        {"max_position_embeddings": -1},
        {"max_position_embeddings": float("inf")},
        {"sliding_window": -4},
        {"kv_lora_rank": -1},
        {"num_attention_heads": 0},
    ],
)
def test_a_configuration_of_impossible_numbers_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json"):
        ModelShape.from_config({**LLAMA_3_8B, **odd})
