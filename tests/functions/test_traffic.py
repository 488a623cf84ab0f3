"""Traffic documents: what a change of weights moves, whose a unit is, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.errors import InvalidInput
from pilotlight.spec import traffic
from pilotlight.spec.traffic import Arm, ExperimentTraffic, Segment, Shadow, TrafficDocument
from tests.fakes.traffic_points import revision_at, unit_point

REVISIONS = ("v1-aaaaaa", "v2-bbbbbb", "v3-cccccc", "v4-dddddd")
V1, V2, V3, V4 = REVISIONS
GRID = [n / 4 for n in range(400)]


def split(**weights: int) -> TrafficDocument:
    named = {name.replace("_", "-"): weight for name, weight in weights.items()}
    return traffic.with_weights(TrafficDocument(salt="f-1"), named)


@st.composite
def weightings(draw: st.DrawFn) -> Mapping[str, int]:
    """Whole percents of some of the revisions that add up to 100, zeros among them."""
    cuts = sorted(
        draw(
            st.lists(st.integers(0, 100), min_size=len(REVISIONS) - 1, max_size=len(REVISIONS) - 1)
        )
    )
    edges = [0, *cuts, 100]
    order = draw(st.permutations(REVISIONS))
    return {name: end - begin for name, begin, end in zip(order, edges, edges[1:], strict=False)}


def owners(document: TrafficDocument) -> list[str]:
    return [revision_at(document.segments, point) for point in GRID]


@given(st.lists(weightings(), min_size=2, max_size=6))
def test_a_change_moves_exactly_the_units_that_the_new_weights_need(
    steps: list[Mapping[str, int]],
) -> None:
    document = traffic.with_weights(TrafficDocument(salt="s"), steps[0])
    for step in steps[1:]:
        after = traffic.with_weights(document, step)
        moved = [
            (old, new)
            for old, new in zip(owners(document), owners(after), strict=True)
            if old != new
        ]
        differences = sum(
            abs(step.get(name, 0) - document.weights.get(name, 0)) for name in REVISIONS
        )
        assert len(moved) == differences / 2 * 4  # the grid has four points per percent
        gains = {name for name in REVISIONS if step.get(name, 0) > document.weights.get(name, 0)}
        losses = {name for name in REVISIONS if step.get(name, 0) < document.weights.get(name, 0)}
        assert all(old in losses and new in gains for old, new in moved)
        document = after


@given(weightings())
def test_segments_are_the_weights_and_cover_everything_once(weights: Mapping[str, int]) -> None:
    document = traffic.validate_document(
        traffic.with_weights(TrafficDocument(salt="s"), weights), revisions=REVISIONS
    )
    assert document.segments[0].begin == 0
    assert document.segments[-1].end == 100
    assert {name: weight for name, weight in weights.items() if weight} == document.weights
    assert all(
        b.begin == a.end and b.revision != a.revision
        for a, b in zip(document.segments, document.segments[1:], strict=False)
    )


@given(st.integers(1, 99), st.integers(1, 99))
def test_raising_a_canary_moves_nobody_back(low: int, high: int) -> None:
    low, high = sorted((low, high))
    before = split(v1_aaaaaa=100 - low, v2_bbbbbb=low)
    after = traffic.with_weights(before, {V1: 100 - high, V2: high})
    assert all(
        new == V2 for old, new in zip(owners(before), owners(after), strict=True) if old == V2
    )


def test_a_revision_that_comes_back_gets_the_units_it_had() -> None:
    start = split(v1_aaaaaa=90, v2_bbbbbb=10)
    there = traffic.with_weights(start, {V1: 100})
    assert owners(traffic.with_weights(there, {V1: 90, V2: 10})) == owners(start)


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_point_is_in_the_range_and_always_the_same(salt: str, unit: str) -> None:
    point = unit_point(salt, unit)
    assert 0 <= point < 100
    assert point == unit_point(salt, unit)


def test_the_last_digest_there_is_still_has_a_point_below_100() -> None:
    assert traffic.point_from_hash(b"\xff" * 8) < 100
    assert traffic.point_from_hash(b"\0" * 8) == 0


def test_units_spread_as_the_weights_say() -> None:
    document = split(v1_aaaaaa=75, v2_bbbbbb=25)
    hits = sum(
        revision_at(document.segments, unit_point("f-1", f"user-{n}")) == V2 for n in range(20_000)
    )
    assert abs(hits / 20_000 - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 20_000)


def test_other_salts_draw_other_units() -> None:
    users = [f"user-{n}" for n in range(1000)]
    first, second = ({u for u in users if unit_point(salt, u) < 10} for salt in ("f-1", "f-2"))
    assert len(first & second) < len(first) / 2


@pytest.mark.parametrize(
    "weights, says",
    [
        ({V1: 90}, "add up to 90"),
        ({V1: 90, V2: 20}, "add up to 110"),
        ({}, "add up to 0"),
        ({V1: 101, V2: -1}, "1 to 100"),
        ({V1: 99.5, V2: 0.5}, "integer percentage"),
        ({V1: True, V2: 99}, "integer percentage"),
    ],
)
def test_weights_that_do_not_sum_are_refused(weights: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        traffic.with_weights(TrafficDocument(), weights)


GOOD = split(v1_aaaaaa=90, v2_bbbbbb=10)
ARMS = (Arm(name="a", revision=V1, share=50), Arm(name="b", revision=V2, share=50))
RUNNING = ExperimentTraffic(id="x-1", salt="s", unit="key", percent=50, arms=ARMS)


@pytest.mark.parametrize(
    "document, says",
    [
        (replace(GOOD, tags={"next": "v9-999999"}), "no revision 'v9-999999'"),
        (replace(GOOD, pins={"acme": "v9-999999"}), "no revision 'v9-999999'"),
        (replace(GOOD, shadow=Shadow(revision="v9-999999")), "no revision 'v9-999999'"),
        (replace(GOOD, stable="v9-999999"), "no revision 'v9-999999'"),
        (replace(GOOD, tags={"No": V1}), "is not valid"),
        (replace(GOOD, tags={V1: V2}), "name of a revision"),
        (replace(GOOD, sticky="header:"), "sticky"),
        (replace(GOOD, sticky="header:X-User"), "in lower case"),
        (replace(GOOD, sticky="header:authorization"), "sticky"),
        (replace(GOOD, sticky="cookie"), "sticky"),
        (replace(GOOD, max_candidate=9), "max_candidate allows 9 %"),
        (replace(GOOD, max_candidate=101), "integer percentage"),
        (replace(GOOD, shadow=Shadow(revision=V2)), "cannot be a shadow"),
        (replace(GOOD, shadow=Shadow(revision=V3, max_compute=1.5)), "from 0 to 1"),
        (replace(GOOD, shadow=Shadow(revision=V3, percent=math.nan)), "from 0 to 100"),
        (
            replace(GOOD, segments=(Segment(revision=V1, begin=0, end=100),)),
            "do not match the weights",
        ),
        (replace(GOOD, segments=(Segment(revision=V1, begin=1, end=100),)), "are not contiguous"),
        (replace(GOOD, experiment=replace(RUNNING, arms=ARMS[:1])), "add up to 100"),
        (
            replace(GOOD, experiment=replace(RUNNING, arms=(ARMS[0], replace(ARMS[1], name="a")))),
            "different names and revisions",
        ),
        (replace(GOOD, experiment=replace(RUNNING, percent=120)), "percent from 0 to 100"),
        (
            replace(
                GOOD,
                experiment=replace(RUNNING, arms=(Arm(name="a", revision="v9-999999", share=100),)),
            ),
            "no revision",
        ),
        (replace(GOOD, experiment=RUNNING, max_candidate=29), "30 % of the traffic"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_named(document: TrafficDocument, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        traffic.validate_document(document, revisions=REVISIONS)


def test_the_blast_radius_counts_arms_as_well_as_weights() -> None:
    assert traffic.exposed_percent(GOOD) == 10
    assert traffic.exposed_percent(replace(GOOD, experiment=RUNNING)) == 30
    assert traffic.exposed_percent(split(v2_bbbbbb=100)) == 0


def test_a_document_survives_json() -> None:
    whole = replace(
        GOOD,
        generation=7,
        tags={"next": V3},
        pins={"acme": V4},
        sticky="header:x-user",
        max_candidate=40,
        stable=V1,
        experiment=RUNNING,
        shadow=Shadow(revision=V3, percent=20),
    )
    assert traffic.from_json(json.loads(json.dumps(traffic.to_json(whole)))) == whole
    assert whole.named() == set(REVISIONS)
    assert whole.answering() == {V1, V2, V4}


@pytest.mark.parametrize(
    "body",
    [
        {"weights": 3},
        {"segments": [{"revision": V1}]},
        {"colour": "red"},
        {"experiment": {"id": "x"}},
    ],
)
def test_json_that_is_no_document_is_an_error(body: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        traffic.from_json(body)
