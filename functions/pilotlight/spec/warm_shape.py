"""Shapes of warm pods: entries of `cluster.warm_pods`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pilotlight.core.settings import parse_item
from pilotlight.spec.function import GIB, MIB
from snapshotter.gpus.kinds import ANY

MAX_SHAPES = 20
"""Each is a Deployment, and the leader compares all of them with the cluster every few seconds."""
MAX_PODS = 1000
MAX_INSTANCES = 16
"""Of one pod: ports 8080 to 8095."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?\Z")
"""Name of a Deployment and value of a label; leaves room for the suffixes of ReplicaSet and pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmShape:
    """Warm pods of one size.

    Attributes:
        name: of the shape, and of its Deployment.
        cpu: cores that a pod requests (it may use idle ones beyond them).
        memory_bytes: memory that it requests, and its limit. Both are those of a pod that waits: a
            promoted one has those of its function.
        instances: for how many instances of its function a promoted pod has room, at most: further
            ones are forked in it. 1 = a promoted pod is as large as one of the function's own;
            None = as many as the shape's memory holds.
        gpu: kind of its GPUs as functions name it (`H100`; `cluster.gpu_products` translates it);
            None = no GPU.
        gpu_count: number of its GPUs; they are held while the pod waits.
        min_pods: warm pods that are always kept; 0 = only those for recent starts.
        max_pods: warm pods at most.
    """

    name: str = ""
    cpu: float = 1.0
    memory_bytes: int = GIB
    instances: int | None = None
    gpu: str | None = None
    gpu_count: int = 0
    min_pods: int = 1
    max_pods: int = 10

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise ValueError(
                f"name = {self.name!r}: must have 1 to 30 of a-z, 0-9 and -, starting with a letter"
            )
        _bound("cpu", self.cpu, 0.05, 256)
        _bound("memory_bytes", self.memory_bytes, 32 * MIB, 4096 * GIB)
        if self.instances is not None:
            _bound("instances", self.instances, 1, MAX_INSTANCES)
        _bound("gpu_count", self.gpu_count, 0, 99)
        _bound("max_pods", self.max_pods, 1, MAX_PODS)
        _bound("min_pods", self.min_pods, 0, self.max_pods, way_out="raise max_pods, or lower it")
        if self.gpu is not None and (self.gpu == ANY or not 0 < len(self.gpu) <= 63):
            raise ValueError(
                f"gpu = {self.gpu!r}: must be one kind of GPU as functions name it, such as H100, "
                f"or null"
            )
        if (self.gpu is None) != (self.gpu_count == 0):
            raise ValueError(
                f"gpu_count = {self.gpu_count} with gpu = {self.gpu!r}: set both, or neither"
            )


def warm_shapes(values: Iterable[Any]) -> list[WarmShape]:
    """Parse the setting. Raises ValueError naming the entry, its key, the value and the bound."""
    shapes = [
        one if isinstance(one, WarmShape) else parse_item(WarmShape, f"warm_pods[{number}]", one)
        for number, one in enumerate(values)
    ]
    if len(shapes) > MAX_SHAPES:
        raise ValueError(
            f"warm_pods has {len(shapes)} shapes: must be at most {MAX_SHAPES}: merge similar ones"
        )
    names = [shape.name for shape in shapes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"warm_pods: two shapes are named {twice!r}: rename one of them")
    return shapes


def _bound(key: str, value: float, lowest: float, highest: float, *, way_out: str = "") -> None:
    if not lowest <= value <= highest:
        hint = f": {way_out}" if way_out else ""
        raise ValueError(f"{key} = {value}: must be {lowest:g} to {highest:g}{hint}")
