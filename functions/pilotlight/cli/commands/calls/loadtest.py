"""`pilotlight loadtest`: generate open-loop load on a function or language model, and report
latencies as a table, JSON or a chart."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_address
from pilotlight.cli.core.command import INTERRUPTED, command
from pilotlight.cli.core.formatting import (
    format_milliseconds,
    format_money,
    format_table,
    parse_duration_s,
)
from pilotlight.cli.core.progress import progress_bar
from pilotlight.cli.core.session import Session
from pilotlight.errors import InvalidInput, NotFound
from pilotlight.spec.engines import is_language_model

if TYPE_CHECKING:
    from pilotlight.loadtest.requests import RequestFactory

Target = Annotated[
    str,
    typer.Argument(
        metavar="APP/FUNCTION",
        help="A function, or a language model, also as APP/FUNCTION:ADAPTER.",
    ),
]
_TITLES = {
    "latency": "last byte",
    "ttft": "first token",
    "itl": "between tokens",
    "late": "sent late",
}
_COLUMNS = {
    "what": "",
    "n": "n",
    "mean": "mean",
    "p50": "p50",
    "p90": "p90",
    "p99": "p99",
    "max": "max",
}
MAX_RATE = 10_000.0
MAX_REQUESTS = 100_000
"""Maximum requests in one test: the gaps of all streams are held in memory."""
_LATE_MS = 100.0
"""Delay of the generator itself (p99) above which it is reported."""

Rate = Annotated[float, typer.Option("--rate", "-r", help="Requests to send per second.")]
Duration = Annotated[str, typer.Option("--duration", "-d", help="Duration of the test.")]
Arrivals = Annotated[str, typer.Option(help="Arrival process: poisson, even or bursty.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Arguments of a function as JSON, or @FILE with one JSON value per line; may be "
        "repeated. Each request uses a random one. Default: the function's example."
    ),
]
PromptLength = Annotated[
    str,
    typer.Option(
        help="Prompt length in tokens: 200, uniform:10,400, exponential:200, "
        "lognormal:200,0.8 or pareto:50,1.5."
    ),
]
OutputLength = Annotated[str, typer.Option(help="Output length in tokens, in the same syntax.")]
SharedPrefix = Annotated[
    int,
    typer.Option(min=0, help="Number of leading tokens that the prompts of a group share."),
]
Groups = Annotated[int, typer.Option(min=1, help="Number of prompt groups.")]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Send chats of words instead of prompts of token ids."),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Request streamed responses. Default: for language models and generators.",
    ),
]
Longest = Annotated[
    int, typer.Option(min=2, help="Limit prompts and outputs to half of this, in tokens.")
]
RequestTimeout = Annotated[str, typer.Option(help="Timeout of one request.")]
Seed = Annotated[
    int,
    typer.Option(help="Random seed: the same seed sends the same requests at the same times."),
]
Picture = Annotated[Path | None, typer.Option(help="Write the latency chart to this SVG file.")]
Report = Annotated[
    Path | None,
    typer.Option(help="Write the report, including histograms, to this JSON file."),
]


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "loadtest")(loadtest)


def loadtest(
    session: Session,
    target: Target,
    *,
    rate: Rate = 1.0,
    duration: Duration = "30s",
    arrivals: Arrivals = "poisson",
    data: Data = None,
    prompt: PromptLength = "lognormal:200,0.6",
    output: OutputLength = "lognormal:64,0.6",
    shared_prefix: SharedPrefix = 0,
    groups: Groups = 1,
    chat: Chat = False,
    stream: Stream = None,
    longest: Longest = 2048,
    timeout: RequestTimeout = "120s",
    seed: Seed = 0,
    picture: Picture = None,
    out: Report = None,
) -> None:
    """Send requests at fixed or random times, whether or not earlier ones are answered, and measure
    the responses.

    Latencies count from the time a request was due, so they include queueing. Ctrl-C ends the test
    early and reports the responses so far."""
    from pilotlight.loadtest.chart import draw_chart

    seconds, patience = parse_duration_s(duration), parse_duration_s(timeout)
    _check_load(rate, seconds, patience, duration=duration)
    for option, path in (("--out", out), ("--picture", picture)):
        _check_writable(option, path)
    recipe = _recipe(
        session,
        target,
        data=data,
        lengths={"prompt": prompt, "output": output, "longest": longest // 2},
        shared=shared_prefix,
        groups=groups,
        chat=chat,
        stream=stream,
    )
    due = _due_times(arrivals, rate, seconds, seed)
    plan = {
        "target": target,
        "rate_per_s": rate,
        "duration_s": seconds,
        "arrivals": arrivals,
        "seed": seed,
        **recipe.describe(),
    }
    found = _measure(session, recipe, due, patience, plan)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    if picture is not None:
        picture.write_text(draw_chart(found, title=f"pilotlight loadtest {target}"))
    session.show(found, lambda: _rendered(found))
    if found["interrupted"]:
        raise typer.Exit(INTERRUPTED)
    if not found["good"]:
        raise typer.Exit(1)


def _due_times(arrivals: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Return when requests are due, in seconds from the begin; at least one. Raises
    InvalidInput."""
    from pilotlight.loadtest.arrivals import arrivals as drawn

    due = list(drawn(arrivals, rate_per_s=rate, duration_s=seconds, source=random.Random(seed)))
    if not due:
        raise InvalidInput(
            f"no request is due in {seconds:g} s at {rate:g} per second",
            hint="Use a higher --rate or a longer --duration.",
        )
    return due


