"""A node's reports, to the real controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.core.crypto import PlatformKey
from pilotlight.core.settings import SettingsInvalid
from pilotlight.core.transport.endpoint import Endpoint
from snapshotter.agent.node_report import (
    GpuReaders,
    NodePods,
    ReportedSnapshots,
    Reporter,
    memory_of_node,
    node_name,
    platform_token,
)
from snapshotter.gpus.sampling import GpuSample
from snapshotter.gpus.view import GpuHolder, GpuUse
from snapshotter.node_reports import NODES_PATH, NodeReport, NodeSnapshot, SnapshotOrders
from snapshotter.types import GpuDevice, GpuGrant, InstanceState, SnapshotInfo, SnapshotState
from tests.fakes.gpu_memory import FakeGpuMemory, gpu
from tests.fakes.quiet_server import QuietServer
from weight_cache.errors import WeightCacheUnavailable
from weight_cache.types import ModelInfo

PATIENCE_S = 20.0


class Taker:
    """A controller that takes reports, or answers `status`."""

    def __init__(self) -> None:
        self.status = 204
        self.answer: bytes | None = None
        self.tokens: set[str | None] = set()
        self.reports: asyncio.Queue[NodeReport] = asyncio.Queue()
        self.refused = asyncio.Event()

    async def take(self, request: Request) -> Response:
        """POST NODES_PATH."""
        self.tokens.add(request.headers.get("pilotlight-platform-token"))
        if self.status != 204:
            self.refused.set()
            return Response("not now", status_code=self.status)
        self.reports.put_nowait(NodeReport.from_json(await request.json()))
        if self.answer is not None:
            return Response(self.answer, media_type="application/json")
        return Response(status_code=204)

    async def next(self) -> NodeReport:
        """The next one."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reports.get()

    @contextlib.asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        """On a Unix socket."""
        app = Starlette(routes=[Route(NODES_PATH, self.take, methods=["POST"])])
        server = QuietServer(
            uvicorn.Config(app, uds=str(path), lifespan="off", log_config=None, access_log=False)
        )
        task = asyncio.create_task(server.serve())
        async with asyncio.timeout(PATIENCE_S):
            while not server.started:
                await asyncio.sleep(0.01)
        try:
            yield
        finally:
            server.should_exit = True
            await task


class Models:
    """A weight cache; None: it does not answer."""

    def __init__(self, *manifests: str) -> None:
        self.manifests: tuple[str, ...] | None = manifests

    async def models(self) -> list[ModelInfo]:
        """See HotWeights."""
        if self.manifests is None:
            raise WeightCacheUnavailable("nobody answers")
        return [
            ModelInfo(manifest=m, size_bytes=1, files=1, leases=0, last_used_at=float(i))
            for i, m in enumerate(self.manifests)
        ]


def snapshot(
    revision: str, *, at: float = 0.0, state: SnapshotState = SnapshotState.READY
) -> SnapshotInfo:
    return SnapshotInfo.from_json(
        {
            "id": f"sn-{revision.replace('@', '-')}",
            "revision": revision,
            "state": state,
            "in_place": False,
            "pages": "eager",
            "image_bytes": 1,
            "reason": "",
            "phases_ms": {},
            "cold_ms": 1.0,
            "restore_ms": 1.0,
            "created_at": 0.0,
            "last_used_at": at,
            "restores": 0,
            "remote": False,
            "identity": {"kernel": "6.1"},
            "labels": {},
        }
    )


class Told:
    """Snapshots that nobody has orders for (`ControllerOrders`).

    Attributes:
        orders: the answers to reports, as they came.
    """

    kind, version = "k" * 64, "7"

    def __init__(self, snapshots: list[SnapshotInfo]) -> None:
        self.snapshots = snapshots
        self.orders: list[SnapshotOrders] = []

    def reported(self) -> tuple[NodeSnapshot, ...]:
        """The last used first."""
        infos = sorted(self.snapshots, key=lambda info: -info.last_used_at)
        return tuple(
            NodeSnapshot(revision=i.revision, identity=dict(i.identity), info=i) for i in infos
        )

    def forgotten(self) -> tuple[str, ...]:
        """One."""
        return ("sn-gone",)

    def apply(self, orders: SnapshotOrders) -> None:
        """Note them."""
        self.orders.append(orders)


@contextlib.asynccontextmanager
async def reporting(
    path: Path,
    models: Models,
    snapshots: list[SnapshotInfo] | ReportedSnapshots,
    memory: FakeGpuMemory | None = None,
    gpu_uses: Sequence[GpuUse] = (),
) -> AsyncIterator[Reporter]:
    reporter = Reporter(
        Endpoint.at(path),
        "token",
        node="node-1",
        version="1",
        weights=models,
        snapshots=Told(snapshots) if isinstance(snapshots, list) else snapshots,
        pods=lambda: NodePods(count=2, tenants=("t-1",)),
        gpus=GpuReaders(memory=memory, uses=lambda: gpu_uses),
    )
    task = asyncio.create_task(reporter.run())
    try:
        yield reporter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await reporter.aclose()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotter.agent.node_report.LOOK_S", 0.01)


