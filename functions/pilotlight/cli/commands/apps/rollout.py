"""`pilotlight rollout …`: show, follow and control rollouts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_milliseconds, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import NotFound

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

Which = Annotated[
    str,
    typer.Argument(
        metavar="ROLLOUT", help="Rollout id, or APP/FUNCTION for the function's newest rollout."
    ),
]
LOOK_S = 1.0
"""Polling interval; the platform evaluates rollouts every second."""
DONE = "done"
_ACTIVE = ("running", "paused")
_COLUMNS = {
    "id": "id",
    "name": "function",
    "candidate": "candidate",
    "stable": "stable",
    "state": "state",
    "share": "traffic",
    "created_at": "started",
    "reason": "reason",
}
_GATE_COLUMNS = {
    "metric": "gate",
    "candidate": "candidate",
    "stable": "stable",
    "limit": "limit",
    "samples": "samples",
    "outcome": "outcome",
}
_COLOURS = {
    "pass": "green",
    "fail": "red",
    "unclear": "yellow",
    "no_data": "dim",
    "running": "cyan",
    "paused": "yellow",
    "done": "green",
    "rolled_back": "red",
    "halted": "red",
    "aborted": "red",
    "superseded": "dim",
    "advance": "green",
    "hold": "yellow",
    "rollback": "red",
    "halt": "red",
}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "rollout",
        "Show and control rollouts, which shift traffic to a new revision step by step.",
        {
            "list": list_,
            "show": show,
            "watch": watch,
            "pause": pause,
            "resume": resume,
            "promote": promote,
            "abort": abort,
        },
    )


def list_(
    session: Session,
    app: Annotated[str | None, typer.Option(help="Only rollouts of this app.")] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Only rollouts in this state: active, running, paused, done, rolled_back, halted, "
            "aborted or superseded."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of rollouts.")] = 50,
) -> None:
    """List rollouts, newest first."""
    rows = session.request(lambda client: client.rollouts(app=app, state=state, limit=limit))
    session.show(
        rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty="No rollouts.")
    )


def show(
    session: Session,
    rollout: Which,
    decisions: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of decisions.")
    ] = 20,
) -> None:
    """Show a rollout: its steps, the candidate compared with stable, and the decisions with their
    reasons."""
    body = session.request(lambda client: client.rollout(_id(client, rollout), limit=decisions))
    session.show(body, lambda: render(body))


def watch(session: Session, rollout: Which) -> None:
    """Follow a rollout to its end. The exit status is 0 if the candidate took over, else 1."""
    with session.client() as client:
        found = _id(client, rollout)
        body = client.rollout(found, limit=8)
        if session.is_json or not sys.stdout.isatty():
            body = _follow_in_lines(session, client, body)
        else:
            body = _follow_live(session, client, body)
    if body["state"] != DONE:
        raise typer.Exit(1)


def pause(session: Session, rollout: Which) -> None:
    """Pause a rollout at its current step. A failing gate still rolls it back."""
    _act(session, rollout, "pause_rollout")


def resume(session: Session, rollout: Which) -> None:
    """Resume a paused rollout."""
    _act(session, rollout, "resume_rollout")


def promote(session: Session, rollout: Which, yes: Yes = False) -> None:
    """Give the candidate all traffic now, regardless of its gates."""
    session.confirm(f"Promote {rollout} now, without waiting for its gates?", yes=yes)
    _act(session, rollout, "promote_rollout")


def abort(session: Session, rollout: Which, yes: Yes = False) -> None:
    """Return all traffic to the stable revision now."""
    session.confirm(f"Abort {rollout}? All traffic returns to stable.", yes=yes)
    _act(session, rollout, "abort_rollout")


# -- following -------------------------------------------------------------------------------------
def _follow_live(session: Session, client: Client, body: dict[str, Any]) -> dict[str, Any]:
    from rich.live import Live

    with Live(render(body), console=session.console(), auto_refresh=False) as live:
        while body["state"] in _ACTIVE:
            time.sleep(LOOK_S)
            body = client.rollout(body["id"], limit=8)
            live.update(render(body), refresh=True)
    return body


def _follow_in_lines(session: Session, client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Print a line for each decision: without a terminal, or with --json."""
    seen = 0
    while True:
        for decision in reversed(body["decisions"]):
            if decision["number"] > seen:
                seen = decision["number"]
                _print_decision(session, decision)
        if body["state"] not in _ACTIVE:
            return body
        time.sleep(LOOK_S)
        body = client.rollout(body["id"], limit=50)


