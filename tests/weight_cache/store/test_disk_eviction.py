"""What goes is what costs least to bring back for each byte that it frees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_cache.store.disk_eviction import EvictionCandidate, EvictionPlan, Files, plan_eviction


def model(files: Files, *, uses: int = 1, clock: float = 0.0, at: float = 0.0) -> EvictionCandidate:
    return EvictionCandidate(files=files, uses=uses, clock=clock, last_used_at=at)


def by_bytes(size: int) -> float:
    return size / 100


def with_latency(size: int) -> float:
    return 1 + size / 100


def pick(
    excess: int,
    candidates: dict[str, EvictionCandidate],
    *,
    kept: list[Files] | None = None,
    latency: bool = False,
) -> EvictionPlan:
    files = {d: s for c in candidates.values() for d, s in c.files.items()}
    return plan_eviction(
        excess,
        files=files,
        partials={},
        candidates=candidates,
        kept=kept or [],
        reload_s=with_latency if latency else by_bytes,
    )[0]


def test_what_was_used_more_often_stays() -> None:
    assert pick(5, {"often": model({"a": 10}, uses=9), "once": model({"b": 10})}).models == (
        "once",
    )


def test_large_models_go_before_small_ones_when_a_fetch_has_a_fixed_cost() -> None:
    assert pick(
        5, {"small": model({"a": 10}), "large": model({"b": 1000})}, latency=True
    ).models == ("large",)


def test_slow_origins_keep_their_models() -> None:
    """The same bytes, but one model's files come from far away: reload_s is what tells."""
    slow = plan_eviction(
        5,
        files={"a": 10, "b": 20},
        partials={},
        candidates={"near": model({"a": 10}), "far": model({"b": 20})},
        kept=[],
        reload_s=lambda size: size**2,
    )
    assert slow[0].models == ("near",)


def test_old_fame_fades_as_the_clock_moves_on() -> None:
    famous, clock, turns = model({"a": 10}, uses=50), 0.0, 0
    removal = EvictionPlan()
    while removal.models != ("famous",) and turns < 1000:
        removal, moved = plan_eviction(
            5,
            files={"a": 10, "b": 10},
            partials={},
            candidates={"famous": famous, "new": model({"b": 10}, clock=clock)},
            kept=[],
            reload_s=by_bytes,
        )
        clock, turns = max(clock, moved), turns + 1
    assert 10 < turns < 999


def test_of_equals_the_least_recently_used_goes() -> None:
    assert pick(5, {"young": model({"a": 10}, at=9), "old": model({"b": 10}, at=1)}).models == (
        "old",
    )


@pytest.mark.parametrize(
    "excess, expected",
    [
        (1, EvictionPlan(partials=("half",), size_bytes=10)),
        (11, EvictionPlan(partials=("half",), files=("loose",), size_bytes=20)),
        (21, EvictionPlan(partials=("half",), files=("loose", "a"), models=("m",), size_bytes=30)),
    ],
)
def test_half_files_go_first_then_files_of_nobody_then_models(
    excess: int, expected: EvictionPlan
) -> None:
    files, candidates = {"a": 10, "loose": 10}, {"m": model({"a": 10})}
    assert (
        plan_eviction(
            excess,
            files=files,
            partials={"half": 10},
            candidates=candidates,
            kept=[],
            reload_s=by_bytes,
        )[0]
        == expected
    )


def test_two_models_of_the_same_files_both_go_when_they_must() -> None:
    twins = {"one": model({"a": 10}), "two": model({"a": 10})}
    assert pick(5, twins) == EvictionPlan(models=("one", "two"), files=("a",), size_bytes=10)


def test_files_that_are_kept_do_not_count_and_whose_going_frees_nothing_goes_last() -> None:
    candidates = {"shares all": model({"a": 10}), "own": model({"b": 10}, uses=99)}
    assert pick(5, candidates, kept=[{"a": 10}]).models == ("own",)


DIGESTS = st.sampled_from("abcdefgh")
SIZE = {d: 5 + i for i, d in enumerate("abcdefgh")}


@given(
    models=st.dictionaries(
        st.sampled_from("MNOPQ"),
        st.tuples(st.sets(DIGESTS, min_size=1), st.integers(1, 5), st.floats(0, 9)),
    ),
    loose=st.sets(DIGESTS),
    kept=st.sets(DIGESTS),
    excess=st.integers(0, 120),
)
def test_any_choice_frees_what_it_says_and_takes_nothing_that_is_needed(
    models: dict[str, tuple[set[str], int, float]], loose: set[str], kept: set[str], excess: int
) -> None:
    candidates = {
        n: model({d: SIZE[d] for d in files}, uses=uses, clock=clock)
        for n, (files, uses, clock) in models.items()
    }
    files = {d: SIZE[d] for d in loose | kept | {d for c in candidates.values() for d in c.files}}
    removal, clock = plan_eviction(
        excess,
        files=files,
        partials={"half": 7},
        candidates=candidates,
        kept=[dict.fromkeys(kept, 0)],
        reload_s=with_latency,
    )
    left = {d for n, c in candidates.items() if n not in removal.models for d in c.files}
    assert not set(removal.files) & (left | kept)
    assert removal.size_bytes == sum(SIZE[d] for d in removal.files) + 7 * len(removal.partials)
    assert len(set(removal.files)) == len(removal.files)
    assert removal.size_bytes >= excess or (
        set(removal.models) == set(candidates) and set(removal.files) == files.keys() - kept
    )
    assert clock >= 0
