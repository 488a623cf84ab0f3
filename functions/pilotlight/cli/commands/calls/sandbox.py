"""`pilotlight sandbox …`: list sandboxes, execute commands in them, and end them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.client.client import Client
from pilotlight.client.resources.sandboxes import SandboxRequest
from pilotlight.client.sandbox_answers import ProcessOutput, process_output
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
    from pilotlight.core.terminal import ForeignOutput

    output = {"stdout": bytearray(), "stderr": bytearray()}
    streams = {"stdout": ForeignOutput(sys.stdout), "stderr": ForeignOutput(sys.stderr)}

    def receive(piece: ProcessOutput) -> None:
        for name, data in (("stdout", piece.stdout), ("stderr", piece.stderr)):
            if session.is_json:
                output[name] += data
            else:
                streams[name].write(data)

    code = session.request(lambda client: _execute(client, sandbox, command, receive))
    if session.is_json:
        texts = {name: data.decode(errors="replace") for name, data in output.items()}
        session.show({"returncode": code, **texts}, lambda: "")
    raise typer.Exit(code if code < 256 else 1)


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


def _execute(
    client: Client, sandbox: str, command: list[str], receive: Callable[[ProcessOutput], None]
) -> int:
    body = json.dumps({"args": command}).encode()
    request = SandboxRequest(sandbox=sandbox, method="POST", path="exec", content=body)
    stdout = stderr = 0
    while True:
        piece = process_output(client.ask_sandbox(request))
        receive(piece)
        if piece.is_ended:
            return piece.returncode or 0
        stdout, stderr = stdout + len(piece.stdout), stderr + len(piece.stderr)
        request = SandboxRequest(
            sandbox=sandbox,
            method="GET",
            path=f"processes/{piece.process}",
            query={"stdout": str(stdout), "stderr": str(stderr), "wait_s": str(WAIT_S)},
            is_repeatable=True,
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
