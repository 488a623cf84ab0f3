"""On a real GPU: what arrives is what was saved, memory is pinned when it is called so, and no
memory in use is overwritten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pilotlight import weights
from tests.weight_cache.tensors.models_on_disk import EVERY_KIND, large, same, save, save_in_two
from weight_cache.errors import DeviceFailed
from weight_cache.tensors.delivery import deliver
from weight_cache.tensors.devices import CudaDevice
from weight_cache.tensors.header import read_tensors
from weight_cache.tensors.pool import Pool
from weight_cache.tensors.read_plan import PIECE_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda:0"))


@pytest.fixture
def pool(device: CudaDevice) -> Iterator[Pool]:
    with Pool(4 * 2 * PIECE_BYTES, pin=device.pin) as one:
        yield one


@pytest.mark.parametrize("files", [1, 2])
def test_every_kind_of_tensor_arrives_as_it_was(tmp_path: Path, files: int) -> None:
    tensors = weights.load(save(tmp_path) if files == 1 else save_in_two(tmp_path), device="cuda:0")
    assert {tensor.device.type for tensor in tensors.values()} == {"cuda"}
    assert all(same(tensors[name].cpu(), expected) for name, expected in EVERY_KIND.items())


def test_a_pool_for_the_gpu_is_pinned_and_torch_agrees(pool: Pool) -> None:
    assert pool.is_pinned
    assert pool.take(100).is_pinned()
    assert weights.pool(1, device="cuda").is_pinned


@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_stages_are_used_again_only_when_their_bytes_have_left(
    tmp_path: Path, device: CudaDevice, pool: Pool, threads: int, is_pinned: bool
) -> None:
    file, state = large(tmp_path, mebibytes=200)
    placed = [(tensor, device) for tensor in read_tensors(file)]
    with Pool(pool.size_bytes) as plain:
        tensors = deliver(file, placed, pool=pool if is_pinned else plain, threads=threads)
    assert all(same(tensors[name].cpu(), expected) for name, expected in state.items())


def test_tensors_may_be_placed_on_different_devices(tmp_path: Path) -> None:
    tensors = weights.load(save(tmp_path), device=lambda name: "cpu" if name == "int64" else "cuda")
    assert tensors["int64"].device.type == "cpu"
    assert tensors["float32"].device == torch.device("cuda", torch.cuda.current_device())
    assert all(same(tensors[name].cpu(), expected) for name, expected in EVERY_KIND.items())


def test_memory_that_earlier_work_still_reads_is_not_overwritten(tmp_path: Path) -> None:
    file, state = large(tmp_path)
    size = file.stat().st_size
    ones = torch.ones(size, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(500_000_000)  # the stream is busy for a while; what follows waits behind it
    total = ones.sum(dtype=torch.int64)
    del ones  # its memory is free for the next allocation, although nobody has read it yet
    tensors = weights.load(file, device="cuda")
    assert int(total) == size
    assert all(same(tensors[name].cpu(), expected) for name, expected in state.items())


def test_a_tensor_that_does_not_fit_is_named_and_the_gpu_stays_usable(device: CudaDevice) -> None:
    with pytest.raises(DeviceFailed, match=r"cuda:0 refuses torch\.uint8"):
        device.allocate(torch.uint8, (1 << 44,))
    assert device.allocate(torch.uint8, (16,)).numel() == 16
    with pytest.raises(DeviceFailed, match="counted from 0"):
        CudaDevice(torch.device("cuda:99"))


def test_memory_that_cannot_be_registered_is_not_called_pinned_and_blames_no_later_work(
    device: CudaDevice,
) -> None:
    assert device.pin is not None
    assert not device.pin.register(0, 4096)
    assert float(torch.ones(4, device="cuda").sum()) == 4.0


def test_a_transformers_model_is_delivered_with_what_is_tied_tied(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to("cuda")
    ours = weights.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, device="cuda")
    assert {tensor.device.type for tensor in [*ours.parameters(), *ours.buffers()]} == {"cuda"}
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    prompt = torch.arange(12, device="cuda").reshape(2, 6)
    assert torch.equal(ours(prompt).logits, plain(prompt).logits)


def test_a_module_is_filled_on_the_gpu(tmp_path: Path) -> None:
    file = save(tmp_path, {"weight": torch.eye(3), "bias": torch.ones(3)})
    with torch.device("meta"):
        module = torch.nn.Linear(3, 3)
    weights.load_into(module, file, device="cuda")
    assert module(torch.ones(3, device="cuda")).tolist() == [2.0, 2.0, 2.0]
