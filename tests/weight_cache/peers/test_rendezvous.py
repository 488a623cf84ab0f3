"""All nodes rank alike; who joins or leaves moves its own share and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_cache.peers.rendezvous import owner, ranked

KEYS = [f"file/{index}" for index in range(600)]
nodes = st.lists(
    st.text("0123456789abcdef", min_size=4, max_size=32), min_size=1, max_size=8, unique=True
)


@given(nodes, st.text(max_size=80), st.randoms())
def test_the_order_in_which_nodes_are_named_says_nothing(
    names: list[str], key: str, random: object
) -> None:
    shuffled = sorted(names, key=lambda name: hash((name, id(random))))
    assert ranked(key, names) == ranked(key, shuffled)
    assert owner(key, shuffled) == ranked(key, names)[0]


@given(nodes, st.text("ghij", min_size=4, max_size=32))
def test_who_joins_takes_keys_for_itself_only(names: list[str], newcomer: str) -> None:
    moved = [key for key in KEYS if owner(key, names) != owner(key, [*names, newcomer])]
    assert all(owner(key, [*names, newcomer]) == newcomer for key in moved)
    # 6 standard deviations of 600 draws
    assert len(moved) / len(KEYS) <= 1 / (len(names) + 1) + 0.12


@given(nodes)
def test_who_leaves_gives_its_keys_to_the_next_in_rank(names: list[str]) -> None:
    gone, left = names[0], names[1:]
    for key in KEYS if left else ():
        order = ranked(key, names)
        assert owner(key, left) == (order[1] if order[0] == gone else order[0])


def test_owners_share_the_keys_about_equally() -> None:
    names = [f"node-{n}" for n in range(5)]
    shares = Counter(owner(f"f/{i}", names) for i in range(5000))
    assert all(800 < shares[name] < 1200 for name in names)


def test_nobody_owns_nothing() -> None:
    with pytest.raises(ValueError, match="empty"):
        owner("key", [])
