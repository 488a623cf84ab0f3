"""`pilotlight slo …`: show service level objectives, error budgets, burn rates and the latency of
stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import NO_VALUE, format_milliseconds, format_time
from pilotlight.cli.core.session import Session

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

SLIS = ("availability", "warm_latency", "first_token", "cold_latency", "completion", "degraded")
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
GAUGE = 10
"""Width of an error budget's gauge in characters."""
MAX_HISTORY = 10
_FAST_BURN, _SLOW_BURN = 6.0, 1.0
_SEVERITIES = {"page": "bold red", "ticket": "yellow"}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "slo",
        "Show service level objectives: error budgets, burn rates and alarms of functions.",
        {"list": list_, "show": show},
    )


def list_(
    session: Session,
    app: Annotated[str | None, typer.Option(help="Only functions of this app.")] = None,
) -> None:
    """List the environment's functions with their remaining error budgets."""
    rows = session.request(lambda client: client.slos(app=app))
    session.show(
        rows,
        lambda: (
            _listing(rows)
            if rows
            else "No function takes traffic. Deploy one with `pilotlight deploy FILE`."
        ),
    )


def show(
    session: Session,
    function: Annotated[
        str, typer.Argument(metavar="APP/FUNCTION", help="The function's address.")
    ],
) -> None:
    """Show a function's indicators, burn rates, stages and alarms."""
    app, name = parse_function(
        function, hint="Write APP/FUNCTION, as shown by `pilotlight slo list`."
    )
    body = session.request(lambda client: client.slo(app, name))
    session.show(body, lambda: render(body))


# -- rendering -------------------------------------------------------------------------------------
def _listing(rows: list[dict[str, Any]]) -> Table:
    out = _table("function", "alarms", *(sli.replace("_", " ") for sli in SLIS))
    for row in rows:
        by_name = {one["sli"]: one for one in row["slis"]}
        name = f"{row['app']}/{row['function']}"
        out.add_row(_plain(name), _alarms(row), *(_left(by_name[sli]) for sli in SLIS))
    return out


def render(body: Mapping[str, Any]) -> RenderableType:
    """Render a function's objectives in four parts."""
    from rich.console import Group

    parts: list[RenderableType] = [_headline(body), "", _indicators(body), "", _stages(body)]
    if body["history"]:
        parts += ["", *(_alarm(alarm) for alarm in body["history"][:MAX_HISTORY])]
    return Group(*parts)


def _headline(body: Mapping[str, Any]) -> Text:
    from rich.text import Text

    whose = "declared objectives" if body["is_declared"] else "default objectives"
    out = Text.assemble(
        (f"{body['app']}/{body['function']}", "bold"),
        f"  {body['revision']}  {whose}, over {body['window_days']} days",
    )
    if body["frozen"]:
        out.append("  frozen: no releases until the budget recovers", "bold red")
    return out


def _indicators(body: Mapping[str, Any]) -> Table:
    shown = [one for one in body["slis"] if one["total"]] or body["slis"][:1]
    out = _table(
        "indicator",
        "target",
        "actual",
        "bad / all",
        "budget left",
        *(f"burn {window}" for window in WINDOWS),
    )
    for one in shown:
        rates = [_burn(one["burn_rates"][window]) for window in WINDOWS]
        out.add_row(
            _plain(one["sli"].replace("_", " ")),
            _target(one),
            _percent(one["ratio"]),
            f"{one['bad']} / {one['total']}",
            _left(one),
            *rates,
        )
    return out


def _stages(body: Mapping[str, Any]) -> Table:
    out = _table("stage", "budget", "p50", "p99", "overran")
    for stage in body["stages"]:
        name = _plain(stage["stage"], "bold red" if stage["stage"] == body["worst_stage"] else "")
        over = f"{stage['overruns']} of {stage['calls']}" if stage["calls"] else NO_VALUE
        out.add_row(
            name,
            format_milliseconds(stage["budget_s"] * 1000),
            _ms(stage["p50_ms"]),
            _ms(stage["p99_ms"]),
            over,
        )
    return out


def _alarm(alarm: Mapping[str, Any]) -> Text:
    from rich.text import Text

    until = format_time(alarm["ended_at"]) if alarm["ended_at"] is not None else "open"
    stage = f", mostly in {alarm['stage']}" if alarm["stage"] else ""
    text = f"{alarm['sli']}: burn rate {alarm['burn_rate']:g} over {alarm['window']}{stage}"
    severity = (f"{alarm['severity']:<6}", _SEVERITIES[alarm["severity"]])
    return Text.assemble(
        (f"{format_time(alarm['began_at'])} to {until}  ", "dim"), severity, f"  {text}"
    )


def _table(*headings: str) -> Table:
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number else "left")
    return out


def _alarms(row: Mapping[str, Any]) -> Text:
    # `page` sorts before `ticket`
    worst = min((alarm["severity"] for alarm in row["alarms"]), default="")
    return _plain(worst or NO_VALUE, _SEVERITIES.get(worst, "dim"))


def _left(one: Mapping[str, Any]) -> Text:
    """Render the remaining budget as a gauge and a percentage."""
    left = one["budget_left"]
    if left is None:
        return _plain(NO_VALUE, "dim")
    if left <= 0 and not one["is_spent"]:
        return _plain("too few calls", "dim")
    filled = round(max(0.0, min(1.0, left)) * GAUGE)
    style = "red" if left <= 0 else "yellow" if left < 0.25 else "green"
    return _plain(f"{'█' * filled}{'░' * (GAUGE - filled)} {max(left, -9.99):>5.0%}", style)


def _burn(rate: float | None) -> Text:
    if rate is None:
        return _plain(NO_VALUE, "dim")
    style = "bold red" if rate > _FAST_BURN else "yellow" if rate > _SLOW_BURN else ""
    return _plain(f"{rate:.3g}", style)


def _target(one: Mapping[str, Any]) -> str:
    bound = (
        f" in {format_milliseconds(one['bound_s'] * 1000)}" if one["bound_s"] is not None else ""
    )
    return f"{one['target'] * 100:.6g} %{bound}"


def _percent(ratio: float | None) -> str:
    return NO_VALUE if ratio is None else f"{ratio * 100:.6g} %"


def _ms(amount: float | None) -> str:
    return NO_VALUE if amount is None else format_milliseconds(amount)


def _plain(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style)
