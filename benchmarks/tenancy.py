"""What tenancy costs, and what it is worth.

- one admission: in the process, and in Redis (`admission`);
- the gateway's throughput: without quotas, with them, and with everything on (quotas, hard budgets,
  a stepped price list, priority), beside nginx `proxy_pass` to the same worker; all of it in one
  run, taking turns;
- a tenant that floods, one whose arguments are costly to check, and one that streams, beside others
  (`neighbours`);
- a ledger of a million records: a month's report and the dashboard's pages (`ledger`);
- a hard budget under load: what was spent beyond it (`overshoot`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import admission, ledger, neighbours, overshoot, stack
from benchmarks.cpu import cpu_s
from benchmarks.gateway import (
    BODY,
    NO_SNAPSHOTS,
    PLENTY,
    SETTLE_S,
    SOURCE,
    add_rows,
    redis_server,
)
from benchmarks.harness import Report, Row, interleave, options, paired_ratio, phase
from benchmarks.load import Load, LoadFailed, wrk
from benchmarks.network import DidNotStart
from benchmarks.nginx import nginx
from pilotlight.protocol import HEADER_CALL, WORKER_INVOKE

NEEDS = ("nginx", "wrk", "h2load", "redis-server")
OFF, QUOTAS, EVERYTHING, NGINX = "no quotas", "quotas", "everything", "nginx to the worker"
APP, FUNCTION = "bench-echo", "echo"
STEPPED = "bench-stepped"
PRICES = {"others": {STEPPED: {"request": "0.0000001", "minimum_ms": 1, "rounding_ms": 1}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    batches: int
    seconds: float
    rounds: int
    neighbour_s: float
    neighbour_rounds: int
    small: int
    records: int
    pages: int
    two_activators: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A tenant as its administrator sees it, and as a caller with a bounded key does."""

    tenant: stack.Stack
    caller: stack.Stack


FULL = Sizes(
    batches=100,
    seconds=3.0,
    rounds=6,
    neighbour_s=10.0,
    neighbour_rounds=4,
    small=200,
    records=1_000_000,
    pages=20,
    two_activators=True,
)
QUICK = Sizes(
    batches=20,
    seconds=1.0,
    rounds=1,
    neighbour_s=2.0,
    neighbour_rounds=1,
    small=4,
    records=10_000,
    pages=3,
    two_activators=False,
)


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.tenancy", needs=NEEDS)
    sizes = QUICK if given.quick else FULL
    report = Report("tenancy")
    measure(report, sizes)
    report.finish(given)


def measure(report: Report, sizes: Sizes) -> None:
    """All parts, each on a platform that the others did not use more than they must."""
    with phase("admission"):
        admission.in_process(report, batches=sizes.batches)
    try:
        with redis_server() as url, phase("admission in Redis"):
            admission.in_redis(report, url=url, batches=sizes.batches)
    except DidNotStart as e:
        report.missing("admission in Redis", str(e))
    with stack.running(prices=PRICES, snapshotter=NO_SNAPSHOTS) as platform:
        parts: Mapping[str, Callable[[], None]] = {
            "gateway": lambda: gateway(
                report, platform, seconds=sizes.seconds, rounds=sizes.rounds
            ),
            "flood": lambda: neighbours.flooded(
                report, platform, seconds=sizes.neighbour_s, rounds=sizes.neighbour_rounds
            ),
            "checks": lambda: neighbours.checked(
                report, platform, seconds=sizes.neighbour_s, rounds=sizes.neighbour_rounds
            ),
            "streams": lambda: neighbours.streaming(
                report,
                platform,
                small=sizes.small,
                seconds=sizes.neighbour_s,
                rounds=sizes.neighbour_rounds,
            ),
            "budget": lambda: overshoot.overshoot(
                report, platform, name="1 activator", instances=4
            ),
        }
        for name, part in parts.items():
            _attempt(report, name, part)
    _attempt(report, "ledger", lambda: _ledger(report, sizes))
    if sizes.two_activators:
        _attempt(report, "budget, 2 activators", lambda: _two_activators(report))
    else:
        report.missing("budget, 2 activators", "--quick leaves it out")


