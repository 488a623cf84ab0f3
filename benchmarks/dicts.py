"""Dicts and queues: operations per second through an activator, and the controller's CPU time for
each, of a tenant whose plan bounds what it stores, with few and with many values and chunks.

Eight callers with a connection each, in this process: values of 100 bytes, one in each request. The
arms take turns. *Many* are 90,000 values in the dict and in the queue, and 100,000 chunks of
volumes, which count in the same bound. With --quick: one round of fewer calls."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.cpu import cpu_s
from benchmarks.harness import Report, Row, options
from benchmarks.stack import Stack, StackFailed, running

ROUNDS, CALLS, CALLERS = 3, 300, 8
FEW, MANY, CHUNKS = 10, 90_000, 100_000
AT_ONCE = 500
VALUE = base64.b64encode(b"v" * 100).decode()
Body = Callable[[int], Mapping[str, Any]]
OPERATIONS: Mapping[str, tuple[str, Body]] = {
    "Dict.put": ("dicts", lambda _: {"op": "put", "entries": [_entry(time.time_ns())]}),
    "Dict.get": ("dicts", lambda n: {"op": "get", "keys": [f'"{n % FEW}"']}),
    "Queue.put": ("queues", lambda _: {"op": "put", "values": [VALUE], "id": f"{time.time_ns()}"}),
    "Queue.get": ("queues", lambda _: {"op": "get"}),
}


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.dicts")
    calls, rounds = (200, 1) if given.quick else (CALLS, ROUNDS)
    report = Report(f"dicts and queues: {CALLERS} callers, {calls} calls each time")
    with running() as stack:
        tenants = {"few": stack.tenant("few", plan="standard")}
        tenants["many"] = stack.tenant("many", plan="standard")
        _fill(tenants["few"], FEW)
        _fill(tenants["many"], MANY)
        _add_chunks(stack, tenants["many"])
        controller = stack.processes()["controller"]
        rates: dict[str, list[float]] = {}
        cpu_us: dict[str, list[float]] = {}
        for _ in range(rounds):
            for operation, (kind, body) in OPERATIONS.items():
                for name, tenant in tenants.items():
                    before_s, began = cpu_s(controller), time.perf_counter()
                    _run(tenant, kind, body, calls)
                    took_s = time.perf_counter() - began
                    used_s = cpu_s(controller) - before_s
                    rates.setdefault(f"{operation}, {name}", []).append(calls / took_s)
                    cpu_us.setdefault(f"{operation}, {name}", []).append(used_s / calls * 1e6)
        for name, samples in rates.items():
            report.rows.append(Row.of(name, "1/s", samples))
            report.rows.append(Row.of(f"  CPU time of {name}", "µs", cpu_us[name]))
    report.finish(given)


def _entry(number: int) -> dict[str, str]:
    return {"key": f'"{number}"', "value": VALUE}


def _fill(tenant: Stack, number: int) -> None:
    with contextlib.closing(_connection(tenant)) as connection:
        for first in range(0, number, AT_ONCE):
            some = range(first, min(first + AT_ONCE, number))
            entries = [_entry(one) for one in some]
            _do(connection, tenant, "dicts", {"op": "put", "create": True, "entries": entries})
            values = [VALUE for _ in some]
            _do(connection, tenant, "queues", {"op": "put", "create": True, "values": values})


def _add_chunks(stack: Stack, tenant: Stack) -> None:
    """Record chunks as a commit does, without their bytes."""
    with tenant.client as client:
        tenant_id = client.whoami()["tenant"]["id"]
    file = stack.directory / "home" / "controller" / "controller.db"
    rows = ((tenant_id, f"{number:064x}", 1, "stored", 9e9) for number in range(CHUNKS))
    names = "tenant, digest, size_bytes, state, used_at"
    with contextlib.closing(sqlite3.connect(file, timeout=30)) as database, database:
        database.executemany(f"INSERT INTO volume_chunks ({names}) VALUES (?, ?, ?, ?, ?)", rows)


def _run(tenant: Stack, kind: str, body: Body, calls: int) -> None:
    """Make `calls` calls. Raises StackFailed where one of them fails."""
    failures: list[BaseException] = []

    def call_on(first: int) -> None:
        try:
            with contextlib.closing(_connection(tenant)) as connection:
                for number in range(first, calls, CALLERS):
                    _do(connection, tenant, kind, body(number))
        except (OSError, StackFailed, http.client.HTTPException) as e:
            failures.append(e)

    callers = [threading.Thread(target=call_on, args=(first,)) for first in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    if failures:
        raise StackFailed(f"{len(failures)} callers failed") from failures[0]


def _connection(tenant: Stack) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(tenant.url.removeprefix("http://"), timeout=60)


def _do(
    connection: http.client.HTTPConnection, tenant: Stack, kind: str, body: Mapping[str, Any]
) -> None:
    connection.request("POST", f"/v1/{kind}/bench", json.dumps(body), dict(tenant.headers))
    answer = connection.getresponse()
    said = answer.read()
    if answer.status != 200:
        raise StackFailed(f"{kind} answered {answer.status}: {said[:300]!r}")


if __name__ == "__main__":
    main()
