"""What a report says of measurements and plans, and of what was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from pilotlight.capacity.measurements import MeasuredCall, Measurements, Prices
from pilotlight.capacity.nodes import Node, node_of_machine, node_of_report, room
from pilotlight.capacity.report import Lengths, Surroundings, make_report
from pilotlight.errors import InvalidInput
from pilotlight.loadtest.distributions import parse_distribution
from tests.functions.capacity.made_calls import made_calls, made_streams

GIB = 1024**3
PRICES = Prices(currency="USD", version="1", instance_s=Decimal("0.0001"))


def measured(calls: Sequence[MeasuredCall], **changes: Any) -> Measurements:
    values: dict[str, Any] = {
        "revision": "v1-abc",
        "since": 0.0,
        "until": 9_999.0,
        "is_cut": False,
        "calls": calls,
        "starts_ms": {"FORK": [20.0] * 10, "COLD": [4_000.0]},
        "max_instances": 50,
        "memory_bytes": GIB,
        "prices": PRICES,
    }
    return Measurements(**{**values, **changes})


def report(found: Measurements, **changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "rate_per_s": 100.0,
        "p99_ms": 200.0,
        "headroom": 0.3,
        "zones": 1,
        "growth_per_min": 0.2,
        "lengths": Lengths(),
        "around": Surroundings(),
    }
    return make_report("app/f", found, **{**asked, **changes})


def test_a_report_of_enough_calls_has_a_plan_a_cost_and_no_warnings() -> None:
    found = report(measured(made_calls(1_500)))
    assert found["warnings"] == []
    plan, times = found["plan"], found["measured"]
    assert (times["calls"], times["slots"], times["start_ms"]) == (1_500, 1, 4_000.0)
    assert times["starts_ms"]["FORK"]["n"] == 10
    assert plan["instances"] == plan["serving"] + plan["reserve"]
    assert plan["p99_ms"] <= plan["p99_at_headroom_ms"] <= 200.0
    assert plan["method"] == "simulation"
    assert plan["load_test"]["p99_low_ms"] <= plan["p99_ms"] <= plan["load_test"]["p99_high_ms"]
    cost = {name: Decimal(found["cost_per_day"][name]) for name in ("busy", "reserved", "total")}
    assert cost["total"] == pytest.approx(Decimal(plan["instances"]) * Decimal("8.64"))
    assert cost["busy"] + cost["reserved"] == pytest.approx(cost["total"])


def test_too_few_calls_are_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidInput, match="has 19 measured calls") as refused:
        report(measured(made_calls(19)))
    assert "pilotlight loadtest app/f" in str(refused.value.detail)


def test_an_impossible_bound_is_no_plan_and_says_by_how_much() -> None:
    found = report(measured(made_calls(1_500)), p99_ms=15.0)
    assert (found["plan"], found["cost_per_day"]) == (None, None)
    assert "impossible: with no other call" in found["warnings"][0]
    assert "more than 15 ms" in found["warnings"][0]


@pytest.mark.parametrize(
    "calls, changes, around, expected",
    [
        (made_calls(200), {}, {}, "only 200 calls were measured"),
        (made_calls(1_500, at_once=3), {"slots": 8}, {}, "at most 3 of 8 calls ran at once"),
        (made_calls(1_500), {"failed": 300}, {}, "300 calls failed"),
        (made_calls(1_500), {"starts_ms": {}}, {}, "no start was measured"),
        (made_calls(1_500), {"max_instances": 2}, {}, "max_instances=2 allows fewer"),
        (made_calls(1_500), {}, {"load": 9.0, "cores": 2}, "a load of 9.0 on 2 processors"),
        (
            [*made_calls(750), *made_calls(750, work_ms=40.0)],
            {},
            {},
            "calls took",
        ),
        (
            made_calls(1_500),
            {"prices": replace(PRICES, rounds=True)},
            {},
            "prices round the durations",
        ),
    ],
)
def test_weak_evidence_is_a_warning(
    calls: Sequence[MeasuredCall], changes: dict[str, Any], around: dict[str, Any], expected: str
) -> None:
    found = report(measured(calls, **changes), around=Surroundings(**around))
    (warning,) = found["warnings"]
    assert expected in warning


def test_a_load_that_was_not_measured_is_a_warning() -> None:
    calls = measured(made_calls(1_500), slots=4)
    found = report(calls, rate_per_s=35.0, p99_ms=2_000.0, headroom=0.0)
    assert found["plan"]["serving"] == 1
    assert any("and had 0.0 when it was measured" in text for text in found["warnings"])


def test_nodes_that_hold_fewer_are_the_constraint() -> None:
    nodes = [Node(memory_bytes=2 * GIB, cpus=1)]
    calls = measured(made_calls(1_500))
    found = report(calls, around=Surroundings(room=room(nodes, calls)))
    assert (found["plan"]["constraint"], found["plan"]["room"]) == ("memory", 2)
    assert [text.partition(":")[0] for text in found["warnings"]] == [
        "the nodes hold 2 instances, by memory",
        "its busy instances use 2.1 processors and the nodes have 1",
    ]


def test_gpus_of_nodes_are_counted_by_kind() -> None:
    calls = measured([], gpu=("H100",), gpu_count=2)
    products = ("NVIDIA H100 80GB HBM3",) * 5 + ("NVIDIA L4",)
    found = room([Node(memory_bytes=64 * GIB, gpus=products)], calls)
    assert found is not None
    assert (found.instances, found.resource) == (2, "gpu")
    anything = room([Node(memory_bytes=2 * GIB, gpus=products)], replace(calls, gpu=("any",)))
    assert anything is not None
    assert (anything.instances, anything.resource) == (2, "memory")
    assert room([], calls) is None


def test_nodes_are_read_from_the_machine_or_from_reports() -> None:
    machine = {"node": {"memory_bytes": GIB, "cpus": 2, "gpus": [{"name": "NVIDIA L4"}]}}
    assert node_of_machine(machine) == Node(memory_bytes=GIB, gpus=("NVIDIA L4",), cpus=2)
    assert node_of_machine({"node": {"fleet": "knative"}}) is None
    assert node_of_report({"memory_bytes": GIB, "gpus": []}) == Node(memory_bytes=GIB)


def test_answers_of_the_cache_need_no_instance() -> None:
    whole = report(measured(made_calls(1_000)), headroom=0.0)
    half = report(measured(made_calls(1_000), cached=1_000), headroom=0.0)
    assert half["plan"]["busy"] == pytest.approx(whole["plan"]["busy"] / 2, rel=0.05)


def test_given_lengths_replace_the_measured_ones() -> None:
    calls = measured(made_streams(1_500), is_language_model=True, slots=8)
    short, long = (
        report(
            calls,
            rate_per_s=5.0,
            p99_ms=3_000.0,
            lengths=Lengths(
                tokens_in=parse_distribution("100", option="--tokens-in"),
                tokens_out=parse_distribution(out, option="--tokens-out"),
            ),
        )
        for out in ("20", "400")
    )
    assert short["measured"]["work_ms"]["mean"] == pytest.approx(5 + 10 + 38, rel=0.1)
    assert long["measured"]["work_ms"]["mean"] == pytest.approx(5 + 10 + 798, rel=0.1)
    assert short["plan"]["serving"] < long["plan"]["serving"]
    assert any("--tokens-out 400 is beyond" in text for text in long["warnings"])
    assert not any("--tokens" in text for text in short["warnings"])


def test_lengths_of_a_plain_function_are_refused() -> None:
    given = Lengths(tokens_out=parse_distribution("9", option="--tokens-out"))
    with pytest.raises(InvalidInput, match="it is no language model"):
        report(measured(made_calls(100)), lengths=given)


def test_columns_of_an_answer_become_calls() -> None:
    columns = {
        "instance": [0, 1, 1],
        "started_at": [20.0, 0.02, 0.0],
        "waited_ms": [0, 4, 0],
        "exec_ms": [10, 40, 50],
        "billed_ns": [10_400_000, 10_000_000, 0],
        "first_token_ms": [0, 14, 0],
        "tokens_in": [0, 50, 0],
        "tokens_cached": [0, 20, 0],
        "tokens_out": [0, 7, 0],
    }
    body = {
        "revision": "v1",
        "since": 0.0,
        "until": 30.0,
        "is_cut": False,
        "calls": columns,
        "failed": 0,
        "cold": 0,
        "cached": 0,
        "starts_ms": {},
        "is_language_model": True,
        "slots": 4,
        "min_instances": 0,
        "max_instances": 8,
        "cpu": 1.0,
        "memory_bytes": GIB,
        "gpu": [],
        "gpu_count": 0,
        "prices": None,
    }
    unbilled, shared, alone = Measurements.from_json(body).calls
    assert alone == MeasuredCall(at=20.0, exec_ms=10.4, first_ms=None, calls_at_once=1.0)
    assert (shared.exec_ms, shared.first_ms, shared.tokens_in) == (40.5, 10.0, 30)
    assert shared.calls_at_once == pytest.approx(4.05)
    assert (unbilled.exec_ms, unbilled.calls_at_once) == (50.5, 1.0)
    assert (unbilled.found, shared.found, alone.found) == (0, 1, 0)
