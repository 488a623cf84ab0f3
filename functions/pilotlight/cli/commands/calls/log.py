"""`pilotlight log …`: query, download and delete prediction logs."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import count_files, parse_time
from pilotlight.cli.core.prediction_query import query_predictions
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from rich.table import Table

    from pilotlight.cli.core.prediction_query import QueryResult

DEFAULT_LIMIT = 1000
_Target = Annotated[str, typer.Argument(metavar="APP/FUNCTION", help="The function.")]
_Since = Annotated[str, typer.Option(help="Rows since then: 24h or 7d ago, or a date.")]
_Until = Annotated[
    str | None, typer.Option(help="Rows until then: 1h ago, or a date. Default: now.")
]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "log",
        "Query the prediction logs of functions, which have rows about a share of their calls.",
        {"query": query, "download": download, "delete": delete},
    )


def query(
    session: Session,
    *,
    target: _Target,
    sql: Annotated[
        str,
        typer.Argument(
            metavar="SQL", help='Such as "select avg(latency_ms) from predictions". Runs here.'
        ),
    ],
    since: _Since = "24h",
    until: _Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = DEFAULT_LIMIT,
) -> None:
    """Query a prediction log with SQL (DuckDB).

    Downloads the hours that the times touch into a temporary directory, and runs the statement on
    the view `predictions` in this process. Each read is in the audit log.
    """
    with tempfile.TemporaryDirectory(prefix="pilotlight-log-") as directory:
        found = download_files(session, target, Path(directory), since, until)
        result = query_predictions(found, Path(directory), sql, limit=limit)
    rows = [dict(zip(result.columns, row, strict=True)) for row in result.rows]
    session.show({"rows": rows, "more": result.is_cut}, lambda: _table(result))
    if result.is_cut:
        session.say(f"The first {limit} rows; pass --limit for more.")


def download(
    session: Session,
    *,
    target: _Target,
    directory: Annotated[Path, typer.Argument(help="Where to write them; created if needed.")],
    since: _Since = "24h",
    until: _Until = None,
) -> None:
    """Download the Parquet files of a prediction log, by hour, for other tools."""
    found = download_files(session, target, directory, since, until)
    session.show(
        {"files": [str(path) for path in found]},
        lambda: f"{count_files(len(found))} in {directory}",
    )


def delete(
    session: Session,
    *,
    target: _Target,
    until: Annotated[
        str | None,
        typer.Option(help="Only hours that begin before: 7d ago, or a date. Default: all."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete the prediction log of a function.

    Rows of the last minute, which are still with the activators, arrive later.
    """
    app, function = parse_target(target)
    end = None if until is None else parse_time(until, now=time.time())
    session.confirm(f"Delete the prediction log of {target}?", yes=yes)
    gone = session.request(lambda client: client.delete_predictions(app, function, until=end))
    session.show(gone, lambda: f"{gone['rows']} rows in {gone['files']} files deleted")


def download_files(
    session: Session, target: str, directory: Path, since: str, until: str | None
) -> list[Path]:
    """Download the files of a log for the hours that the times touch. Raises NotFound without
    any."""
    app, function = parse_target(target)
    now = time.time()
    begin = parse_time(since, now=now)
    end = None if until is None else parse_time(until, now=now)
    found = session.request(
        lambda client: client.download_predictions(app, function, directory, since=begin, until=end)
    )
    if not found:
        raise NotFound(
            f"{target} has no logged calls in this time",
            hint="A function logs calls if it is deployed with log=pilotlight.PredictionLog(…); "
            "rows arrive about a minute after the call.",
        )
    return found


def parse_target(target: str) -> tuple[str, str]:
    """Split APP/FUNCTION. Raises InvalidInput."""
    app, slash, function = target.partition("/")
    if not (app and slash and function) or "/" in function:
        raise InvalidInput(f"{target!r} is not APP/FUNCTION", parameter="target")
    return app, function


def _table(result: QueryResult) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in result.columns:
        table.add_column(Text(_printable(name)), overflow="fold")
    for row in result.rows:
        table.add_row(*(Text("" if value is None else _printable(str(value))) for value in row))
    return table


def _printable(text: str) -> str:
    """Replace control characters: callers of the function wrote what is shown here."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
