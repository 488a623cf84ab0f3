"""`pilotlight snapshot …` and `template …`: manage snapshots and Templates, from which functions
start without a cold start."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.commands.operations.instance import with_label_columns
from pilotlight.cli.core.addresses import match_id, parse_function
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import (
    format_bytes,
    format_milliseconds,
    format_table,
    format_time,
)
from pilotlight.cli.core.session import Session
from pilotlight.errors import NotFound

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

Id = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help="Snapshot id, or a unique prefix of it.")
]
Function = Annotated[
    str, typer.Argument(metavar="APP/FUNCTION", help="The function; all revisions are included.")
]
_COLUMNS = {
    "id": "snapshot",
    "address": "function",
    "revision": "revision",
    "state": "state",
    "kind": "kind",
    "pages": "pages",
    "image_bytes": "image",
    "restore": "restore",
    "cold": "cold",
    "restores": "restores",
    "last_used_at": "last used",
    "node": "node",
    "where": "where",
    "reason": "reason",
}


def register(root: typer.Typer) -> None:
    """Add both command groups."""
    command_group(
        root,
        "snapshot",
        "Manage snapshots on disk, from which functions are restored.",
        {
            "list": list_,
            "show": show,
            "prove": prove,
            "quarantine": quarantine,
            "disable": disable,
            "enable": enable,
            "delete": delete,
        },
    )
    command_group(
        root,
        "template",
        "Manage Templates in memory, from which instances are forked.",
        {"list": template_list, "drop": template_drop},
    )


def list_(
    session: Session,
    app: Annotated[
        str | None, typer.Argument(metavar="[APP]", help="Only snapshots of this app.")
    ] = None,
) -> None:
    """List the snapshots of the node, or of all nodes of a cluster and their object store,
    including quarantined ones and those of older revisions.

    A refused snapshot was never made: `deploy` and `doctor` show why.
    """
    rows = session.request(lambda client: client.snapshots(app=app))
    empty = (
        "No snapshots. `pilotlight deploy` creates them if the machine supports it, which "
        "`pilotlight doctor` shows."
    )
    session.show(rows, lambda: format_table([row_of(row) for row in rows], _COLUMNS, empty=empty))


def show(session: Session, snapshot: Id) -> None:
    """Show a snapshot: its times and size, and what must be unchanged for it to be restored."""
    found = session.request(lambda client: client.snapshot(find_snapshot(client, snapshot)))
    session.show(found, lambda: _details(found))


def prove(session: Session, snapshot: Id) -> None:
    """Test a snapshot: restore it and call it with its example.

    It becomes ready if that works, else it is quarantined and the exit status is 1.
    """
    with session.client() as client:
        which = find_snapshot(client, snapshot)
        session.say(f"restoring {which}")
        found = client.prove_snapshot(which)
    session.show(found, lambda: _verdict(found))
    if found["state"] != "READY":
        raise typer.Exit(1)


def quarantine(
    session: Session,
    snapshot: Id,
    reason: Annotated[str, typer.Option(help="Why; shown by `snapshot list`.")] = "by command",
) -> None:
    """Quarantine a snapshot: it is kept for diagnosis, and never restored again.

    On a cluster this holds for all nodes, and the copy in the object store is removed.
    """
    with session.client() as client:
        found = client.quarantine_snapshot(find_snapshot(client, snapshot), reason=reason)
    session.show(found, lambda: _verdict(found))


def disable(session: Session, function: Function, yes: Yes = False) -> None:
    """Disable snapshots of a function, also for later deploys, and delete the existing ones.

    The function then starts by FORK and COLD only.
    """
    app, name = parse_function(function)
    session.confirm(
        f"Delete the snapshots of {app}/{name} and create no more? Without a Template, it starts "
        f"by COLD.",
        yes=yes,
    )
    done = session.request(lambda client: client.switch_snapshots(app, name, enabled=False))
    gone = (
        "the node does not answer: its snapshots are deleted later"
        if done["deleted"] is None
        else f"{done['deleted']} deleted"
    )
    session.show(
        done,
        lambda: (
            f"snapshots of {app}/{name} are disabled ({gone}); `pilotlight snapshot enable "
            f"{app}/{name}` enables them"
        ),
    )


def enable(session: Session, function: Function) -> None:
    """Enable snapshots of a function. The next deploy or cold start creates one."""
    app, name = parse_function(function)
    done = session.request(lambda client: client.switch_snapshots(app, name, enabled=True))
    session.show(
        done,
        lambda: f"snapshots of {app}/{name} are enabled: the next deploy or cold start creates one",
    )


def delete(
    session: Session,
    what: Annotated[
        str,
        typer.Argument(metavar="SNAPSHOT|APP/FUNCTION", help="One snapshot, or all of a function."),
    ],
    yes: Yes = False,
) -> None:
    """Delete one snapshot, or the snapshots of all revisions of a function.

    The next deploy or cold start creates a new one.
    """
    with session.client() as client:
        if "/" in what:
            app, name = parse_function(what)
            session.confirm(f"Delete all snapshots of {app}/{name}?", yes=yes)
            count = client.delete_snapshots(app, name)
        else:
            which = find_snapshot(client, what)
            session.confirm(f"Delete snapshot {which}?", yes=yes)
            count = client.delete_snapshot(which)
    session.show({"deleted": count}, lambda: f"{count} snapshots deleted")


def template_list(session: Session) -> None:
    """List the Templates in memory."""
    rows = session.request(lambda client: client.templates())
    columns = {
        "address": "function",
        "revision": "revision",
        "pss_bytes": "memory",
        "forks": "forks",
        "parked": "parked",
        "last_used_at": "last used",
    }
    session.show(
        rows,
        lambda: format_table(
            [row_of(row) for row in rows], columns, empty="No Template is in memory."
        ),
    )


def template_drop(session: Session, function: Function) -> None:
    """Drop a function's Templates to free their memory. Running instances are not affected.

    The next start is a RESTORE or COLD.
    """
    app, name = parse_function(function)
    count = session.request(lambda client: drop_templates(client, app, name))
    session.show({"dropped": count}, lambda: f"{count} Templates dropped")


def drop_templates(client: Client, app: str, function: str | None = None) -> int:
    """Drop the Templates of an app or function; return how many were dropped. A Template that ends
    meanwhile is not counted."""
    wanted = {"app": app} | ({"function": function} if function else {})
    found = [t for t in client.templates() if wanted.items() <= dict(t["labels"]).items()]
    dropped = 0
    for template in found:
        with contextlib.suppress(NotFound):
            client.drop_template(str(template["revision"]))
            dropped += 1
    return dropped


def find_snapshot(client: Client, prefix: str) -> str:
    """The one snapshot whose id begins with `prefix`. Raises NotFound or InvalidInput."""
    return match_id(
        client.snapshots(),
        prefix,
        missing=f"there is no snapshot {prefix!r}",
        hint="List snapshots with `pilotlight snapshot list`.",
    )


def row_of(row: dict[str, Any]) -> dict[str, Any]:
    """Format a snapshot or Template as a table row."""
    out = with_label_columns(row)
    out["address"] = f"{out.get('app')}/{out.get('function')}"
    out["kind"] = "server" if row.get("in_place") else "fork"
    out |= {
        name: format_milliseconds(row[f"{name}_ms"])
        for name in ("restore", "cold")
        if row.get(f"{name}_ms")
    }
    return {
        **out,
        "state": str(row.get("state", "")).lower(),
        "reason": row.get("reason") or None,
        "node": row.get("node") or None,
        "last_used_at": row.get("last_used_at") or None,
    }


def _verdict(found: dict[str, Any]) -> str:
    if found["state"] == "READY":
        return (
            f"{found['id']} is proven: it answered after "
            f"{format_milliseconds(found['restore_ms'])} "
            f"({found['pages']} pages)"
        )
    return f"{found['id']} is {found['state'].lower()}: {found['reason']}"


def _details(found: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    row = row_of(found)
    cold = f"cold {format_milliseconds(found['cold_ms'])}, " if found["cold_ms"] else ""
    lines = [
        (
            f"{row['id']}  {row['address']} {row['revision']}, "
            f"{row['state']}{': ' + row['reason'] if row['reason'] else ''}"
        ),
        (
            f"{row['kind']} snapshot, {found['pages']} pages, image "
            f"{format_bytes(found['image_bytes'])}, "
            f"created {format_time(found['created_at'])}"
        ),
        (f"{cold}first answer after a restore {format_milliseconds(found['restore_ms'])}"),
        (
            f"{found['restores']} restores on this "
            f"node{', a copy is in the object store' if found['remote'] else ''}"
        ),
    ]
    if found.get("heap_bytes"):
        lines.append(
            found.get("heap_why")
            or f"the image contains {format_bytes(found['heap_bytes'])} of memory by value"
        )
    phases = [
        {"phase": name, "took": format_milliseconds(ms)} for name, ms in found["phases_ms"].items()
    ]
    same = [{"must be the same": name, "value": value} for name, value in found["identity"].items()]
    both = [
        format_table(phases, {"phase": "phase", "took": "took"}, empty=""),
        format_table(same, {"must be the same": "must be the same", "value": ""}, empty=""),
    ]
    return Group(*lines, "", both[0], "", both[1])
