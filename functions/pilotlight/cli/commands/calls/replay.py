"""`pilotlight replay`: run logged calls on another revision, and report the differences."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

from pilotlight.cli.commands.calls.log import download_files, parse_target
from pilotlight.cli.core import command as commands
from pilotlight.cli.core.command import command, ended_by_signals
from pilotlight.cli.core.formatting import (
    NO_VALUE,
    format_milliseconds,
    format_money,
    format_table,
    parse_time,
)
from pilotlight.cli.core.prediction_query import open_predictions
from pilotlight.cli.core.progress import progress_bar
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, NotFound, PilotlightError, TooManyRequests
from pilotlight.validation.json_compare import TOLERANCE
from pilotlight.validation.json_paths import parse_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.client.client import Client
    from pilotlight.replay.report import ReplayReport
    from pilotlight.replay.rows import LogSelection, Row
    from pilotlight.replay.runner import Comparison, Outcome

LOG: Final = "log"
DEFAULT_LIMIT: Final = 1000
MAX_CONCURRENCY: Final = 64
SHOWN_PATHS: Final = 20
PATIENCE_S: Final = 30.0
"""How long a call waits for a platform that starts again, or for room."""

Target = Annotated[str, typer.Argument(metavar="APP/FUNCTION", help="The function, or the class.")]
On = Annotated[
    str, typer.Option(metavar="REVISION", help="Revision to call: its name, v6, an alias or a tag.")
]
Source = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="log|FILE",
        help='The prediction log, or a file with {"input": …, "output": …} in each line.',
    ),
]
Since = Annotated[str, typer.Option(help="Logged calls since then: 24h or 7d ago, or a date.")]
Until = Annotated[
    str | None, typer.Option(help="Logged calls until then: 1h ago, or a date. Default: now.")
]
Version = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="Only calls that this revision answered. Default: all."),
]
Limit = Annotated[int, typer.Option(min=1, help="Maximum number of calls; the newest ones.")]
Sample = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Share of the logged calls: each time the same."),
]
Tolerance = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Relative difference of numbers that is none.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Leave out what is at $.a.path, $..name or $.list[*]."),
]
Scrubbed = Annotated[
    bool, typer.Option("--scrubbed", help="Also calls whose arguments are scrubbed.")
]
Concurrency = Annotated[int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Calls at once.")]
FailOver = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        min=0.0,
        max=1.0,
        help="Exit status 1 if a greater share of the calls failed or was answered differently.",
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Write what became of each row to this file, as JSON lines.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is replayed on which revision, and how."""

    app: str
    function: str
    revision: str
    comparison: Comparison
    concurrency: int


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "replay")(replay)


def replay(
    session: Session,
    target: Target,
    *,
    on: On,
    source: Source = LOG,
    since: Since = "24h",
    until: Until = None,
    version: Version = None,
    limit: Limit = DEFAULT_LIMIT,
    sample: Sample = 1.0,
    tolerance: Tolerance = TOLERANCE,
    ignore: Ignore = None,
    scrubbed: Scrubbed = False,
    concurrency: Concurrency = 4,
    fail_over: FailOver = None,
    out: Out = None,
) -> None:
    """Run logged calls of a function on another revision, and report how its answers differ.

    The calls have priority batch, wait for quotas, and are billed like others. They are not logged,
    and count in no rollout, experiment, objective or drift. Ctrl-C reports what was compared so
    far.
    """
    from pilotlight.replay.rows import LogSelection
    from pilotlight.replay.runner import Comparison

    app, function = parse_target(target)
    paths = tuple(parse_path(one, where="--ignore", parameter="ignore") for one in ignore or [])
    now = time.time()
    with ended_by_signals(), contextlib.ExitStack() as stack:
        client = stack.enter_context(session.client())
        plan = _Plan(
            app=app,
            function=function,
            revision=client.revision(app, on, function=function)["revision"],
            comparison=Comparison(tolerance=tolerance, ignored=paths),
            concurrency=concurrency,
        )
        selection = LogSelection(
            since=parse_time(since, now=now),
            until=None if until is None else parse_time(until, now=now),
            version=_resolved(client, plan, version) if version else "",
            sample=sample,
            with_scrubbed=scrubbed,
        )
        if source == LOG:
            total, rows = stack.enter_context(_logged(session, target, selection, since, until))
        else:
            total, rows = None, _of_file(Path(source), selection)
        lines = (
            None
            if out is None
            else stack.enter_context(out.open("w", encoding="utf-8", buffering=1))
        )
        stack.enter_context(_callable(session, client, plan))
        session.say(f"{plan.revision} is called; the calls are billed like others.")
        report = _run(session, plan, rows, limit=limit, total=total, lines=lines)
    found = {"target": target, "revision": plan.revision, "rows": total, **report.to_json()}
    session.show(found, lambda: render(found))
    _exit(report, fail_over)


