"""The gateway's price: an echo function through the activator (authenticated, metered), beside
nginx `proxy_pass` to the very same worker socket and that socket alone; with quotas that are never
used up, and with traces of 1 % of the calls; with --peers beside other servers' echoes; without
--quick also with 2 and 4 activators.

Load: one wrk thread, 32 connections, closed loop. wrk cannot speak to a Unix socket, so the socket
alone is driven by h2load, and nginx by both, which shows what the change of tool does. CPU time is
that of each process per request. Latencies are compared at equal load: as many requests a second,
half of what the activator answers in a closed loop, to one and to the other (h2load, open loop)."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers, stack
from benchmarks.cpu import CpuPerCall, grandchild_pid, listener_pid
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
from benchmarks.load import CONNECTIONS, Load, LoadFailed, h2load, steady, wrk
from benchmarks.network import DidNotStart
from benchmarks.nginx import nginx
from benchmarks.programs import program
from pilotlight.protocol import HEADER_CALL, WORKER_INVOKE

NEEDS = ("nginx", "wrk", "h2load", "redis-server")
BODY = peers.ECHO_BODY
APP, FUNCTION = "bench-echo", "echo"
SOURCE = ROOT / "benchmarks" / "functions" / "echo.py"
ACTIVATOR, NGINX, NGINX_H2LOAD, SOCKET = (
    "activator",
    "nginx to the worker",
    "nginx to the worker (h2load)",
    "worker socket alone (h2load)",
)
QUOTAS, TRACED = "activator, quotas", "activator, traces of 1 %"
PLENTY: Mapping[str, Any] = {"requests_per_s": 1_000_000, "burst": 1_000_000, "concurrent": 100_000}
"""Bounds that nobody reaches: what is measured is what it costs to look."""
NO_SNAPSHOTS = {"snapshots": False}
"""Making them in the background would take CPU from what is measured."""
GOAL_RPS = 20_000
ACTIVATORS = (2, 4)
SETTLE_S = 1.5

Arms = Mapping[str, Callable[[], Load]]


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.gateway", needs=NEEDS)
    report = Report("gateway: echo, 32 connections")
    seconds, rounds = (2.0, 2) if given.quick else (5.0, 7)
    with (
        stack.running(snapshotter=NO_SNAPSHOTS) as platform,
        stack.running(snapshotter=NO_SNAPSHOTS, activator={"traces_sampled": 0.01}) as traced,
    ):
        with phase("deploy"):
            for one in (platform, traced):
                one.deploy(SOURCE)
                one.invoke(APP, FUNCTION, {"text": "ready"})
            tenant, caller = with_quotas(platform)
        with phase("activator, nginx, socket"):
            beside_nginx(
                report,
                {
                    ACTIVATOR: Subject(owner=platform, caller=platform),
                    QUOTAS: Subject(owner=tenant, caller=caller),
                    TRACED: Subject(owner=traced, caller=traced),
                },
                seconds=seconds,
                rounds=rounds,
            )
        if given.peers:
            beside_peers(report, platform, seconds=seconds, rounds=max(3, rounds // 2))
    if not given.quick:
        several_activators(report, seconds=seconds, rounds=rounds)
    report.finish(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A platform as the owner of the echo sees it, and as its caller does."""

    owner: stack.Stack
    caller: stack.Stack

    @property
    def socket(self) -> Path:
        """The socket of the only worker."""
        (found,) = self.owner.instance_sockets(APP)
        return found


def with_quotas(platform: stack.Stack) -> tuple[stack.Stack, stack.Stack]:
    """A tenant with an echo of its own, and a caller of it: tenant, function and key each have a
    rate, a burst and a bound on calls at once."""
    tenant = platform.tenant("quotas", **PLENTY)
    tenant.deploy(SOURCE)
    with tenant.client as client:
        key = client.create_key(quotas=PLENTY)
        client.set_function_quotas(APP, FUNCTION, PLENTY)
    tenant.invoke(APP, FUNCTION, {"text": "ready"})
    return tenant, dataclasses.replace(tenant, api_key=str(key["secret"]))


