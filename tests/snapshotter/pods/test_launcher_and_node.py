"""The real launcher and the real node agent's side of it: from the announcement to the first
answer, and over a restart of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from snapshotter.images.code_bundles import Bundles
from snapshotter.pods import tenant_listeners
from snapshotter.pods.tenant_listeners import Tenants
from snapshotter.types import WeightsMount
from tests.fakes.bundle import pack
from tests.fakes.fake_shim import function_spec
from tests.fakes.gpu_memory import FakeGpuMemory
from tests.fakes.launched_pod import Pod, pod
from tests.fakes.pod_weights import FakePodWeights

PATIENCE_S = 30.0
MODEL = "a" * 64
CODE = b"""
import json, os
def f():
    place = json.loads(os.environ["PILOTLIGHT_WEIGHTS"])["model"]
    return [os.path.relpath(__file__, os.environ["NODE"]), open(os.path.join(place, "model.safetensors")).read()]
"""


async def test_a_launched_pod_is_served_by_the_node_agent_and_outlives_it(short_tmp: Path) -> None:
    bundle = pack(short_tmp / "home", {"app.py": CODE})
    tenant = short_tmp / "node" / "t-1"
    tenant.mkdir(parents=True)
    weights = FakePodWeights(short_tmp / "models")
    weights.arriving[MODEL] = asyncio.Event()

    @contextlib.asynccontextmanager
    async def agent() -> AsyncIterator[Tenants]:
        bundles = Bundles(short_tmp / "home")
        async with tenant_listeners.open_tenants(
            tenant.parent, bundles=bundles, weights=weights, memory=FakeGpuMemory()
        ) as found:
            yield found

    with pod(
        {},
        function_spec(),
        bundle=bundle,
        labels={"tenant": "t-1"},
        uid=os.geteuid(),
        node=tenant,
        env={"NODE": str(tenant)},
        weights=[WeightsMount(name="model", manifest=MODEL)],
    ) as launched:
        async with agent() as first:
            launched.begin()
            await weights.waiting.wait()
            weights.arrive(MODEL)
            await asyncio.to_thread(launched.wait_said, "launcher.ready")
            async with asyncio.timeout(PATIENCE_S):
                while not any(line.is_ready for line in first.sessions()):
                    await asyncio.sleep(0.01)
            answered = await asyncio.to_thread(_call, launched)
        async with agent() as second:
            async with asyncio.timeout(PATIENCE_S):
                while not any(line.is_ready for line in second.sessions()):
                    await asyncio.sleep(0.01)
            assert await second.sweep() == 0
            again = await asyncio.to_thread(_call, launched)
            launched.terminate()
            assert await asyncio.to_thread(launched.wait_exit) == 0
            async with asyncio.timeout(PATIENCE_S):
                while weights.held:
                    await asyncio.sleep(0.01)

    assert answered == again == [f"bundles/{bundle}/app.py", "model.safetensors"]
    assert f'launcher.wait why="fetching weights {MODEL[:12]}"' in launched.said


def _call(launched: Pod) -> object:
    with launched.client() as client:
        return client.post("/invoke/", json={}).json()
