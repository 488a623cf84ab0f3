"""The options by which a deploy or a promotion says how it is released."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pilotlight.errors import InvalidInput

Meta = Annotated[
    list[str] | None,
    typer.Option("--meta", help="Lineage: name=value, such as dataset=sha256:…; may be repeated."),
]
Evaluation = Annotated[
    Path | None,
    typer.Option("--eval", help="JSON file with the numbers of the offline evaluation."),
]
NoTraffic = Annotated[
    bool, typer.Option("--no-traffic", help="Make the revisions, and leave the traffic as it is.")
]
Tag = Annotated[
    str | None, typer.Option(help="Tag by which the new revisions can be called: APP/FUNCTION@TAG.")
]
AllowBreaking = Annotated[
    bool, typer.Option("--allow-breaking", help="No caller depends on what a new schema breaks.")
]
OverrideFreeze = Annotated[
    bool,
    typer.Option(
        "--override-freeze", help="Release although an error budget is spent (scope admin)."
    ),
]
Message = Annotated[str, typer.Option("--message", "-m", help="Kept in the app's history.")]


def parse_lineage(words: Sequence[str] | None) -> dict[str, str]:
    """`name=value` words; values stay text. Raises InvalidInput."""
    out: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise InvalidInput(
                f"--meta {word!r} is not name=value", hint="Write --meta dataset=sha256:…"
            )
        out[name] = value
    return out


def read_evaluation(file: Path | None) -> dict[str, float]:
    """The numbers in a file: `{"accuracy": 0.93}`, or by function `{"embed": {"accuracy": 0.93}}`.
    Raises InvalidInput."""
    if file is None:
        return {}
    try:
        body = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise InvalidInput(
            f"--eval {file}: {e}", hint='Write a JSON file such as {"accuracy": 0.93}.'
        ) from e
    if not isinstance(body, dict):
        raise InvalidInput(
            f"--eval {file}: expected an object of numbers, got {type(body).__name__}"
        )
    return _numbers(body, file, "")


def _numbers(body: Mapping[str, Any], file: Path, inside: str) -> dict[str, float]:
    out: dict[str, float] = {}
    for name, value in body.items():
        if isinstance(value, dict) and not inside:
            out |= _numbers(value, file, f"{name}.")
        elif (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ):
            out[inside + name] = float(value)
        else:
            raise InvalidInput(f"--eval {file}: {inside}{name} = {value!r}: expected a number")
    return out