def _measure(
    session: Session,
    recipe: RequestFactory,
    due: Sequence[float],
    timeout_s: float,
    plan: dict[str, Any],
) -> dict[str, Any]:
    """Send a request at each time of `due`; the report of `plan`."""
    from pilotlight.loadtest import runner
    from pilotlight.loadtest.results import report

    with progress_bar(session, "loadtest", total=len(due)) as show:
        results, elapsed_s = asyncio.run(
            runner.run(
                session.profile(),
                recipe,
                due,
                timeout_s=timeout_s,
                seed=plan["seed"],
                on_progress=lambda sent, answered, failed: show(
                    answered, _in_flight(sent, answered, failed)
                ),
            )
        )
    return {
        **report(results, elapsed_s=elapsed_s, plan=plan),
        "due": len(due),
        "interrupted": len(results) < len(due),
    }


def _check_load(rate: float, seconds: float, patience: float, *, duration: str) -> None:
    """Raises InvalidInput."""
    if not 0 < rate <= MAX_RATE:
        raise InvalidInput(
            f"--rate {rate:g}: must be more than 0 and at most {MAX_RATE:g} per second"
        )
    if seconds <= 0 or patience <= 0 or rate * seconds > MAX_REQUESTS:
        raise InvalidInput(
            f"--duration {duration}: must be more than 0, with at most {MAX_REQUESTS} requests in "
            f"one test"
        )


