"""`pilotlight instance …` and `pilotlight shell`: manage running instances."""

from __future__ import annotations

import contextlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import match_id, parse_function
from pilotlight.cli.core.command import command, command_group
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.logs import Follow, OfCall, Since, Tail, print_logs
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, NotFound, PilotlightError

if TYPE_CHECKING:
    from pilotlight.client.client import Client

Id = Annotated[
    str, typer.Argument(metavar="INSTANCE", help="Instance id, or a unique prefix of it.")
]
_STATE_FILE = """d=/dev/shm; [ -w $d ] || d=${TMPDIR:-/tmp}
umask 077; mktemp "$d/pilotlight-shell.XXXXXX"
"""
"""Creates the state file: in memory where possible, since it has the instance's secrets too."""
_LINE = """_pilotlight_keep() {{ (umask 077; export -p >{file}); }}
set -a; . {file}
set -- "$1" "$OLDPWD"; cd "$PWD" || cd /; OLDPWD=$2
trap _pilotlight_keep EXIT
eval "$1"
"""
"""Runs the line $1 with the variables and the directory of the state file, and updates it. All
variables are exported, because POSIX shells can only write those in a form that they can read."""
_COLUMNS = {
    "id": "instance",
    "app": "app",
    "function": "function",
    "revision": "revision",
    "state": "state",
    "start_kind": "start",
    "weights": "weights",
    "in_flight": "in flight",
    "memory_bytes": "memory",
    "started_at": "started",
}


def register(root: typer.Typer) -> None:
    """Add the command group and `shell`."""
    group = command_group(
        root,
        "instance",
        "Manage running instances: list, read logs, run commands, stop.",
        {"list": list_, "logs": logs},
    )
    command(
        group, "exec", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
    )(exec_)
    command(group, "stop")(stop)
    command(root, "shell")(shell)


def list_(
    session: Session,
    app: Annotated[str | None, typer.Option(help="Only instances of this app.")] = None,
) -> None:
    """List running instances."""
    rows = session.request(lambda client: client.instances(app=app))
    session.show(
        rows,
        lambda: format_table(
            [with_label_columns(row) for row in rows],
            _COLUMNS,
            empty="No instance is running: all functions are scaled to zero.",
        ),
    )


def logs(
    session: Session,
    *,
    instance: Id,
    follow: Follow = False,
    since: Since = None,
    tail: Tail = None,
    call: OfCall = None,
) -> None:
    """Print the output of an instance, even if it has already stopped."""
    print_logs(session, instance=instance, call=call, since=since, tail=tail, follow=follow)


def exec_(session: Session, instance: Id, rest: list[str]) -> None:
    """Run a command in an instance's namespaces, as its user and with its environment.

    Write the command after `--`: `pilotlight instance exec ID -- ls -l`. The exit status is the
    command's.
    """
    if not rest:
        raise InvalidInput(
            "no command was given",
            hint="Write it after the instance id: pilotlight instance exec ID -- ls -l",
        )
    status = session.request(
        lambda client: run_in(session, client, find_instance(client, instance), rest)
    )
    raise typer.Exit(status)