async def test_a_node_tells_what_is_hot_the_last_used_first(short_tmp: Path) -> None:
    taker = Taker()
    snapshots = [
        snapshot("f@1"),
        snapshot("f@2", at=5.0),
        snapshot("f@3", state=SnapshotState.PROVING),
    ]
    async with (
        taker.serving(short_tmp / "c"),
        reporting(short_tmp / "c", Models("cold", "hot"), snapshots, FakeGpuMemory(gpu(0))),
    ):
        report = await taker.next()

    assert (report.node, report.weights, [s.revision for s in report.snapshots]) == (
        "node-1",
        ("hot", "cold"),
        ["f@2", "f@1"],
    )
    assert report.snapshots[0].identity == {"kernel": "6.1"}
    assert [s.revision for s in report.others] == ["f@3"]
    assert (report.tenants, report.kind, report.orders, report.forgotten) == (
        ("t-1",),
        "k" * 64,
        "7",
        ("sn-gone",),
    )
    assert (report.gpus[0].product, report.gpus[0].is_free, report.pods) == ("H100", True, 2)
    assert 0 < report.memory_free_bytes < report.memory_bytes
    assert taker.tokens == {"token"}


async def test_orders_come_with_the_answer_and_nonsense_is_none(short_tmp: Path) -> None:
    taker, told = Taker(), Told([])
    orders = SnapshotOrders(version="8", approved=(), delete=("sn-1",), quarantine={"sn-2": "x"})
    taker.answer = b'{"version": 1}'
    async with taker.serving(short_tmp / "c"), reporting(short_tmp / "c", Models(), told) as one:
        await taker.next()
        async with asyncio.timeout(PATIENCE_S):
            while "KeyError" not in repr(one):
                await asyncio.sleep(0.01)
            taker.answer = json.dumps(orders.to_json()).encode()
            told.snapshots = [snapshot("f@1")]
            while not told.orders:
                await asyncio.sleep(0.01)
    assert told.orders[0] == orders


async def test_a_gpus_use_is_told_with_its_holder_and_only_where_it_is_known(
    short_tmp: Path,
) -> None:
    taker = Taker()
    known, unknown = gpu(0), gpu(1)
    device = GpuDevice(uuid=known.uuid, kind="H100")
    labels = {"tenant": "t-1", "app": "chat", "function": "Llama"}
    use = GpuUse(
        device=device,
        sample=GpuSample(uuid=known.uuid, sm_utilisation=0.5, used_bytes=7, total_bytes=80),
        holder=GpuHolder(
            instance="pod-1",
            labels=labels,
            state=InstanceState.READY,
            grant=GpuGrant(kind="H100", devices=(device,)),
        ),
    )
    async with (
        taker.serving(short_tmp / "c"),
        reporting(short_tmp / "c", Models(), [], FakeGpuMemory(known, unknown), [use]),
    ):
        one, other = (await taker.next()).gpus
    assert (one.used_bytes, one.sm_utilisation, one.holder) == (7, 0.5, labels)
    assert (other.used_bytes, other.sm_utilisation, other.holder) == (None, None, {})


async def test_what_became_hot_is_told_at_once_and_a_cache_that_restarts_is_no_news(
    short_tmp: Path,
) -> None:
    taker, models = Taker(), Models("a")
    async with taker.serving(short_tmp / "c"), reporting(short_tmp / "c", models, []):
        assert (await taker.next()).weights == ("a",)
        models.manifests = None
        await asyncio.sleep(0.05)
        assert taker.reports.empty()
        models.manifests = ("a", "b")
        assert (await taker.next()).weights == ("b", "a")


async def test_a_controller_that_refuses_or_is_away_is_told_again(short_tmp: Path) -> None:
    taker, models = Taker(), Models("a")
    taker.status = 503
    async with reporting(short_tmp / "c", models, []) as reporter:
        async with asyncio.timeout(PATIENCE_S):
            while "ConnectError" not in repr(reporter):
                await asyncio.sleep(0.01)
        async with taker.serving(short_tmp / "c"):
            async with asyncio.timeout(PATIENCE_S):
                await taker.refused.wait()
            taker.status = 204
            assert (await taker.next()).weights == ("a",)


def test_the_token_is_the_platforms_own(tmp_path: Path) -> None:
    key = PlatformKey.load_or_create(tmp_path / "platform.key")

    assert platform_token(tmp_path / "platform.key") == key.node_token
    with pytest.raises(SettingsInvalid, match=r"platform\.key_file"):
        platform_token(tmp_path / "missing")


def test_a_node_is_called_as_the_cluster_calls_it() -> None:
    assert node_name({"NODE_NAME": "gke-1"}) == "gke-1"
    assert node_name({})
    assert memory_of_node()[0] > 0
