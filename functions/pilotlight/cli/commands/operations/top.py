"""`pilotlight top`: show live activity of functions, from the activators' metrics. Rates are
differences between two samples."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.operations.instance import with_label_columns
from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import NO_VALUE, format_milliseconds, format_money
from pilotlight.cli.core.histogram import histogram_quantile
from pilotlight.cli.core.session import Session
from pilotlight.errors import Unavailable

if TYPE_CHECKING:
    from prometheus_client.samples import Sample
    from rich.console import RenderableType

Key = tuple[str, str]
"""App and function."""
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """Counters at one point in time, since the activator started.

    Attributes:
        at: monotonic time in seconds.
        requests: answered calls.
        buckets: cumulative counts of execution times by upper bound in seconds.
        cost: total of all usage records.
        starts: calls that waited for a start, by start kind.
    """

    at: float
    requests: Mapping[Key, float]
    buckets: Mapping[Key, Mapping[float, float]]
    in_flight: Mapping[Key, float] = field(default_factory=dict)
    instances: Mapping[Key, int] = field(default_factory=dict)
    cost: Mapping[Key, float] = field(default_factory=dict)
    starts: Mapping[Key, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRow:
    """One function's activity between two samples; None is "no data". `starts`: calls that waited
    for a start, by start kind, since the activator started."""

    app: str
    function: str
    instances: int
    in_flight: int
    calls_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    cost_per_h: float
    starts: Mapping[str, int] = field(default_factory=dict)


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "top")(top)


def top(
    session: Session,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Print totals since the activator started, and exit."),
    ] = False,
) -> None:
    """Show a live table of the local platform's functions: instances, calls, latencies and cost.

    Stop it with Ctrl-C.
    """
    now = sample_metrics(session)
    if once or session.is_json or not sys.stdout.isatty():
        rows = rows_between(None, now)
        session.show([asdict(row) for row in rows], lambda: _table(rows))
        return
    from rich.live import Live

    with Live(
        _table(rows_between(None, now)), console=session.console(), screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(interval)
            before, now = now, sample_metrics(session)
            live.update(_table(rows_between(before, now)), refresh=True)


def sample_metrics(session: Session) -> MetricsSample:
    """Read the activators' metrics and the control API. Raises Unavailable."""
    from pilotlight.cli.supervisor.local_platform import find_running, with_active_config

    platform = with_active_config(session.platform())
    found = find_running(platform)
    samples = parse_samples(metrics_text(Path(found.run) if found else platform.paths.run))
    with session.client() as client:
        instances = [with_label_columns(row) for row in client.instances()]
        bill = client.billing_report(by="function")["rows"]
    counted: dict[Key, int] = defaultdict(int)
    for row in instances:
        counted[str(row.get("app")), str(row.get("function"))] += 1
    cost: dict[Key, float] = defaultdict(float)
    for line in bill:
        cost[line["group"]["app"], line["group"]["function"]] += float(line["cost"])
    return sum_samples(samples, at=time.monotonic(), instances=counted, cost=cost)


def parse_samples(page: str) -> list[Sample]:
    """The samples of a Prometheus page."""
    from prometheus_client.parser import text_string_to_metric_families

    return [one for family in text_string_to_metric_families(page) for one in family.samples]


