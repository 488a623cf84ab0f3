"""Choice of the GPU for a restored process, by UUID: a pure decision.

The driver requires a pair for *every* GPU that its kernel part sees, used or not, and treats an
empty mapping as "unchanged", which is faster. Only a GPU of the same model can replace another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from snapshotter.cuda.errors import CudaRefused, Refusal
from snapshotter.cuda.gpu_blockers import MIGRATION_RELEASE
from snapshotter.cuda.gpu_usage import CudaNode, Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """A snapshot's record of the GPU state of its processes; part of the manifest.

    Attributes:
        processes: number of processes of the tree with checkpointed CUDA state; 0: none.
        used: UUID of the GPU that they used.
        gpus: (UUID, model) of every GPU of the node, in the order of their device numbers.
        release: the display driver's release.
    """

    processes: int = 0
    used: str | None = None
    gpus: tuple[tuple[str, str], ...] = ()
    release: int | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "processes": self.processes,
            "used": self.used,
            "gpus": [list(g) for g in self.gpus],
            "release": self.release,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(
            processes=body["processes"],
            used=body["used"],
            gpus=tuple((u, n) for u, n in body["gpus"]),
            release=body["release"],
        )


def gpu_mapping(
    record: DeviceRecord, node: CudaNode, *, target: str | None = None
) -> dict[str, str]:
    """Old UUID → new UUID for a restore on `node`, onto GPU `target` (None: the same one, otherwise
    the first free one of the model).

    Empty if unchanged. Raises CudaRefused with the difference if the nodes are incompatible.
    """
    here = {g.uuid: g.name for g in sorted(node.gpus, key=lambda g: g.minor)}
    there = dict(record.gpus)
    if record.used is None or record.used not in there:
        raise _refused(
            str(record.used), "the snapshot does not say which GPU it used: create it again"
        )
    chosen = _chosen(record.used, there[record.used], here, target)
    pairs = {record.used: chosen}
    pairs.update(
        (uuid, uuid) for uuid in there if uuid in here and uuid not in (record.used, chosen)
    )
    free = [uuid for uuid in here if uuid not in pairs.values()]
    for uuid in (u for u in there if u not in pairs):
        stand_in = next((f for f in free if here[f] == there[uuid]), None)
        if stand_in is None:
            raise _refused(
                uuid,
                f"the snapshot was made beside a {there[uuid]} ({uuid}), for which this node has "
                f"no replacement: restore it on a node with the same GPUs",
            )
        free.remove(stand_in)
        pairs[uuid] = stand_in
    if free:
        raise _refused(
            ", ".join(free),
            f"this node has {len(here)} GPUs and the snapshot's had {len(there)}: restore it on a "
            f"node with the same GPUs",
        )
    if all(old == new for old, new in pairs.items()):
        return {}
    if (node.release or 0) < MIGRATION_RELEASE:
        raise _refused(
            chosen,
            f"a restore onto another GPU needs driver {MIGRATION_RELEASE} (this node has "
            f"{node.version or 'none'}): restore on {record.used}",
        )
    return pairs


def record_of(node: CudaNode, used: Gpu | None, processes: int) -> DeviceRecord:
    """The record for a snapshot made on `node`."""
    ordered = tuple((g.uuid, g.name) for g in sorted(node.gpus, key=lambda g: g.minor))
    return DeviceRecord(
        processes=processes, used=used.uuid if used else None, gpus=ordered, release=node.release
    )


def _chosen(used: str, model: str, here: Mapping[str, str], target: str | None) -> str:
    if target is None:
        candidates: Sequence[str] = [uuid for uuid, name in here.items() if name == model]
        if not candidates:
            raise _refused(
                model,
                f"the snapshot was made on a {model}, and this node has "
                f"{', '.join(sorted(set(here.values()))) or 'no GPU'}",
            )
        return used if used in here else candidates[0]
    if here.get(target) != model:
        raise _refused(
            target,
            f"the snapshot was made on a {model}, and {target} is "
            f"{here.get(target, 'not on this node')}",
        )
    return target


def _refused(what: str, message: str) -> CudaRefused:
    return CudaRefused([Refusal(kind="gpu_remap", what=what, message=message)])
