"""Figures: what leases, speeds, predictions and the store say of themselves when somebody
scrapes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from pilotlight.core.metrics_server import MetricsAddress, MetricsServer
from tests.weight_cache.models import put_model
from tests.weight_cache.served import node_with_client
from weight_cache.metrics import PredictionMetrics, StoreCollector, TierCollector


async def scrape(path: Path) -> str:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    body = await reader.read()
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0)  # the other end closes in the loop's next turn
    return body.decode()


async def test_figures_of_a_model_that_was_fetched_and_served_again() -> None:
    async with node_with_client() as (node, cache, client):
        registry = CollectorRegistry()
        registry.register(StoreCollector(cache.store.statistics))
        registry.register(
            TierCollector(leases=cache.leases, bandwidths=cache.bandwidths, ahead=cache.ahead)
        )
        forecasts = PredictionMetrics(registry)
        name = put_model(node.origin, {"a": b"x" * 1000})
        await client.wait((await client.open(name, holder="s-1")).lease_id)
        await client.open(name, holder="s-2")
        await client.pin(name)
        for predicted_s, actual_s in [*node.forecasts, (1.0, 3.0), (0.0, 1.0)]:
            forecasts.fetched(predicted_s, actual_s)
        servers = await MetricsServer(registry=registry).serve(
            MetricsAddress(socket_path=node.home / "m")
        )
        text = await scrape(node.home / "m")
        for line in (
            "pilotlight_weights_leases 2.0",
            'pilotlight_weights_leases_granted_total{result="miss"} 1.0',
            'pilotlight_weights_leases_served_total{tier="origin"} 1.0',
            'pilotlight_weights_leases_served_total{tier="dram"} 1.0',
            "pilotlight_weights_dram_bytes 1000.0",
            "pilotlight_weights_dram_budget_bytes 1e+06",
            "pilotlight_weights_pinned_bytes 1000.0",
            "pilotlight_weights_fetched_bytes_total 1000.0",
            "pilotlight_weights_partial_bytes 0.0",
            "pilotlight_weights_prediction_ratio_count 2.0",
            'pilotlight_weights_bandwidth_bytes_per_second{tier="origin"} ',
        ):
            assert line in text
        for server in servers:
            server.close()
