"""What a rollout can be asked for, and what is refused with its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pilotlight.controller.rollouts.plan import DEFAULT_GATES, Gate, GateKind, RolloutPlan, parse
from pilotlight.errors import InvalidInput
from pilotlight.spec.record_json import to_json


def test_what_is_not_said_is_as_by_default() -> None:
    plan = parse({})
    assert (plan.steps, plan.every_s, plan.gates) == ((5, 25, 50, 100), 300, DEFAULT_GATES)
    assert [(gate.metric, gate.kind) for gate in plan.gates] == [
        ("error_ratio", GateKind.VETO),
        ("latency_p99", GateKind.VETO),
        ("cost_per_call", GateKind.VETO),
    ]


def test_the_false_alarms_of_a_rollout_are_shared_by_gates_and_steps() -> None:
    plan = parse({"false_rollback_rate": 0.12, "steps": [50, 100]})
    assert plan.alpha == pytest.approx(0.02)


def test_a_plan_comes_back_from_the_table_as_it_was() -> None:
    trade = {
        "metric": "cost_per_call",
        "kind": "trade",
        "paid_by": "feedback:accuracy",
        "exchange": 2,
        "at_most": 0.5,
    }
    plan = parse(
        {"steps": [1, 100], "gates": [{"metric": "latency_p95", "max_increase": 0.5}, trade]}
    )
    assert parse(json.loads(json.dumps(to_json(plan)))) == plan


@pytest.mark.parametrize(
    "body,said",
    [
        ({"steps": []}, "0 steps"),
        ({"steps": [5, 25]}, "end with 100"),
        ({"steps": [25, 5, 100]}, "must rise"),
        ({"steps": [5, 5, 100]}, "must rise"),
        ({"steps": [0, 100]}, "between 1 and 100"),
        ({"steps": ["5", 100]}, "steps"),
        ({"every_s": 0}, "every_s = 0"),
        ({"min_samples": 0}, "min_samples"),
        ({"false_rollback_rate": 0}, "false_rollback_rate"),
        ({"gates": []}, "0 gates"),
        ({"gates": [{"metric": "luck"}]}, "unknown metric 'luck'"),
        ({"gates": [{"metric": "feedback:"}]}, "unknown metric"),
        (
            {"gates": [{"metric": "error_ratio", "paid_by": "feedback:score"}]},
            "require kind 'trade'",
        ),
        ({"gates": [{"metric": "error_ratio", "min": 0.1}]}, "set `max`"),
        ({"gates": [{"metric": "feedback:score", "max": 1}]}, "set `min`"),
        ({"gates": [{"metric": "cost_per_call", "kind": "trade"}]}, "unknown metric ''"),
        (
            {
                "gates": [
                    {
                        "metric": "cost_per_call",
                        "kind": "trade",
                        "paid_by": "cost_per_call",
                        "exchange": 1,
                    }
                ]
            },
            "cannot pay for itself",
        ),
        (
            {"gates": [{"metric": "cost_per_call", "kind": "trade", "paid_by": "feedback:score"}]},
            "exchange = 0",
        ),
        ({"speed": 1}, "speed"),
        ([5, 100], "an object"),
    ],
)
def test_what_cannot_be_is_refused_by_name(body: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse(body)
    assert said in str(refused.value)


def test_a_bound_of_its_own_replaces_the_comparison_unless_both_are_asked_for() -> None:
    assert Gate(metric="error_ratio", max=0.01).allowed_increase is None
    assert Gate(metric="error_ratio", max=0.01, max_increase=0.2).allowed_increase == 0.2
    assert Gate(metric="error_ratio").allowed_increase == 0.5
    assert RolloutPlan().alpha == pytest.approx(0.01 / 12)
