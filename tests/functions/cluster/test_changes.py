"""What a watch says, as differences."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.kubernetes.reflector import Store
from pilotlight.kubernetes.watch_events import JsonLines, ResourceVersions, WatchChange


def pod(name: str, version: int, *, uid: str = "u", namespace: str = "a") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"{uid}-{name}",
            "resourceVersion": str(version),
        }
    }


def test_a_listing_adds_what_is_new_and_deletes_what_vanished() -> None:
    known = ResourceVersions()
    assert [c.type for c in known.listed([pod("a", 1), pod("b", 2)])] == ["ADDED", "ADDED"]
    changes = known.listed([pod("b", 2), pod("c", 5)])
    assert [(c.type, c.key[1]) for c in changes] == [("DELETED", "a"), ("ADDED", "c")]


def test_what_did_not_change_is_not_told_again() -> None:
    known = ResourceVersions()
    known.listed([pod("a", 1)])
    assert known.listed([pod("a", 1)]) == []
    assert known.happened("MODIFIED", pod("a", 1)) == []
    assert [c.type for c in known.happened("MODIFIED", pod("a", 2))] == ["MODIFIED"]


def test_another_object_under_an_old_name_is_a_deletion_and_an_addition() -> None:
    known = ResourceVersions()
    known.listed([pod("a", 1, uid="one")])
    assert [c.type for c in known.listed([pod("a", 7, uid="two")])] == ["DELETED", "ADDED"]


def test_a_deletion_that_was_told_is_not_told_again() -> None:
    known = ResourceVersions()
    known.listed([pod("a", 1)])
    assert [c.type for c in known.happened("DELETED", pod("a", 2))] == ["DELETED"]
    assert known.happened("DELETED", pod("a", 2)) == []
    assert known.listed([]) == []


NAMES = st.sampled_from("abc")
STEPS = st.lists(st.tuples(st.sampled_from(["put", "drop", "relist", "lose"]), NAMES))


@given(STEPS)
def test_a_follower_has_what_the_cluster_has_whatever_was_lost(
    steps: list[tuple[str, str]],
) -> None:
    """The cluster changes; events arrive, or are lost until the next listing. No change comes
    twice."""
    known, store, is_lost = ResourceVersions(), Store(), False
    cluster: dict[str, dict[str, Any]] = {}
    told: list[WatchChange] = []
    for version, (step, name) in enumerate([*steps, ("relist", "")]):
        if step == "put":
            uid = cluster[name]["metadata"]["uid"] if name in cluster else str(version)
            cluster[name] = {
                "metadata": {"name": name, "uid": uid, "resourceVersion": str(version)}
            }
            told += [] if is_lost else known.happened("MODIFIED", cluster[name])
        elif step == "drop" and name in cluster:
            gone = cluster.pop(name)
            told += [] if is_lost else known.happened("DELETED", gone)
        elif step == "lose":
            is_lost = True
        elif step == "relist":
            told, is_lost = told + known.listed(cluster.values()), False
    for change in told:
        assert (store.get(change.key[1]) is None) == (change.type == "ADDED")
        store.apply(change)
    assert {item["metadata"]["name"]: item for item in store.items()} == cluster


def test_a_store_finds_by_index_and_forgets() -> None:
    store = Store({"node": lambda item: [item["spec"]["node"]]})
    one = {**pod("a", 1), "spec": {"node": "n1"}}
    store.apply(WatchChange("ADDED", one))
    assert store.by("node", "n1") == [one]
    moved = {**pod("a", 2), "spec": {"node": "n2"}}
    store.apply(WatchChange("MODIFIED", moved))
    assert (store.by("node", "n1"), store.by("node", "n2")) == ([], [moved])
    assert store.get("a", "a") == moved
    store.apply(WatchChange("DELETED", moved))
    assert (store.by("node", "n2"), len(store), store.get("a", "a")) == ([], 0, None)


@given(st.lists(st.dictionaries(st.text(), st.integers(), max_size=3)), st.integers(1, 7))
def test_lines_are_whole_however_the_bytes_come(documents: list[dict[str, int]], size: int) -> None:
    data = b"".join(json.dumps(document).encode() + b"\n" for document in documents) + b'{"cut": '
    lines = JsonLines()
    assert [
        found for at in range(0, len(data), size) for found in lines.feed(data[at : at + size])
    ] == documents


def test_a_line_without_an_end_is_refused() -> None:
    lines = JsonLines(most_bytes=100)
    list(lines.feed(b"x" * 99))
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        list(lines.feed(b"xx"))
