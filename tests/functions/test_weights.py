"""`pilotlight.weights`: what users call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pilotlight
from pilotlight import weights
from tests.weight_cache.tensors.models_on_disk import EVERY_KIND, large, same, save, save_in_two
from weight_cache.errors import DeviceFailed, PoolFull, TensorsInvalid


class Tied(torch.nn.Module):
    """An embedding whose matrix is the head's too, and a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("positions", torch.arange(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        out: torch.Tensor = self.head(self.embedding(x) * self.scale)
        return out


@pytest.fixture
def tied(tmp_path: Path) -> tuple[Tied, Path]:
    """A module, and the file of another one like it."""
    trained = Tied()
    with torch.no_grad():
        trained.scale.copy_(torch.arange(4.0))
    return trained, save(
        tmp_path,
        {"embedding.weight": trained.embedding.weight.detach(), "scale": trained.scale.detach()},
    )


def test_it_is_there_when_it_is_asked_for_and_costs_nothing_before() -> None:
    probe = (
        "import pilotlight, sys; assert 'pilotlight.weights' not in sys.modules; "
        "pilotlight.weights.load; assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", probe], check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert pilotlight.weights is weights


@pytest.mark.parametrize("mode", ["auto", "mapped", "pool"])
@pytest.mark.parametrize("files", [1, 2])
def test_every_mode_gives_the_same_tensors(tmp_path: Path, mode: weights.Mode, files: int) -> None:
    path = save(tmp_path) if files == 1 else save_in_two(tmp_path)
    tensors = weights.load(path, mode=mode)
    assert set(tensors) == set(EVERY_KIND)
    assert all(same(tensors[name], expected) for name, expected in EVERY_KIND.items())


@pytest.mark.parametrize("mode", ["mapped", "pool"])
def test_some_names_only(tmp_path: Path, mode: weights.Mode) -> None:
    tensors = weights.load(save_in_two(tmp_path), names=["bool", "scalar"], mode=mode)
    assert set(tensors) == {"bool", "scalar"}
    assert weights.load(tmp_path, names=[], mode=mode) == {}
    with pytest.raises(TensorsInvalid, match="does not contain 'biases', 'boole'"):
        weights.load(tmp_path, names=["boole", "biases", "bool"], mode=mode)


def test_a_device_may_be_said_for_each_tensor(tmp_path: Path) -> None:
    asked: list[str] = []

    def place(name: str) -> str:
        asked.append(name)
        return "cpu"

    tensors = weights.load(save(tmp_path), device=place)
    assert sorted(asked) == sorted(EVERY_KIND)
    assert all(same(tensors[name], expected) for name, expected in EVERY_KIND.items())


def test_a_pool_serves_one_load_after_the_other(tmp_path: Path) -> None:
    file, state = large(tmp_path)
    with weights.pool(48 * 1024**2) as pool:
        for _ in range(3):
            tensors = weights.load(file, mode="pool", pool=pool)
            assert all(same(tensors[name], expected) for name, expected in state.items())
            del tensors
        assert pool.used_bytes == 0
        kept = weights.load(file, mode="pool", pool=pool)
        with pytest.raises(PoolFull):
            weights.load(file, mode="pool", pool=pool)
        del kept


def test_without_a_pool_the_memory_goes_with_the_tensors(tmp_path: Path) -> None:
    tensors = dict(weights.load(save(tmp_path), mode="pool"))
    assert same(tensors["int64"], EVERY_KIND["int64"])
    with open("/proc/self/maps") as maps:
        assert "pilotlight-pool" in maps.read()
    tensors.clear()
    with open("/proc/self/maps") as maps:
        assert "pilotlight-pool" not in maps.read()


def test_what_cannot_be_is_refused_with_its_name(tmp_path: Path) -> None:
    file = save(tmp_path)
    with pytest.raises(ValueError, match="expected 'auto', 'mapped' or 'pool'"):
        weights.load(file, mode="fast")  # type: ignore[arg-type]
    with pytest.raises(DeviceFailed, match="meta"):
        weights.load(file, device="meta")
    with pytest.raises(FileNotFoundError):
        weights.load(tmp_path / "gone.safetensors")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceFailed, match="finds no CUDA device"):
            weights.load(file, device="cuda:0")
        with pytest.raises(DeviceFailed, match="finds no CUDA device"):
            weights.pool(1, device="cuda")


# -- into a module ---------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["mapped", "pool"])
def test_a_module_is_given_the_tensors_and_what_is_one_stays_one(
    tied: tuple[Tied, Path], mode: weights.Mode
) -> None:
    trained, file = tied
    module = Tied()
    assert weights.load_into(module, file, mode=mode) == weights.Loaded(missing=(), unexpected=())
    assert module.head.weight is module.embedding.weight
    assert torch.equal(module(torch.arange(8)), trained(torch.arange(8)))


def test_the_parameters_are_the_file_itself(tied: tuple[Tied, Path]) -> None:
    _, file = tied
    module = Tied()
    weights.load_into(module, file)
    assert module.scale.untyped_storage().nbytes() == file.stat().st_size
    assert (
        module.scale.untyped_storage().data_ptr()
        == module.embedding.weight.untyped_storage().data_ptr()
    )


@pytest.mark.slow  # what torch imports for its `meta` device
def test_a_module_without_memory_that_computes_a_buffer_is_refused_unless_it_is_left(
    tied: tuple[Tied, Path],
) -> None:
    _, file = tied
    with torch.device("meta"):
        module, other = Tied(), Tied()
    with pytest.raises(TensorsInvalid, match="does not contain 'positions'"):
        weights.load_into(module, file)
    weights.load_into(other, file, strict=False)
    assert not other.scale.is_meta
    assert not other.head.weight.is_meta


def test_names_on_one_side_only_are_told(tied: tuple[Tied, Path], tmp_path: Path) -> None:
    trained, _ = tied
    file = save(
        tmp_path / "more",
        {"embedding.weight": trained.embedding.weight.detach(), "extra": torch.ones(1)},
    )
    module = Tied()
    with pytest.raises(TensorsInvalid, match=r"'scale'; unexpected 'extra'\. Use strict=False"):
        weights.load_into(module, file)
    assert weights.load_into(module, file, strict=False) == weights.Loaded(
        missing=("scale",), unexpected=("extra",)
    )
    assert torch.equal(module.scale, torch.ones(4))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path, {"weight": torch.ones(3, 3), "bias": torch.ones(2)})
    with pytest.raises(TensorsInvalid, match="does not fit the module"):
        weights.load_into(torch.nn.Linear(2, 2), file)


def test_dtypes_are_those_of_the_file(tmp_path: Path) -> None:
    file = save(
        tmp_path,
        {
            "weight": torch.ones(2, 2, dtype=torch.bfloat16),
            "bias": torch.ones(2, dtype=torch.bfloat16),
        },
    )
    module = torch.nn.Linear(2, 2)
    weights.load_into(module, file)
    assert (module.weight.dtype, module.weight.requires_grad) == (torch.bfloat16, True)
