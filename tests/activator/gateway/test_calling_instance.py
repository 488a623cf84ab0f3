"""Which one of the instances in a pod makes a request: they all connect alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from activator.calls.attempt import Attempt
from activator.gateway.calls_by_functions import calling_instance
from pilotlight.errors import InvalidInput


def instance(*calls: str) -> Any:
    """One in which these calls run."""
    return SimpleNamespace(running={call: object.__new__(Attempt) for call in calls})


def test_the_one_that_runs_the_named_call_makes_it() -> None:
    idle, one, two = instance(), instance("a"), instance("b", "c")
    assert calling_instance([idle, one, two], b"c") is two
    assert calling_instance([idle, one, two], b"x, a") is one
    assert calling_instance([idle, one, two], b"x") is idle, "it is refused there, by its name"


def test_without_a_name_it_is_the_only_one_that_runs_any() -> None:
    idle, one = instance(), instance("a")
    assert calling_instance([idle, one], None) is one
    assert calling_instance([idle], None) is idle
    with pytest.raises(InvalidInput, match="2 instances of this pod"):
        calling_instance([one, instance("b")], None)
