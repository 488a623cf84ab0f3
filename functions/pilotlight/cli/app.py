"""`pilotlight app …`: what is deployed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands import Yes, command
from pilotlight.cli.logs import Follow, OfCall, OfInstance, Since, Tail, print_logs
from pilotlight.cli.output import table
from pilotlight.cli.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

Name = Annotated[str, typer.Argument(metavar="APP", help="Name of the app.")]


def register(root: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Deployed apps.", no_args_is_help=True)
    verbs: dict[str, Callable[..., None]] = {"list": list_, "show": show, "logs": logs, "history": history, "stop": stop, "delete": delete}
    for name, function in verbs.items():
        command(group, name)(function)
    root.add_typer(group, name="app")


def list_(session: Session) -> None:
    """Apps of this environment."""
    with session.client() as client:
        rows = client.apps()
    columns = {"app": "app", "name": "app", "state": "state", "version": "version", "functions": "functions", "deployed_at": "deployed"}
    session.show(rows, lambda: table(flattened(rows), columns, empty="No apps yet: deploy one with `pilotlight deploy FILE`."))


def show(session: Session, app: Name) -> None:
    """Functions, revisions and traffic of one app."""
    with session.client() as client:
        body = client.app(app)
    session.show(body, lambda: _details(body))


def logs(
    session: Session,
    *,
    app: Annotated[str, typer.Argument(metavar="APP[/FUNCTION]", help="App, or one of its functions.")],
    follow: Follow = False,
    since: Since = None,
    tail: Tail = None,
    call: OfCall = None,
    instance: OfInstance = None,
) -> None:
    """What its instances printed; stopped instances included."""
    name, _, function = app.partition("/")
    print_logs(session, app=name, function=function or None, instance=instance, call=call, since=since, tail=tail, follow=follow)


def history(session: Session, app: Name) -> None:
    """Deployments, newest first."""
    with session.client() as client:
        rows = client.history(app)
    columns = {"version": "version", "deployed_at": "deployed", "created_at": "deployed", "by": "by", "key": "by", "functions": "functions"}
    session.show(rows, lambda: table(flattened(rows), {**columns, "message": "message"}, empty=f"{app} was never deployed."))


def stop(session: Session, app: Name, yes: Yes = False) -> None:
    """Stop its instances and answer its calls with 503 until it is deployed again."""
    session.confirm(f"Stop {app}? Its calls are refused until it is deployed again.", yes=yes)
    with session.client() as client:
        client.stop_app(app)
    session.show({"app": app, "stopped": True}, lambda: f"{app} is stopped; `pilotlight deploy` brings it back")


def delete(session: Session, app: Name, yes: Yes = False) -> None:
    """Remove an app and its revisions; its usage records stay."""
    session.confirm(f"Delete {app} with all its revisions?", yes=yes)
    with session.client() as client:
        client.delete_app(app)
    session.show({"app": app, "deleted": True}, lambda: f"{app} is deleted")


def flattened(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose nested functions are shown by their names (and revisions, where they say so)."""
    return [{**row, "functions": [_label(f) for f in row["functions"]]} if isinstance(row.get("functions"), list) else row for row in rows]


def _label(function: Any) -> str:
    if not isinstance(function, dict):
        return str(function)
    name = str(function.get("function") or function.get("name") or "?")
    return f"{name}@{function['revision']}" if isinstance(function.get("revision"), str) else name


def _details(body: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    functions = [f for f in body.get("functions") or [] if isinstance(f, dict)]
    facts = [{"what": key, "value": value} for key, value in body.items() if key != "functions"]
    columns = {"function": "function", "name": "function", "kind": "kind", "revision": "revision", "traffic": "traffic", "state": "state"}
    return Group(table(facts, {"what": "", "value": ""}, empty=""), "", table(functions, columns, empty="It has no functions."))
