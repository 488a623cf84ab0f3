"""`pilotlight trace` against the real control plane, and the waterfall that it draws."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.table import Table
from typer.testing import CliRunner, Result

from pilotlight.cli.commands.calls.trace import describe_span, draw_bar, waterfall
from pilotlight.cli.main import build
from pilotlight.controller.analytics import traces
from pilotlight.core.tracing.trace_layout import MAX_DEPTH, layout_spans
from tests.fakes.served_controller import ServedController
from tests.functions.controller.test_traces import trace

OLD = 600
"""More than a page."""


def span(
    id: str,
    parent: str = "",
    *,
    name: str = "",
    begin_ms: float = 0.0,
    ms: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    return {
        "id": id,
        "parent": parent,
        "name": name or id,
        "begin_ms": begin_ms,
        "ms": ms,
        "error": "",
        "attributes": {},
        **more,
    }


def rows(*spans: dict[str, Any]) -> list[tuple[int, str]]:
    return [(bar.depth, bar.span["id"]) for bar in layout_spans({"spans": spans})]


# -- the waterfall ---------------------------------------------------------------------------------
def test_spans_stand_below_their_parents_in_the_order_in_which_they_began() -> None:
    given = [
        span("exec", "root", begin_ms=5),
        span("root", ms=10),
        span("user", "exec", begin_ms=6),
        span("queue", "root", begin_ms=1),
    ]
    assert rows(*given) == [(0, "root"), (1, "queue"), (1, "exec"), (2, "user")]


def test_a_parent_elsewhere_makes_a_root() -> None:
    assert rows(span("a", "the caller's"), span("b", "a")) == [(0, "a"), (1, "b")]


def test_circles_are_cut_and_every_span_is_shown_once() -> None:
    assert rows(span("a", "b"), span("b", "a"), span("c", "c")) == [(0, "c"), (0, "a"), (1, "b")]
    assert len(rows(span("a"), span("a"), span("b", "a"))) == 3


def test_a_deep_chain_is_shown_flat_at_its_end() -> None:
    chain = [span(str(n), str(n - 1)) for n in range(3000)]
    assert [depth for depth, _ in rows(*chain)][-1] == MAX_DEPTH


def test_bars_are_shares_of_the_whole_and_never_invisible() -> None:
    first, second = layout_spans({"spans": [span("a", ms=100), span("b", begin_ms=99.9, ms=0)]})
    assert (draw_bar(first, 10), draw_bar(second, 10)) == ("█" * 10, "·" * 9 + "█")
    (empty,) = layout_spans({"spans": [span("a", ms=0)]})
    assert draw_bar(empty, 4) == "█···"


def test_errors_are_drawn_otherwise_and_told() -> None:
    (bar,) = layout_spans(
        {
            "spans": [
                span(
                    "a",
                    error="KeyError",
                    attributes={"tokens": 12, "pilotlight.node": "n1", "faas.name": "x"},
                )
            ]
        }
    )
    assert draw_bar(bar, 2) == "▒▒"
    assert describe_span(bar.span) == "error: KeyError, tokens=12, node=n1"


# -- the command -----------------------------------------------------------------------------------
@pytest.fixture(scope="module", name="platform")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    with ServedController(tmp_path_factory.mktemp("traces")) as platform:
        with platform.client() as client:
            mine = client.whoami()["tenant"]["id"]
        with platform.store.write() as write:
            old = [trace(n, tenant=mine, at=float(n), app="old") for n in range(10, 10 + OLD)]
            new = [
                trace(1, tenant=mine, at=1e4),
                trace(2, tenant=mine, at=2e4, kept_for="error", status=502, function="rank"),
            ]
            traces.put(write, old + new, keep=10_000)
        yield platform


def run(platform: ServedController, *words: str) -> Result:
    return CliRunner().invoke(build(), list(words), env=platform.environ(), prog_name="pilotlight")


def test_a_list_can_be_narrowed(platform: ServedController) -> None:
    everything = run(platform, "trace", "list", "search", "--json")
    assert [row["function"] for row in json.loads(everything.stdout)] == ["rank", "embed"]
    failed = run(
        platform, "trace", "list", "search/rank", "--failed", "--kept-for", "error", "--json"
    )
    assert [row["status"] for row in json.loads(failed.stdout)] == [502]
    assert (
        run(platform, "trace", "list", "search/rank", "--slower-than", "99999").stdout.strip()
        == "No traces."
    )


def test_one_is_shown_by_the_id_of_its_call(platform: ServedController) -> None:
    done = run(platform, "trace", "show", f"req-{1:032x}")
    assert done.exit_code == 0, done.output
    assert "POST" in done.stdout
    assert "█" in done.stdout
    assert isinstance(
        waterfall(json.loads(run(platform, "trace", "show", f"{1:032x}", "--json").stdout)), Table
    )


def test_one_that_was_not_kept_says_what_to_do(platform: ServedController) -> None:
    done = run(platform, "trace", "show", "req-none")
    assert done.exit_code == 1
    assert "traceparent" in done.stderr


def test_the_client_reads_all_pages(platform: ServedController) -> None:
    with platform.client() as client:
        assert len({row["call"] for row in client.traces()}) == OLD + 2
        assert len(list(client.traces(limit=OLD))) == OLD
