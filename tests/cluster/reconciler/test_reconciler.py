"""The reconciler: what the platform wants comes to be in the cluster, step by step, and nothing is written where nothing changed."""

from __future__ import annotations

from tests.cluster.reconciler.conftest import Bench
from tests.fakes.fed_platform import ACME, spec

SERVING = "serving.knative.dev/v1"


async def test_a_deployed_function_becomes_a_service_in_its_tenants_namespace(bench: Bench) -> None:
    bench.platform.tenant()
    bench.platform.function(spec())
    async with bench.running():
        await bench.until_phase("ready")
    service = bench.server.get(SERVING, "Service", "search-embed", "fn-acme")
    assert service is not None
    assert service["spec"]["traffic"] == [{"revisionName": "search-embed-v1-000001", "latestRevision": False, "percent": 100}]
    assert bench.server.get("v1", "ConfigMap", "search-embed-v1-000001", "fn-acme") is not None
    assert ACME.id in str(service)
