"""Dicts and queues: what the transactions of one operation take in the controller's database, of a
tenant whose plan bounds what it stores, with few and with many values and chunks; and operations
per second through an activator.

Transactions run in this process, one after the other, with values of 100 bytes. *Many* are 90,000
values in the dict and in the queue, and 100,000 chunks of volumes, which count in the same bound.
PostgreSQL runs without fsync, as in the tests. Through an activator, eight callers with a
connection each make one operation in each request, of *few* values."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.cpu import cpu_s
from benchmarks.harness import Report, Row, options, phase
from benchmarks.stack import Stack, StackFailed, running
from pilotlight.controller.collections import collections
from pilotlight.controller.collections.collections import Collection, CollectionScope
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.identity import tenants
from pilotlight.controller.identity.tenant_plan import TenantPlan
from pilotlight.controller.weights import storage_usage
from pilotlight.spec.collection import CollectionKind
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan
from tests.fakes.databases import empty_postgres, empty_sqlite
from tests.fakes.postgres_server import PostgresServer, programs

CALLS, CALLERS = 200, 8
FEW, MANY, CHUNKS = 10, 90_000, 100_000
PLAN = "standard"
VALUE = b"v" * 100
Change = Callable[[Write, Collection, Plan, str], object]
OPERATIONS: Mapping[str, tuple[CollectionKind, Change]] = {
    "Dict.put": (
        CollectionKind.DICT,
        lambda write, found, plan, key: collections.put(write, found, plan, {key: VALUE}),
    ),
    "Dict.get": (
        CollectionKind.DICT,
        lambda write, found, _, key: collections.entries(write.sql, found, keys=[key]),
    ),
    "Queue.put": (
        CollectionKind.QUEUE,
        lambda write, found, plan, key: collections.push(
            write, found, plan, "", [VALUE], operation_id=key
        ),
    ),
    "Queue.get": (
        CollectionKind.QUEUE,
        lambda write, found, *_: collections.take(write, found, "", 1),
    ),
}


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.dicts")
    calls = 50 if given.quick else CALLS
    report = Report(f"dicts and queues: {calls} operations")
    with tempfile.TemporaryDirectory(prefix="pld") as directory:
        url = empty_sqlite(Path(directory) / "controller.db")
        _measure(report, "SQLite", url, calls)
    with contextlib.ExitStack() as stack:
        if (server := stack.enter_context(_postgres())) is None:
            report.missing("PostgreSQL", "it is not installed: apt-get install postgresql")
        else:
            _measure(report, "PostgreSQL", server, calls)
    with running() as platform:
        _measure_requests(report, platform, calls)
    report.finish(given)


@contextlib.contextmanager
def _postgres() -> Iterator[str | None]:
    binaries = programs()
    if binaries is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="plp") as directory:
        Path(directory).chmod(0o755)
        server = PostgresServer(Path(directory), binaries)
        server.start()
        try:
            with empty_postgres(server.url) as url:
                yield url
        finally:
            server.stop()


def _measure(report: Report, database: str, url: str, calls: int) -> None:
    store = Store(url, clock=time.time)
    for name, values, chunks in (("few", FEW, 0), ("many", MANY, CHUNKS)):
        with phase(f"{database}: fill {name}"):
            tenant = _filled(store, name, values, chunks)
        for operation, (kind, change) in OPERATIONS.items():
            scope = CollectionScope(tenant=tenant, environment="main", kind=kind, name="d")
            began, used = time.perf_counter(), time.process_time()
            for number in range(calls):
                with store.write() as write:
                    found = collections.find(write.sql, scope)
                    plan = storage_usage.plan_of(write.sql, BUILT_IN_PLANS, tenant=tenant)
                    change(write, found, plan, f"new-{number}")
            used_us = (time.process_time() - used) / calls * 1e6
            rate = calls / (time.perf_counter() - began)
            title = f"{operation}, {database}, {name}"
            report.rows.append(Row.of(title, "1/s", [rate]))
            report.rows.append(Row.of(f"  {title}", "µs CPU", [used_us]))
    store.close()


def _filled(store: Store, name: str, values: int, chunks: int) -> str:
    """A tenant with so many values in a dict and in a queue, and chunks of volumes; its id."""
    with store.write() as write:
        terms = TenantPlan(plan=PLAN)
        tenant = tenants.create(write, name=name, uid_base=20_000, actor="k", terms=terms).id
        for kind in CollectionKind:
            scope = CollectionScope(tenant=tenant, environment="main", kind=kind, name="d")
            made = collections.create(write, scope)
            is_dict = kind is CollectionKind.DICT
            rows: list[dict[str, Any]] = [
                {
                    "collection": made.id,
                    "key": str(number) if is_dict else "",
                    "position": 0 if is_dict else number,
                    "size_bytes": len(VALUE),
                    "value": VALUE,
                }
                for number in range(1, values + 1)
            ]
            write.sql.execute(sa.insert(tables.collection_values), rows)
            table = tables.collections
            sums = {"entries": values, "size_bytes": values * len(VALUE), "position": values + 1}
            write.sql.execute(sa.update(table).where(table.c.id == made.id).values(**sums))
        rows = [
            {
                "tenant": tenant,
                "digest": f"{number:064x}",
                "size_bytes": 1,
                "state": "stored",
                "used_at": write.now,
            }
            for number in range(chunks)
        ]
        if rows:
            write.sql.execute(sa.insert(tables.volume_chunks), rows)
        write.sql.execute(sa.text("ANALYZE"))  # as the autovacuum does
    return tenant


def _measure_requests(report: Report, stack: Stack, calls: int) -> None:
    value = base64.b64encode(VALUE).decode()
    bodies: Mapping[str, tuple[str, Callable[[str], Mapping[str, Any]]]] = {
        "Dict.put": ("dicts", lambda k: {"op": "put", "entries": [{"key": k, "value": value}]}),
        "Dict.get": ("dicts", lambda k: {"op": "get", "keys": [k]}),
        "Queue.put": ("queues", lambda k: {"op": "put", "values": [value], "id": k}),
        "Queue.get": ("queues", lambda _: {"op": "get"}),
    }
    tenant = stack.tenant("few", plan=PLAN)
    controller = stack.processes()["controller"]
    for operation, (kind, body) in bodies.items():
        began, used_s = time.perf_counter(), cpu_s(controller)
        _call(tenant, kind, body, calls)
        used_us = (cpu_s(controller) - used_s) / calls * 1e6
        rate = calls / (time.perf_counter() - began)
        report.rows.append(Row.of(f"{operation}, request", "1/s", [rate]))
        title = f"  {operation}, request, controller"
        report.rows.append(Row.of(title, "µs CPU", [used_us]))


def _call(tenant: Stack, kind: str, body: Callable[[str], Mapping[str, Any]], calls: int) -> None:
    """Make `calls` calls. Raises StackFailed where one of them fails."""
    failures: list[Exception] = []

    def call_on(first: int) -> None:
        host = tenant.url.removeprefix("http://")
        try:
            with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
                for number in range(first, calls, CALLERS):
                    text = json.dumps({"create": True, **body(f"new-{number}")})
                    connection.request("POST", f"/v1/{kind}/d", text, dict(tenant.headers))
                    answer = connection.getresponse()
                    said = answer.read()
                    if answer.status != 200:
                        raise StackFailed(f"{kind} answered {answer.status}: {said[:300]!r}")
        except (OSError, StackFailed, http.client.HTTPException) as e:
            failures.append(e)

    callers = [threading.Thread(target=call_on, args=(first,)) for first in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    if failures:
        raise StackFailed(f"{len(failures)} callers failed") from failures[0]


if __name__ == "__main__":
    main()
