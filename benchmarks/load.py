"""Load generators, and what they said: wrk for TCP, h2load for Unix sockets (wrk knows only TCP), both closed loops on one thread."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import percentile

CONNECTIONS = 32
SCRIPT = Path(__file__).with_name("wrk.lua")


class LoadFailed(Exception):
    """Raised when a load generator could not run, or got answers that are not 2xx: such numbers would compare nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run: throughput in requests per second, latencies in milliseconds."""

    rps: float
    p50_ms: float
    p99_ms: float
    requests: int


def wrk(url: str, *, body: str, headers: Mapping[str, str], seconds: float, connections: int = CONNECTIONS) -> Load:
    """`wrk -t1 -c<connections>` against `url`. Raises LoadFailed."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(SCRIPT)]
    for name, value in headers.items():
        command += ["-H", f"{name}: {value}"]
    run = subprocess.run([*command, url], env={**os.environ, "BENCH_BODY": body}, capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith("{")]
    if run.returncode != 0 or not lines:
        raise LoadFailed(f"wrk {url}: {run.stderr.strip() or run.stdout.strip()}")
    told = json.loads(lines[-1])
    if told["bad"] or not told["requests"]:
        raise LoadFailed(f"wrk {url}: {told['bad']} of {told['requests']} requests failed")
    return Load(
        rps=told["requests"] / (told["duration_us"] / 1e6),
        p50_ms=told["p50_us"] / 1000,
        p99_ms=told["p99_us"] / 1000,
        requests=told["requests"],
    )


def h2load(
    url: str, *, body: str, headers: Mapping[str, str], seconds: float, unix: Path | None = None, connections: int = CONNECTIONS
) -> Load:
    """The same load over HTTP/1.1 by h2load, through the Unix socket `unix` when given. Raises LoadFailed."""
    with tempfile.TemporaryDirectory(prefix="plh2") as name:
        data, log = Path(name) / "body", Path(name) / "log"
        data.write_text(body)
        command = ["h2load", "--h1", "-t1", f"-c{connections}", "-m1", "-D", f"{max(1, round(seconds))}", "-d", str(data)]
        command += ["--log-file", str(log)]
        for key, value in headers.items():
            command += ["-H", f"{key}: {value}"]
        if unix is not None:
            command += ["-B", f"unix:{unix}"]
        run = subprocess.run([*command, url], capture_output=True, text=True, check=False)
        if run.returncode != 0 or not log.exists():
            raise LoadFailed(f"h2load {unix or url}: {run.stderr.strip() or run.stdout.strip()}")
        return _from_log(log, where=str(unix or url))


def _from_log(log: Path, *, where: str) -> Load:
    """h2load writes `start_us<TAB>status<TAB>duration_us` per request."""
    entries = [line.split("\t") for line in log.read_text().splitlines() if line.count("\t") >= 2]
    if not entries or any(status[:1] != "2" for _, status, *_ in entries):
        raise LoadFailed(f"h2load {where}: {sum(e[1][:1] != '2' for e in entries)} of {len(entries)} requests failed")
    durations_ms = [int(entry[2]) / 1000 for entry in entries]
    first_us = min(int(entry[0]) for entry in entries)
    last_us = max(int(entry[0]) + int(entry[2]) for entry in entries)
    return Load(
        rps=len(entries) / ((last_us - first_us) / 1e6),
        p50_ms=percentile(durations_ms, 50),
        p99_ms=percentile(durations_ms, 99),
        requests=len(entries),
    )
