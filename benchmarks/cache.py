"""A weight cache of the benchmark's own: the real process, its store in `.bench`, its origin an
object store that the benchmark serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import BENCH_HOME, ROOT
from benchmarks.network import DidNotStart
from benchmarks.origin import BUCKET
from weight_cache.client import WeightCacheClient

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """A running weight cache: its home directory, its socket, its process."""

    home: Path
    socket: Path
    pid: int

    def fetch(self, manifest: str) -> float:
        """Seconds from asking for a model that is not here until it can be used: fetched, verified,
        durable. It is dropped afterwards."""
        return asyncio.run(self._fetch(manifest))

    async def _fetch(self, manifest: str) -> float:
        async with self.client() as client:
            began = time.perf_counter()
            opened = await client.open(manifest, holder="benchmark")
            await client.wait(opened.lease_id)
            elapsed = time.perf_counter() - began
            await client.close(opened.lease_id)
            await client.drop(manifest)
        return elapsed

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[WeightCacheClient]:
        """A connection of one's own."""
        client = WeightCacheClient(self.socket)
        try:
            yield client
        finally:
            await client.aclose()

    def cpu_s(self) -> float:
        """CPU time that the process took until now (proc_pid_stat(5): utime and stime)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(
    environment: Mapping[str, str],
    *,
    s3_client: str = "auto",
    key_file: Path | None = None,
    **settings: Any,
) -> Iterator[Cache]:
    """Start it with a store that is empty, its origin what `environment` says of S3; it is gone
    with its files afterwards.

    `key_file`: the platform's, by which nodes know each other. Raises DidNotStart.
    """
    BENCH_HOME.mkdir(exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="cache-", dir=BENCH_HOME))
    run = Path(tempfile.mkdtemp(prefix="plwc"))
    config = home / "platform.yaml"
    platform = {
        "home": str(home),
        "run": str(run),
        "blobs": f"s3://{BUCKET}",
        "s3_client": s3_client,
        "key_file": str(key_file) if key_file else None,
    }
    config.write_text(
        yaml.safe_dump({"platform": platform, "weight_cache": {"metrics_listen": None, **settings}})
    )
    try:
        with _process(config, home / "log", environment=environment) as process:
            yield Cache(home=home, socket=run / "weight_cache.sock", pid=process.pid)
    finally:
        remove(home)
        remove(run)


@contextlib.contextmanager
def _process(
    config: Path, log: Path, *, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    ready, telling = os.pipe()
    command = [
        sys.executable,
        "-m",
        "weight_cache",
        "--config",
        str(config),
        "--ready-fd",
        str(telling),
    ]
    with log.open("wb") as stderr:
        variables = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command,
            env=variables,
            stderr=stderr,
            pass_fds=[telling],
            cwd=config.parent,
            start_new_session=True,
        )
    os.close(telling)
    try:
        with os.fdopen(ready, "rb") as pipe:
            if not pipe.read(1):
                raise DidNotStart(
                    f"weight_cache ended with status {process.wait()}: {log.read_text()[-2000:]}"
                )
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def remove(directory: Path) -> None:
    """Remove a tree in which a store has closed its directories for writing."""
    for folder, _, _ in os.walk(directory):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
    shutil.rmtree(directory, ignore_errors=True)
