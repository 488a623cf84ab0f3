"""Batched against unbatched: the same model, the same callers, one instance with one CPU each; the
arms take turns.

Closed loops of 32 callers say how many calls an instance takes, one caller alone what batching
costs where there is nobody to share with. How long calls were held for others is read from the
worker's own answers, on its socket: the activator keeps them to itself."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import stack
from benchmarks.harness import (
    ROOT,
    Report,
    Row,
    interleave,
    options,
    paired_ratio,
    percentile,
    phase,
)
from benchmarks.load import Load, h2load
from pilotlight.protocol import HEADER_BATCH

NEEDS = ("h2load",)
CALLERS = 32
FUNCTIONS = Path(__file__).parent / "functions"
QUERY = "how do I reset my password"
PARAGRAPH = (
    "The quick brown fox jumps over the lazy dog, and then runs home to tell the others what it "
    "saw there. " * 2
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with two ways to call it.

    Attributes:
        key: what its ratios are called after `batched_vs_unbatched`.
        wait_ms: what the batched one is configured to wait at most.
    """

    key: str
    title: str
    single: tuple[str, str]
    batched: tuple[str, str]
    arguments: Sequence[Any]
    wait_ms: float


QUERIES = Subject(
    key="",
    title="MiniLM, 6 words",
    single=("search", "Embedder.embed"),
    batched=("batches", "Embedder.embed"),
    arguments=[QUERY],
    wait_ms=10,
)
PARAGRAPHS = Subject(
    key="_paragraph",
    title="MiniLM, 42 words",
    single=QUERIES.single,
    batched=QUERIES.batched,
    arguments=[PARAGRAPH],
    wait_ms=10,
)
MATRIX = Subject(
    key="_matrix",
    title="2 layers of 4096²",
    single=("bench-matrix", "Single.score"),
    batched=("bench-matrix", "Batched.score"),
    arguments=[7],
    wait_ms=20,
)


def measure(
    report: Report, running: stack.Stack, subject: Subject, *, seconds: float, rounds: int
) -> None:
    """Rows and ratios of one model."""
    body = json.dumps(subject.arguments)

    def load(way: tuple[str, str], callers: int) -> Load:
        return h2load(
            running.invoke_url(*way),
            body=body,
            headers=running.headers,
            seconds=seconds,
            connections=callers,
        )

    ways = {"unbatched": subject.single, "batched": subject.batched}
    for way in ways.values():
        load(way, CALLERS)  # what a first run learns, allocates and starts is not counted
    with phase(subject.title):
        many = interleave(
            {name: partial(load, way, CALLERS) for name, way in ways.items()}, rounds=rounds
        )
        alone = interleave(
            {name: partial(load, way, 1) for name, way in ways.items()}, rounds=rounds
        )
    for name in ways:
        rates = [one.rps for one in many[name]]
        report.rows.append(Row.of(f"{subject.title}, {name}, {CALLERS} callers", "calls/s", rates))
        report.rows.append(_latency(f"{subject.title}, {name}, {CALLERS} callers", many[name]))
        report.rows.append(_latency(f"{subject.title}, {name}, 1 caller", alone[name]))
    ratio = paired_ratio(
        [one.rps for one in many["batched"]], [one.rps for one in many["unbatched"]]
    )
    report.ratio(f"batched_vs_unbatched{subject.key}", ratio)
    report.ratio(
        f"batched_vs_unbatched_alone{subject.key}",
        paired_ratio(*([one.p50_ms for one in alone[n]] for n in ("batched", "unbatched"))),
    )
    seen = asyncio.run(
        _held(running.instance_sockets(subject.batched[0]), subject, seconds=seconds)
    )
    report.rows.append(Row.of(f"{subject.title}, size of batches", "calls", seen["size"]))
    report.rows.append(
        Row.of(
            f"{subject.title}, held for others",
            "ms",
            seen["held_ms"],
            f"configured: at most {subject.wait_ms:g}",
        )
    )


def _latency(name: str, loads: Sequence[Load]) -> Row:
    """Medians over the rounds of what the load generator said of each."""
    p50, p99 = (
        percentile([getattr(one, which) for one in loads], 50) for which in ("p50_ms", "p99_ms")
    )
    return Row(name=name, unit="ms", n=sum(one.requests for one in loads), p50=p50, p99=p99)


async def _held(
    sockets: Sequence[Path], subject: Subject, *, seconds: float
) -> dict[str, list[float]]:
    """What the worker says of its batches while CALLERS call it: sizes, one for each batch, and how
    long each call was held."""
    seen: dict[str, list[float]] = {"size": [], "held_ms": []}
    path, until = f"/invoke/{subject.batched[1].partition('.')[2]}", time.monotonic() + seconds
    clients = [
        httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://worker", timeout=60
        )
        for path in sockets
    ]

    async def caller(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            answer = await client.post(path, json=subject.arguments)
            told = dict(
                part.split("=") for part in answer.headers.get(HEADER_BATCH, "").split(";") if part
            )
            if told:
                seen["held_ms"].append(float(told["held_ms"]))
                seen["size"] += [float(told["size"])] if told["first"] == "1" else []

    answering = [
        client
        for client in clients
        if (await client.post(path, json=subject.arguments)).headers.get(HEADER_BATCH)
    ]
    await asyncio.gather(*(caller(answering[0]) for _ in range(CALLERS)))
    for client in clients:
        await client.aclose()
    return seen


def add(report: Report, *, quick: bool) -> None:
    """Everything, on a platform of its own."""
    seconds, rounds = (3.0, 3) if quick else (8.0, 7)
    with stack.running() as running:
        with phase("deploy"):
            for file in ("embed.py", "batched.py"):
                running.deploy(ROOT / "examples" / file, min_instances=1, max_instances=1)
            running.deploy(FUNCTIONS / "matrix.py")
        for subject in (QUERIES, MATRIX) if quick else (QUERIES, PARAGRAPHS, MATRIX):
            measure(report, running, subject, seconds=seconds, rounds=rounds)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    given = options(
        "Batched against unbatched functions", argv, name="benchmarks.batching", needs=NEEDS
    )
    report = Report("Batching")
    add(report, quick=given.quick)
    report.finish(given)


if __name__ == "__main__":
    main(sys.argv[1:])
