"""`pilotlight.weights` inside real workers: another user, a file system of its own, a filter on
system calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import PlatformUnderTest
from tests.weight_cache.tensors.models_on_disk import large

pytestmark = pytest.mark.timeout(240)

APP = """
import os
import pilotlight

app = pilotlight.App("loading")
model = pilotlight.Weights("./model")


def described(tensors) -> dict:
    return {name: [tensor.numel(), int(tensor.long().sum())] for name, tensor in tensors.items()}


@app.cls(weights=model, memory="1GiB")
class Mapped:
    @pilotlight.enter()
    def load(self):
        self.tensors = pilotlight.weights.load(model.path)

    @pilotlight.method()
    def sums(self) -> dict:
        return described(self.tensors)


@app.cls(weights=model, memory="1GiB")
class Pooled:
    @pilotlight.enter(snap=False)
    def load(self):
        self.pool = pilotlight.weights.pool(64 * 1024**2)
        self.tensors = pilotlight.weights.load(model.path, mode="pool", pool=self.pool)

    @pilotlight.method()
    def sums(self) -> dict:
        return described(self.tensors)
"""


@pytest.mark.parametrize("how", ["Mapped", "Pooled"])
def test_tensors_in_a_worker_are_those_that_were_saved(
    platform: PlatformUnderTest, tmp_path: Path, how: str
) -> None:
    _, state = large(tmp_path / "model", mebibytes=36)
    (tmp_path / "loading.py").write_text(APP)
    platform.cli("deploy", str(tmp_path / "loading.py"), "--no-wait")
    assert platform.result(f"loading/{how}.sums") == {
        name: [tensor.numel(), int(tensor.long().sum())] for name, tensor in state.items()
    }
