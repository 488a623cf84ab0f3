"""Who is answered by which revision: the traffic document of a function, and the pure rules by which it is changed and read.

The weights are percents of *units*: of the callers when traffic is sticky, of single requests when it is not. A unit is hashed to a point
from 0 to 100, and `segments` say whose each part of that range is. A change of weights moves only the parts that it must (what one
revision loses goes to those that gain, and nothing else changes hands), so raising a canary from 5 to 10 moves nobody back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

WHOLE = 100
"""Percent: weights and segments add up to it."""
PER_REQUEST, BY_KEY, BY_TENANT = "request", "key", "tenant"
BY_HEADER = "header:"
"""`header:<name>`: the value of that request header; a request without it is a unit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The units whose point is in [`begin`, `end`), percents, are `revision`'s."""

    revision: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of an experiment: `share` percent of its units are answered by `revision`. The first arm is what others are compared to."""

    name: str
    revision: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentTraffic:
    """An experiment that runs: `percent` of all units are in it, by their own hash, the rest follow the weights.

    Attributes:
        id: names it in records.
        unit: as `TrafficDocument.sticky`; must not be `request` where exposures count.
        arms: shares add up to 100.
    """

    id: str
    salt: str
    unit: str
    percent: float
    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """A revision that gets copies of calls, whose answers are compared and thrown away.

    Attributes:
        percent: of the calls.
        max_compute: the greatest share of the function's execution time that copies may take.
    """

    revision: str
    percent: float = 100.0
    max_compute: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDocument:
    """All that decides which revision answers.

    Attributes:
        generation: rises with every change; a change names the one that it was made from.
        weights: revision → whole percent; they add up to 100.
        segments: the same, cut into parts of the range of units; keeps units where they are.
        tags: name → revision: addressed as `app/function@tag`, with the header `Pilotlight-Tag`, or `?tag=`.
        sticky: what a unit is: `request`, `key`, `tenant`, or `header:<name>`.
        salt: of the hash; set once per function.
        pins: tenant's name → the revision that answers it, whatever the weights.
        max_candidate: blast radius: the greatest weight, in percent, of all revisions but the heaviest together; 100 = no bound.
        experiment, shadow: None = there is none.
    """

    generation: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    sticky: str = PER_REQUEST
    salt: str = ""
    pins: Mapping[str, str] = field(default_factory=dict)
    max_candidate: int = WHOLE
    experiment: ExperimentTraffic | None = None
    shadow: Shadow | None = None
