"""Logged calls, and the rows in files of a prediction log."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet

from activator.prediction_log.frames import LoggedCall
from activator.prediction_log.shipper import PutResult
from pilotlight.spec.prediction_log import Content, PredictionLogSpec
from pilotlight.spec.record_json import to_json

FULL = PredictionLogSpec(sample=1.0, inputs=Content.FULL, outputs=Content.FULL)


def logged(
    number: int = 1,
    *,
    tenant: str = "t-1",
    function_id: str = "f-1",
    at_ns: int | None = None,
    body: bytes = b'{"x":1}',
    answer: bytes = b"2",
    terms: PredictionLogSpec = FULL,
) -> LoggedCall:
    """A call, which has the id `req-<number>`."""
    facts: dict[str, Any] = {
        "request_id": f"req-{number}",
        "at_ns": time.time_ns() if at_ns is None else at_ns,
        "tenant": tenant,
        "caller": tenant,
        "environment": "main",
        "app": "shop",
        "function": "hello",
        "function_id": function_id,
        "method": "",
        "model_id": "shop/hello",
        "version": "v1",
        "experiment": "",
        "arm": "",
        "start_kind": "WARM",
        "degraded": "",
        "feature_schema": "",
        "status": 200,
        "latency_ms": 1.5,
        "queue_ms": 0.0,
        "start_ms": 0.0,
        "exec_ms": 1.5,
        "picos": 1_234_567,
        "currency": "EUR",
        "input_bytes": len(body),
        "output_bytes": len(answer),
        "input_is_json": True,
        "output_is_json": True,
        "parameters": ["x"],
        "log": to_json(terms),
    }
    return LoggedCall(facts, body, answer)


def read_rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    return rows


def rows_below(directory: Path) -> list[dict[str, Any]]:
    """The rows of all ready files of a spool."""
    return [
        row
        for path in sorted((directory / "ready").glob("*.parquet"))
        for row in read_rows(path.read_bytes())
    ]


class MemoryStore:
    """Keeps files by name, like the controller (`shipper.PredictionStore`).

    Attributes:
        answers: what it answers next, in place of storing; an exception is raised.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.answers: list[PutResult | Exception] = []
        self.puts = 0

    async def put(self, name: str, data: bytes) -> PutResult:
        """See PredictionStore."""
        self.puts += 1
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.files[name] = data
        return PutResult(200)

    async def aclose(self) -> None:
        """Nothing to close."""

    def ids(self) -> list[str]:
        """Ids of all rows, sorted."""
        return sorted(row["request_id"] for data in self.files.values() for row in read_rows(data))
