"""Which devices are of the kind that a user wrote."""

from __future__ import annotations

import pytest

from snapshotter.gpus.kinds import kind_of_model, mig_kind, satisfies, split_mig
from snapshotter.types import GpuDevice


def device(model: str, profile: str = "") -> GpuDevice:
    if profile:
        return GpuDevice(uuid="MIG-1", kind=mig_kind(model, profile), model=model)
    return GpuDevice(uuid="GPU-1", kind=kind_of_model(model), model=model)


@pytest.mark.parametrize(
    "model, kind",
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA", "GPU"),
    ],
)
def test_a_model_has_a_short_kind_that_it_satisfies(model: str, kind: str) -> None:
    assert kind_of_model(model) == kind
    if kind != "GPU":
        assert satisfies(device(model), kind)


@pytest.mark.parametrize(
    "kind, model",
    [
        ("H100-80GB", "NVIDIA H100 80GB HBM3"),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB"),
        ("A100-SXM4", "NVIDIA A100-SXM4-80GB"),
        ("RTX-4090", "NVIDIA GeForce RTX 4090"),
        ("RTX3090", "NVIDIA GeForce RTX 3090"),
        ("any", "NVIDIA L4"),
        ("ANY", "Tesla T4"),
    ],
)
def test_more_words_of_the_driver_narrow_a_kind(kind: str, model: str) -> None:
    assert satisfies(device(model), kind)


@pytest.mark.parametrize(
    "kind, model",
    [
        ("L4", "NVIDIA L40S"),
        ("A10", "NVIDIA A100-SXM4-80GB"),
        ("A10", "NVIDIA A10G"),
        ("T4", "NVIDIA T400 4GB"),
        ("A100-40GB", "NVIDIA A100-SXM4-80GB"),
        ("H100-MIG-3g.40gb", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_part_of_a_word_is_another_kind(kind: str, model: str) -> None:
    assert not satisfies(device(model), kind)


def test_a_mig_instance_is_of_its_profile_only() -> None:
    instance = device("NVIDIA H100 80GB HBM3", "3g.40gb")
    assert instance.kind == "H100-MIG-3g.40gb"
    assert satisfies(instance, "H100-MIG-3g.40gb")
    assert satisfies(instance, "h100-mig-3G.40GB")
    for kind in ("H100", "any", "H100-MIG-1g.10gb", "A100-MIG-3g.40gb"):
        assert not satisfies(instance, kind)


def test_a_kind_is_split_at_mig() -> None:
    assert split_mig("H100-80GB-MIG-3G.40GB") == ("H100-80GB", "3g.40gb")
    assert split_mig("RTX4090") == ("RTX4090", "")
