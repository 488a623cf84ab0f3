"""A ledger of a million records: what it takes to write them, and how long a month's report and the
dashboard's pages then take.

The records are put in while the platform is down, in the batches and by the code with which the
controller takes them from activators; reports and pages are asked for over HTTP, through the
activator, as anybody asks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import httpx

from benchmarks import stack
from benchmarks.harness import ROOT, Report, Row, progress
from benchmarks.ledger_fill import BATCH, Month, generate
from pilotlight.controller.billing import usage_ingestion
from pilotlight.controller.billing.ledger import decode_records
from pilotlight.controller.database.store import Store
from pilotlight.controller.registry.launch_spec import function_id
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.record_json import from_json

SOURCE = ROOT / "benchmarks" / "functions" / "echo.py"
APPS, FUNCTIONS, KEYS = 5, 40, 4
DAYS = 28
"""All in the month that ends now, so that the month's report has every record."""
TIMEOUT_S = 120.0
PAGES = {
    "overview, 24 hours": "/dashboard",
    "overview, 30 days": "/dashboard?span=30d",
    "function, 30 days": "/dashboard/functions/app-0/function-0?span=30d",
    "newest calls": "/dashboard/calls",
    "invoices": "/dashboard/invoices",
}


def ledger(report: Report, platform: stack.Stack, *, records: int, asked: int) -> None:
    """Rows of writing, reporting and showing."""
    tenant = _deploy(platform)
    taken: list[Taken] = []
    platform.restart(
        platform={}, variables={}, between=lambda: _fill(platform, tenant, records, taken)
    )
    size = f"{records:,} records"
    report.rows.append(
        Row.of(
            f"ledger: {BATCH:,} records taken",
            "ms",
            [one.took_ms for one in taken],
            note="decoding and rollups included",
        )
    )
    report.rows.append(
        Row.of("ledger: CPU", "µs", [one.cpu_us for one in taken], note="per record")
    )
    with _visitor(platform) as http:
        found = sum(
            row["records"]
            for row in http.get("/v1/billing/report?by=app").raise_for_status().json()["rows"]
        )
        if found < records:
            raise stack.StackFailed(
                f"the report has {found:,} of {records:,} records: what is timed here would be "
                f"empty pages"
            )
        for name, by in {"by function": "function", "by key": "key", "by day": "day"}.items():
            path = f"/v1/billing/report?by={by}&since={time.time() - (DAYS + 1) * 86_400:.0f}"
            report.rows.append(
                Row.of(f"monthly report {name}, {size}", "ms", _asked(http, path, asked))
            )
        report.rows.append(
            Row.of(
                "dashboard: first page after a start",
                "ms",
                _asked(http, "/dashboard", 1),
                note="libraries are loaded",
            )
        )
        for name, path in PAGES.items():
            report.rows.append(
                Row.of(f"dashboard: {name}, {size}", "ms", _asked(http, path, asked))
            )


def _deploy(platform: stack.Stack) -> str:
    """Functions that the records are of, none of which runs; the tenant's id."""
    platform.deploy(SOURCE, app="bench-pattern", min_instances=0)
    with platform.client as client:
        (found,) = client.app("bench-pattern")["functions"]
        spec = replace(from_json(FunctionSpec, found["spec"]), scaling=Scaling(min_instances=0))
        for app in range(APPS):
            client.deploy(
                f"app-{app}",
                [replace(spec, name=f"function-{i}") for i in range(app, FUNCTIONS, APPS)],
            )
        return str(client.whoami()["tenant"]["id"])


def _asked(http: httpx.Client, path: str, times: int) -> list[float]:
    took_ms = []
    for _ in range(times):
        began = time.perf_counter()
        http.get(path).raise_for_status()
        took_ms.append((time.perf_counter() - began) * 1000)
    return took_ms


@contextlib.contextmanager
def _visitor(platform: stack.Stack) -> Iterator[httpx.Client]:
    """A client that is signed in, and has the key for the API."""
    with httpx.Client(
        base_url=platform.url,
        timeout=TIMEOUT_S,
        headers={"authorization": f"Bearer {platform.api_key}"},
    ) as http:
        _sign_in(http, platform.api_key)
        yield http


def _sign_in(http: httpx.Client, key: str) -> None:
    page = http.get("/dashboard/login").text
    form = re.search(r'name="form"[^>]*value="([^"]*)"', page)
    answer = http.post("/dashboard/login", data={"key": key, "form": form[1] if form else ""})
    if answer.status_code != 303:
        raise stack.StackFailed(f"signing in was answered {answer.status_code}")


class Taken(NamedTuple):
    """What a batch took, and its CPU time per record."""

    took_ms: float
    cpu_us: float


def _fill(platform: stack.Stack, tenant: str, count: int, taken: list[Taken]) -> None:
    store = Store(
        f"sqlite:///{platform.directory / 'home' / 'controller' / 'controller.db'}", clock=time.time
    )
    try:
        for i, batch in enumerate(batches(tenant, count)):
            taken.append(_take(store, batch))
            progress(f"{(i + 1) * BATCH:,}/{count:,} records")
    finally:
        store.close()


def _take(store: Store, batch: list[dict[str, Any]]) -> Taken:
    body = json.dumps({"activator": "a-0", "records": batch}).encode()
    began, cpu_began = time.perf_counter(), time.thread_time()
    records = decode_records(body)
    with store.write() as write:
        usage_ingestion.ingest_values(write, records)
    cpu_s = time.thread_time() - cpu_began
    return Taken((time.perf_counter() - began) * 1000, cpu_s / len(batch) * 1e6)


def batches(tenant: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """`count` records over DAYS days, oldest first, of the functions that were deployed."""
    month = Month(
        begin_at=time.time() - DAYS * 86_400,
        days=DAYS,
        tenants=(tenant,),
        functions=FUNCTIONS,
        keys=KEYS,
    )
    rows = generate(count, month)
    while batch := list(itertools.islice(rows, BATCH)):
        for row in batch:
            row["function_id"] = _function_id(tenant, row["app"], row["function"])
        yield batch


@functools.cache
def _function_id(tenant: str, app: str, function: str) -> str:
    return function_id(tenant=tenant, environment="main", app=app, function=function)
