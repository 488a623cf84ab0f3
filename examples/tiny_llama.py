"""A small language model made on the spot: Llama architecture, random weights from a seed, a
tokenizer of its own with a chat template.

`make(directory)` writes what a Hugging Face repository would have: config.json, model.safetensors
(bfloat16), tokenizer.json and friends. It answers in syllables that mean nothing, always the same
ones for the same prompt (greedy), and never ends by itself: its answers run to `max_tokens`.
Standard library and numpy only; the defaults have 4 million parameters, `make(d, hidden=1024,
layers=35)` 0.4 billion.

    python examples/tiny_llama.py models/tiny
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HEAD = 64
VOCABULARY = 512
SPECIALS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] "
    "}}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(
    directory: Path, *, hidden: int = 256, layers: int = 5, max_len: int = 2048, seed: int = 7
) -> Path:
    """Write the model into a directory, which is made. The same arguments give the same bytes;
    returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(hidden=hidden, layers=layers, max_len=max_len)
    tokens = _tokens()
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]},
    )
    _write_json(directory / "tokenizer.json", _tokenizer(tokens))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(max_len))
    _write_tensors(directory / "model.safetensors", config, tokens, seed)
    return directory


def _config(*, hidden: int, layers: int, max_len: int) -> dict[str, Any]:
    heads = hidden // HEAD
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": -(-hidden * 8 // 3 // 64) * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": max_len,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": VOCABULARY - len(SPECIALS),
        "eos_token_id": VOCABULARY - len(SPECIALS) + 1,
    }


# --- its tokens: every byte, syllables, syllables that begin a word, and marks of who speaks


def _bytes_as_text() -> list[str]:
    """How byte-level BPE writes each byte: printable ones as they are, others as letters from
    U+0100 on (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _syllables() -> list[str]:
    return [consonant + vowel for consonant in "bcdfghjklmnprstvwyz" for vowel in "aeiou"]


def _tokens() -> list[str]:
    space = _bytes_as_text()[0x20]
    tokens = [*_bytes_as_text(), *_syllables(), *(space + s for s in _syllables())]
    unused = [f"<|unused{i}|>" for i in range(VOCABULARY - len(SPECIALS) - len(tokens))]
    return [*tokens, *unused, *SPECIALS]


def _merges() -> list[str]:
    space = _bytes_as_text()[0x20]
    return [f"{s[0]} {s[1]}" for s in _syllables()] + [f"{space} {s}" for s in _syllables()]


def _tokenizer(tokens: list[str]) -> dict[str, Any]:
    marked = [(i, t) for i, t in enumerate(tokens) if t.startswith("<|")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": t,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, t in marked
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": _merges(),
        },
    }


def _tokenizer_config(max_len: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


# --- its weights


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * HEAD
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _write_tensors(path: Path, config: dict[str, Any], tokens: list[str], seed: int) -> None:
    """One safetensors file: the header's length, the header as JSON, then the tensors one after
    another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in _shapes(config):
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for name, shape in _shapes(config):
            f.write(_bfloat16(_values(name, shape, tokens, random)))


def _values(
    name: str, shape: tuple[int, ...], tokens: list[str], random: np.random.Generator
) -> np.ndarray[Any, Any]:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    values = random.standard_normal(shape, np.float32)
    if "embed" in name:
        return values
    if name == "lm_head.weight":  # only syllables are ever said: the logits of all others are 0
        spoken = np.array([len(t) in (2, 3) for t in tokens], np.float32)
        return values * spoken[:, None] * np.float32(4 / shape[-1] ** 0.5)
    return values * np.float32(shape[-1] ** -0.5)


def _bfloat16(values: np.ndarray[Any, Any]) -> bytes:
    """The upper halves of the float32 numbers, rounded."""
    return ((values.view(np.uint32) + 0x8000) >> 16).astype("<u2").tobytes()


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
