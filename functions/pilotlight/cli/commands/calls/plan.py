"""`pilotlight plan`: how many instances, GPUs and how much money a function needs for a rate and a
99th percentile, from its measured calls and starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from pilotlight.cli.core.addresses import parse_address
from pilotlight.cli.core.command import command
from pilotlight.cli.core.formatting import (
    NO_VALUE,
    format_milliseconds,
    format_money,
    format_table,
    format_time,
    parse_duration_s,
    parse_share,
    parse_time,
)
from pilotlight.cli.core.session import Session
from pilotlight.errors import Forbidden, InvalidInput, Unavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pilotlight.capacity.measurements import Measurements
    from pilotlight.capacity.nodes import Room
    from pilotlight.capacity.report import Lengths, Surroundings
    from pilotlight.client.client import Client

MAX_RATE = 1_000_000.0
MAX_ZONES = 20
_MAX_SHARE = 10.0
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Target = Annotated[
    str, typer.Argument(metavar="APP/FUNCTION", help="A function, method or language model.")
]
Rate = Annotated[float, typer.Option("--rate", "-r", help="Calls per second.")]
P99 = Annotated[
    str,
    typer.Option("--p99", help="Bound on the 99th percentile, such as 300ms: to the last byte."),
]
TokensIn = Annotated[
    str | None,
    typer.Option(
        help="Prompt length in tokens, as in `pilotlight loadtest`: 200, lognormal:200,0.8. "
        "Default: as measured."
    ),
]
TokensOut = Annotated[str | None, typer.Option(help="Answer length in tokens, in the same syntax.")]
Zones = Annotated[
    int,
    typer.Option(
        min=1, max=MAX_ZONES, help="Zones with equally many instances, of which one may be lost."
    ),
]
Headroom = Annotated[str, typer.Option(help="Share that the rate may be higher.")]
Growth = Annotated[
    str, typer.Option(help="Share by which the rate grows in a minute, for the warm reserve.")
]
Since = Annotated[str, typer.Option(help="Use calls since this duration ago, or this time.")]


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "plan")(plan)


def plan(
    session: Session,
    target: Target,
    *,
    rate: Rate,
    p99: P99,
    tokens_in: TokensIn = None,
    tokens_out: TokensOut = None,
    zones: Zones = 1,
    headroom: Headroom = "30%",
    growth: Growth = "20%",
    since: Since = "24h",
) -> None:
    """Plan the instances that a function needs for a rate and a 99th percentile, from its measured
    calls and starts.

    The calls of the window are simulated as they were measured; `pilotlight loadtest` measures
    them. Exit status 1 where no number of instances is enough."""
    from pilotlight.capacity.measurements import Measurements
    from pilotlight.capacity.report import make_report, require_calls

    app, function, method = parse_address(
        target, hint="Write APP/FUNCTION. Plans of tenants are shown by `pilotlight tenant plans`."
    )
    options = {
        "rate_per_s": _in_range("--rate", rate, MAX_RATE),
        "p99_ms": _in_range("--p99", parse_duration_s(p99), 86_400.0) * 1000,
        "headroom": _share("--headroom", headroom),
        "growth_per_min": _share("--growth", growth),
    }
    lengths = _lengths(tokens_in, tokens_out)
    begin = parse_time(since, now=time.time())
    with session.client() as client:
        body = client.service_times(app, function, method=method, since=begin)
        measured = Measurements.from_json(body)
        require_calls(target, measured)
        around = _surroundings(session, client, measured)
    found = make_report(target, measured, zones=zones, lengths=lengths, around=around, **options)
    session.show(found, lambda: _rendered(found))
    if found["plan"] is None:
        raise typer.Exit(1)


def _in_range(option: str, value: float, most: float) -> float:
    if not 0 < value <= most:
        raise InvalidInput(f"{option} {value:g}: must be more than 0 and at most {most:g}")
    return value


def _share(option: str, text: str) -> float:
    share = parse_share(text, option=option)
    if share > _MAX_SHARE:
        raise InvalidInput(f"{option} {text}: must be at most {_MAX_SHARE:.0%}")
    return share


def _lengths(tokens_in: str | None, tokens_out: str | None) -> Lengths:
    from pilotlight.capacity.report import Lengths
    from pilotlight.loadtest.distributions import parse_distribution

    return Lengths(
        tokens_in=None
        if tokens_in is None
        else parse_distribution(tokens_in, option="--tokens-in"),
        tokens_out=None
        if tokens_out is None
        else parse_distribution(tokens_out, option="--tokens-out"),
    )


def _surroundings(session: Session, client: Client, measured: Measurements) -> Surroundings:
    from pilotlight.capacity.report import Surroundings

    is_here = urlsplit(session.profile().url).hostname in _LOOPBACK
    return Surroundings(
        room=_room(client, measured),
        load=os.getloadavg()[0] if is_here else None,
        cores=os.cpu_count() if is_here else None,
    )


def _room(client: Client, measured: Measurements) -> Room | None:
    """The room on the platform's nodes; None where this key may not see them, or they are away."""
    from pilotlight.capacity import nodes

    try:
        machine = nodes.node_of_machine(client.machine())
        found = [machine] if machine else list(map(nodes.node_of_report, client.nodes()))
    except (Forbidden, Unavailable):
        return None
    return nodes.room(found, measured)


