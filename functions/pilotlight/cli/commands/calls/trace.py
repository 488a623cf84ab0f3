"""`pilotlight trace`: what happened inside calls, for traces that were kept."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import (
    NO_VALUE,
    format_milliseconds,
    format_table,
    format_time,
    parse_time,
)
from pilotlight.cli.core.session import Session
from pilotlight.core.tracing.trace_layout import SpanRow, layout_spans
from pilotlight.errors import NotFound

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_LIMIT = 30
WIDTH = 40
"""Characters of the whole time."""
_COLUMNS = {
    "at": "time",
    "call": "call",
    "function": "function",
    "revision": "revision",
    "start_kind": "start",
    "kept_for": "kept for",
    "status": "status",
    "took": "took",
}
_SHOWN = ("pilotlight.node", "pilotlight.arm", "faas.instance", "pilotlight.cost")
"""Attributes that stand behind a span; --json has all of them."""
_PLATFORM = ("pilotlight.", "faas.", "http.", "url.", "error.")


def register(root: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        help="What happened inside calls: traces that were kept.", no_args_is_help=True
    )
    command(group, "list")(list_traces)
    command(group, "show")(show)
    root.add_typer(group, name="trace")


def list_traces(
    session: Session,
    *,
    target: Annotated[
        str | None, typer.Argument(metavar="[APP[/FUNCTION]]", help="Of this app, or function.")
    ] = None,
    kept_for: Annotated[
        str | None, typer.Option(help="asked, drawn, error, cold, slow or shadow.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Of this revision.")] = None,
    arm: Annotated[str | None, typer.Option(help="Of this arm of an experiment.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Of calls that failed.")] = False,
    slower_than: Annotated[
        float | None,
        typer.Option(min=0, metavar="MS", help="Of calls that took longer than so many ms."),
    ] = None,
    since: Annotated[str | None, typer.Option(help="From: 24h, 7d, or a date.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = DEFAULT_LIMIT,
) -> None:
    """Traces, newest first. Kept are failed, cold and slow calls, those whose callers ask, and some
    of the others."""
    app, _, function = (target or "").partition("/")
    filters: dict[str, Any] = {
        "app": app or None,
        "function": function or None,
        "kept_for": kept_for,
        "revision": revision,
        "arm": arm,
        "failed": True if failed else None,
        "min_ms": slower_than,
    }
    if since is not None:
        filters["since"] = parse_time(since, now=time.time())
    with session.client() as client:
        found = list(client.traces(limit=limit, **filters))
    session.show(found, lambda: listing(found))


def listing(traces: list[dict[str, Any]]) -> Table | str:
    """Traces as a table."""
    rows = [
        {
            **one,
            "at": format_time(one["at"]),
            "function": f"{one['app']}/{one['function']}",
            "took": format_milliseconds(one["duration_ms"]),
        }
        for one in traces
    ]
    return format_table(rows, _COLUMNS, empty="No traces.")


def show(
    session: Session,
    *,
    trace: Annotated[
        str, typer.Argument(metavar="ID", help="A trace, or a call (X-Request-Id of its answer).")
    ],
) -> None:
    """One trace as a waterfall."""
    with session.client() as client:
        try:
            found = client.trace(trace)
        except NotFound as e:
            raise NotFound(
                str(e),
                hint="`pilotlight trace list` shows those that were kept; a `traceparent` header "
                "asks for one.",
            ) from e
    session.show(found, lambda: waterfall(found))


def waterfall(trace: Mapping[str, Any], *, width: int = WIDTH) -> Table | str:
    """A trace as rows: name, its part of the whole time, how long it took, and what is worth
    telling."""
    rows = [
        {
            "span": "  " * bar.depth + bar.span["name"],
            "when": draw_bar(bar, width),
            "took": format_milliseconds(bar.span["ms"]),
            "what": describe_span(bar.span),
        }
        for bar in layout_spans(trace)
    ]
    heading = f"{trace['id']}  {format_time(trace['at'])}"
    return format_table(
        rows,
        {
            "span": heading,
            "when": format_milliseconds(trace["duration_ms"]),
            "took": "took",
            "what": "what",
        },
        empty="No spans.",
    )


def draw_bar(bar: SpanRow, width: int) -> str:
    """A bar of characters: what happened is never invisible."""
    begin = min(int(bar.begin * width), width - 1)
    length = max(1, min(round(bar.width * width), width - begin))
    return (
        "·" * begin
        + ("█" if not bar.span["error"] else "▒") * length
        + "·" * (width - begin - length)
    )


def describe_span(span: Mapping[str, Any]) -> str:
    """Its error, what the user's own code said of it, and where it ran."""
    attributes = span["attributes"]
    own = [f"{key}={value}" for key, value in attributes.items() if not key.startswith(_PLATFORM)]
    parts = [f"error: {span['error']}"] if span["error"] else []
    parts += own + [
        f"{key.rpartition('.')[2]}={attributes[key]}" for key in _SHOWN if attributes.get(key)
    ]
    return ", ".join(parts) or NO_VALUE
