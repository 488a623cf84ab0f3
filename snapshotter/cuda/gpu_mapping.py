"""Choice of the GPUs for a restored process, by UUID: a pure decision.

The driver requires a pair for *every* GPU that its kernel part sees, used or not, and treats an
empty mapping as "unchanged", which is faster. Only a GPU of the same model can replace another. A
process numbers its GPUs (device 0, 1, …) in the order of its grant, so that pairs keep that
order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from snapshotter.cuda.errors import CudaRefused, Refusal
from snapshotter.cuda.gpu_blockers import MIGRATION_RELEASE
from snapshotter.cuda.gpu_usage import CudaNode


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """A snapshot's record of the GPU state of its processes; part of the manifest.

    Attributes:
        processes: number of processes of the tree with checkpointed CUDA state; 0: none.
        used: UUIDs of its GPUs, in the order in which CUDA numbers them; also those that were
            granted and not used yet.
        gpus: (UUID, model) of every GPU of the node, in the order of their device numbers.
        release: the display driver's release.
    """

    processes: int = 0
    used: tuple[str, ...] = ()
    gpus: tuple[tuple[str, str], ...] = ()
    release: int | None = None

    @property
    def model(self) -> str:
        """Model of its GPUs; "" if it has none."""
        return dict(self.gpus).get(self.used[0], "") if self.used else ""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "processes": self.processes,
            "used": list(self.used),
            "gpus": [list(g) for g in self.gpus],
            "release": self.release,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`. Earlier versions recorded one GPU, as a string or null."""
        used = body["used"] or ()
        return cls(
            processes=body["processes"],
            used=(used,) if isinstance(used, str) else tuple(used),
            gpus=tuple((u, n) for u, n in body["gpus"]),
            release=body["release"],
        )


def gpu_mapping(
    record: DeviceRecord, node: CudaNode, *, target: Sequence[str] = ()
) -> dict[str, str]:
    """Old UUID → new UUID for a restore on `node`, of the first used GPU onto the first of
    `target`, and so on (empty: the same ones, otherwise the first free ones of the model).

    Empty if unchanged. Raises CudaRefused with the difference if the nodes are incompatible.
    """
    here = {g.uuid: g.name for g in sorted(node.gpus, key=lambda g: g.minor)}
    there = dict(record.gpus)
    if not record.used or not there.keys() >= set(record.used):
        raise _refused(
            ", ".join(record.used) or "none",
            "the snapshot does not say which GPUs it used: create it again",
        )
    chosen = _given(record, here, target) if target else _found(record, here)
    pairs = dict(zip(record.used, chosen, strict=True))
    pairs.update((uuid, uuid) for uuid in there if uuid in here and uuid not in {*pairs, *chosen})
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
            ", ".join(chosen),
            f"a restore onto other GPUs needs driver {MIGRATION_RELEASE} (this node has "
            f"{node.version or 'none'}): restore on {', '.join(record.used)}",
        )
    return pairs


def record_of(
    node: CudaNode, used: Sequence[str], processes: int, *, granted: Sequence[str] = ()
) -> DeviceRecord:
    """The record for a snapshot made on `node`. `used`: UUIDs in the order of device numbers;
    `granted`: those of the slot, in CUDA's order, which include them; () if not known."""
    ordered = tuple((g.uuid, g.name) for g in sorted(node.gpus, key=lambda g: g.minor))
    return DeviceRecord(
        processes=processes,
        used=tuple(granted) or tuple(used),
        gpus=ordered,
        release=node.release,
    )


def _given(record: DeviceRecord, here: Mapping[str, str], target: Sequence[str]) -> Sequence[str]:
    """The GPUs of `target`, if each is of the model of the one that it replaces."""
    there = dict(record.gpus)
    if len(target) != len(record.used):
        raise _refused(
            ", ".join(target),
            f"the snapshot was made on {len(record.used)} GPUs, and {len(target)} are granted",
        )
    for old, new in zip(record.used, target, strict=True):
        if here.get(new) != there[old]:
            raise _refused(
                new,
                f"the snapshot was made on a {there[old]}, and {new} is "
                f"{here.get(new, 'not on this node')}",
            )
    return target


def _found(record: DeviceRecord, here: Mapping[str, str]) -> list[str]:
    """For each used GPU itself, if it is on this node, otherwise the first other one of its
    model."""
    there, chosen = dict(record.gpus), list[str]()
    for old in record.used:
        others = [
            uuid
            for uuid, model in here.items()
            if model == there[old] and uuid not in (*chosen, *record.used)
        ]
        if old not in here and not others:
            raise _refused(
                there[old],
                f"the snapshot was made on a {there[old]}, and this node has "
                f"{', '.join(sorted(set(here.values()))) or 'no GPU'}",
            )
        chosen.append(old if old in here else others[0])
    return chosen


def _refused(what: str, message: str) -> CudaRefused:
    return CudaRefused([Refusal(kind="gpu_remap", what=what, message=message)])