def _print_decision(session: Session, decision: Mapping[str, Any]) -> None:
    if session.is_json:
        print(json.dumps(decision, ensure_ascii=False), flush=True)
        return
    action = "" if decision["action"] == "none" else decision["action"]
    reasons = "; ".join(decision["reasons"])
    print(
        f"{format_time(decision['at'])}  {decision['verdict']:<8} {action:<16} {reasons}",
        flush=True,
    )


# -- rendering -------------------------------------------------------------------------------------
def render(body: Mapping[str, Any]) -> RenderableType:
    """Render a rollout with its steps, gates and decisions."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_headline(body), _steps(body)]
    gates: list[Mapping[str, Any]] = (body["now"] or {}).get("gates") or next(
        (d["gates"] for d in body["decisions"] if d["gates"]), []
    )
    if gates:
        parts += ["", _gates(gates)]
    if body["now"]:
        parts.append(
            Text.assemble(
                "\nnow   ",
                (body["now"]["verdict"], _COLOURS[body["now"]["verdict"]]),
                f": {body['now']['reasons'][0]}",
            )
        )
    elif body["reason"]:
        parts.append(Text(f"\n{body['reason']}"))
    parts += ["", *(_decision(decision) for decision in body["decisions"])]
    return Group(*parts)


def _headline(body: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    state = (body["state"].replace("_", " "), f"bold {_COLOURS[body['state']]}")
    name = f"{body['app']}/{body['function']}"
    return Text.assemble(
        (name, "bold"),
        f"  {body['candidate']} against {body['stable']}  ",
        state,
        (f"  {body['id']}", "dim"),
    )


def _steps(body: Mapping[str, Any]) -> RenderableType:
    """Render `5 % ── 25 % ── 50 % ── 100 %` with the current step and its elapsed time."""
    from rich.text import Text

    out = Text()
    is_over = body["state"] not in _ACTIVE
    for number, percent in enumerate(body["steps"]):
        is_passed = number < body["step"] or body["state"] == DONE
        style = (
            "green"
            if is_passed
            else "bold cyan"
            if number == body["step"] and not is_over
            else "dim"
        )
        out.append(f"{' ── ' if number else ''}", "green" if is_passed else "dim")
        out.append(f"{percent} %", style)
    if not is_over:
        out.append(f"   {body['elapsed_s']:.0f} s of {body['every_s']:.0f} s in this step")
    return out


def _gates(gates: list[Mapping[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, header_style="bold", pad_edge=False)
    for heading in _GATE_COLUMNS.values():
        out.add_column(heading, justify="left" if heading in ("gate", "outcome") else "right")
    for gate in gates:
        numbers = [_format(gate[key], gate["unit"]) for key in ("candidate", "stable", "limit")]
        finds = Text(gate["outcome"].replace("_", " "), _COLOURS[gate["outcome"]])
        out.add_row(Text(gate["metric"]), *numbers, str(gate["samples"]), finds)
    return out


def _decision(decision: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    verdict = (f"{decision['verdict']:<9}", _COLOURS[decision["verdict"]])
    action = "" if decision["action"] == "none" else f"{decision['action']}: "
    return Text.assemble(
        (f"{format_time(decision['at'])}  ", "dim"), verdict, action, "; ".join(decision["reasons"])
    )


def _format(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    match unit:
        case "share":
            return f"{value:.2%}"
        case "ms":
            return format_milliseconds(value)
        case "money":
            return f"{value:.3g}"
    return f"{value:.4g}"


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "name": f"{row['app']}/{row['function']}", "share": f"{row['weight']} %"}


def _id(client: Client, which: str) -> str:
    """The id of a rollout that is named by id or by its function. Raises NotFound."""
    app, slash, function = which.partition("/")
    if not slash:
        return which
    found = client.rollouts(app=app, function=function, limit=1)
    if not found:
        hint = f"Start one for {app}: pilotlight deploy app.py --canary 5,25,50,100."
        raise NotFound(f"{which} has never had a rollout", hint=hint)
    return str(found[0]["id"])


def _act(session: Session, rollout: str, method: str) -> None:
    body = session.request(lambda client: getattr(client, method)(_id(client, rollout)))
    sentence = (
        f"{body['id']} is {body['state'].replace('_', ' ')}: {body['candidate']} has "
        f"{body['weight']} % of {body['app']}/{body['function']}"
    )
    session.show(body, lambda: sentence)
