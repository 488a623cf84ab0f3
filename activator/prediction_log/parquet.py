"""The columns of a prediction log, and their conversion to Parquet. The only module that imports
pyarrow: in the writer process."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet

COST_DIGITS: Final = 12
"""Digits behind the point: costs are whole picounits."""
COLUMNS: Final = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        *(
            pa.field(name, pa.string(), nullable=False)
            for name in (
                *("tenant", "caller", "environment", "app", "function", "method"),
                *("model_id", "version", "experiment", "arm", "start_kind"),
                *("degraded", "feature_schema"),
            )
        ),
        pa.field("status", pa.int32(), nullable=False),
        *(
            pa.field(name, pa.float64(), nullable=False)
            for name in ("latency_ms", "queue_ms", "start_ms", "exec_ms")
        ),
        pa.field("cost", pa.decimal128(38, COST_DIGITS), nullable=False),
        pa.field("currency", pa.string(), nullable=False),
        pa.field("input_bytes", pa.int64(), nullable=False),
        pa.field("output_bytes", pa.int64(), nullable=False),
        *(
            pa.field(name, pa.string())
            for name in ("feature_hash", "input_summary", "input", "output_summary", "output")
        ),
    ]
)


def set_limits() -> None:
    """Use one thread, and the allocator of the process, which gives memory back."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    pa.set_memory_pool(pa.system_memory_pool())


def convert(lines: Iterable[bytes]) -> tuple[bytes, int]:
    """Convert rows as JSON to a Parquet file. Returns it and the number of its rows."""
    rows = [_row(json.loads(line)) for line in lines]
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=COLUMNS)
    pyarrow.parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue(), len(rows)


def _row(row: dict[str, Any]) -> dict[str, Any]:
    picos = Decimal(row.pop("picos"))
    return {**row, "cost": picos.scaleb(-COST_DIGITS), "started_at": row["at_ns"] // 1000}
