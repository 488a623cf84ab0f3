"""`pilotlight sandbox …`: list sandboxes, execute commands in them, and end them."""

from __future__ import annotations

import base64
import json
import sys
from typing import Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.client.client import Client
from pilotlight.client.resources.sandboxes import SandboxRequest
from pilotlight.spec.sandboxes import LABEL, WAIT_S

Id = Annotated[str, typer.Argument(metavar="ID", help="Id, as `list` shows it.")]
Command = Annotated[list[str], typer.Argument(metavar="COMMAND...", help="After `--`.")]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "sandbox",
        "Manage sandboxes: slots in which callers execute commands.",
        {"list": list_, "exec": execute, "terminate": terminate},
    )


def list_(session: Session) -> None:
    """List the sandboxes of the environment that have not ended."""
    rows = session.request(_running)
    session.show(rows, lambda: _table(rows))


def execute(session: Session, sandbox: Id, command: Command) -> None:
    """Execute a command in a sandbox, without standard input."""
    output = {"stdout": b"", "stderr": b""}

    def receive(piece: dict[str, Any]) -> None:
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            data = base64.b64decode(piece[name])
            output[name] += data
            if not session.is_json:
                stream.buffer.write(data)
                stream.flush()

    code = session.request(lambda client: _execute(client, sandbox, command, receive))
    if session.is_json:
        texts = {name: data.decode(errors="replace") for name, data in output.items()}
        session.show({"returncode": code, **texts}, lambda: "")
    raise typer.Exit(code)


def terminate(session: Session, sandbox: Id, yes: Yes = False) -> None:
    """End a sandbox: its processes are killed, its files are gone."""
    session.confirm(f"End sandbox {sandbox}, with all its processes and files?", yes=yes)
    session.request(lambda client: client.cancel(sandbox))
    session.show({"terminated": sandbox}, lambda: f"sandbox {sandbox} terminated")


def _running(client: Client) -> list[dict[str, Any]]:
    return [
        {
            "id": record.id,
            "app": record.app,
            "function": record.function,
            "state": record.state,
            "submitted_at": record.submitted_at,
        }
        for state in ("QUEUED", "RUNNING")
        for record in client.calls(state=state, limit=1000)
        if LABEL in record.labels
    ]


def _execute(client: Client, sandbox: str, command: list[str], receive: Any) -> int:
    body = json.dumps({"args": command}).encode()
    piece = client.ask_sandbox(
        SandboxRequest(sandbox=sandbox, method="POST", path="exec", content=body)
    )
    ends = {"stdout": 0, "stderr": 0}
    while True:
        receive(piece)
        if piece["is_ended"]:
            return int(piece["returncode"])
        for name in ends:
            ends[name] += len(base64.b64decode(piece[name]))
        query = {**{name: str(end) for name, end in ends.items()}, "wait_s": str(WAIT_S)}
        path = f"processes/{piece['process']}"
        piece = client.ask_sandbox(
            SandboxRequest(
                sandbox=sandbox, method="GET", path=path, query=query, is_repeatable=True
            )
        )


def _table(rows: list[dict[str, Any]]) -> Any:
    texts = [{**row, "submitted_at": format_time(row["submitted_at"])} for row in rows]
    columns = {
        "id": "sandbox",
        "app": "app",
        "function": "function",
        "state": "state",
        "submitted_at": "created",
    }
    return format_table(texts, columns, empty="no sandboxes: pilotlight.Sandbox.create(app=app)")
