"""How many instances the machines of a platform can hold. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.capacity.measurements import Measurements
from pilotlight.spec.pricing import is_any_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine. `gpus`: product of each; `cpus`: None = not known."""

    memory_bytes: int
    gpus: Sequence[str] = ()
    cpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The instances that all nodes hold together if nothing else runs there, and the `resource`
    that bounds them: `memory` or `gpu`. `cpus`: of all nodes; None = not known."""

    instances: int
    resource: str
    cpus: int | None = None


def node_of_machine(body: Mapping[str, Any]) -> Node | None:
    """The one machine of a platform, as `GET /v1/node` describes it; None on a cluster."""
    machine = body.get("node") or {}
    memory = machine.get("memory_bytes")
    if not memory:
        return None
    gpus = tuple(str(gpu.get("name", "")) for gpu in machine.get("gpus") or ())
    return Node(memory_bytes=int(memory), gpus=gpus, cpus=machine.get("cpus"))


def node_of_report(body: Mapping[str, Any]) -> Node:
    """A node of a cluster, as `GET /v1/nodes` lists it."""
    return Node(memory_bytes=int(body["memory_bytes"]), gpus=tuple(body["gpus"]))


def room(nodes: Sequence[Node], measured: Measurements) -> Room | None:
    """Return the room for instances of a function; None where no node is known."""
    if not nodes:
        return None
    by_memory = [node.memory_bytes // max(1, measured.memory_bytes) for node in nodes]
    held = [
        min(memory, _by_gpu(node, measured)) for memory, node in zip(by_memory, nodes, strict=True)
    ]
    cpus = [node.cpus for node in nodes]
    return Room(
        instances=sum(held),
        resource="memory" if held == by_memory else "gpu",
        cpus=None if None in cpus else sum(filter(None, cpus)),
    )


def _by_gpu(node: Node, measured: Measurements) -> int:
    if not measured.gpu_count or any("-mig-" in kind.lower() for kind in measured.gpu):
        return sys.maxsize  # products do not tell how GPUs are divided into MIG instances
    fitting = sum(
        any(is_any_gpu(kind) or kind.lower() in product.lower() for kind in measured.gpu)
        for product in node.gpus
    )
    return fitting // measured.gpu_count
