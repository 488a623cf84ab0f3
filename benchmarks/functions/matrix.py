"""The matrix-bound one of batching.py: two layers of 4096 by 4096, whose 128 MiB of weights a pass
reads, for one item or for many."""

from typing import Any

import pilotlight

WIDTH = 4096
app = pilotlight.App("bench-matrix")


class Layers:
    """The model; not called itself."""

    @pilotlight.enter()
    def load(self) -> None:
        """Weights from a seed, and inputs to choose from."""
        import torch

        torch.set_num_threads(1)
        seed = torch.Generator().manual_seed(1)
        self.layers: list[Any] = [
            torch.randn(WIDTH, WIDTH, generator=seed) / WIDTH**0.5 for _ in range(2)
        ]
        self.inputs: Any = torch.randn(64, WIDTH, generator=seed)

    def scores(self, numbers: list[int]) -> list[float]:
        """One number for each input."""
        import torch

        with torch.inference_mode():
            hidden = self.inputs[numbers]
            for layer in self.layers:
                hidden = torch.relu(hidden @ layer)
            found: list[float] = hidden.mean(dim=1).tolist()
        return found


@app.cls(cpu=1, memory="1GiB", min_instances=1, max_instances=1)
class Single(Layers):
    """One call, one pass."""

    @pilotlight.method(example=[1])
    def score(self, number: int) -> float:
        """Of one input."""
        return self.scores([number])[0]


@app.cls(cpu=1, memory="1GiB", min_instances=1, max_instances=1)
class Batched(Layers):
    """Calls that are there at the same time share a pass."""

    @pilotlight.method(example=[1])
    @pilotlight.batched(max_batch_size=32, wait_ms=20)
    def score(self, numbers: list[int]) -> list[float]:
        """Of each input."""
        return self.scores(numbers)
