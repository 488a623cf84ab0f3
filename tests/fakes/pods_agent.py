"""A node agent's side of pods in a process of its own, which kills itself (SIGKILL) at a step of the
next promotion: `python -m tests.fakes.pods_agent ROOT TARGET KEY STEP`.

Steps: `announced`, `marked`, `mounted`, `held` (code and weights are there), "" for none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.images.code_bundles import Bundles
from snapshotter.pods import tenant_listeners
from snapshotter.pods.entry.processes import EntryProcesses, PodMounts
from snapshotter.pods.promotions import Promotions
from snapshotter.pods.registration import Announcement
from snapshotter.pods.restoring import PodRestores
from snapshotter.pods.tenant_listeners import Tenants
from tests.fakes.gpu_memory import FakeGpuMemory
from tests.fakes.pod_weights import FakePodWeights


class DyingPromotions(Promotions):
    """Kills the process before or after a marker is written."""

    step = ""

    def record(self, announced: Announcement, pod: str) -> None:
        """As the base class."""
        die_at("announced", self.step)
        super().record(announced, pod)
        die_at("marked", self.step)


class DyingBundles(Bundles):
    """Kills the process once a bundle is unpacked."""

    step = ""

    async def ensure(self, digest: str) -> Path:
        """As the base class."""
        found = await super().ensure(digest)
        die_at("held", self.step)
        return found


class DyingMounts(PodMounts):
    """Kills the process once a tenant's directory is mounted."""

    step = ""

    async def show(self, pidfd: int, warm: Path, tenant: Path) -> None:
        """As the base class."""
        await super().show(pidfd, warm, tenant)
        die_at("mounted", self.step)


def die_at(here: str, step: str) -> None:
    """`kill -9` of ourselves, if that is the step."""
    if here == step:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.asynccontextmanager
async def serving(
    root: Path,
    target: Path,
    signer: LaunchSigner,
    *,
    step: str = "",
    processes: EntryProcesses,
    restores: PodRestores | None = None,
) -> AsyncIterator[Tenants]:
    """Pods' directories are `<root>/node`; `target`: where pods see theirs."""
    promotions, bundles = DyingPromotions(root / "promoted"), DyingBundles(root / "home")
    promotions.step = bundles.step = step

    mounts = DyingMounts(processes, target=target)
    mounts.step = step
    async with tenant_listeners.open_tenants(
        root / "node",
        bundles=bundles,
        weights=FakePodWeights(root / "models"),
        memory=FakeGpuMemory(),
        grants=signer,
        promotions=promotions,
        restores=restores,
        mounts=mounts,
    ) as found:
        yield found


async def _main() -> None:
    root, target, key, step = sys.argv[1:]
    signer = LaunchSigner(key.encode())
    async with (
        contextlib.aclosing(EntryProcesses()) as processes,
        serving(Path(root), Path(target), signer, step=step, processes=processes),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