def gateway(report: Report, platform: stack.Stack, *, seconds: float, rounds: int) -> None:
    """Throughput of three tenants' functions, and of nginx."""
    tenants = {name: _tenant(platform, name) for name in (OFF, QUOTAS, EVERYTHING)}
    (socket,) = tenants[OFF].tenant.instance_sockets(APP)
    headers = {"Content-Type": "application/json", HEADER_CALL: "req-benchmark"}
    with nginx(socket=socket, path=WORKER_INVOKE) as url:
        arms: dict[str, Callable[[], Load]] = {
            NGINX: lambda: wrk(url, body=BODY, headers=headers, seconds=seconds)
        }
        pid = platform.processes()["activator"]
        cpu_us: dict[str, list[float]] = {name: [] for name in tenants}
        arms |= {
            name: _through(subject.caller, seconds, pid=pid, cpu_us=cpu_us[name])
            for name, subject in tenants.items()
        }
        loads = interleave(arms, rounds=rounds)
    for name, runs in loads.items():
        add_rows(report, name, runs)
        if name in cpu_us:
            report.rows.append(
                Row.of(
                    f"{name} activator's CPU",
                    "µs",
                    cpu_us[name],
                    note="per request; machines' noise touches it less",
                )
            )
    rps = {name: [run.rps for run in runs] for name, runs in loads.items()}
    report.ratio("rps_quotas_on_vs_off", paired_ratio(rps[QUOTAS], rps[OFF]))
    report.ratio("rps_everything_on_vs_off", paired_ratio(rps[EVERYTHING], rps[OFF]))
    report.ratio("rps_everything_vs_nginx", paired_ratio(rps[EVERYTHING], rps[NGINX]))


def _tenant(platform: stack.Stack, name: str) -> Subject:
    """A tenant with an echo of its own that stays warm, and a key to call it; bounded on every
    level unless it is OFF."""
    terms: dict[str, Any] = {} if name == OFF else dict(PLENTY)
    if name == EVERYTHING:
        terms["prices"] = STEPPED
    tenant = platform.tenant(name.replace(" ", "-"), **terms)
    options = {"tags": {"team": "bench"}, "priority": "standard"} if name == EVERYTHING else {}
    tenant.deploy(SOURCE, app=APP, **options)
    with tenant.client as client:
        key = client.create_key(quotas=None if name == OFF else dict(PLENTY))
        if name != OFF:
            client.set_function_quotas(APP, FUNCTION, PLENTY)
        if name == EVERYTHING:
            for app, function in (("", ""), (APP, ""), (APP, FUNCTION)):
                client.set_budget("1000000", period="day", app=app, function=function)
    tenant.invoke(APP, FUNCTION, {"text": "ready"})
    return Subject(tenant=tenant, caller=dataclasses.replace(tenant, api_key=str(key["secret"])))


def _through(
    tenant: stack.Stack, seconds: float, *, pid: int, cpu_us: list[float]
) -> Callable[[], Load]:
    """As `gateway.through`, with this tenant's key; CPU time of process `pid` per request is noted,
    until its records are shipped."""

    def run() -> Load:
        before_s = cpu_s(pid)
        load = wrk(
            tenant.invoke_url(APP, FUNCTION), body=BODY, headers=tenant.headers, seconds=seconds
        )
        time.sleep(SETTLE_S)
        cpu_us.append((cpu_s(pid) - before_s) / load.requests * 1e6)
        return load

    return run


def _ledger(report: Report, sizes: Sizes) -> None:
    with stack.running(snapshotter=NO_SNAPSHOTS) as platform:
        ledger.ledger(report, platform, records=sizes.records, asked=sizes.pages)


def _two_activators(report: Report) -> None:
    """Both count in Redis."""
    with (
        redis_server() as url,
        stack.running(activators=2, redis_url=url, snapshotter=NO_SNAPSHOTS) as platform,
    ):
        overshoot.overshoot(report, platform, name="2 activators", instances=4)


def _attempt(report: Report, name: str, part: Callable[[], None]) -> None:
    """A part that cannot be measured is said to be missing; the others are measured all the
    same."""
    try:
        with phase(name):
            part()
    except (DidNotStart, LoadFailed, stack.StackFailed) as e:
        report.missing(name, str(e))


if __name__ == "__main__":
    main()
