"""Chart data: the page shows it as a table, and its script draws it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from markupsafe import Markup

from pilotlight.controller.analytics.environment_usage import KINDS, EnvironmentUsage, stacked
from pilotlight.controller.analytics.latency_histograms import HOURS, Histogram
from pilotlight.controller.analytics.rollup_queries import UsageSums
from pilotlight.controller.analytics.time_range import HOUR_S, TimeRange
from pilotlight.controller.dashboard import formatting
from pilotlight.spec.pricing import UNPAID_KINDS

MOST_SERIES = 7
Number = Decimal | float | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One name's values. `colour` is a custom property of the style sheet: `--c1`, `--k-CALL`, …"""

    name: str
    colour: str
    values: Sequence[Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over the same units of time.

    Attributes:
        id: of the element on the page.
        alt_text: text alternative: a sentence with the main numbers.
        shape: `bars` (stacked) or `lines`.
        unit: a currency, `calls`, `tokens`, `times`, or `ms`.
        labels: of each unit, as shown in the table.
        moments: the start of each unit, as ISO 8601.
    """

    id: str
    title: str
    alt_text: str
    shape: str
    unit: str
    labels: Sequence[str]
    moments: Sequence[str]
    series: Sequence[Series]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, class of its swatch) of each series."""
        return [(one.name, one.colour.removeprefix("--")) for one in self.series]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(value for one in self.series for value in one.values)

    def shown(self, value: Number) -> str:
        """Format a value for display."""
        if value is None:
            return formatting.DASH
        if self.unit in ("calls", "tokens"):
            return formatting.count(float(value))
        if self.unit == "times":
            return f"{float(value):.2f} {formatting.TIMES}"
        return (
            formatting.milliseconds(float(value))
            if self.unit == "ms"
            else formatting.money(Decimal(value), self.unit)
        )

    def rows(self) -> Iterable[tuple[str, list[str]]]:
        """Yield the table's rows: each unit with a value, newest first."""
        for index in reversed(range(len(self.labels))):
            if any(one.values[index] for one in self.series):
                yield self.labels[index], [self.shown(one.values[index]) for one in self.series]

    def data(self) -> Markup:
        """Return JSON for the page's script, safe inside an element: `<`, `>` and `&` are
        escaped."""
        series = [
            {"name": one.name, "colour": one.colour, "values": [_plain(v) for v in one.values]}
            for one in self.series
        ]
        body = {
            "shape": self.shape,
            "unit": self.unit,
            "moments": list(self.moments),
            "series": series,
        }
        text = json.dumps(body, separators=(",", ":"))
        return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _plain(value: Number) -> float | int | None:
    return float(value) if isinstance(value, Decimal) else value


def _over(span: TimeRange, shape: str, unit: str) -> dict[str, Any]:
    pattern = "%d %b %H:00" if span.unit == "hour" else "%d %b"
    moments = span.starts()
    return {
        "shape": shape,
        "unit": unit,
        "labels": [f"{m:{pattern}}" for m in moments],
        "moments": [f"{m:%Y-%m-%dT%H:%M}" for m in moments],
    }


def spend_by_function(usage: EnvironmentUsage) -> Chart:
    """Cost per unit of the most expensive functions."""
    found = stacked(usage, lambda cell: cell.name, most=MOST_SERIES)
    return Chart(
        id="spend-by-function",
        title="Spend by function",
        alt_text=_spend_text(usage, found, lambda name: name),
        series=_palette(found),
        **_over(usage.span, "bars", usage.currency),
    )


def spend_by_kind(usage: EnvironmentUsage) -> Chart:
    """Cost per unit by kind of record."""
    paid = replace(usage, cells=tuple(c for c in usage.cells if c.kind not in UNPAID_KINDS))
    found = stacked(paid, lambda cell: cell.kind, most=len(KINDS))
    ordered = [name for name in KINDS if name in found] + [
        name for name in found if name not in KINDS
    ]
    series = [
        Series(
            name=formatting.kind(name), colour=f"--k-{name}", values=[s.cost for s in found[name]]
        )
        for name in ordered
    ]
    return Chart(
        id="spend-by-kind",
        title="Spend by kind",
        alt_text=_spend_text(usage, found, formatting.kind),
        series=series,
        **_over(usage.span, "bars", usage.currency),
    )


def _spend_text(
    usage: EnvironmentUsage, found: Mapping[str, Sequence[UsageSums]], name_of: Any
) -> str:
    parts = {name: sum((s.cost for s in values), Decimal(0)) for name, values in found.items()}
    whole = formatting.money(usage.total.cost, usage.currency)
    most = ", ".join(
        f"{name_of(name)} {formatting.money(cost, usage.currency)}"
        for name, cost in list(parts.items())[:3]
    )
    return f"{whole} in {usage.span.words}" + (f": {most}" if most else "")


def _palette(found: Mapping[str, Sequence[UsageSums]]) -> list[Series]:
    return [
        Series(
            name=name,
            colour="--other" if name == "other" else f"--c{index}",
            values=[s.cost for s in values],
        )
        for index, (name, values) in enumerate(found.items(), 1)
    ]


def requests(usage: EnvironmentUsage) -> Chart:
    """Successful and failed calls per unit."""
    good, bad = ([0] * usage.span.count for _ in range(2))
    for cell in usage.cells:
        if cell.kind == "CALL":
            index = cell.unit - usage.span.first
            good[index] += cell.sums.records - cell.sums.errors
            bad[index] += cell.sums.errors
    alt_text = (
        f"{formatting.count(sum(good) + sum(bad))} calls in {usage.span.words}, "
        f"{formatting.count(sum(bad))} of them failed"
    )
    series = [
        Series(name="Answered", colour="--good", values=good),
        Series(name="Failed", colour="--bad", values=bad),
    ]
    return Chart(
        id="requests",
        title="Requests",
        alt_text=alt_text,
        series=series,
        **_over(usage.span, "bars", "calls"),
    )


def latency(hours: Mapping[int, Histogram], now: float) -> Chart:
    """Latency percentiles per hour over the last day."""
    last = int(now // HOUR_S)
    span = TimeRange.of("24h", now)
    ordered = [hours.get(hour, Histogram()) for hour in range(last - HOURS + 1, last + 1)]
    series = [
        Series(name=f"p{percent}", colour=colour, values=[h.percentile(percent) for h in ordered])
        for percent, colour in ((50, "--c2"), (95, "--c3"), (99, "--c1"))
    ]
    newest = next((h for h in reversed(ordered) if h.calls), Histogram())
    alt_text = (
        f"the last hour with calls: median {formatting.milliseconds(newest.percentile(50))}, p99 "
        f"{formatting.milliseconds(newest.percentile(99))}"
    )
    return Chart(
        id="latency",
        title="Latency, last 24 hours",
        alt_text=alt_text,
        series=series,
        **_over(span, "lines", "ms"),
    )