def beside_nginx(
    report: Report, subjects: Mapping[str, Subject], *, seconds: float, rounds: int
) -> None:
    """Rows and ratios of the activator, alone, with quotas and with traces; of nginx, and of the
    socket."""
    platform, socket = subjects[ACTIVATOR].caller, subjects[ACTIVATOR].socket
    headers = {"Content-Type": "application/json", HEADER_CALL: "req-benchmark"}
    with nginx(socket=socket, path=WORKER_INVOKE) as url:
        worker = listener_pid(socket)
        cpu = {
            NGINX: CpuPerCall({"nginx": grandchild_pid("nginx"), "worker": worker}),
            SOCKET: CpuPerCall({"worker": worker}),
        }
        for name, subject in subjects.items():
            pids = subject.owner.processes()
            parts = {part: pids[part] for part in ("activator", "controller")}
            cpu[name] = CpuPerCall({**parts, "worker": listener_pid(subject.socket)})
        alone = {
            NGINX: lambda: wrk(url, body=BODY, headers=headers, seconds=seconds),
            SOCKET: lambda: h2load(
                f"http://worker{WORKER_INVOKE}",
                body=BODY,
                headers=headers,
                seconds=seconds,
                unix=socket,
            ),
        }
        ours = {
            name: through(subject.caller, seconds=seconds) for name, subject in subjects.items()
        }
        arms: dict[str, Callable[[], Load]] = {
            name: cpu[name].during(run) for name, run in {**alone, **ours}.items()
        }
        arms[NGINX_H2LOAD] = lambda: h2load(url, body=BODY, headers=headers, seconds=seconds)
        loads = interleave(arms, rounds=rounds)
        per_s = statistics.median(run.rps for run in loads[ACTIVATOR]) / 2
        equal = at_equal_load(
            {
                NGINX: (url, headers),
                ACTIVATOR: (platform.invoke_url(APP, FUNCTION), platform.headers),
            },
            per_s=per_s,
            seconds=seconds,
            rounds=rounds,
        )
    for name, runs in loads.items():
        add_rows(report, name, runs)
    for name, measured in cpu.items():
        for part, us in measured.us.items():
            report.rows.append(Row.of(f"{name}: CPU of {part}", "µs", us, note="per request"))
    for name, p99_ms in equal.items():
        note = f"at {per_s:,.0f} requests a second; of rounds"
        report.rows.append(Row.of(f"{name} p99 at equal load", "ms", p99_ms, note=note))
    rps = {name: [run.rps for run in runs] for name, runs in loads.items()}
    report.ratio("rps_vs_nginx", paired_ratio(rps[ACTIVATOR], rps[NGINX]))
    report.ratio("p99_vs_nginx", paired_ratio(equal[ACTIVATOR], equal[NGINX]))
    report.ratio(
        "cpu_per_call_vs_nginx",
        paired_ratio(cpu[ACTIVATOR].together("activator", "controller"), cpu[NGINX].us["nginx"]),
    )
    report.ratio("rps_quotas_on_vs_off", paired_ratio(rps[QUOTAS], rps[ACTIVATOR]))
    report.ratio("rps_traced_vs_off", paired_ratio(rps[TRACED], rps[ACTIVATOR]))
    for name, key in ((QUOTAS, "cpu_quotas_on_vs_off"), (TRACED, "cpu_traced_vs_off")):
        report.ratio(key, paired_ratio(cpu[name].us["activator"], cpu[ACTIVATOR].us["activator"]))
    report.remarks.append(cores_needed(cpu[ACTIVATOR]))


def at_equal_load(
    arms: Mapping[str, tuple[str, Mapping[str, str]]],
    *,
    per_s: float,
    seconds: float,
    rounds: int,
) -> dict[str, list[float]]:
    """p99 in ms of each round of `per_s` requests a second to each URL, with its headers."""

    def run(url: str, headers: Mapping[str, str]) -> float:
        with steady(
            url, body=BODY, headers=headers, per_s=per_s, connections=CONNECTIONS
        ) as requests:
            time.sleep(seconds)
            found = requests()
        time.sleep(SETTLE_S)
        return percentile([request.milliseconds for request in found], 99)

    return interleave({name: partial(run, *arm) for name, arm in arms.items()}, rounds=rounds)


