"""`pilotlight app …`: manage deployed apps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.apps import app_revisions
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import format_bytes, format_table, format_time
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType

Name = Annotated[str, typer.Argument(metavar="APP", help="Name of the app.")]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "app",
        "Manage deployed apps and their revisions.",
        {
            "list": list_,
            "show": show,
            "history": history,
            **app_revisions.VERBS,
            "stop": stop,
            "prune": prune,
            "delete": delete,
        },
    )


def list_(session: Session) -> None:
    """List the apps of the environment."""
    rows = session.request(lambda client: client.apps())
    columns = {
        "name": "app",
        "version": "version",
        "functions": "functions",
        "stopped": "stopped",
        "updated_at": "changed",
    }
    session.show(
        rows,
        lambda: format_table(
            rows, columns, empty="No apps yet: deploy one with `pilotlight deploy FILE`."
        ),
    )


def show(session: Session, app: Name) -> None:
    """Show an app's functions, revisions and traffic."""
    body = session.request(lambda client: client.app(app))
    session.show(body, lambda: _details(body))


def history(session: Session, app: Name) -> None:
    """List an app's deployments, newest first."""
    rows = session.request(lambda client: client.history(app))
    columns = {
        "version": "version",
        "action": "action",
        "created_at": "when",
        "created_by": "by",
        "message": "message",
        "functions": "functions",
    }
    session.show(
        rows, lambda: format_table(flattened(rows), columns, empty=f"{app} was never deployed.")
    )


def stop(session: Session, app: Name, yes: Yes = False) -> None:
    """Stop an app's instances and answer its calls with 503 until it is deployed again."""
    session.confirm(f"Stop {app}? Its calls are refused until it is deployed again.", yes=yes)
    session.request(lambda client: client.stop_app(app))
    session.show(
        {"app": app, "stopped": True},
        lambda: f"{app} is stopped; deploy it again to start it",
    )


def prune(
    session: Session,
    app: Name,
    keep: Annotated[
        int, typer.Option(min=1, help="Number of newest revisions of each function to keep.")
    ] = 10,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print how many revisions would be pruned; change nothing."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Prune old revisions and free the bundles and weights that only they use.

    A pruned revision can serve again only after a new deploy. Revisions with traffic, a tag, an
    alias or a pin, and those in a rollout or an experiment, are kept.
    """
    if not dry_run:
        session.confirm(
            f"Prune all but the newest {keep} revisions of each function of {app}?", yes=yes
        )
    done = session.request(lambda client: client.prune_app(app, keep=keep, dry_run=dry_run))
    verb = "would be pruned" if dry_run else f"pruned, {format_bytes(done['freed_bytes'])} freed"
    session.show(done, lambda: f"{done['revisions']} revisions of {app} {verb}")


def delete(session: Session, app: Name, yes: Yes = False) -> None:
    """Delete an app and its revisions. Its usage records are kept."""
    session.confirm(f"Delete {app} with all its revisions?", yes=yes)
    session.request(lambda client: client.delete_app(app))
    session.show({"app": app, "deleted": True}, lambda: f"{app} is deleted")


def flattened(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Format the functions of history rows as `name@revision`."""
    return [
        {**row, "functions": [f"{f['function']}@{f['revision']}" for f in row["functions"]]}
        for row in rows
    ]


def function_rows(body: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each method of an app's functions: its address, its revision or traffic split,
    its resources."""
    rows = []
    for function in body["functions"]:
        spec = function["spec"]
        traffic = [
            t["revision"] if t["weight"] == 100 else f"{t['revision']} {t['weight']} %"
            for t in function["traffic"]
        ]
        for method in spec["methods"]:
            name = f"{function['name']}.{method['name']}" if method["name"] else function["name"]
            scaling, resources = spec["scaling"], spec["resources"]
            rows.append(
                {
                    "address": f"{body['name']}/{name}",
                    "kind": spec["kind"],
                    "traffic": traffic,
                    "cpu": resources["cpu"],
                    "memory_bytes": resources["memory_bytes"],
                    "instances": _instances(scaling),
                    "at_once": scaling["max_inputs"],
                    "snapshots": None
                    if function.get("snapshots", True) and spec.get("snapshot", True)
                    else "off",
                    "cluster": (function.get("cluster") or {}).get("phase"),
                }
            )
    return rows


def _instances(scaling: dict[str, Any]) -> str:
    """The bounds of their number, such as "0 to 8" or "0 to 8, by schedule at least 2"."""
    bounds = f"{scaling['min_instances']} to {scaling['max_instances']}"
    floors = [one["min_instances"] for one in scaling.get("schedules", ())]
    return f"{bounds}, by schedule at least {max(floors)}" if floors else bounds


def _details(body: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    state = "stopped" if body["stopped"] else "deployed"
    head = (
        f"{body['name']}, version {body['version']}, {state} in environment "
        f"{body['environment']}, changed {format_time(body['updated_at'])}"
    )
    columns = {
        "address": "address",
        "kind": "kind",
        "traffic": "traffic",
        "cpu": "cpu",
        "memory_bytes": "memory",
    }
    late = {
        "instances": "instances",
        "at_once": "concurrency",
        "snapshots": "snapshots",
        "cluster": "cluster",
    }
    shown = format_table(
        function_rows(body), {**columns, **late}, empty="The app has no functions."
    )
    return Group(head, "", shown, *_in_cluster(body))


def _in_cluster(body: dict[str, Any]) -> list[RenderableType]:
    """Why functions are not ready in the cluster."""
    # Text, not markup: field names contain brackets
    from rich.text import Text

    there = [
        (function["name"], function.get("cluster") or {"phase": "ready"})
        for function in body["functions"]
    ]
    return [
        Text(f"\n{name}: {status['reason']}: {status['message']}")
        for name, status in there
        if status["phase"] != "ready"
    ]
