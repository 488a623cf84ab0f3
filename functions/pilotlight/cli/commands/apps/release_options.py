"""Release options of the deploy and promote commands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pilotlight.cli.core.formatting import parse_duration_s
from pilotlight.errors import InvalidInput
from pilotlight.protocol import MAX_LEASE_S, MIN_LEASE_S

Meta = Annotated[
    list[str] | None,
    typer.Option(
        "--meta", help="Lineage as name=value, such as dataset=sha256:…; may be repeated."
    ),
]
Evaluation = Annotated[
    Path | None,
    typer.Option("--eval", help="JSON file with the metrics of the offline evaluation."),
]
NoTraffic = Annotated[
    bool, typer.Option("--no-traffic", help="Create the revisions without giving them traffic.")
]
Tag = Annotated[
    str | None, typer.Option(help="Tag of the new revisions; call them as APP/FUNCTION@TAG.")
]
AllowBreaking = Annotated[
    bool,
    typer.Option("--allow-breaking", help="Accept schema changes that break existing callers."),
]
OverrideFreeze = Annotated[
    bool,
    typer.Option(
        "--override-freeze", help="Release although an error budget is spent (scope admin)."
    ),
]
Lease = Annotated[
    str | None,
    typer.Option(
        "--lease",
        metavar="DURATION",
        help="Delete the app after this time (such as 2h) unless it is deployed again.",
    ),
]
Message = Annotated[str, typer.Option("--message", "-m", help="Description for the app's history.")]


def parse_lease_s(text: str | None) -> float | None:
    """Parse `--lease` to seconds. Raises InvalidInput."""
    if text is None:
        return None
    lease_s = parse_duration_s(text)
    if not MIN_LEASE_S <= lease_s <= MAX_LEASE_S:
        raise InvalidInput(
            f"--lease {text}: must be {MIN_LEASE_S} s to {MAX_LEASE_S // 86_400} days",
            hint="Write --lease 2h, or leave it out to keep the app until it is deleted.",
        )
    return lease_s


def parse_lineage(words: Sequence[str] | None) -> dict[str, str]:
    """Parse `name=value` words; values stay text. Raises InvalidInput."""
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
    """Read metrics from a file: `{"accuracy": 0.93}`, or by function `{"embed": {"accuracy":
    0.93}}`. Raises InvalidInput."""
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