def cores_needed(cpu: CpuPerCall) -> str:
    """How many cores GOAL_RPS need, by the CPU time of each process per request. One activator is
    one core: several share the address."""
    cores = {part: statistics.median(us) * GOAL_RPS / 1e6 for part, us in cpu.us.items()}
    parts = ", ".join(f"{part} {count:.2f}" for part, count in cores.items())
    return (
        f"computed: {GOAL_RPS:,} requests a second take {sum(cores.values()):.1f} cores "
        f"({parts}), without the load generator"
    )


def beside_peers(report: Report, platform: stack.Stack, *, seconds: float, rounds: int) -> None:
    """One other server at a time, taking turns with the activator: each idles while the other is
    driven."""
    for peer in peers.ECHOES:
        try:
            with peers.running(peer) as other, phase(peer.name):
                loads = interleave(
                    {
                        peer.name: against(other.url, peer, seconds=seconds),
                        ACTIVATOR: through(platform, seconds=seconds),
                    },
                    rounds=rounds,
                )
        except (peers.PeerFailed, DidNotStart, LoadFailed) as e:
            report.missing(peer.name, str(e))
            continue
        add_rows(report, peer.name, loads[peer.name])
        ratio = paired_ratio([r.rps for r in loads[ACTIVATOR]], [r.rps for r in loads[peer.name]])
        report.remarks.append(f"activator's rps over {peer.name}'s: {ratio}")
        if peer is peers.RAY_ECHO:
            report.ratio("rps_vs_ray", ratio)


def several_activators(report: Report, *, seconds: float, rounds: int) -> None:
    """More activator processes on one address, each with an instance of its own (an instance is
    leased to one activator)."""
    for count in ACTIVATORS:
        name = f"{count} activators"
        try:
            with (
                redis_server() as url,
                stack.running(activators=count, redis_url=url) as platform,
                phase(name),
            ):
                platform.deploy(SOURCE, min_instances=count, max_instances=2 * count)
                # new connections are spread over the processes by the kernel
                for _ in range(4 * count):
                    platform.invoke(APP, FUNCTION, {"text": "ready"})
                runs = [through(platform, seconds=seconds)() for _ in range(rounds)]
        except (DidNotStart, LoadFailed, stack.StackFailed) as e:
            report.missing(name, str(e))
        else:
            add_rows(report, name, runs)


def through(platform: stack.Stack, *, seconds: float) -> Callable[[], Load]:
    """The load on the function's public address; then a pause, so that the last usage records are
    not shipped in another arm's time."""

    def run() -> Load:
        load = wrk(
            platform.invoke_url(APP, FUNCTION), body=BODY, headers=platform.headers, seconds=seconds
        )
        time.sleep(SETTLE_S)
        return load

    return run


def against(url: str, peer: peers.Peer, *, seconds: float) -> Callable[[], Load]:
    """The load on another server."""
    return lambda: wrk(
        url, body=peer.body, headers={"Content-Type": "application/json"}, seconds=seconds
    )


def add_rows(report: Report, name: str, runs: list[Load]) -> None:
    """Throughput over rounds, and the latencies: medians over rounds of each round's own
    percentiles."""
    report.rows.append(Row.of(f"{name} rps", "1/s", [run.rps for run in runs]))
    p50 = Row.of(name, "ms", [run.p50_ms for run in runs]).p50
    p99 = Row.of(name, "ms", [run.p99_ms for run in runs]).p50
    report.rows.append(
        Row(
            name=f"{name} latency", unit="ms", n=sum(run.requests for run in runs), p50=p50, p99=p99
        )
    )


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """A Redis of this run's own, on a Unix socket; its URL. Raises DidNotStart."""
    with tempfile.TemporaryDirectory(prefix="plrd", ignore_cleanup_errors=True) as home:
        socket = Path(home) / "r.sock"
        arguments = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", home]
        process = subprocess.Popen([program("redis-server"), *arguments], stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 10
            while not socket.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise DidNotStart("redis-server made no socket")
                time.sleep(0.02)
            yield f"unix://{socket}?db=0"
        finally:
            process.terminate()
            process.wait(10)


if __name__ == "__main__":
    main()
