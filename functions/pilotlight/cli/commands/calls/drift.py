"""`pilotlight drift …`: drift and quality of monitored functions, and their baselines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import NO_VALUE, format_time, parse_time
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput
from pilotlight.spec.monitor import PREDICTION, value_at
from pilotlight.spec.sketches import Sketch

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

AT_ONCE = 10_000
"""Rows of a file that are held in memory."""
_STYLES = {"drift": "bold red", "quality": "bold red", "moderate": "yellow", "ok": "green"}
_Target = Annotated[str, typer.Argument(metavar="APP/FUNCTION", help="The function.")]


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "drift",
        "Show drift and quality of functions with monitor=pilotlight.Monitor(…).",
        {"list": list_, "show": show, "baseline": baseline},
    )


def list_(session: Session) -> None:
    """List the monitored functions of the environment with their last windows."""
    rows = session.request(lambda client: client.drift_list())
    session.show(
        rows,
        lambda: (
            _listing(rows)
            if rows
            else "No function is monitored. Deploy one with monitor=pilotlight.Monitor(…)."
        ),
    )


def show(
    session: Session,
    *,
    target: _Target,
    windows: Annotated[int, typer.Option(min=1, max=50, help="Judged windows, the newest.")] = 10,
    revision: Annotated[str | None, typer.Option(help="Compare this revision …")] = None,
    against: Annotated[str | None, typer.Option(help="… with this one.")] = None,
) -> None:
    """Show the features of a function against its baseline, and quality by slices.

    The current window is shown as it is so far; each is judged once, five minutes after its end.
    """
    app, name = parse_function(target, hint="Write APP/FUNCTION.")
    body = session.request(
        lambda client: client.drift(app, name, limit=windows, revision=revision, against=against)
    )
    session.show(body, lambda: render(body))


def baseline(
    session: Session,
    *,
    target: _Target,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help='Rows such as those of the training data: a file with {"input": …, "output": …} '
            "in each line. Only counts are sent.",
        ),
    ] = None,
    since: Annotated[str | None, typer.Option(help="Rows of the log: 7d ago, or a date.")] = None,
    until: Annotated[str | None, typer.Option(help="1h ago, or a date. Default: now.")] = None,
) -> None:
    """Set what windows are compared with: a time of the log, or a file of rows."""
    app, name = parse_function(target, hint="Write APP/FUNCTION.")
    if (source is None) == (since is None) or (until is not None and since is None):
        raise InvalidInput(
            "give --from, or --since and --until", hint="drift baseline APP/FUNCTION --since 7d"
        )
    values: dict[str, Any]
    if source is not None:
        terms = session.request(lambda client: client.drift(app, name))["terms"]
        values = count_rows(source, terms)
    else:
        now = time.time()
        begin = parse_time(since or "", now=now)
        end = now if until is None else parse_time(until, now=now)
        values = {"since": str(begin), "until": str(end)}
    body = session.request(lambda client: client.set_drift_baseline(app, name, **values))
    session.show(body, lambda: f"{target}: compared with {body['rows']} rows from now on")


def count_rows(path: Path, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Count the watched values of a file of rows. Raises InvalidInput naming the line."""
    features = {one["path"]: one for one in terms["features"]}
    total: dict[str, Sketch] = {}
    rows = 0
    documents = _documents(path)
    while some := list(islice(documents, AT_ONCE)):
        rows += len(some)
        found = {
            name: Sketch.of(
                (value_at(given, name) for given, _ in some), low=one["low"], high=one["high"]
            )
            for name, one in features.items()
        }
        if terms["prediction"]:
            found[PREDICTION] = Sketch.of(value_at(out, terms["prediction"]) for _, out in some)
        total = {name: total.get(name, Sketch()).merged(one) for name, one in found.items()}
    return {"rows": rows, "features": {name: one.to_json() for name, one in total.items()}}