# -- rendering -------------------------------------------------------------------------------------
def _rendered(found: Mapping[str, Any]) -> RenderableType:
    from rich.console import Group

    def table(rows: Iterator[tuple[str, str]]) -> RenderableType:
        lines = [{"what": what, "value": value} for what, value in rows]
        return format_table(lines, {"what": "", "value": ""}, empty="")

    parts: list[RenderableType] = [_headline(found), "", table(_measured(found["measured"]))]
    if found["plan"] is not None:
        parts += ["", table(_planned(found))]
    parts += ["", *(_warning(text) for text in found["warnings"])] if found["warnings"] else []
    return Group(*parts)


def _headline(found: Mapping[str, Any]) -> RenderableType:
    from rich.text import Text

    asked = found["asked"]
    lengths = [
        f", {asked[name]} tokens {word}"
        for name, word in (("tokens_in", "in"), ("tokens_out", "out"))
        if asked[name]
    ]
    return Text(
        f"{found['function']} {found['revision']}: {asked['rate_per_s']:g} calls/s, 99 % within "
        f"{format_milliseconds(asked['p99_ms'])}{''.join(lengths)}"
    )


def _measured(measured: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    since, until = format_time(measured["since"]), format_time(measured["until"])
    cut = ", the newest" if measured["is_cut"] else ""
    yield "measured", f"{measured['calls']} calls, {since} to {until}{cut}"
    left_out = {name: measured[name] for name in ("failed", "cold", "cached") if measured[name]}
    if left_out:
        yield "left out", ", ".join(f"{count} {name}" for name, count in left_out.items())
    yield "a call", _times(measured["exec_ms"])
    yield "of it alone", f"{_times(measured['work_ms'])}, C² {measured['scv']:.2g}"
    if measured["slots"] > 1:
        at_once = f"{measured['calls_at_once']} of {measured['slots']} measured"
        yield "calls at once", f"{at_once}, each makes the others {measured['slowdown']:.0%} slower"
    if (first := measured["first_token_ms"]) is not None:
        yield "first token", _times(first)
    if (tokens := measured["token_times"]) is not None:
        prompt = f"{tokens['prompt_ms']:.3g} ms + {tokens['prompt_token_ms']:.3g} ms each"
        lengths = f"{measured['tokens_in']:.0f} in, {measured['tokens_out']:.0f} out"
        yield "tokens", f"{lengths}; first {prompt}, then {tokens['token_ms']:.3g} ms each"
    starts = measured["starts_ms"]
    yield "starts", "; ".join(f"{kind} {_times(starts[kind])}" for kind in starts) or NO_VALUE
    yield "one instance", f"at most {measured['max_rate_per_s']:.4g} calls/s"


def _times(times: Mapping[str, Any]) -> str:
    p50, p99 = format_milliseconds(times["p50"]), format_milliseconds(times["p99"])
    return f"p50 {p50}, p99 {p99} (n {times['n']})"


def _planned(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    planned, asked = found["plan"], found["asked"]
    reserve = NO_VALUE if planned["reserve"] is None else planned["reserve"]
    count = f"{planned['instances']}: {planned['serving']} serving, reserve {reserve}"
    zones = f", {planned['per_zone']} in each of {asked['zones']} zones"
    yield "instances", f"{count}{zones if asked['zones'] > 1 else ''}"
    if planned["gpus"]:
        yield "GPUs", str(planned["gpus"])
    yield "decided by", _CONSTRAINTS[planned["constraint"]]
    p50, p99 = format_milliseconds(planned["p50_ms"]), format_milliseconds(planned["p99_ms"])
    expected = f"p50 {p50}, p99 {p99} at {asked['rate_per_s']:g}/s"
    if _streams(found):
        expected += f", first token p99 {format_milliseconds(planned['first_p99_ms'])}"
    yield "expected", expected
    if (test := planned["load_test"]) is not None:
        low, high = map(format_milliseconds, (test["p99_low_ms"], test["p99_high_ms"]))
        yield "load tests", f"p99 {low} to {high} in 9 of 10 tests of {test['calls']} calls"
    peak = asked["rate_per_s"] * (1 + asked["headroom"])
    late = format_milliseconds(planned["p99_at_headroom_ms"])
    yield "with headroom", f"p99 {late} at {peak:g}/s"
    yield "busy", f"{planned['busy']:.2f} of {planned['serving']} instances"
    if (cost := found["cost_per_day"]) is not None:
        parts = ", ".join(
            f"{name} {format_money(cost[name])}" for name in ("busy", "reserved", "calls")
        )
        yield "cost a day", f"{format_money(cost['total'], cost['currency'])} ({parts})"


def _streams(found: Mapping[str, Any]) -> bool:
    measured, planned = found["measured"], found["plan"]
    return measured["first_token_ms"] is not None and planned["first_p99_ms"] is not None


_CONSTRAINTS = {
    "rate": "the rate: fewer are overloaded",
    "p99": "the 99th percentile: fewer answer too late",
    "memory": "the memory of the nodes, which do not hold so many",
    "gpu": "the GPUs of the nodes, which do not hold so many",
}


def _warning(text: str) -> RenderableType:
    from rich.text import Text

    return Text(f"! {text}", "yellow")
