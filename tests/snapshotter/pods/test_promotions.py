"""Markers of promoted pods."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotter.pods.promotions import GONE_S, Promotions
from snapshotter.pods.registration import Announcement, NotAdmitted
from snapshotter.types import LaunchSpec, RevisionKey
from tests.fakes.clock import ManualClock

POD, OTHER = (f"0000000{n}-0000-4000-8000-000000000000" for n in (1, 2))


def announced(pod: str | None = POD, *, signature: str = "a") -> Announcement:
    labels = {"tenant": "t-1", **({"pod": pod} if pod else {})}
    launch = LaunchSpec(
        revision=RevisionKey("f-1@v1"),
        trust_domain="t-1",
        uid=64000,
        bundle="b" * 64,
        image=None,
        entry={},
        memory_bytes=1,
        cpu=1.0,
        startup_timeout_s=1.0,
        labels=labels,
    )
    return Announcement(pod="pod-1", namespace="warm", launch=launch, signature=signature)


def test_a_pod_has_one_document_for_as_long_as_it_lives(tmp_path: Path) -> None:
    promotions = Promotions(tmp_path)
    promotions.require(announced(None), POD)  # a pod that is not promoted
    with pytest.raises(NotAdmitted, match="was not promoted"):
        promotions.require(announced(), POD)
    promotions.record(announced(), POD)
    promotions.record(announced(), POD)
    for known in (promotions, Promotions(tmp_path)):  # and an agent that was restarted
        assert known.is_promoted(POD)
        known.require(announced(), POD)
        for other, words in (
            (announced(signature="b"), "another launch document"),
            (announced(None, signature="c"), "another launch document"),
            (announced(OTHER), f"is of pod {OTHER}"),
        ):
            with pytest.raises(NotAdmitted, match=words):
                known.require(other, POD)
        with pytest.raises(NotAdmitted, match="another launch document"):
            known.record(announced(signature="b"), POD)


@pytest.mark.parametrize(
    "document, pod",
    [
        (announced(None), POD),
        (announced(OTHER), POD),
        (announced(signature=""), POD),
        (announced("../x"), "../x"),
    ],
)
def test_a_document_that_is_not_of_the_pod_is_not_recorded(
    tmp_path: Path, document: Announcement, pod: str
) -> None:
    with pytest.raises(NotAdmitted):
        Promotions(tmp_path).record(document, pod)
    assert list(tmp_path.iterdir()) == []


def test_where_the_pod_is_not_known_only_documents_of_no_pod_are_announced(tmp_path: Path) -> None:
    promotions = Promotions(tmp_path)
    promotions.require(announced(None), None)
    with pytest.raises(NotAdmitted, match="unknown"):
        promotions.require(announced(), None)


def test_a_marker_goes_long_after_the_last_process_of_its_pod(tmp_path: Path) -> None:
    clock = ManualClock()
    promotions = Promotions(tmp_path, clock=clock)
    for pod in (POD, OTHER):
        promotions.record(announced(pod), pod)
    assert promotions.sweep({POD}) == 0
    clock.advance(GONE_S - 1)
    assert promotions.sweep({POD}) == 0
    clock.advance(1)
    assert promotions.sweep({POD}) == 1
    assert (promotions.is_promoted(POD), promotions.is_promoted(OTHER)) == (True, False)
    promotions.sweep(())
    clock.advance(GONE_S / 2)
    promotions.sweep({POD})  # its container has started again
    clock.advance(GONE_S / 2)
    assert promotions.sweep(()) == 0


def test_what_a_killed_agent_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".{POD}-1-2").touch()
    assert not Promotions(tmp_path).is_promoted(POD)
    assert os.listdir(tmp_path) == []
