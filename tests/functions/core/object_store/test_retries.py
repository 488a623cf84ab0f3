"""How often, and after which pauses, the same is asked again."""

from __future__ import annotations

import pytest

from pilotlight.core.object_store.errors import ObjectStoreError, ObjectStoreUnavailable
from pilotlight.core.object_store.retries import FIRST_PAUSE_S, retry_unavailable
from tests.fakes.faulty_objects import Pauses


class Work:
    """Fails with `errors`, one per call, then answers."""

    def __init__(self, *errors: ObjectStoreError) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def failures(number: int) -> list[ObjectStoreUnavailable]:
    return [ObjectStoreUnavailable(str(i)) for i in range(number)]


async def test_pauses_grow_and_are_bounded() -> None:
    work, pauses = Work(*failures(9)), Pauses()
    assert await retry_unavailable(work, attempts=10, longest_pause_s=3.0, pause=pauses) == "answer"
    bounds = [min(3.0, FIRST_PAUSE_S * 2**i) for i in range(9)]
    assert work.calls == 10
    assert all(pause <= bound for pause, bound in zip(sorted(pauses), bounds, strict=False))


async def test_pauses_differ_between_callers() -> None:
    pauses = Pauses()
    for _ in range(20):
        await retry_unavailable(Work(*failures(1)), attempts=2, pause=pauses)
    assert len(set(pauses)) > 1


async def test_the_last_failure_is_told() -> None:
    work = Work(*failures(5))
    with pytest.raises(ObjectStoreUnavailable, match="2"):
        await retry_unavailable(work, attempts=3, pause=Pauses())
    assert work.calls == 3


async def test_what_is_final_is_not_asked_again() -> None:
    work = Work(ObjectStoreError("no"))
    with pytest.raises(ObjectStoreError, match="no"):
        await retry_unavailable(work, attempts=3, pause=Pauses())
    assert work.calls == 1
