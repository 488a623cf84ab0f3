"""`pilotlight engine …`: show language models and their last 24 hours."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pilotlight.cli.core.addresses import parse_function
from pilotlight.cli.core.command import command_group
from pilotlight.cli.core.formatting import NO_VALUE, format_milliseconds, format_money, format_table
from pilotlight.cli.core.session import Session

_COLUMNS = {
    "name": "model",
    "calls": "calls",
    "tokens_in": "tokens in",
    "tokens_out": "tokens out",
    "cached": "cached",
    "first": "first token p50/p99",
    "between": "between tokens p50/p99",
    "pace": "tokens/s",
    "cache": "KV in use",
    "price_per_1k": "per 1k tokens",
}
_STARTS = {"kind": "start", "n": "calls", "p50": "first token p50", "p99": "p99"}
_TENANTS = {
    "tenant": "tenant",
    "calls": "calls",
    "tokens_in": "tokens in",
    "tokens_out": "tokens out",
    "cost": "cost",
}


def register(root: typer.Typer) -> None:
    """Add the command group."""
    command_group(
        root,
        "engine",
        "Show language models: tokens, latencies, cache use and prices.",
        {"list": list_, "show": show},
    )


def list_(
    session: Session,
    app: Annotated[str | None, typer.Option(help="Only models of this app.")] = None,
) -> None:
    """List the environment's language models with figures of the last 24 hours."""
    rows = session.request(lambda client: client.engines(app=app))
    empty = "No language models. Declare one with app.vllm(…); see docs/how-to/language-models.md."
    session.show(rows, lambda: format_table([_row(row) for row in rows], _COLUMNS, empty=empty))


def show(
    session: Session,
    target: Annotated[str, typer.Argument(metavar="APP/FUNCTION", help="The model's address.")],
) -> None:
    """Show a language model: time to first token by start kind, finish reasons, tokens by
    tenant."""
    app, function = parse_function(
        target,
        hint="List models with `pilotlight engine list`.",
        without_method="A language model has no methods: write APP/FUNCTION.",
    )
    body = session.request(lambda client: client.engine(app, function))
    session.show(body, lambda: _detail(body))


def _detail(body: dict[str, Any]) -> Any:
    from rich.console import Group

    where = f"{body['gpu']}:{body['gpu_count']}" if body["gpu_count"] else "CPU"
    lines = [
        (
            f"{body['revision']} on {where}: {body['max_num_seqs']} concurrent sequences of at most "
            f"{body['max_model_len']} tokens"
        )
    ]
    if body["adapters"]:
        lines.append("adapters: " + ", ".join(body["adapters"]))
    if body["finishes"]:
        lines.append(
            "finish reasons: "
            + ", ".join(f"{reason} {n}" for reason, n in body["finishes"].items())
        )
    if body["completed"] is not None:
        lines.append(f"streams: {body['streams']}, {body['completed']:.2%} completed")
    if body["out_of_memory"]:
        lines.append(f"out of memory: {body['out_of_memory']} times")
    starts = [
        {
            "kind": kind,
            "n": row["n"],
            "p50": format_milliseconds(row["p50_ms"]),
            "p99": format_milliseconds(row["p99_ms"]),
        }
        for kind, row in body["first_token_by_start"].items()
    ]
    return Group(
        format_table([_row(body)], _COLUMNS, empty=""),
        "",
        "\n".join(lines),
        "",
        format_table(starts, _STARTS, empty="No streams yet."),
        "",
        format_table(body["tenants"], _TENANTS, empty="No calls in the last day."),
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    cache = row["cache_use"]
    return {
        **row,
        "name": f"{row['app']}/{row['function']}",
        "cached": None if row["cached"] is None else f"{row['cached']:.0%}",
        "first": _times(row["first_token"]),
        "between": _times(row["between_tokens"]),
        "pace": None if row["tokens_per_s"] is None else round(row["tokens_per_s"], 1),
        "cache": None if cache is None else f"{cache[0]} %, at most {cache[1]} %",
        "price_per_1k": None if row["price_per_1k"] is None else format_money(row["price_per_1k"]),
    }


def _times(times: dict[str, Any] | None) -> str:
    return (
        NO_VALUE
        if times is None
        else f"{format_milliseconds(times['p50_ms'])} / {format_milliseconds(times['p99_ms'])}"
    )