def sum_samples(
    samples: Sequence[Sample],
    *,
    at: float,
    instances: Mapping[Key, int],
    cost: Mapping[Key, float],
) -> MetricsSample:
    """Sum the activators' samples by function."""
    requests: dict[Key, float] = defaultdict(float)
    in_flight: dict[Key, float] = defaultdict(float)
    buckets: dict[Key, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    starts: dict[Key, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for s in samples:
        key = s.labels.get("app", ""), s.labels.get("function", "")
        if s.name == "pilotlight_requests_total":
            requests[key] += s.value
        elif s.name == "pilotlight_instances" and s.labels.get("state") == "calls_in_flight":
            in_flight[key] += s.value
        elif s.name == "pilotlight_execution_seconds_bucket":
            buckets[key][float(s.labels["le"])] += s.value
        elif s.name == "pilotlight_cold_calls_total":
            starts[key][s.labels.get("start_kind", "")] += s.value
    return MetricsSample(
        at=at,
        requests=requests,
        buckets=buckets,
        in_flight=in_flight,
        instances=instances,
        cost=cost,
        starts=starts,
    )


def rows_between(before: MetricsSample | None, now: MetricsSample) -> list[FunctionRow]:
    """Activity between two samples, busiest function first; without `before`, totals and no
    rates."""
    keys = {*now.requests, *now.instances, *now.in_flight}
    rows = [_row(key, before, now) for key in keys if key[0]]
    return sorted(rows, key=lambda row: (-row.calls_per_s, -row.instances, row.app, row.function))


def _row(key: Key, before: MetricsSample | None, now: MetricsSample) -> FunctionRow:
    span_s = now.at - before.at if before else 0.0
    earlier = before.buckets.get(key, {}) if before else {}
    fresh = [
        (bound, count - earlier.get(bound, 0.0))
        for bound, count in now.buckets.get(key, {}).items()
    ]
    median, slow = (histogram_quantile(fresh, share) for share in (0.5, 0.99))

    def rate(of: Mapping[Key, float], was: Mapping[Key, float]) -> float:
        return max(0.0, of.get(key, 0.0) - was.get(key, 0.0)) / span_s if span_s else 0.0

    return FunctionRow(
        app=key[0],
        function=key[1],
        instances=now.instances.get(key, 0),
        in_flight=int(now.in_flight.get(key, 0)),
        calls_per_s=rate(now.requests, before.requests if before else {}),
        p50_ms=None if median is None else median * 1000,
        p99_ms=None if slow is None else slow * 1000,
        cost_per_h=rate(now.cost, before.cost if before else {}) * 3600,
        starts={kind: int(count) for kind, count in sorted(now.starts.get(key, {}).items())},
    )


def metrics_text(run: Path) -> str:
    """Concatenate the Prometheus pages of all local activators. Raises Unavailable."""
    import httpx

    hint = (
        "Run `top` on the platform's machine, as its user, with its --home; `pilotlight status` "
        "shows whether it runs."
    )
    sockets = sorted(run.glob("metrics-activator*.sock"))
    if not sockets:
        raise Unavailable(f"no activator serves its metrics in {run}", hint=hint)
    pages, refused = [], None
    for path in sockets:
        try:
            pages.append(_page(path))
        except httpx.HTTPError as e:  # the activator is restarting or has stopped
            refused = Unavailable(f"no metrics at {path}: {e}", hint=hint)
    if not pages and refused is not None:
        raise refused
    return "\n".join(pages)


def _page(path: Path) -> str:
    import httpx

    from pilotlight.core.transport.cookies import no_cookies

    transport = httpx.HTTPTransport(uds=str(path), verify=False)  # a Unix socket: there is no TLS
    with httpx.Client(transport=transport, timeout=_TIMEOUT_S, cookies=no_cookies()) as client:
        return client.get("http://local/metrics").raise_for_status().text


def _table(rows: Sequence[FunctionRow]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("function")
    for heading in ("instances", "in flight", "calls/s", "p50", "p99", "cost/h"):
        table.add_column(heading, justify="right")
    table.add_column("starts")
    for row in rows:
        times = [
            NO_VALUE if ms is None else format_milliseconds(ms) for ms in (row.p50_ms, row.p99_ms)
        ]
        cells: list[Any] = [
            row.instances,
            row.in_flight,
            f"{row.calls_per_s:.1f}",
            *times,
            format_money(f"{row.cost_per_h:.6f}"),
        ]
        cells.append(", ".join(f"{kind} {count}" for kind, count in row.starts.items()) or NO_VALUE)
        table.add_row(f"{row.app}/{row.function}", *map(str, cells))
    if not rows:
        table.add_row("no function is active")
    return table
