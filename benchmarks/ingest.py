"""Ingest: how fast a checkpoint comes from an object store on loopback to this disk, verified or
not, and durable or not.

Ours runs as the real process and always does everything: ranges, sha256 of every chunk, fsync,
rename. Peers do not verify; each says how long the transfer took and how long the fsync after it,
so that they can be compared in the same state of the disk (durable) and in their own (in the page
cache). All write to the same file system, and what was written is on the disk before the next arm
begins."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cache, orders, origin, page_cache, peers
from benchmarks.checkpoints import Shape, checkpoint
from benchmarks.harness import BENCH_HOME, Report, Row, interleave, paired_ratio, percentile, phase
from benchmarks.network import DidNotStart
from pilotlight.core.object_store import blob_key
from weight_cache.errors import WeightCacheError

GB = 1e9
OURS = "weight cache"
DISK = "this disk"
_ZEROS_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """One arm's time: until the bytes were where the arm leaves them, and until they were
    durable."""

    transfer_s: float
    durable_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A peer's script, and one of its ways."""

    name: str
    environment: str
    how: str = ""


TOOLS = (
    Tool(name="aws s3 cp", environment="awscli"),
    Tool(name="boto3 download_file", environment="boto3", how="default"),
    Tool(name="boto3 download_file, 8 x 16 MiB", environment="boto3", how="ranges"),
    Tool(name="obstore, one stream", environment="obstore", how="stream"),
    Tool(name="obstore, 8 x 16 MiB", environment="obstore", how="ranges"),
)


def measure(
    report: Report,
    shape: Shape,
    *,
    rounds: int,
    with_peers: bool,
    clients: tuple[str, ...] = ("auto",),
    suffix: str = "",
) -> None:
    """Rows and ratios (their keys with `suffix`) for one checkpoint.

    `clients`: who speaks S3 in the weight cache; the first one's figures make the ratios.
    """
    made = checkpoint(shape)
    page_cache.warm([made.file])  # the origin's memory is not what is measured
    with contextlib.ExitStack() as held:
        folder = Path(
            held.enter_context(tempfile.TemporaryDirectory(prefix="ingest-", dir=BENCH_HOME))
        )
        manifest = origin.publish(made.directory, folder / "blobs")
        server = held.enter_context(origin.serving(folder / "blobs"))
        arms: dict[str, Callable[[], Took]] = {
            DISK: lambda: disk(folder / "zeros", made.size_bytes)
        }
        for client in clients:
            running = held.enter_context(cache.running(server.environment, s3_client=client))
            arms[_ours(client)] = lambda running=running: ours(running, manifest.digest)  # type: ignore[misc]
        if with_peers:
            arms |= hire(
                report, held, server, folder / "download", key=blob_key(manifest.files[0].digest)
            )
        with phase(f"ingest {shape.name}"):
            took = interleave(
                {name: arm for name, arm in arms.items() if works(report, name, arm)}, rounds=rounds
            )
    write(report, shape, made.size_bytes, took, suffix=suffix)


def works(report: Report, name: str, arm: Callable[[], Took]) -> bool:
    """Try an arm once, uncounted (connections, imports, the first growth of directories); one that
    fails is said."""
    try:
        arm()
    except (orders.OrderFailed, WeightCacheError) as e:
        report.missing(name, str(e))
        return False
    return True


def _ours(client: str) -> str:
    return OURS if client == "auto" else f"{OURS} ({client})"


def ours(running: cache.Cache, manifest: str) -> Took:
    """The weight cache answers only when the bytes are durable."""
    elapsed = running.fetch(manifest)
    return Took(transfer_s=elapsed, durable_s=elapsed)


def hire(
    report: Report, held: contextlib.ExitStack, server: origin.Origin, file: Path, *, key: str
) -> Mapping[str, Callable[[], Took]]:
    """Peers' arms; what could not be installed is said."""
    arms: dict[str, Callable[[], Took]] = {}
    workers: dict[str, orders.Worker] = {}
    for tool in TOOLS:
        try:
            if tool.environment not in workers:
                script = peers.HERE / f"s3_{tool.environment}.py"
                command = (str(peers.install(tool.environment)), str(script))
                workers[tool.environment] = held.enter_context(
                    orders.hired(*command, environment=server.environment)
                )
        except (peers.PeerFailed, DidNotStart) as e:
            report.missing(tool.name, str(e))
            continue
        arms[tool.name] = lambda tool=tool: download(workers[tool.environment], tool, key, file)  # type: ignore[misc]
    return arms


def download(worker: orders.Worker, tool: Tool, key: str, file: Path) -> Took:
    """One transfer by a peer; its file is removed."""
    try:
        told = worker.ask(bucket=origin.BUCKET, key=key, file=str(file), how=tool.how)
    finally:
        file.unlink(missing_ok=True)
    return Took(transfer_s=told["transfer_s"], durable_s=told["transfer_s"] + told["fsync_s"])


def disk(file: Path, size_bytes: int) -> Took:
    """What this disk takes without any network: as many bytes from memory, and fsync."""
    zeros = memoryview(bytes(_ZEROS_BYTES))
    began = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for offset in range(0, size_bytes, _ZEROS_BYTES):
            out.write(zeros[: size_bytes - offset])
        written = time.perf_counter()
        os.fsync(out.fileno())
    durable = time.perf_counter()
    file.unlink()
    return Took(transfer_s=written - began, durable_s=durable - began)


def write(
    report: Report, shape: Shape, size_bytes: int, took: Mapping[str, list[Took]], *, suffix: str
) -> None:
    """Rows in GB/s, and ours over the best peer: durable both, and ours against the peer that
    leaves its bytes in the page cache."""
    durable = {name: [size_bytes / GB / t.durable_s for t in times] for name, times in took.items()}
    lazy = {name: [size_bytes / GB / t.transfer_s for t in times] for name, times in took.items()}
    for name in took:
        row = f"ingest {shape.name}: {name}"
        if name.startswith(OURS):
            report.rows.append(Row.of(row, "GB/s", durable[name], note="verified, with fsync"))
        else:
            report.rows.append(
                Row.of(
                    row,
                    "GB/s",
                    durable[name],
                    note="with fsync" if name == DISK else "not verified, with fsync",
                )
            )
            report.rows.append(
                Row.of(
                    f"{row}, no fsync",
                    "GB/s",
                    lazy[name],
                    note="" if name == DISK else "not verified",
                )
            )
    theirs = [name for name in took if name != DISK and not name.startswith(OURS)]
    for key, rates in (
        ("ingest_vs_best_peer", durable),
        ("ingest_vs_best_peer_without_fsync", lazy),
    ):
        if theirs and OURS in took:
            best = max(theirs, key=lambda name: percentile(rates[name], 50))
            report.ratio(key + suffix, paired_ratio(durable[OURS], rates[best]))
            report.remarks.append(f"{key}{suffix}: the best peer is {best}")
