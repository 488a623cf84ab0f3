"""The gateway's price: an echo function through the activator (authenticated, metered), beside
nginx `proxy_pass` to the very same worker socket and that socket alone; with --peers beside other
servers' echoes; without --quick also with 2 and 4 activators.

Load: one wrk thread, 32 connections, closed loop. wrk cannot speak to a Unix socket, so the socket
alone is driven by h2load, and nginx by both, which shows what the change of tool does."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks import peers, stack
from benchmarks.harness import ROOT, Report, Row, interleave, options, paired_ratio, phase
from benchmarks.load import Load, LoadFailed, h2load, wrk
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
ACTIVATORS = (2, 4)
SETTLE_S = 1.5

Arms = Mapping[str, Callable[[], Load]]


def main() -> None:
    """Run it."""
    given = options(__doc__ or "", name="benchmarks.gateway", needs=NEEDS)
    report = Report("gateway: echo, 32 connections")
    seconds, rounds = (2.0, 3) if given.quick else (5.0, 7)
    with stack.running() as platform:
        with phase("deploy"):
            platform.deploy(SOURCE)
            platform.invoke(APP, FUNCTION, {"text": "ready"})
        with phase("activator, nginx, socket"):
            beside_nginx(report, platform, seconds=seconds, rounds=rounds)
        if given.peers:
            beside_peers(report, platform, seconds=seconds, rounds=max(3, rounds // 2))
    if not given.quick:
        several_activators(report, seconds=seconds, rounds=rounds)
    report.finish(given)


def beside_nginx(report: Report, platform: stack.Stack, *, seconds: float, rounds: int) -> None:
    """Rows and ratios of the activator, nginx, and the socket."""
    (socket,) = platform.instance_sockets(APP)
    headers = {"Content-Type": "application/json", HEADER_CALL: "req-benchmark"}
    with nginx(socket=socket, path=WORKER_INVOKE) as url:
        arms: Arms = {
            NGINX: lambda: wrk(url, body=BODY, headers=headers, seconds=seconds),
            ACTIVATOR: through(platform, seconds=seconds),
            SOCKET: lambda: h2load(
                f"http://worker{WORKER_INVOKE}",
                body=BODY,
                headers=headers,
                seconds=seconds,
                unix=socket,
            ),
            NGINX_H2LOAD: lambda: h2load(url, body=BODY, headers=headers, seconds=seconds),
        }
        loads = interleave(arms, rounds=rounds)
    for name, runs in loads.items():
        add_rows(report, name, runs)
    ours, theirs = loads[ACTIVATOR], loads[NGINX]
    report.ratio("rps_vs_nginx", paired_ratio([r.rps for r in ours], [r.rps for r in theirs]))
    report.ratio("p99_vs_nginx", paired_ratio([r.p99_ms for r in ours], [r.p99_ms for r in theirs]))


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
