"""`pilotlight experiment …`: compare revisions of a function on a random split of its callers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import Yes, command_group
from pilotlight.cli.core.formatting import NO_VALUE, format_table, format_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import Conflict, InvalidInput, NotFound

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client

Which = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Experiment id or name.")]
Address = Annotated[
    str, typer.Argument(metavar="APP/FUNCTION", help="The function whose callers are split.")
]
_COLUMNS = {
    "id": "id",
    "name": "name",
    "function": "function",
    "state": "state",
    "arms": "arms",
    "percent": "%",
    "began_at": "began",
    "ended_at": "ended",
    "reason": "reason",
}
_ARM_COLUMNS = {
    "arm": "arm",
    "revision": "revision",
    "share": "share %",
    "units": "units",
    "calls": "calls",
    "stopped": "stopped",
}
_COMPARISON_COLUMNS = {
    "metric": "metric",
    "arm": "arm",
    "value": "value",
    "first": "first arm",
    "difference": "difference",
    "between": "between",
    "relative": "relative",
    "verdict": "verdict",
}
_GUARDRAIL_COLUMNS = {
    "guardrail": "guardrail",
    "arm": "arm",
    "state": "state",
    "beyond": "above the bound by",
}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "experiment",
        "Run experiments, which compare revisions on a random split of a function's callers.",
        {
            "create": create,
            "start": start,
            "report": report,
            "stop": stop,
            "conclude": conclude,
            "list": list_,
            "show": show,
        },
    )


def create(
    session: Session,
    address: Address,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name, unique per function.")],
    *,
    arm: Annotated[
        list[str],
        typer.Option(
            "--arm",
            metavar="NAME=REVISION[:SHARE]",
            help="An arm; repeat for each. The first one is the baseline.",
        ),
    ],
    unit: Annotated[
        str, typer.Option(help="Unit of assignment: key, tenant or header:<name>.")
    ] = "key",
    percent: Annotated[
        float,
        typer.Option(help="Percentage of units in the experiment; the rest follow the weights."),
    ] = 100.0,
    guardrail: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'METRIC +BOUND[%]'",
            help="Stop an arm that exceeds this bound; may be repeated. Default: 'error_ratio "
            "+0.02'.",
        ),
    ] = None,
    no_guardrails: Annotated[
        bool, typer.Option("--no-guardrails", help="Never stop an arm automatically.")
    ] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Start the experiment immediately.")
    ] = False,
) -> None:
    """Create an experiment. Arms without a share divide the remaining share equally."""
    app, function = parse_function(address)
    bounds = [] if no_guardrails else guardrail
    body = session.request(
        lambda client: client.create_experiment(
            app,
            function,
            name,
            arms=_arms(arm),
            unit=unit,
            percent=percent,
            guardrails=bounds,
            start=start,
        )
    )
    session.show(body, lambda: _line(body))
    if not start:
        session.say(f"start it with: pilotlight experiment start {body['id']}")


def start(session: Session, experiment: Which) -> None:
    """Start an experiment. It takes effect within a second."""
    body = session.request(lambda client: client.start_experiment(_id(client, experiment)))
    session.show(body, lambda: _line(body))


def report(session: Session, experiment: Which) -> None:
    """Report an experiment's results so far. The exit status is 1 if the report is invalid.

    Its statistics stay valid however often you look.
    """
    body = session.request(lambda client: client.experiment_report(_id(client, experiment)))
    session.show(body, lambda: _report(body))
    if not body["valid"]:
        raise typer.Exit(1)


def stop(
    session: Session,
    experiment: Which,
    *,
    arm: Annotated[
        str | None, typer.Option(help="Stop only this arm; its share goes to the first arm.")
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="Reason, kept with the experiment and in the history.")
    ] = None,
) -> None:
    """Stop an experiment: all callers follow the traffic weights again within a second.

    Does not ask for confirmation.
    """
    body = session.request(
        lambda client: client.stop_experiment(_id(client, experiment), reason=reason, arm=arm)
    )
    session.show(body, lambda: _line(body))


def conclude(
    session: Session,
    experiment: Which,
    arm: Annotated[
        str, typer.Argument(metavar="ARM", help="The arm whose revision gets all traffic.")
    ],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Conclude even if the report is invalid.")
    ] = False,
    yes: Yes = False,
) -> None:
    """End an experiment and give all traffic to the revision of one arm."""
    with session.client() as client:
        found = client.experiment(_id(client, experiment))
        place = f"{found['app']}/{found['function']}"
        session.confirm(f"Give all traffic of {place} to arm {arm} of {found['name']}?", yes=yes)
        body = client.conclude_experiment(found["id"], arm, force=force)
    session.show(
        body,
        lambda: f"{place}: arm {arm} gets all traffic; see `pilotlight app history {found['app']}`",
    )


def list_(
    session: Session,
    app: Annotated[str | None, typer.Option(help="Only experiments of this app.")] = None,
) -> None:
    """List experiments, newest first."""
    rows = session.request(lambda client: client.experiments(app=app))
    session.show(
        rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty="No experiments.")
    )


def show(session: Session, experiment: Which) -> None:
    """Show an experiment's plan and state."""
    body = session.request(lambda client: client.experiment(_id(client, experiment)))
    session.show(body, lambda: _plan(body))


