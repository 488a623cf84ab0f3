"""Which revision is good to go back to."""

from __future__ import annotations

import pytest

from pilotlight.controller.release import app_history


@pytest.mark.parametrize(
    "changes,current,good",
    [
        ([], "v1", None),
        ([("deploy", "v1")], "v1", None),
        ([("deploy", "v1"), ("deploy", "v2")], "v2", "v1"),
        ([("deploy", "v1"), ("stop", "v1"), ("deploy", "v1")], "v1", None),
        ([("deploy", "v1"), ("deploy", "v2"), ("rollback", "v1")], "v1", None),
        ([("deploy", "v1"), ("deploy", "v2"), ("deploy", "v3"), ("rollback", "v2")], "v2", "v1"),
        (
            [("deploy", "v1"), ("deploy", "v2"), ("rollout.rollback", "v1"), ("deploy", "v3")],
            "v3",
            "v1",
        ),
        ([("deploy", "v1"), ("deploy", "v2"), ("rollback", "v1"), ("promote", "v2")], "v2", "v1"),
        ([("deploy", "v1"), ("deploy", "v2"), ("rollback", "v9")], "v9", "v2"),
        ([("deploy", "v1")], "v2", "v1"),
    ],
)
def test_what_was_left_by_going_back_is_not_good_until_it_is_chosen_again(
    changes: list[tuple[str, str]], current: str, good: str | None
) -> None:
    assert app_history.last_good_revision(changes, current) == good


def test_an_action_that_goes_back_ends_in_rollback() -> None:
    assert [
        app_history.is_rollback(action)
        for action in ("rollback", "rollout.rollback", "deploy", "rollbacks")
    ] == [True, True, False, False]
