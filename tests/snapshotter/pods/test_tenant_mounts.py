"""Pods' weights from the real weight cache, over its socket: the store's own files, for as long as
a pod needs them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.images.code_bundles import Bundles
from snapshotter.pods.tenant_mounts import TenantMounts
from tests.weight_cache.models import put_model
from tests.weight_cache.served import node_with_client


async def test_a_tenants_links_are_the_stores_files_and_keep_them_until_the_last_pod_is_gone(
    short_tmp: Path,
) -> None:
    async with node_with_client() as (node, _, client):
        name = put_model(node.origin, {"model.bin": b"x" * 1000, "sub/config.json": b"{}"})
        background_tasks, tenant = BackgroundTasks(), node.home / "t-1"
        tenant.mkdir()
        holds = TenantMounts(
            tenant, bundles=Bundles(short_tmp), weights=client, background_tasks=background_tasks
        )
        said: list[str] = []
        async with contextlib.AsyncExitStack() as pods:
            places = await asyncio.gather(
                *(pods.enter_async_context(holds.weights(name, said.append)) for _ in range(3))
            )
            (lease,) = await client.leases()
            shown = tenant / places[0] / "sub/config.json"

            assert set(places) == {f"weights/{name}"}
            assert lease.holder == "pods/t-1"
            assert shown.samefile(node.home / "w" / "models" / name / "sub/config.json")
            assert not await client.drop(name)
            assert await client.verify(name) == []  # a link more is no change of a file
        await background_tasks.aclose()

        assert not shown.exists()
        assert await client.leases() == []
        assert await client.drop(name)
        assert any(why.startswith(f"fetching weights {name[:12]}") for why in said)
