"""Routes for the reports of a cluster's node agents."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Depends, Response
from fastapi.responses import JSONResponse

from pilotlight.controller.api.schemas import Body
from pilotlight.controller.context import Admin, Ctx, require_node_token
from pilotlight.controller.kubernetes.node_reports import NodeStatus
from pilotlight.controller.lazy_routes import APIRouter
from pilotlight.errors import InvalidInput
from snapshotter.node_reports import NODES_PATH, NodeGpu, NodeReport

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z", re.IGNORECASE)

internal = APIRouter(dependencies=[Depends(require_node_token)], include_in_schema=False)
router = APIRouter(prefix="/v1", tags=["node"])


class NodeGpuInfo(Body):
    """A GPU of a node. `used_bytes` and `sm_utilisation` are null where NVML does not tell;
    `function` is `<app>/<function>` of the tenant `tenant` that has it, as its pod says."""

    product: str
    uuid: str
    total_bytes: int
    used_bytes: int | None
    sm_utilisation: float | None
    tenant: str
    function: str


class NodeInfo(Body):
    """A node's last report. `is_fresh`: recent enough for its labels to be valid. `at`: seconds
    since the epoch."""

    node: str
    version: str
    at: float
    is_fresh: bool
    weights: int
    snapshots: int
    pods: int
    gpus: list[str]
    gpus_free: int
    gpu_use: list[NodeGpuInfo]
    memory_bytes: int
    memory_free_bytes: int


class NodeList(Body):
    """The nodes, by name."""

    nodes: list[NodeInfo]


@internal.post(NODES_PATH)
async def report(context: Ctx, body: dict[str, Any]) -> Response:
    """Store a node's report, and answer with orders about its snapshots (200), or nothing (204)."""
    try:
        found = NodeReport.from_json(body)
    except (TypeError, KeyError, ValueError, AttributeError) as e:
        raise InvalidInput(f"the body is not a valid node report: {e}") from e
    if not isinstance(found.node, str) or not _NAME.match(found.node):
        raise InvalidInput(f"{str(found.node)[:80]!r} is not a valid node name", parameter="node")
    context.nodes.take(found, now=context.clock())
    if context.register is None:
        return Response(status_code=204)
    orders = await context.register.take(found, now=context.clock())
    return JSONResponse(orders.to_json())


@router.get("/nodes")
async def nodes(context: Ctx, caller: Admin) -> NodeList:
    """List the cluster's nodes (platform administrators only). Empty if the platform runs on one
    machine."""
    caller.require_platform()
    now = context.clock()
    return NodeList(nodes=[_node_info(known, now) for known in context.nodes.all()])


def _gpu_info(gpu: NodeGpu) -> NodeGpuInfo:
    holder = gpu.holder
    return NodeGpuInfo(
        product=gpu.product,
        uuid=gpu.uuid,
        total_bytes=gpu.total_bytes,
        used_bytes=gpu.used_bytes,
        sm_utilisation=gpu.sm_utilisation,
        tenant=str(holder.get("tenant", "")),
        function="/".join(filter(None, (holder.get("app"), holder.get("function")))),
    )


def _node_info(known: NodeStatus, now: float) -> NodeInfo:
    report = known.report
    return NodeInfo(
        node=report.node,
        version=report.version,
        at=known.at,
        is_fresh=known.is_fresh(now),
        weights=len(report.weights),
        snapshots=len(report.snapshots),
        pods=report.pods,
        gpus=[gpu.product for gpu in report.gpus],
        gpus_free=sum(gpu.is_free for gpu in report.gpus),
        gpu_use=[_gpu_info(gpu) for gpu in report.gpus],
        memory_bytes=report.memory_bytes,
        memory_free_bytes=report.memory_free_bytes,
    )
