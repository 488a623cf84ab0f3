"""Quotas and plans as records: their bounds, and overrides."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.spec.identifiers import Isolation, Priority
from pilotlight.spec.quotas import BUILT_IN_PLANS, UNLIMITED, Plan, Quotas, parse_quotas

NAMES = [f.name for f in fields(Quotas)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, -math.inf, math.inf, math.nan, 1 << 80, True, "5", [1]])
def test_what_is_no_bound_is_refused_by_key_value_and_bound(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} = .*: must be (an integer )?between"):
        parse_quotas({"requests_per_s": 1, name: value})


@pytest.mark.parametrize("name", [n for n in NAMES if n != "requests_per_s"])
def test_half_a_thing_is_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 1.5: must be an integer"):
        parse_quotas({"requests_per_s": 1, name: 1.5})


def test_an_unknown_quota_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="wheels: unknown quota; known: body_bytes, burst, concurrent"
    ):
        parse_quotas({"wheels": 4})


@pytest.mark.parametrize(
    "rate, burst, depth", [(None, None, 0), (0.5, None, 1), (5, None, 5), (5, 20, 20)]
)
def test_a_bucket_holds_its_burst_else_a_second(
    rate: float | None, burst: int | None, depth: float
) -> None:
    assert Quotas(requests_per_s=rate, burst=burst).depth == depth


@given(st.dictionaries(st.sampled_from(NAMES), st.none() | st.integers(1, 1000)))
def test_an_override_changes_its_key_and_no_other(overrides: dict[str, Any]) -> None:
    plan = BUILT_IN_PLANS["standard"]
    if (
        overrides.get("requests_per_s", plan.requests_per_s) is None
        and overrides.get("burst", plan.burst) is not None
    ):
        with pytest.raises(ValueError, match="requires requests_per_s"):
            plan.with_overrides(overrides)
        return
    changed = plan.with_overrides(overrides)
    assert changed.to_json() == {**plan.to_json(), **overrides}
    assert Plan(**changed.to_json()) == changed


def test_a_plan_knows_its_words() -> None:
    plan = Plan(name="x", priority="batch", isolation="dedicated")  # type: ignore[arg-type]  # as JSON has them
    assert (plan.priority, plan.isolation) == (Priority.BATCH, Isolation.DEDICATED)
    assert UNLIMITED.quotas().is_empty
    with pytest.raises(
        ValueError, match="reserved_memory_bytes = 1: requires isolation 'reserved'"
    ):
        Plan(reserved_memory_bytes=1)
