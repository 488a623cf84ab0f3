"""What is typed and what is printed: durations, money, tables, Server-Timing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pilotlight.cli.core.formatting import (
    format_bytes,
    format_cell,
    format_milliseconds,
    format_money,
    format_table,
    parse_duration_s,
    parse_pairs,
    parse_share,
    parse_time,
)
from pilotlight.client.server_timing import (
    parse_server_timing,
    parse_server_timing_descriptions,
)
from pilotlight.errors import InvalidInput


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("2h", 7200),
        ("7d", 604_800),
        ("1w", 604_800),
        ("0.5m", 30),
        ("300ms", 0.3),
    ],
)
def test_durations_have_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "5 minutes", "nan", "inf"])
def test_what_is_no_duration_is_refused_with_the_way_to_write_one(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not a duration") as failure:
        parse_duration_s(text)
    assert "5m" in failure.value.detail["hint"]


@pytest.mark.parametrize("text, share", [("30%", 0.3), ("0.3", 0.3), ("0", 0), ("250%", 2.5)])
def test_shares_are_percents_or_fractions(text: str, share: float) -> None:
    assert parse_share(text, option="--headroom") == share


@pytest.mark.parametrize("text", ["", "%", "-1", "nan", "a third"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--headroom '.*' is not a share"):
        parse_share(text, option="--headroom")


def test_instants_are_back_from_now_or_iso_times() -> None:
    assert parse_time("5m", now=1000.0) == 700.0
    assert parse_time("1970-01-01T00:01:00+00:00", now=0.0) == 60.0


@pytest.mark.parametrize(
    "amount, text",
    [
        ("0.000013400000", "0.0000134"),
        ("1E-12", "0.000000000001"),
        ("0", "0"),
        ("0.000", "0"),
        ("120", "120"),
    ],
)
def test_money_keeps_every_digit_and_never_an_exponent(amount: str, text: str) -> None:
    assert format_money(amount) == text
    assert format_money(amount, "USD") == f"{text} USD"


def test_times_and_sizes_are_short() -> None:
    assert [format_milliseconds(ms) for ms in (5400, 29.4, 0.42)] == ["5.40 s", "29 ms", "0.4 ms"]
    assert [format_bytes(n) for n in (12, 1536, 3 * 1024**3)] == ["12 B", "1.5 KiB", "3.0 GiB"]


def test_cells_follow_the_units_in_their_keys() -> None:
    assert format_cell("memory_bytes", 256 * 1024**2) == "256.0 MiB"
    assert format_cell("cost", "0.10") == "0.1"
    assert format_cell("stopped", False) == "no"
    assert format_cell("evaluation", {}) == "-"
    assert format_cell("functions", ["a", "b"]) == "a, b"
    assert [format_cell("name", None), format_cell("name", ""), format_cell("name", [])] == [
        "-",
        "-",
        "-",
    ]


def test_server_timing_is_read_and_foreign_parts_are_left_out() -> None:
    assert parse_server_timing("queue;dur=1.5, start;dur=0, cache;desc=x, exec;dur=oops") == {
        "queue": 1.5,
        "start": 0.0,
    }
    assert parse_server_timing("") == {}


def test_server_timing_has_descriptions_too() -> None:
    assert parse_server_timing_descriptions(
        'queue;dur=1.5, weights;desc="dram", cache;desc=x;dur=1'
    ) == {
        "weights": "dram",
        "cache": "x",
    }
    assert parse_server_timing_descriptions("") == {}


def test_pairs_take_json_where_it_is_json() -> None:
    assert parse_pairs(["name=Ada", "count=3", 'tags=["a"]', "empty="], option="--arg") == {
        "name": "Ada",
        "count": 3,
        "tags": ["a"],
        "empty": "",
    }
    with pytest.raises(InvalidInput, match="--arg 'Ada' is not key=value"):
        parse_pairs(["Ada"], option="--arg")


def test_a_table_leaves_out_columns_that_nobody_filled_and_escapes_markup() -> None:
    out = io.StringIO()
    rows = [{"name": "[red]a", "expires_at": None}, {"name": "b", "expires_at": None}]
    Console(file=out, width=80).print(
        format_table(rows, {"name": "name", "expires_at": "expires"}, empty="none")
    )
    assert "[red]a" in out.getvalue()
    assert "expires" not in out.getvalue()
    assert format_table([], {"name": "name"}, empty="none") == "none"
