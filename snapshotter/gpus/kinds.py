"""Kinds of GPUs: the names that users write and the operator prices, and which devices satisfy
them.

A kind is `H100`, `A100-80GB`, `RTX4090`: words of the driver's name, of which each must occur in it
as a whole word (`L4` is no `L40S`), or as two words in a row (`RTX 4090`). `H100-MIG-3g.40gb` is a
MIG instance of that profile, `any` a whole GPU of any model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from snapshotter.types import GpuDevice

ANY = "any"
_SEPARATORS = re.compile(r"[\s_/-]+")
_MIG = re.compile(r"(?P<base>.+?)-MIG-(?P<profile>.+)", re.IGNORECASE)
_MAKERS = frozenset({"NVIDIA", "TESLA", "QUADRO", "GEFORCE"})
_LINES = frozenset({"RTX", "GTX"})


def satisfies(device: GpuDevice, kind: str) -> bool:
    """Whether the device is of this kind."""
    if kind.lower() == ANY:
        return not device.is_mig
    base, profile = split_mig(kind)
    if profile != (split_mig(device.kind)[1] if device.is_mig else ""):
        return False
    return set(_words(base)) <= _names(device.model)


def satisfies_any(device: GpuDevice, kinds: Sequence[str]) -> bool:
    """Whether the device is of one of these kinds."""
    return any(satisfies(device, kind) for kind in kinds)


def split_mig(kind: str) -> tuple[str, str]:
    """A kind's GPU and MIG profile, in lower case: `("H100", "3g.40gb")`; the profile is "" of a
    whole GPU."""
    match = _MIG.fullmatch(kind)
    return (kind, "") if match is None else (match["base"], match["profile"].lower())


def kind_of_model(model: str) -> str:
    """The short kind of a GPU that its driver names so: `NVIDIA A100-SXM4-80GB` is an `A100`,
    `NVIDIA GeForce RTX 4090` an `RTX4090`, `NVIDIA RTX A6000` an `A6000`."""
    words = [word for word in _words(model) if word not in _MAKERS]
    if len(words) > 1 and words[0] in _LINES:
        if words[1].isdigit():
            return words[0] + words[1]
        return "-".join(words[:3]) if words[1] == "PRO" else words[1]
    return words[0] if words else "GPU"


def mig_kind(model: str, profile: str) -> str:
    """The kind of a MIG instance of a GPU of this model."""
    return f"{kind_of_model(model)}-MIG-{profile.lower()}"


def _words(name: str) -> list[str]:
    return [word for word in _SEPARATORS.split(name.upper()) if word]


def _names(model: str) -> set[str]:
    """The words of a model, and each two of them in a row as one."""
    words = _words(model)
    return {*words, *(one + two for one, two in pairwise(words))}
