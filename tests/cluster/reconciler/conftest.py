"""A reconciler against the API server of the tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.kubernetes.desired_state import DesiredState
from pilotlight.controller.kubernetes.function_status import FunctionStatus, FunctionStatuses
from pilotlight.controller.kubernetes.reconciler import ReconcileLimits, Reconciler
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.fed_platform import CLOCK_S, FedPlatform
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.small_serving import SmallServing

RUNTIME = "registry.example/runtime@sha256:" + "0" * 64
PATIENCE_S = 30.0
QUICK = ReconcileLimits(
    workers=4,
    first_retry_s=0.02,
    most_retry_s=0.1,
    most_away_s=0.1,
    feed_s=60.0,
    sync_s=0.2,
)


@dataclass(kw_only=True)
class Bench:
    """Everything that a test of the reconciler looks at."""

    server: ApiServer
    serving: SmallServing
    platform: FedPlatform
    kubeconfig: Path
    settings: ClusterSettings
    statuses: FunctionStatuses = field(default_factory=FunctionStatuses)
    wall_s: float = CLOCK_S
    may_write: bool = True
    reconciler: Reconciler | None = None

    @contextlib.asynccontextmanager
    async def running(self, statuses: FunctionStatuses | None = None) -> AsyncIterator[Reconciler]:
        """A reconciler, for the time of a block."""
        async with await Cluster.connect(self.settings) as cluster:
            self.reconciler = Reconciler(
                cluster,
                DesiredState(
                    settings=cluster.settings,
                    platform=self.platform.identity(),
                    key=self.platform.key,
                ),
                store=self.platform.store,
                notifier=self.platform.notifier,
                statuses=statuses or self.statuses,
                pace=QUICK,
                wall=lambda: self.wall_s,
                may_write=lambda: self.may_write,
            )
            task = asyncio.create_task(self.reconciler.run())
            try:
                yield self.reconciler
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def until(self, is_so: Callable[[], object], what: str = "") -> None:
        """Wait until something is so."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not is_so():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(
                f"{what or 'never so'}: {self.reconciler!r}, {self.status()}"
            ) from None

    async def until_phase(self, phase: str, function: str | None = None) -> FunctionStatus:
        """Wait for a function's phase; returns its status."""
        await self.until(
            lambda: (status := self.status(function)) is not None and status.phase == phase,
            f"not {phase}",
        )
        status = self.status(function)
        assert status is not None
        return status

    async def until_quiet(self) -> None:
        """Wait until the reconciler has nothing to do, and has seen everything that it wrote."""
        reconciler = self.reconciler
        assert reconciler is not None
        await self.until(lambda: reconciler.work.is_idle)
        for _ in range(3):
            await asyncio.sleep(0.02)
            await self.until(lambda: reconciler.work.is_idle)

    def renewed_statuses(self) -> FunctionStatuses:
        """Those of another process, which knows nothing yet."""
        self.statuses = FunctionStatuses()
        return self.statuses

    def status(self, function: str | None = None) -> FunctionStatus | None:
        """Of a function; of the only one where none is named."""
        known = dict(self.statuses.known())
        return known.get(function) if function is not None else next(iter(known.values()), None)


@pytest.fixture
async def bench(api_server: ApiServer, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[Bench]:
    """An API server with a small Knative, and an empty platform."""
    settings = ClusterSettings(
        kubeconfig=str(kubeconfig), runtime_image=RUNTIME, namespace="default"
    )
    platform = FedPlatform(tmp_path, notifier=ChangeNotifier())
    with SmallServing(api_server) as serving:
        yield Bench(
            server=api_server,
            serving=serving,
            platform=platform,
            kubeconfig=kubeconfig,
            settings=settings,
        )
    platform.close()
