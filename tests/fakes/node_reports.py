"""Reports of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotter.node_reports import NodeGpu, NodeReport, NodeSnapshot

GIB = 1024**3


def node_report(
    node: str = "node-1",
    *,
    weights: Sequence[str] = (),
    revisions: Sequence[str] = (),
    images: Sequence[str] = (),
    engines: Sequence[str] = (),
) -> NodeReport:
    """A node with one free GPU and these things hot, the hottest first."""
    return NodeReport(
        node=node,
        version="0.1.0",
        weights=tuple(weights),
        snapshots=tuple(
            NodeSnapshot(revision=revision, identity={"kernel": "6.1"}) for revision in revisions
        ),
        memory_bytes=64 * GIB,
        memory_free_bytes=48 * GIB,
        gpus=(
            NodeGpu(
                product="NVIDIA H100 80GB HBM3", uuid="GPU-1", total_bytes=80 * GIB, is_free=True
            ),
        ),
        pods=3,
        images=tuple(images),
        engines=tuple(engines),
    )
