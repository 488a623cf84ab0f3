"""Load generators, and what they said: wrk for TCP, h2load for Unix sockets (wrk knows only TCP),
both closed loops on one thread."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import priority
from benchmarks.harness import percentile
from benchmarks.programs import program

CONNECTIONS = 32
LONGEST_S = 600
"""A load without an end of its own is ended by whoever began it, or by this."""
SCRIPT = Path(__file__).with_name("wrk.lua")


class LoadFailed(Exception):
    """Raised when a load generator could not run, or got answers that are not 2xx: such numbers
    would compare nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run: throughput in requests per second, latencies in milliseconds."""

    rps: float
    p50_ms: float
    p99_ms: float
    requests: int


def wrk(
    url: str,
    *,
    body: str,
    headers: Mapping[str, str],
    seconds: float,
    connections: int = CONNECTIONS,
) -> Load:
    """`wrk -t1 -c<connections>` against `url`. Raises LoadFailed."""
    command = [program("wrk"), "-t1", f"-c{connections}", f"-d{seconds:g}s", "-s", str(SCRIPT)]
    for name, value in headers.items():
        command += ["-H", f"{name}: {value}"]
    run = subprocess.run(
        [*command, url],
        env={**os.environ, "BENCH_BODY": body},
        capture_output=True,
        text=True,
        check=False,
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answered request: when it was sent (wall clock, seconds since the epoch), and how long
    its answer took."""

    sent_at: float
    milliseconds: float


@contextlib.contextmanager
def steady(
    url: str | Sequence[str],
    *,
    body: str,
    headers: Mapping[str, str],
    per_s: float,
    connections: int | None = None,
) -> Iterator[Callable[[], list[Request]]]:
    """`per_s` requests a second beside what the block does, on one connection per ten of them
    unless told otherwise.

    Several URLs (of one address) take turns. Calling what is yielded ends the load and returns its
    requests; it raises LoadFailed. The generator goes before others where it may: it stands for
    callers elsewhere, and its own waiting for a CPU is nobody's latency."""
    connections = connections or max(1, int(per_s) // 10)
    with _driven(
        url,
        body=body,
        headers=headers,
        per_s=per_s,
        connections=connections,
        niceness=priority.BEFORE_OTHERS,
    ) as end:
        yield lambda: _requests(end(), where=str(url))


@contextlib.contextmanager
def flood(
    url: str, *, body: str, headers: Mapping[str, str], per_s: float | None, connections: int
) -> Iterator[Callable[[], Counter[int]]]:
    """More than is wanted, beside what the block does; per_s None: as fast as answers come. What is
    yielded ends it and counts statuses.

    It has no advantage on the CPU, and need not succeed: being refused is what most of it is for.
    """
    with _driven(
        url, body=body, headers=headers, per_s=per_s, connections=connections, niceness=0
    ) as end:
        yield lambda: Counter(int(entry[1]) for entry in _entries(end()))


@contextlib.contextmanager
def _driven(
    url: str | Sequence[str],
    *,
    body: str,
    headers: Mapping[str, str],
    per_s: float | None,
    connections: int,
    niceness: int,
) -> Iterator[Callable[[], Path]]:
    """h2load until the block or what is yielded ends it; that returns its log, and raises
    LoadFailed when it ended by itself."""
    with tempfile.TemporaryDirectory(prefix="plh2") as name:
        data, log, urls = Path(name) / "body", Path(name) / "log", Path(name) / "urls"
        data.write_text(body)
        urls.write_text(url if isinstance(url, str) else "\n".join(url))
        command = [
            program("h2load"),
            "--h1",
            "-t1",
            f"-c{connections}",
            "-m1",
            "-i",
            str(urls),
            "-D",
            str(LONGEST_S),
        ]
        command += ["-d", str(data), "--log-file", str(log)]
        command += [] if per_s is None else [f"--rps={per_s / connections:g}"]
        command += [part for key, value in headers.items() for part in ("-H", f"{key}: {value}")]
        process = priority.started(
            command, niceness=niceness, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

        def end() -> Path:
            if process.poll() is not None:
                raise LoadFailed(f"h2load {url} ended by itself with status {process.returncode}")
            process.terminate()
            process.wait()
            return log

        try:
            yield end
        finally:
            process.terminate()
            process.wait()


def h2load(
    url: str,
    *,
    body: str,
    headers: Mapping[str, str],
    seconds: float,
    unix: Path | None = None,
    connections: int = CONNECTIONS,
) -> Load:
    """The same load over HTTP/1.1 by h2load, through the Unix socket `unix` when given. Raises
    LoadFailed."""
    with tempfile.TemporaryDirectory(prefix="plh2") as name:
        data, log = Path(name) / "body", Path(name) / "log"
        data.write_text(body)
        command = [
            program("h2load"),
            "--h1",
            "-t1",
            f"-c{connections}",
            "-m1",
            "-D",
            f"{max(1, round(seconds))}",
            "-d",
            str(data),
        ]
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
    requests = _requests(log, where=where)
    ended_s = max(r.sent_at + r.milliseconds / 1000 for r in requests)
    return Load(
        rps=len(requests) / (ended_s - min(r.sent_at for r in requests)),
        p50_ms=percentile([r.milliseconds for r in requests], 50),
        p99_ms=percentile([r.milliseconds for r in requests], 99),
        requests=len(requests),
    )


def _requests(log: Path, *, where: str) -> list[Request]:
    """h2load writes `sent_us<TAB>status<TAB>duration_us` per request. Raises LoadFailed when one of
    them failed."""
    entries = _entries(log)
    if not entries or any(status[:1] != "2" for _, status, *_ in entries):
        raise LoadFailed(
            f"h2load {where}: {sum(e[1][:1] != '2' for e in entries)} of {len(entries)} requests "
            f"failed"
        )
    return [
        Request(sent_at=int(sent) / 1e6, milliseconds=int(duration) / 1000)
        for sent, _, duration, *_ in entries
    ]


def _entries(log: Path) -> list[list[str]]:
    return [line.split("\t") for line in log.read_text().splitlines() if line.count("\t") >= 2]
