"""`pilotlight traffic …`: show and change how calls are distributed over revisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import format_table
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import RenderableType

Function = Annotated[str, typer.Argument(metavar="APP/FUNCTION")]
Generation = Annotated[
    int | None,
    typer.Option(help="Generation from `traffic show`: fail if the traffic has changed since."),
]
Message = Annotated[
    str | None, typer.Option("--message", "-m", help="Description for the app's history.")
]
Remove = Annotated[bool, typer.Option("--remove", help="Remove the setting.")]
Json = Mapping[str, Any]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "traffic",
        "Show and change how calls are distributed over revisions.",
        {"show": show, "set": set_, "tag": tag, "pin": pin, "sticky": sticky, "shadow": shadow},
    )


def show(session: Session, function: Function) -> None:
    """Show a function's traffic weights, tags, aliases, pins, shadow and experiment."""
    app, name = parse_function(function)
    found = session.request(lambda client: client.traffic(app, name))
    session.show(found, lambda: _render(found))


def set_(
    session: Session,
    function: Function,
    weights: Annotated[
        list[str],
        typer.Argument(
            metavar="REVISION=PERCENT…",
            help="Such as stable=90 next=10; one revision without a percentage gets the rest.",
        ),
    ],
    *,
    max_candidate: Annotated[
        int | None,
        typer.Option(
            min=0, max=100, help="Maximum total percentage of all revisions but the largest."
        ),
    ] = None,
    generation: Generation = None,
    message: Message = None,
    allow_breaking: Annotated[
        bool,
        typer.Option("--allow-breaking", help="Accept schema changes that break existing callers."),
    ] = False,
    override_freeze: Annotated[
        bool,
        typer.Option(
            "--override-freeze", help="Release although an error budget is spent (scope admin)."
        ),
    ] = False,
) -> None:
    """Split traffic between revisions. Name revisions by name, tag or alias; all others get
    none."""
    app, name = parse_function(function)
    split = _weights(weights)
    found = session.request(
        lambda client: client.change_traffic(
            app,
            name,
            weights=split,
            max_candidate=max_candidate,
            generation=generation,
            message=message,
            allow_breaking=allow_breaking,
            override_freeze=override_freeze,
        )
    )
    session.show(found, lambda: _render(found))


def tag(
    session: Session,
    function: Function,
    tag: Annotated[
        str,
        typer.Argument(metavar="TAG", help="Such as next; call it as APP/FUNCTION@next."),
    ],
    revision: Annotated[
        str, typer.Argument(metavar="[REVISION]", help="Revision name, or another tag or alias.")
    ] = "",
    remove: Remove = False,
) -> None:
    """Tag a revision so that it can be called directly, regardless of its weight."""
    _named(session, function, "tags", tag, revision, remove=remove)


def pin(
    session: Session,
    function: Function,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Name of the calling tenant.")],
    revision: Annotated[
        str, typer.Argument(metavar="[REVISION]", help="Revision name, tag or alias.")
    ] = "",
    remove: Remove = False,
) -> None:
    """Route a tenant's calls to one revision, regardless of traffic weights."""
    _named(session, function, "pins", tenant, revision, remove=remove)


def sticky(
    session: Session,
    function: Function,
    unit: Annotated[
        str, typer.Argument(metavar="UNIT", help="request, key, tenant, or header:<name>.")
    ],
) -> None:
    """Set the unit of sticky assignment: calls of one unit go to the same revision unless a weight
    change moves the unit."""
    app, name = parse_function(function)
    found = session.request(lambda client: client.change_traffic(app, name, sticky=unit))
    session.show(found, lambda: _render(found))


def shadow(
    session: Session,
    function: Function,
    revision: Annotated[
        str, typer.Argument(metavar="[REVISION]", help="The revision that receives the copies.")
    ] = "",
    *,
    percent: Annotated[
        float, typer.Option(min=0, max=100, help="Percentage of calls to copy.")
    ] = 100.0,
    max_compute: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Maximum share of the function's execution time for copies."
        ),
    ] = 0.15,
    remove: Remove = False,
) -> None:
    """Send copies of calls to a revision. Its answers are compared and discarded; copies are not
    billed."""
    app, name = parse_function(function)
    _one_of(revision, remove=remove)
    wanted = (
        None if remove else {"revision": revision, "percent": percent, "max_compute": max_compute}
    )
    found = session.request(lambda client: client.change_traffic(app, name, shadow=wanted))
    session.show(found, lambda: _render(found))


def _named(
    session: Session, function: str, kind: str, key: str, revision: str, *, remove: bool
) -> None:
    app, name = parse_function(function)
    _one_of(revision, remove=remove)
    with session.client() as client:
        change = {key: None if remove else revision}
        found = (
            client.change_traffic(app, name, tags=change)
            if kind == "tags"
            else client.change_traffic(app, name, pins=change)
        )
    session.show(found, lambda: _render(found))


def _one_of(revision: str, *, remove: bool) -> None:
    if bool(revision) == remove:
        raise InvalidInput(
            "pass either a revision or --remove",
            hint="`pilotlight app revisions APP/FUNCTION` lists the revisions.",
        )


def _weights(words: Sequence[str]) -> dict[str, int]:
    """Parse `name=percent` words; one without a percentage gets the rest."""
    split: dict[str, int] = {}
    rest = [word for word in words if "=" not in word]
    for word in words:
        name, equals, percent = word.partition("=")
        if equals and not percent.isdecimal():
            raise InvalidInput(
                f"{word!r} is not REVISION=PERCENT with a whole number",
                hint="For example: stable=90 next=10.",
            )
        if equals:
            split[name] = int(percent)
    if len(rest) > 1:
        raise InvalidInput(
            f"{rest[0]!r} and {rest[1]!r} have no percentage: only one revision can get the rest",
            hint="For example: stable next=10.",
        )
    if rest:
        split[rest[0]] = 100 - sum(split.values())
    return split


def _render(found: Json) -> RenderableType:
    rows: list[dict[str, Any]] = [
        {"what": f"{weight} %", "revision": name} for name, weight in found["weights"].items()
    ]
    rows += [
        {"what": f"tag @{name}", "revision": revision} for name, revision in found["tags"].items()
    ]
    rows += [
        {"what": f"alias {name}", "revision": revision}
        for name, revision in found["aliases"].items()
    ]
    rows += [
        {"what": f"tenant {name}", "revision": revision} for name, revision in found["pins"].items()
    ]
    if (copied := found["shadow"]) is not None:
        rows.append(
            {
                "what": f"shadow of {copied['percent']:g} %, ≤ {copied['max_compute']:.0%} of "
                f"compute",
                "revision": copied["revision"],
            }
        )
    if (result := found.get("shadow_result")) is not None:
        same = (
            f"{result['matched']} of {result['compared']} compared were equal"
            if result["compared"]
            else "none compared"
        )
        text = (
            f"last day: {result['answered']} answered, {result['failed']} failed, {same}, "
            f"{result['skipped']} skipped"
        )
        rows.append({"what": text, "revision": ""})
    if (experiment := found["experiment"]) is not None:
        arms = [
            {"what": f"arm {arm['name']}, {arm['share']:g} %", "revision": arm["revision"]}
            for arm in experiment["arms"]
        ]
        rows += [
            {
                "what": f"experiment {experiment['id']}, {experiment['percent']:g} % of units",
                "revision": "",
            },
            *arms,
        ]
    rows.append({"what": f"by {found['sticky']}, generation {found['generation']}", "revision": ""})
    return format_table(rows, {"what": "", "revision": "revision"}, empty="")
