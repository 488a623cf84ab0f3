"""`pilotlight cluster …`: whose objects are in the cluster, and its warm pods."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.session import Session


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "cluster",
        "Show whose objects are in the cluster and its warm pods, and take over objects of another "
        "platform.",
        {"show": show, "adopt": adopt},
    )


def show(session: Session) -> None:
    """Show this platform's id, tenants' namespaces of other platforms, and the warm pods of each
    shape. Platform administrators only.

    The exit status is 1 while there are any: nothing in the cluster is changed then."""
    with session.client() as client:
        found = client.cluster()
    session.show(found, lambda: _render(found))
    if found["foreign"]:
        raise typer.Exit(1)


def adopt(
    session: Session,
    platform: Annotated[
        str, typer.Argument(help="The other platform's id, or `unlabelled` (see `cluster show`).")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Take over the objects of another platform in the cluster. Platform administrators only.

    Use it after the database was replaced, or after an upgrade from a version without the label.
    Functions in the cluster that this platform does not have are deleted."""
    with session.client() as client:
        namespaces: list[str] = next(
            (
                one["namespaces"]
                for one in client.cluster()["foreign"]
                if one["platform"] == platform
            ),
            [],
        )
        session.confirm(
            f"Take over {len(namespaces)} namespaces of {platform} ({', '.join(namespaces[:5])}"
            f"{' …' if len(namespaces) > 5 else ''}), and delete the functions in them that this "
            f"platform does not have?",
            yes=yes,
        )
        found = client.adopt_cluster(platform)
    session.show(found, lambda: f"{platform} is adopted by {found['platform']}")


def _render(found: dict[str, Any]) -> str:
    lines = [f"platform {found['platform']}"]
    if found["adopted"]:
        lines.append(f"adopted: {', '.join(found['adopted'])}")
    lines += [f"of {one['platform']}: {', '.join(one['namespaces'])}" for one in found["foreign"]]
    if found["message"]:
        lines.append(found["message"])
    elif not found["is_checked"]:
        lines.append("the cluster was not looked at: this controller does not lead one")
    if found["warm_pods"]:
        lines.append(f"{'SHAPE':<30} {'WARM':>6} {'STARTING':>9} {'PROMOTED':>9} {'WANTED':>7}")
    lines += [
        f"{one['shape']:<30} {one['warm']:>6} {one['starting']:>9} {one['promoted']:>9} "
        f"{one['wanted']:>7}"
        for one in found["warm_pods"]
    ]
    if found["warm_trouble"]:
        lines.append(found["warm_trouble"])
    return "\n".join(lines)