def _documents(path: Path) -> Iterator[tuple[Any, Any]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    yield row["input"], row.get("output")
                except (ValueError, KeyError, TypeError, AttributeError) as e:
                    raise InvalidInput(
                        f'{path}, line {number}: not a row such as {{"input": …, "output": …}}',
                        parameter="from",
                    ) from e
    except OSError as e:
        raise InvalidInput(f"{path}: {e.strerror}", parameter="from") from e


# -- rendering -------------------------------------------------------------------------------------
def _listing(rows: list[dict[str, Any]]) -> Table:
    out = _table("function", "window", "until", "status", "rows", "drifted", "broken")
    for row in rows:
        last = row["last"]
        cells = [NO_VALUE] * 5
        if last is not None:
            drifted = sum(one["status"] == "drift" for one in last["features"])
            broken = sum(len(one["broken"]) for one in last["quality"])
            cells = [format_time(last["until"]), last["status"], str(last["rows"])]
            cells += [str(drifted), str(broken)]
        out.add_row(f"{row['app']}/{row['function']}", f"{row['window_h']} h", *cells)
    return out


def render(body: Mapping[str, Any]) -> RenderableType:
    """Render a function: the last judged window and the current one, with quality."""
    from rich.console import Group
    from rich.text import Text

    based = body["baseline"]
    parts: list[RenderableType] = [
        Text(f"{body['app']}/{body['function']}  {body['revision']}", "bold"),
        Text(
            f"baseline: {based['rows']} rows, {based['source']}, {format_time(based['created_at'])}"
            if based is not None
            else f"reference: {body['terms']['reference']}",
            "dim",
        ),
    ]
    for title, window in (("so far", body["current"]), *(("", one) for one in body["windows"])):
        status = window["status"]
        head = f"{format_time(window['since'])} to {format_time(window['until'])} {title}"
        parts += [
            "",
            Text.assemble(f"{head}  {window['rows']} rows  ", (status, _STYLES.get(status, "dim"))),
        ]
        if window["features"]:
            parts.append(_features(window["features"]))
        if window["quality"]:
            parts.append(_quality(window["quality"]))
    if (found := body.get("contrast")) is not None:
        parts += ["", Text(_contrast(found))]
    return Group(*parts)


def _features(features: list[dict[str, Any]]) -> Table:
    from rich.text import Text

    out = _table("feature", "status", "PSI", "KS", "missing", "out of range", "why")
    for one in features:
        out.add_row(
            Text(one["feature"]),
            Text(one["status"], _STYLES.get(one["status"], "dim")),
            _number(one["psi"]),
            _number(one["ks"]),
            f"{one['missing']:.1%}",
            f"{one['outside']:.1%}",
            "; ".join(one["reasons"]),
        )
    return out


def _quality(slices: list[dict[str, Any]]) -> Table:
    from rich.text import Text

    names = sorted({name for one in slices for name in one["measures"]})
    out = _table("slice", "labels", *(name.replace("_", " ") for name in names), "calibration", "")
    for one in slices:
        cells = []
        for name in names:
            found = one["measures"].get(name)
            cells.append(
                NO_VALUE
                if found is None
                else f"{found['value']:.3g} ({found['low']:.3g} to {found['high']:.3g})"
            )
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in one["slice"])
        broken = f"broken: {', '.join(one['broken'])}" if one["broken"] else ""
        out.add_row(
            Text(text or "all"),
            str(one["labels"]),
            *cells,
            _number(one["calibration_error"]),
            Text(broken, "bold red"),
        )
    return out


def _contrast(found: Mapping[str, Any]) -> str:
    lines = [f"{found['revision']} against {found['against']}: {found['rows']} rows"]
    if found["prediction_ks"] is not None:
        lines.append(
            f"  predictions: KS {found['prediction_ks']:.3g}, "
            f"at least {found['prediction_ks_low']:.3g}"
        )
    for name, one in found["quality"].items():
        lines.append(f"  {name}: {one['value']:+.3g} ({one['low']:+.3g} to {one['high']:+.3g})")
    return "\n".join(lines)


def _table(*headings: str) -> Table:
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        out.add_column(heading)
    return out


def _number(value: float | None) -> str:
    return NO_VALUE if value is None else f"{value:.3g}"