def _check_writable(option: str, path: Path | None) -> None:
    """Check an output path before the test begins. Raises InvalidInput."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = (
            "is a directory" if path.is_dir() else f"there is no directory {path.absolute().parent}"
        )
        raise InvalidInput(f"{option} {path}: {what}", hint="Name a file in an existing directory.")


def _recipe(
    session: Session,
    target: str,
    *,
    data: list[str] | None,
    lengths: dict[str, Any],
    shared: int,
    groups: int,
    chat: bool,
    stream: bool | None,
) -> RequestFactory:
    """The request factory for the kind of the target. Raises NotFound, InvalidInput."""
    from pilotlight.loadtest import distributions
    from pilotlight.loadtest.requests import FunctionCalls, ModelCalls

    path = target.partition(":")[0]
    app, function, method = parse_address(path.partition("@")[0])
    spec = serving_spec(session, app, function)
    if not is_language_model(spec):
        if spec.get("kind") == "asgi":
            raise InvalidInput(
                f"{path} is a web application, which loadtest does not support",
                hint="Name a function or a language model, or use a generic HTTP load generator.",
            )
        is_generator = any(
            m.get("is_generator") for m in spec.get("methods", ()) if m.get("name", "") == method
        )
        is_stream = is_generator if stream is None else stream
        return FunctionCalls(
            path=f"/v1/functions/{path}:invoke",
            arguments=read_arguments(data, spec, method),
            is_stream=is_stream,
        )
    if data:
        raise InvalidInput(
            "--data is for functions; for a language model pass --prompt and --output",
            parameter="data",
        )
    drawn = {
        name: distributions.parse_distribution(
            lengths[name], option=f"--{name}", longest=lengths["longest"]
        )
        for name in ("prompt", "output")
    }
    return ModelCalls(
        model=target,
        prompt=drawn["prompt"],
        output=drawn["output"],
        by_ids=not chat,
        is_stream=stream is not False,
        shared=shared,
        groups=groups,
    )


def serving_spec(session: Session, app: str, function: str) -> dict[str, Any]:
    """The spec of the revision with the most traffic. Raises NotFound."""
    with session.client() as client:
        rows = client.revisions(app, function=function)
        if not rows:
            raise NotFound(
                f"{app}/{function} has no revision",
                hint="List apps with `pilotlight app list`.",
            )
        serving = max(rows, key=lambda row: row.get("weight", 0))
        spec: dict[str, Any] = client.revision(app, serving["revision"], function=function)["spec"]
    return spec


def read_arguments(data: list[str] | None, spec: dict[str, Any], method: str) -> list[Any]:
    """Arguments of calls, from `--data`, or the example of the function. Raises InvalidInput."""
    if not data:
        example = next(
            (m.get("example") for m in spec.get("methods", ()) if m.get("name", "") == method), None
        )
        return [example if example is not None else {}]
    found: list[Any] = []
    for text in data:
        lines = Path(text[1:]).read_text().splitlines() if text.startswith("@") else [text]
        try:
            found += [json.loads(line) for line in lines if line.strip()]
        except ValueError as e:
            raise InvalidInput(
                f"--data {text[:80]!r} is not JSON: {e}",
                hint='Write --data \'{"name": "Ada"}\', or --data @calls.ndjson.',
            ) from e
    if not found:
        raise InvalidInput("--data contains no arguments: the file is empty")
    return found


def _in_flight(sent: int, answered: int, failed: int) -> str:
    return f"{sent - answered} in flight{f', {failed} failed' if failed else ''}"


def _rendered(found: dict[str, Any]) -> Any:
    from rich.console import Group

    rows = [
        {
            "what": _TITLES[name],
            **{
                key: row[key] if key == "n" else format_milliseconds(row[key])
                for key in _COLUMNS
                if key != "what"
            },
        }
        for name, row in found["ms"].items()
    ]
    text = (
        f"{found['requests']} requests, {found['good']} good, {found['good_per_s']:.1f}/s of "
        f"{found['offered_per_s']:g}/s offered"
    )
    lines = (
        [f"interrupted: {found['requests']} of {found['due']} requests were answered", text]
        if found["interrupted"]
        else [text]
    )
    if (late := found["ms"].get("late")) is not None and late["p99"] > _LATE_MS:
        lines.append(
            f"this generator sent requests {format_milliseconds(late['p99'])} late (p99): lower "
            f"the rate, or use several machines"
        )
    if found["errors"]:
        lines.append(
            "failed: "
            + ", ".join(f"{count} times {what}" for what, count in found["errors"].items())
        )
    if found["starts"]:
        lines.append(
            "starts: "
            + ", ".join(f"{kind} {count}" for kind, count in sorted(found["starts"].items()))
        )
    if found["tokens_out"]:
        lines.append(
            f"tokens: {found['tokens_in']} in, {found['tokens_out']} out, "
            f"{found['tokens_out_per_s']:.0f}/s"
        )
    if found["cost"] not in ("0", "0E-12"):
        lines.append(f"cost: {format_money(found['cost'])}")
    return Group("\n".join(lines), "", format_table(rows, _COLUMNS, empty="no responses"))