def _exit(report: ReplayReport, fail_over: float | None) -> None:
    """Raises Exit for a replay that did not end, without a comparison, or with too many
    differences."""
    from pilotlight.replay.runner import INTERRUPTED

    if report.stopped == INTERRUPTED:
        raise typer.Exit(commands.INTERRUPTED)
    is_over = fail_over is not None and report.share > fail_over
    if report.stopped or not report.compared or is_over:
        raise typer.Exit(1)


# -- rows ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _logged(
    session: Session, target: str, selection: LogSelection, since: str, until: str | None
) -> Iterator[tuple[int, Iterator[Row]]]:
    """Download the log; its selected rows and their number while the context lasts. Raises
    NotFound without any."""
    from pilotlight.replay.rows import read_log

    with tempfile.TemporaryDirectory(prefix="pilotlight-log-") as directory:
        files = download_files(session, target, Path(directory), since, until)
        with open_predictions(files, Path(directory)) as database:
            total, rows = read_log(database, selection)
            if not total:
                raise NotFound(
                    f"{target} has no logged calls that --since, --until, --version and --sample "
                    f"select",
                    hint=f"`pilotlight log query {target} "
                    f'"select version, count(*) from predictions group by 1"` shows what there is.',
                )
            yield total, rows


def _of_file(path: Path, selection: LogSelection) -> Iterator[Row]:
    from pilotlight.replay.rows import read_file

    if not path.is_file():
        raise InvalidInput(
            f"--from {path}: there is no such file", hint="Write --from log, or name a file."
        )
    return read_file(path, with_scrubbed=selection.with_scrubbed)


def _resolved(client: Client, plan: _Plan, version: str) -> str:
    """The name of a revision that the log may have: one that was deleted has no other name."""
    try:
        return str(client.revision(plan.app, version, function=plan.function)["revision"])
    except NotFound:
        return version


@contextlib.contextmanager
def _callable(session: Session, client: Client, plan: _Plan) -> Iterator[None]:
    """Tag the revision while the context lasts, if it cannot be called otherwise."""
    found = client.traffic(plan.app, plan.function)
    arms = (found["experiment"] or {"arms": []})["arms"]
    shadow = [found["shadow"]["revision"]] if found["shadow"] else []
    named = {found["stable"], *found["weights"], *shadow, *(arm["revision"] for arm in arms)}
    for names in (found["tags"], found["aliases"], found["pins"]):
        named |= set(names.values())
    if plan.revision in named:
        yield
        return
    tag = f"replay-{secrets.token_hex(4)}"
    message = "pilotlight replay"
    session.say(f"{plan.revision} takes no calls so far: it is tagged {tag} meanwhile.")
    client.change_traffic(plan.app, plan.function, tags={tag: plan.revision}, message=message)
    try:
        yield
    finally:
        try:
            client.change_traffic(plan.app, plan.function, tags={tag: None}, message=message)
        except PilotlightError as e:
            where = f"{plan.app}/{plan.function}"
            session.say(f"Tag {tag} is left ({e}): pilotlight traffic tag {where} {tag} --remove")


# -- calls -----------------------------------------------------------------------------------------
def _run(
    session: Session,
    plan: _Plan,
    rows: Iterator[Row],
    *,
    limit: int,
    total: int | None,
    lines: TextIO | None,
) -> ReplayReport:
    """Make the calls; also those of an interrupted replay are in the report."""
    from pilotlight.replay.report import ReplayReport, describe_outcome
    from pilotlight.replay.rows import take
    from pilotlight.replay.runner import INTERRUPTED

    report = ReplayReport()
    most = None if total is None else min(total, limit)
    with progress_bar(session, "replay", total=most) as show:

        def add(outcome: Outcome) -> None:
            report.add(outcome)
            if lines is not None:
                lines.write(json.dumps(describe_outcome(outcome), ensure_ascii=False) + "\n")
            show(report.compared + report.failed, _progress(report))

        waiting: list[str] = []

        def wait(refused: TooManyRequests, seconds: float) -> None:
            if not waiting:
                session.say(f"Calls wait: {refused}")
            waiting.append(refused.type)
            show(report.compared + report.failed, f"waits {seconds:.3g} s: {refused.type}")

        calls = _calls(session, plan, take(rows, limit), on_outcome=add, on_wait=wait)
        try:
            report.stopped = asyncio.run(calls)
        except KeyboardInterrupt:
            report.stopped = INTERRUPTED
    return report


