"""Before anything is timed: what the weight cache fetches from an S3 server of somebody else's
making (moto's) is what was put there.

moto answers ranged reads at some 0.05 GB/s, so that it says nothing of speed; nginx, which is used
for that, is no S3 server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks import cache, origin
from benchmarks.checkpoints import Shape, checkpoint
from benchmarks.harness import Report, phase
from benchmarks.network import DidNotStart, free_port, wait_connectable
from pilotlight.core.object_store import blob_key
from weight_cache.manifest import Manifest
from weight_cache.sources.manifest_builder import build_manifest

START_TIMEOUT_S = 30.0


class Wrong(Exception):
    """Raised when other bytes came than were put there: nothing that is measured after that means
    anything."""


def check(report: Report, shape: Shape) -> None:
    """Fetch a checkpoint from moto and compare every byte; the remark says that it was done, or why
    not. Raises Wrong."""
    made = checkpoint(shape)
    try:
        with _moto() as environment, phase("correctness: moto"):
            manifest = build_manifest(made.directory)
            _put(
                environment,
                manifest,
                {file.digest: (made.directory / file.path).read_bytes() for file in manifest.files},
            )
            with cache.running(environment) as running:
                asyncio.run(_compare(running, manifest))
    except (DidNotStart, ImportError) as e:
        report.missing("correctness against moto", str(e))
        return
    report.remarks.append(
        f"correctness: {shape.name} fetched from moto's S3 server, equal byte for byte"
    )


@contextlib.contextmanager
def _moto() -> Iterator[dict[str, str]]:
    """A moto server in a process of its own; yields what an S3 client needs to speak to it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_connectable(port, process, deadline=time.monotonic() + START_TIMEOUT_S)
        yield origin.environment(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def _put(environment: dict[str, str], manifest: Manifest, files: dict[str, bytes]) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name=environment["AWS_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=origin.BUCKET)
    for digest, content in {**files, manifest.digest: manifest.to_bytes()}.items():
        client.put_object(Bucket=origin.BUCKET, Key=blob_key(digest), Body=content)


async def _compare(running: cache.Cache, manifest: Manifest) -> None:
    async with running.client() as client:
        opened = await client.open(manifest.digest, holder="correctness")
        lease = await client.wait(opened.lease_id)
        found = await asyncio.to_thread(build_manifest, lease.path)
        await client.close(lease.lease_id)
    if found.digest != manifest.digest:
        raise Wrong(f"{lease.path} is not what was put into the bucket")
