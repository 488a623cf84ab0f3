"""A model from another node that has it, beside the same model from the object store; everything on
loopback, every chunk verified.

Loopback has no network in it: what is compared is what both sides cost. The node that gives is a
weight cache that shares the machine's cores with the one that takes; the object store is nginx,
which sends files from the page cache without copying them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import cache, ingest, origin, page_cache
from benchmarks.checkpoints import Shape, checkpoint
from benchmarks.harness import BENCH_HOME, Report, Row, interleave, paired_ratio, phase
from benchmarks.network import free_port


def measure(report: Report, shape: Shape, rounds: int) -> None:
    """Two rows, and the ratio `peer_vs_origin` of their speeds."""
    made = checkpoint(shape)
    page_cache.warm([made.file])
    with contextlib.ExitStack() as held:
        folder = Path(
            held.enter_context(tempfile.TemporaryDirectory(prefix="peering-", dir=BENCH_HOME))
        )
        manifest = origin.publish(made.directory, folder / "blobs").digest
        server = held.enter_context(origin.serving(folder / "blobs"))
        key, port = folder / "key", free_port()
        key.write_bytes(base64.urlsafe_b64encode(os.urandom(32)))
        unbounded: dict[str, Any] = {"peer_upload_bytes_per_s": 0, "peer_uploads_at_once": 8}
        giver = held.enter_context(
            cache.running(
                server.environment, key_file=key, peer_listen=f"127.0.0.1:{port}", **unbounded
            )
        )
        taker = held.enter_context(
            cache.running(server.environment, key_file=key, peers=[f"127.0.0.1:{port}"])
        )
        alone = held.enter_context(cache.running(server.environment))
        asyncio.run(_hold(giver, manifest))
        arms: dict[str, Callable[[], float]] = {
            "origin": lambda: alone.fetch(manifest),
            "node": lambda: taker.fetch(manifest),
        }
        with phase(f"another node {shape.name}"):
            for arm in arms.values():
                # connections, the first growth of directories; and the taker sees what the giver
                # holds
                arm()
            sent = server.sent_bytes()
            took = interleave({"node": arms["node"]}, rounds=1)
            came = server.sent_bytes() - sent
            took = interleave(arms, rounds=rounds)
    speeds = {
        name: [made.size_bytes / ingest.GB / seconds for seconds in times]
        for name, times in took.items()
    }
    report.rows.append(
        Row.of(
            f"a model of {shape.name} from the object store",
            "GB/s",
            speeds["origin"],
            note="verified, with fsync",
        )
    )
    report.rows.append(
        Row.of(
            f"… from another node, {came} bytes of it from the store",
            "GB/s",
            speeds["node"],
            note="verified, with fsync",
        )
    )
    report.ratio("peer_vs_origin", paired_ratio(speeds["node"], speeds["origin"]))


async def _hold(running: cache.Cache, manifest: str) -> None:
    async with running.client() as client:
        opened = await client.open(manifest, holder="benchmark")
        await client.wait(opened.lease_id)