async def _calls(
    session: Session,
    plan: _Plan,
    rows: Iterator[Row],
    *,
    on_outcome: Callable[[Outcome], None],
    on_wait: Callable[[TooManyRequests, float], None],
) -> str:
    """Make the calls; why they stopped, "" if they did not."""
    from pilotlight.client.async_client import AsyncClient
    from pilotlight.replay.runner import ReplayRunner

    async with AsyncClient(session.profile(), retry_budget_s=PATIENCE_S) as client:
        runner = ReplayRunner(
            client,
            app=plan.app,
            function=plan.function,
            revision=plan.revision,
            comparison=plan.comparison,
            on_outcome=on_outcome,
            on_wait=on_wait,
        )
        await runner.run(rows, concurrency=plan.concurrency)
    return runner.stopped


def _progress(report: ReplayReport) -> str:
    failed = f", {report.failed} failed" if report.failed else ""
    return f"{report.different} different{failed}"


# -- rendering -------------------------------------------------------------------------------------
def render(found: dict[str, Any]) -> RenderableType:
    """Render a report."""
    from rich.console import Group
    from rich.text import Text

    lines = [f"stopped: {found['stopped']}"] if found["stopped"] else []
    called = f"called {found['compared'] + found['failed']}"
    of = f" of {found['rows']} logged calls" if found["rows"] is not None else ""
    lines.append(f"{found['target']} {found['revision']}: {called}{of}")
    if found["versions"]:
        answered = ", ".join(f"{name} ({count})" for name, count in found["versions"].items())
        lines.append(f"logged answers of {answered}")
    share = f" ({found['different'] / found['compared'] * 100:.3g} %)" if found["different"] else ""
    lines.append(
        f"{found['compared']} compared: {found['equal']} equal, {found['different']} different"
        f"{share}"
    )
    for reason, one in found["failures"].items():
        lines.append(
            f"{one['calls']} failed: {reason}, such as {one['request_id']}: {one['message']}"
        )
    lines += [f"{count} skipped: {reason}" for reason, count in found["skipped_by"].items()]
    parts: list[RenderableType] = [Text("\n".join(lines))]
    if found["ms"] or found["cost"]:
        parts += ["", _measures(found)]
    if found["paths"]:
        parts += ["", _paths(found["paths"])]
    return Group(*parts)


def _measures(found: dict[str, Any]) -> RenderableType:
    """Table of times and costs, of the logged calls and now."""
    rows = [
        {
            "what": f"{name} {quantile}",
            "old": format_milliseconds(pair["old"][quantile]),
            "new": format_milliseconds(pair["new"][quantile]),
        }
        for name, pair in found["ms"].items()
        for quantile in pair["old"]
    ]
    if (cost := found["cost"]) is not None:
        old, new = (format_money(cost[one], cost["currency"]) for one in ("old", "new"))
        rows.append({"what": "cost", "old": old, "new": new})
    return format_table(rows, {"what": "", "old": "logged", "new": "replayed"}, empty="")


def _paths(paths: list[dict[str, Any]]) -> RenderableType:
    """Table of the most frequent differences, each with an example."""
    rows = [
        {
            "path": one["path"],
            "rows": one["rows"],
            "change": one["change"]
            if one["largest"] is None
            else f"up to {one['largest'] * 100:.3g} %",
            "example": one["examples"][0]["request_id"],
            "old": one["examples"][0].get("old", NO_VALUE),
            "new": one["examples"][0].get("new", NO_VALUE),
        }
        for one in paths[:SHOWN_PATHS]
    ]
    columns = {
        "path": "differs at",
        "rows": "calls",
        "change": "how",
        "example": "such as",
        "old": "logged",
        "new": "replayed",
    }
    return format_table(rows, columns, empty="")
