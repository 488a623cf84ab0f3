"""Some traces for pictures and browsers: a cold call, one whose retry helped, one that failed, and
warm ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
Step = tuple[str, str, float, float]
"""Name, its parent's, begin and length in ms; a name that begins with ! failed."""

COLD: Sequence[Step] = (
    ("route", "", 0, 0.1),
    ("admit", "", 0.1, 0.3),
    ("queue", "", 0.4, 0.6),
    ("start", "", 1.0, 214.0),
    ("slot", "start", 1.2, 9.0),
    ("restore", "start", 10.2, 158.0),
    ("wake", "start", 168.2, 31.0),
    ("exec", "", 215.4, 27.0),
    ("worker", "exec", 215.9, 26.0),
    ("tokenise", "worker", 216.1, 2.4),
    ("embed", "worker", 218.6, 22.8),
    ("normalise", "embed", 240.1, 1.1),
)
RETRIED: Sequence[Step] = (
    ("attempt 1", "", 0.3, 120.0),
    ("!exec", "attempt 1", 0.5, 119.0),
    ("attempt 2", "", 120.3, 61.0),
    ("queue", "attempt 2", 120.3, 20.0),
    ("exec 2", "attempt 2", 140.4, 40.0),
    ("worker", "exec 2", 140.9, 39.0),
)
FAILED: Sequence[Step] = (
    ("!exec", "", 0.2, 4.0),
    ("worker", "!exec", 0.4, 3.6),
    ("!look up", "worker", 0.9, 2.8),
)
WARM: Sequence[Step] = (
    ("exec", "", 0.05, 3.1),
    ("worker", "exec", 0.2, 2.7),
    ("tokenise", "worker", 0.3, 0.4),
)


def traces(*, tenant: str, revisions: Mapping[str, str], now: float) -> Iterator[Json]:
    """Newest last; each of the demo's functions has some."""
    for number, (function, revision) in enumerate(sorted(revisions.items())):
        place = {"tenant": tenant, "function": function, "revision": revision}
        yield _trace(
            number * 10 + 1,
            COLD,
            **place,
            at=now - 3000 + number,
            kept_for="cold",
            start_kind="RESTORE",
            status=200,
        )
        yield _trace(
            number * 10 + 2,
            RETRIED,
            **place,
            at=now - 2000 + number,
            kept_for="slow",
            start_kind="WARM",
            status=200,
        )
        yield _trace(
            number * 10 + 3,
            FAILED,
            **place,
            at=now - 1000 + number,
            kept_for="error",
            start_kind="WARM",
            status=500,
        )
        yield _trace(
            number * 10 + 4,
            WARM,
            **place,
            at=now - 60 + number,
            kept_for="drawn",
            start_kind="WARM",
            status=200,
        )


def _trace(
    number: int,
    steps: Sequence[Step],
    *,
    tenant: str,
    function: str,
    revision: str,
    at: float,
    kept_for: str,
    start_kind: str,
    status: int,
) -> Json:
    app, _, name = function.partition("/")
    whole_ms = max(begin + ms for _, _, begin, ms in steps) + 0.1
    root = f"POST /v1/functions/{function}:invoke"
    ids = {
        step[0]: f"{number:08x}{n:08x}"
        for n, step in enumerate(((root, "", 0.0, whole_ms), *steps), 1)
    }
    attributes = {
        "http.response.status_code": status,
        "faas.name": function,
        "faas.version": revision,
        "pilotlight.kept_for": kept_for,
    }
    spans = [
        _span(
            ids[root],
            "",
            root,
            0.0,
            whole_ms,
            kind="server",
            error=str(status) if status >= 500 else "",
            attributes=attributes,
        )
    ]
    for step, parent, begin, ms in steps:
        own = (
            {"pilotlight.phase_ms": ms}
            if parent == "start"
            else {"tokens": 12}
            if step == "tokenise"
            else {}
        )
        error = "500" if step.startswith("!") else ""
        shown = step.lstrip("!").removesuffix(" 2") if step != "attempt 2" else step
        spans.append(
            _span(ids[step], ids[parent or root], shown, begin, ms, error=error, attributes=own)
        )
    return {
        "id": f"{number:032x}",
        "call": f"req-{number:032x}",
        "tenant": tenant,
        "environment": "main",
        "app": app,
        "function": name,
        "revision": revision,
        "start_kind": start_kind,
        "kept_for": kept_for,
        "status": status,
        "duration_ms": whole_ms,
        "at": at,
        "spans": spans,
    }


def _span(
    id: str,
    parent: str,
    name: str,
    begin_ms: float,
    ms: float,
    *,
    attributes: Json,
    kind: str = "internal",
    error: str = "",
) -> Json:
    return {
        "id": id,
        "parent": parent,
        "name": name,
        "kind": kind,
        "begin_ms": begin_ms,
        "ms": ms,
        "error": error,
        "attributes": attributes,
    }
