"""`pilotlight trace …`: list and show the traces of calls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import command_group
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
"""Width of the waterfall in characters."""
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
"""Span attributes to print; --json prints all."""
_PLATFORM = ("pilotlight.", "faas.", "http.", "url.", "error.")


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "trace",
        "Show the traces of calls: which steps ran, and how long they took.",
        {"list": list_traces, "show": show},
    )


def list_traces(
    session: Session,
    *,
    target: Annotated[
        str | None,
        typer.Argument(metavar="[APP[/FUNCTION]]", help="Only traces of this app or function."),
    ] = None,
    kept_for: Annotated[
        str | None,
        typer.Option(
            help="Only traces kept for this reason: asked, drawn, error, cold, slow or shadow."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Only traces of this revision.")] = None,
    arm: Annotated[str | None, typer.Option(help="Only traces of this experiment arm.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only traces of failed calls.")] = False,
    slower_than: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="MS", help="Only traces of calls that took longer than MS milliseconds."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only traces since then: 24h or 7d ago, or a date.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of traces.")] = DEFAULT_LIMIT,
) -> None:
    """List traces, newest first.

    The platform keeps traces of failed, cold and slow calls, of calls whose callers request it, and
    a sample of the others.
    """
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
    found = session.request(lambda client: list(client.traces(limit=limit, **filters)))
    session.show(found, lambda: listing(found))


def listing(traces: list[dict[str, Any]]) -> Table | str:
    """Format traces as a table."""
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
        str,
        typer.Argument(
            metavar="ID", help="Trace id, or call id (the X-Request-Id of the response)."
        ),
    ],
) -> None:
    """Show a trace as a waterfall."""
    with session.client() as client:
        try:
            found = client.trace(trace)
        except NotFound as e:
            raise NotFound(
                str(e),
                hint="`pilotlight trace list` lists the kept traces; send a `traceparent` header "
                "to keep the trace of a call.",
            ) from e
    session.show(found, lambda: waterfall(found))


def waterfall(trace: Mapping[str, Any], *, width: int = WIDTH) -> Table | str:
    """Format a trace as rows: span name, position in the trace, duration, and details."""
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
    """Draw a span as a bar of at least one character."""
    begin = min(int(bar.begin * width), width - 1)
    length = max(1, min(round(bar.width * width), width - begin))
    return (
        "·" * begin
        + ("█" if not bar.span["error"] else "▒") * length
        + "·" * (width - begin - length)
    )


def describe_span(span: Mapping[str, Any]) -> str:
    """Describe a span: its error, the attributes set by user code, and where it ran."""
    attributes = span["attributes"]
    own = [f"{key}={value}" for key, value in attributes.items() if not key.startswith(_PLATFORM)]
    parts = [f"error: {span['error']}"] if span["error"] else []
    parts += own + [
        f"{key.rpartition('.')[2]}={attributes[key]}" for key in _SHOWN if attributes.get(key)
    ]
    return ", ".join(parts) or NO_VALUE
