"""`pilotlight batch …`: run files of requests, and fetch their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import NO_VALUE, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.client.client import Client
from pilotlight.errors import InvalidInput

POLL_S: Final = 1.0
FINAL: Final = frozenset({"completed", "failed", "expired", "cancelled"})
BatchId = Annotated[str, typer.Argument(metavar="ID", help="Id, as `list` shows it.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write the answers to this file.")
]
Errors = Annotated[
    Path | None, typer.Option(help="Write the lines that failed or were not run to this file.")
]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "batch",
        "Run files of requests at low priority, and fetch their answers.",
        {"create": create, "list": list_, "show": show, "cancel": cancel, "wait": wait},
    )


def create(
    session: Session,
    *,
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help='JSON lines: {"custom_id", "method": "POST", "url", "body"}.',
        ),
    ],
    endpoint: Annotated[
        str,
        typer.Option(
            help="/v1/chat/completions, /v1/completions, /v1/embeddings, or "
            "/v1/functions/APP/FUNCTION:invoke: the url of each line."
        ),
    ],
    window: Annotated[str, typer.Option(help="Time to run in: hours or days, up to 7d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Kept with the batch.")
    ] = None,
    customer: Annotated[
        str | None, typer.Option(metavar="ID", help="Customer for which the lines are run.")
    ] = None,
) -> None:
    """Upload a file and run its lines."""
    pairs = _pairs(metadata or [])

    def run(client: Client) -> dict[str, Any]:
        uploaded = client.upload_batch_file(file)
        return client.create_batch(
            uploaded["id"],
            endpoint,
            completion_window=window,
            metadata=pairs,
            customer=customer,
        )

    batch = session.request(run)
    session.show(batch, lambda: str(batch["id"]))
    session.say(f"Wait for its end: pilotlight batch wait {batch['id']}")


def list_(
    session: Session,
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most so many.")] = 20,
    after: Annotated[str | None, typer.Option(help="Older than this batch.")] = None,
) -> None:
    """List the batches of the environment, newest first."""
    rows = session.request(lambda client: client.batches(after=after, limit=limit))
    session.show(rows, lambda: _table(rows))


def show(session: Session, batch: BatchId) -> None:
    """Show a batch: its progress, and what is wrong with its file."""
    found = session.request(lambda client: client.batch(batch))
    session.show(found, lambda: _described(found))


def cancel(session: Session, batch: BatchId, yes: Yes = False) -> None:
    """Cancel a batch. Answers so far are kept; other lines are not run."""
    session.confirm(f"Cancel {batch}? Lines that have no answer yet end without one.", yes=yes)
    found = session.request(lambda client: client.cancel_batch(batch))
    session.show(found, lambda: f"{found['id']} {found['status']}")


def wait(session: Session, *, batch: BatchId, output: Output = None, errors: Errors = None) -> None:
    """Wait until a batch has ended, and fetch its files. Exit status 1 unless every line was
    answered."""
    with session.client() as client:
        found = client.batch(batch)
        said = ""
        while found["status"] not in FINAL:
            if (progress := _progress(found)) != said:
                session.say(said := progress)
            time.sleep(POLL_S)
            found = client.batch(batch)
        for path, file_id in ((output, "output_file_id"), (errors, "error_file_id")):
            if path is not None:
                with path.open("wb") as target:
                    if found[file_id] is not None:
                        client.download_batch_file(found[file_id], target)
    session.show(found, lambda: _described(found))
    if found["status"] != "completed" or found["request_counts"]["failed"]:
        raise typer.Exit(1)


def _pairs(given: list[str]) -> dict[str, str]:
    pairs = dict(one.partition("=")[::2] for one in given)
    if "" in pairs or any("=" not in one for one in given):
        raise InvalidInput("--metadata: write NAME=VALUE", parameter="metadata")
    return pairs


def _progress(batch: Mapping[str, Any]) -> str:
    counts = batch["request_counts"]
    done = counts["completed"] + counts["failed"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"{batch['status']}: {done} of {counts['total']}{failed}"


def _table(batches: list[dict[str, Any]]) -> Any:
    rows = [
        {**one, "created": format_time(one["created_at"]), "progress": _progress(one)}
        for one in batches
    ]
    columns = {"id": "id", "created": "created", "endpoint": "endpoint", "progress": "progress"}
    return format_table(rows, columns, empty="There is no batch: pilotlight batch create FILE")


def _described(batch: Mapping[str, Any]) -> str:
    lines = [
        f"{batch['id']}  {_progress(batch)}",
        f"endpoint  {batch['endpoint']}",
        f"input     {batch['input_file_id']}",
        f"output    {batch['output_file_id'] or NO_VALUE}",
        f"errors    {batch['error_file_id'] or NO_VALUE}",
        f"expires   {format_time(batch['expires_at'])}",
    ]
    for one in (batch["errors"] or {"data": ()})["data"]:
        place = f"line {one['line']}: " if one["line"] is not None else ""
        lines.append(f"{place}{one['code']}: {one['message']}")
    return "\n".join(lines)
