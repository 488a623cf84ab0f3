"""What drift monitoring gets of rows: the watched values, which are part of a row until its file is
converted, and the sketch of a file, which counts them. Runs in the writer's confined processes.

A sketch has bounded counts for each revision and feature, and for functions with labels a line for
each row: the call's id, its prediction and the values of its slices."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from activator.prediction_log.content import parse_body
from activator.prediction_log.frames import LoggedCall
from pilotlight.spec.monitor import PREDICTION, value_at
from pilotlight.spec.sketches import MAX_CATEGORY_CHARS, Sketch

MAX_REVISIONS: Final = 8
"""In one file; rows of further ones are not counted."""
MAX_SCORES: Final = 5_000
"""Rows of one file whose predictions can be compared with labels."""
WATCHED_MEMBER: Final = b'"watched":'
"""In rows with watched values, and perhaps in others."""
_MAX_BITS: Final = sys.float_info.max_exp
_MAX_STATUS: Final = 400
"""Answers from here on are errors, and no predictions."""


def watched_values(logged: LoggedCall, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return the member `watched` of a row, with the values that its terms name; {} without
    monitoring."""
    facts, monitor = logged.facts, terms.get("monitor")
    if monitor is None or facts["status"] >= _MAX_STATUS:
        return {}
    _, arguments = (
        parse_body(logged.input, terms["scrub"], facts["parameters"])
        if facts["input_is_json"]
        else (False, None)
    )
    watched: dict[str, Any] = {
        "features": {
            one["path"]: [_plain(value_at(arguments, one["path"])), one["low"], one["high"]]
            for one in monitor["features"]
        }
    }
    if monitor["prediction"]:
        is_json = facts["output_is_json"] and logged.output
        found, result = parse_body(logged.output, terms["scrub"], ()) if is_json else (False, None)
        predicted = _plain(value_at(result, monitor["prediction"])) if found else None
        watched["features"][PREDICTION] = [predicted, None, None]
        if monitor["label"] and predicted is not None:
            watched["slices"] = [_text(value_at(arguments, path)) for path in monitor["slices"]]
    return {"watched": watched}


def sketch(lines: Iterable[bytes]) -> bytes | None:
    """Count the watched values of rows; None if they have none. Raises ValueError, KeyError for
    damaged lines."""
    columns: dict[str, dict[str, list[list[Any]]]] = {}
    rows: dict[str, int] = {}
    scores: list[list[Any]] = []
    for line in lines:
        row = json.loads(line)
        watched, version = row.get("watched"), row["version"]
        if watched is None or (version not in columns and len(columns) >= MAX_REVISIONS):
            continue
        rows[version] = rows.get(version, 0) + 1
        by_feature = columns.setdefault(version, {})
        for name, value in watched["features"].items():
            by_feature.setdefault(name, []).append(value)
        if "slices" in watched and len(scores) < MAX_SCORES:
            predicted = watched["features"][PREDICTION][0]
            at_s = row["at_ns"] / 1e9
            scores.append([row["request_id"], version, at_s, predicted, watched["slices"]])
    if not columns:
        return None
    revisions = {
        version: {
            "rows": rows[version],
            "features": {name: _sketch(values).to_json() for name, values in features.items()},
        }
        for version, features in columns.items()
    }
    return json.dumps({"revisions": revisions, "scores": scores}, separators=(",", ":")).encode()


def _sketch(values: list[list[Any]]) -> Sketch:
    _, low, high = values[0]
    return Sketch.of((value for value, _, _ in values), low=low, high=high)


def _plain(value: Any) -> Any:
    """Return a number or short text; null for anything else, and "" for a long text. An integer
    beyond the doubles is no number here."""
    if isinstance(value, str):
        return _stored(value) if len(value) <= MAX_CATEGORY_CHARS else ""
    if isinstance(value, int) and value.bit_length() >= _MAX_BITS:
        return None
    return value if isinstance(value, bool | int | float) else None


def _stored(text: str) -> str:
    """Return text as every database takes it: half of a surrogate pair and NUL become "?"."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _text(value: Any) -> str:
    """Return the value of a slice as text; "" without one."""
    plain = _plain(value)
    if isinstance(plain, bool):
        return "true" if plain else "false"
    return "" if plain is None else str(plain)[:MAX_CATEGORY_CHARS]