def stop(
    session: Session,
    instance: Annotated[
        str | None,
        typer.Argument(metavar="[INSTANCE]", help="Instance id, or a unique prefix of it."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all instances.")] = False,
    app: Annotated[str | None, typer.Option(help="With --all: only instances of this app.")] = None,
) -> None:
    """Stop an instance after its calls have finished. The next call starts a new one."""
    if (instance is None) is not every:
        raise InvalidInput(
            "pass either an instance id or --all",
            hint="List instances with `pilotlight instance list`.",
        )
    with session.client() as client:
        found = (
            [find_instance(client, instance)]
            if instance is not None
            else [str(row["id"]) for row in client.instances(app=app)]
        )
        for one in found:
            client.stop_instance(one)
    if instance is not None:
        session.show({"instance": found[0], "stopped": True}, lambda: f"{found[0]} is stopped")
    else:
        session.show(
            {"instances": found, "stopped": True}, lambda: f"{len(found)} instances stopped"
        )


def shell(
    session: Session,
    function: Annotated[
        str, typer.Argument(metavar="APP/FUNCTION", help="Function whose instance to use.")
    ],
    command_text: Annotated[
        str | None,
        typer.Option("--command", "-c", help="Run this line and exit with its status."),
    ] = None,
) -> None:
    """Open a line-based shell in an instance; start an instance if none is running.

    Each line runs in its own `sh`, without a terminal or job control. Variables, which are
    exported, and the working directory are kept between lines; functions and options are not.
    """
    app, name = parse_function(function)
    with session.client() as client:
        instance = _any_instance(session, client, app, name)
        if command_text is not None:
            raise typer.Exit(run_in(session, client, instance, ["sh", "-c", command_text]))
        session.say(
            f"in {instance} of {function}; each line runs in its own sh, variables are kept; leave "
            f"with Ctrl-D or `exit`"
        )
        _read_lines(session, client, instance)


def run_in(session: Session, client: Client, instance: str, argv: list[str]) -> int:
    """Run `argv` in the instance, forward its output, and return its exit status."""
    from pilotlight.core.terminal import ForeignOutput

    status, outputs = 0, {"stdout": ForeignOutput(sys.stdout), "stderr": ForeignOutput(sys.stderr)}
    for part in client.exec_instance(instance, argv):
        if "exit_status" in part:
            status = int(part["exit_status"])
        elif session.is_json:
            session.show(part, str)
        else:
            name = "stderr" if part.get("stream") == "stderr" else "stdout"
            outputs[name].write(str(part.get("text", "")).encode())
    if session.is_json:
        session.show({"exit_status": status}, str)
    return status if 0 <= status < 256 else 1


def find_instance(client: Client, prefix: str) -> str:
    """The one running instance whose id begins with `prefix`. Raises NotFound or InvalidInput."""
    return match_id(
        client.instances(),
        prefix,
        missing=f"no instance {prefix!r} is running",
        hint="List instances with `pilotlight instance list`.",
    )


def with_label_columns(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its labels (app, function, …) as columns and its weights (`minilm dram`) as
    text."""
    out = {**(row.get("labels") or {}), **row}
    weights = ", ".join(f"{name} {tier}" for name, tier in (row.get("weights") or {}).items())
    return {**out, "revision": str(out.get("revision", "")).rpartition("@")[2], "weights": weights}


def _any_instance(session: Session, client: Client, app: str, function: str) -> str:
    for attempt in ("running", "started"):
        rows = [with_label_columns(row) for row in client.instances(app=app)]
        ready = [
            str(r["id"])
            for r in rows
            if r.get("function") == function and r.get("state", "READY") == "READY"
        ]
        if ready:
            return ready[0]
        if attempt == "running":
            session.say(f"starting an instance of {app}/{function}")
            client.warmup(app, function)
    raise NotFound(
        f"no instance of {app}/{function} started",
        hint=f"Read the app's log: `pilotlight logs {app}`.",
    )


def _read_lines(session: Session, client: Client, instance: str) -> None:
    file = _make_state_file(client, instance)
    script = _LINE.format(file=shlex.quote(file))
    try:
        while True:
            try:
                line = input("$ " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            if line in ("exit", "logout"):
                return
            if line:
                run_in(session, client, instance, ["sh", "-c", script, "sh", line])
    finally:
        with contextlib.suppress(PilotlightError):  # the instance may have ended, with the file
            list(client.exec_instance(instance, ["rm", "-f", file]))


def _make_state_file(client: Client, instance: str) -> str:
    """Create the file that keeps the state between lines, and return its path. Raises
    InvalidInput."""
    parts = list(client.exec_instance(instance, ["sh", "-c", _STATE_FILE]))
    text = "".join(str(part.get("text", "")) for part in parts).strip()
    if any(part.get("exit_status") for part in parts):
        raise InvalidInput(
            f"{instance} cannot keep variables between lines: {text}",
            hint="Run a single line with --command.",
        )
    return text
