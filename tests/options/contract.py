"""The table of proofs: which test shows the effect, or the refusal, of which option on which fleet.

`proves` marks a test with the options that it shows. `required` lists all options by reflection, so
that a new field without a proof fails `test_every_option.py`. There is no list of exceptions."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from activator.settings import ActivatorSettings
from pilotlight.controller.settings import ControllerSettings
from pilotlight.core.oidc.settings import Issuer
from pilotlight.core.settings import PlatformSettings
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import FunctionSpec, ImageSpec
from pilotlight.spec.pricing import PriceSettings
from pilotlight.spec.quotas import Plan
from snapshotter.settings import SnapshotterSettings
from weight_cache.settings import WeightCacheSettings

LOCAL, CLUSTER = "local", "cluster"
"""Instances behind this machine's node agent (`platform.fleet: local`), or in pods (`knative`)."""
BOTH = (LOCAL, CLUSTER)
ROOTS: tuple[type, ...] = (
    FunctionSpec,
    ImageSpec,
    Plan,
    PriceSettings,
    PlatformSettings,
    ClusterSettings,
    ActivatorSettings,
    ControllerSettings,
    Issuer,
    SnapshotterSettings,
    WeightCacheSettings,
)
"""What users and operators declare: records that are nested in these are found."""
Test = TypeVar("Test", bound=Callable[..., Any])
Proofs = dict[tuple[str, str], list[str]]
PROOFS: Proofs = {}
"""(option, fleet) → names of the tests that show it."""
SOURCES: dict[tuple[str, str], str] = {}
"""(option, test) → the test's source."""


def proves(*options: str, fleets: tuple[str, ...] = BOTH) -> Callable[[Test], Test]:
    """Mark a test that takes `fleet` as the proof of options such as `Scaling.max_inputs`."""

    def mark(test: Test) -> Test:
        name = f"{test.__module__}.{test.__qualname__}"
        for option in options:
            SOURCES[option, name] = inspect.getsource(test)
            for fleet in fleets:
                PROOFS.setdefault((option, fleet), []).append(name)
        marked: Test = pytest.mark.parametrize("fleet", fleets)(test)
        return marked

    return mark


def required() -> set[str]:
    """All options, as `Record.field`. A field that holds records is shown by their fields."""
    return {
        f"{record.__name__}.{name}"
        for record in records()
        for name, hint in typing.get_type_hints(record).items()
        if name in {field.name for field in dataclasses.fields(record)}
        and not any(True for _ in _inside(hint))
    }


def records() -> list[type]:
    """The roots and the records that are nested in them, each once."""
    found: list[type] = []
    left = list(ROOTS)
    while left:
        record = left.pop(0)
        if record not in found:
            found.append(record)
            for hint in typing.get_type_hints(record).values():
                left.extend(_inside(hint))
    return found


def _inside(hint: Any) -> Iterator[type]:
    """The records that a type is made of."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for argument in typing.get_args(hint):
        yield from _inside(argument)