def _id(client: Client, which: str) -> str:
    """The id of an experiment that is named by id or name. Raises NotFound, Conflict."""
    found = [one for one in client.experiments() if which in (one["id"], one["name"])]
    if not found:
        raise NotFound(
            f"there is no experiment {which!r}",
            hint="List experiments with `pilotlight experiment list`.",
        )
    if len(found) > 1:
        places = ", ".join(f"{one['id']} ({one['app']}/{one['function']})" for one in found)
        raise Conflict(
            f"several experiments are named {which!r}: {places}", hint="Pass the experiment's id."
        )
    return str(found[0]["id"])


def _arms(words: list[str]) -> list[dict[str, Any]]:
    """Parse words like `control=v6-0a1b2c:80`. Arms without a share divide the rest equally."""
    arms: list[dict[str, Any]] = []
    for word in words:
        name, equals, rest = word.partition("=")
        revision, colon, share = rest.partition(":")
        try:
            arms.append(
                {"name": name, "revision": revision, "share": float(share) if colon else None}
            )
        except ValueError:
            equals = ""
        if not (name and equals and revision):
            raise InvalidInput(
                f"--arm {word!r} is not NAME=REVISION[:SHARE]",
                hint="For example: --arm control=v6-0a1b2c --arm bold=v7-9f8e7d.",
            )
    open_arms = [arm for arm in arms if arm["share"] is None]
    left = 100 - sum(arm["share"] for arm in arms if arm["share"] is not None)
    for arm in open_arms:
        arm["share"] = left / len(open_arms)
    return arms


def _row(body: Mapping[str, Any]) -> dict[str, Any]:
    arms = [f"{arm['name']} {arm['share']:g} %" for arm in body["arms"]]
    return {**body, "function": f"{body['app']}/{body['function']}", "arms": arms}


def _line(body: Mapping[str, Any]) -> str:
    why = f": {body['reason']}" if body["reason"] else ""
    return (
        f"{body['id']} {body['name']} on {body['app']}/{body['function']} is {body['state']}{why}"
    )


def _plan(body: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group

    arms = [
        {**arm, "arm": arm["name"], "stopped": body["stopped"].get(arm["name"], {}).get("reason")}
        for arm in body["arms"]
    ]
    words = (
        f"{body['percent']:g} % of all units ({body['unit']}); guardrails: "
        f"{', '.join(body['guardrails']) or 'none'}"
    )
    return Group(_line(body), words, format_table(arms, _ARM_COLUMNS, empty=""))


def _report(body: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    arms = [
        {**arm, "arm": arm["name"], "stopped": (arm["stopped"] or {}).get("reason")}
        for arm in body["arms"]
    ]
    values = {
        (arm["name"], metric): bounds["value"]
        for arm in body["arms"]
        for metric, bounds in arm["metrics"].items()
    }
    rows = [_comparison(one, values) for one in body["comparisons"]]
    guards = [
        {**one, "beyond": _between(one) if one["value"] is not None else None}
        for one in body["guardrails"]
    ]
    invalid = [Text(f"INVALID: {problem}", style="bold red") for problem in body["problems"]]
    hint = (
        [
            Text(
                "Ignore the figures below. Find the cause, stop this experiment, start another.",
                style="red",
            )
        ]
        if invalid
        else []
    )
    return Group(
        _line(body["experiment"]),
        *invalid,
        *hint,
        f"at {format_time(body['at'])}; {body['peeking']}",
        format_table(arms, _ARM_COLUMNS, empty=""),
        format_table(
            rows,
            _COMPARISON_COLUMNS,
            empty="Not enough data to compare: at least 20 units per arm are needed.",
        ),
        format_table(guards, _GUARDRAIL_COLUMNS, empty="No guardrails."),
    )


def _comparison(one: Mapping[str, Any], values: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    relative = None if one["relative"] is None else f"{one['relative']:+.1%}"
    first, value = (
        values.get((one["first"], one["metric"])),
        values.get((one["arm"], one["metric"])),
    )
    return {
        **one,
        "value": value,
        "first": first,
        "difference": one["value"],
        "between": _between(one),
        "relative": relative,
    }


def _between(one: Mapping[str, Any]) -> str:
    return " … ".join(
        NO_VALUE if one[end] is None else f"{one[end]:.4g}" for end in ("low", "high")
    )
