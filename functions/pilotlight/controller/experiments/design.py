"""What an experiment is: named arms, who is in it, and the bounds beyond which an arm is stopped.
Pure; parsed once, strictly."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pilotlight.controller.analytics.feedback import LABEL
from pilotlight.errors import InvalidInput
from pilotlight.spec.traffic import BY_HEADER, BY_KEY, BY_TENANT, WHOLE, Arm, ExperimentTraffic

MAX_ARMS = 8
MAX_GUARDRAILS = 8
RATIOS = ("error_ratio", "degraded_ratio", "cold_ratio")
"""Shares of calls, 0 to 1."""
MEANS = ("latency_mean", "exec_mean", "cost_per_call", "cost_per_1k_tokens")
QUANTILES = {"latency_p50": 0.5, "latency_p95": 0.95, "latency_p99": 0.99}
METRICS = (*RATIOS, "latency_mean", *QUANTILES, "exec_mean", "cost_per_call", "cost_per_1k_tokens")
"""Latencies are milliseconds of warm calls; costs are in the currency of the function's price."""
FEEDBACK = "feedback:"
"""`feedback:<metric>`, or `feedback:label=<text>` for the share of labelled calls that have that
label."""
DEFAULT_GUARDRAILS = ("error_ratio +0.02",)
_GUARDRAIL = re.compile(
    r"(?P<metric>\S+)\s+(?P<sign>[+-])(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<percent>%?)\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guardrail:
    """How far an arm's metric may be from the first arm's before the arm is stopped; as text
    `error_ratio +0.02`, `latency_p99 +20%`.

    Attributes:
        allowed: the greatest increase, or decrease for a negative one.
        is_relative: `allowed` is a share of the first arm's value.
    """

    metric: str
    allowed: float
    is_relative: bool

    def __str__(self) -> str:
        shown = f"{self.allowed * 100:+.12g}%" if self.is_relative else f"{self.allowed:+.12g}"
        return f"{self.metric} {shown}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidInput."""
        found = _GUARDRAIL.match(text)
        if found is None or not (found["metric"] in METRICS or is_feedback(found["metric"])):
            known = f"{', '.join(METRICS)}, {FEEDBACK}<metric>"
            raise InvalidInput(
                f"guardrail {text!r}: write METRIC +BOUND or METRIC -BOUND[%], METRIC one of "
                f"{known}",
                parameter="guardrails",
            )
        number = float(f"{found['sign']}{found['number']}") / (100 if found["percent"] else 1)
        return cls(metric=found["metric"], allowed=number, is_relative=bool(found["percent"]))

    @property
    def is_ceiling(self) -> bool:
        """Whether more is worse."""
        return math.copysign(1.0, self.allowed) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStop:
    """An arm that answers nobody any more: since when, and why."""

    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """An experiment as it was made, and which of its arms were stopped since.

    Attributes:
        unit: what is assigned to an arm: `key`, `tenant`, or `header:<name>`. A unit meets one arm,
        however often it calls. percent: of all units; the rest follow the function's weights. arms:
        shares add up to 100; the first is what others are compared with. salt: of the units' hash.
        stopped: arm → when and why.
    """

    unit: str
    percent: float
    arms: tuple[Arm, ...]
    guardrails: tuple[Guardrail, ...]
    salt: str
    stopped: Mapping[str, ArmStop] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "unit": self.unit,
            "percent": self.percent,
            "arms": [
                {"name": arm.name, "revision": arm.revision, "share": arm.share}
                for arm in self.arms
            ],
            "guardrails": [str(guardrail) for guardrail in self.guardrails],
            "salt": self.salt,
            "stopped": {
                name: {"at": stop.at, "reason": stop.reason} for name, stop in self.stopped.items()
            },
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """The reverse of `to_json`."""
        return cls(
            unit=body["unit"],
            percent=body["percent"],
            arms=tuple(Arm(**arm) for arm in body["arms"]),
            guardrails=tuple(Guardrail.parse(text) for text in body["guardrails"]),
            salt=body["salt"],
            stopped={name: ArmStop(**stop) for name, stop in body["stopped"].items()},
        )

    def arm(self, name: str) -> Arm:
        """The arm of that name. Raises InvalidInput."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise InvalidInput(
            f"there is no arm {name!r}: there are {', '.join(arm.name for arm in self.arms)}",
            parameter="arm",
        )

    def traffic(self, experiment: str) -> ExperimentTraffic | None:
        """What activators follow; None when no arm is left beside the first.

        A stopped arm's part of the units stays where it is, and is the first arm's now: nobody else
        changes sides."""
        first = self.arms[0]
        arms = tuple(
            Arm(name=first.name, revision=first.revision, share=a.share)
            if a.name in self.stopped
            else a
            for a in self.arms
        )
        if all(arm.name == first.name for arm in arms):
            return None
        return ExperimentTraffic(
            id=experiment, salt=self.salt, unit=self.unit, percent=self.percent, arms=arms
        )


def is_feedback(metric: str) -> bool:
    """Whether it is a metric that callers tell."""
    return metric.startswith(FEEDBACK) and metric not in (
        FEEDBACK,
        f"{FEEDBACK}{LABEL}",
        f"{FEEDBACK}{LABEL}=",
    )


def parse(
    *,
    unit: str,
    percent: float,
    arms: Sequence[Mapping[str, Any]],
    guardrails: Sequence[str],
    salt: str,
) -> Design:
    """An experiment that was asked for, checked as far as it goes beyond a traffic document. Raises
    InvalidInput naming what is wrong."""
    if unit not in (BY_KEY, BY_TENANT) and not unit.startswith(BY_HEADER):
        raise InvalidInput(
            f"unit = {unit!r}: one of {BY_KEY!r}, {BY_TENANT!r}, '{BY_HEADER}<name>'; single "
            f"requests are no unit: who calls "
            "twice would meet both arms",
            parameter="unit",
        )
    if not 0 < percent <= WHOLE:
        raise InvalidInput(f"percent = {percent}: above 0, at most {WHOLE}", parameter="percent")
    if len(guardrails) > MAX_GUARDRAILS:
        raise InvalidInput(
            f"{len(guardrails)} guardrails: at most {MAX_GUARDRAILS}", parameter="guardrails"
        )
    bounds = tuple(Guardrail.parse(text) for text in guardrails)
    return Design(unit=unit, percent=percent, arms=_arms(arms), guardrails=bounds, salt=salt)


def _arms(given: Sequence[Mapping[str, Any]]) -> tuple[Arm, ...]:
    arms = tuple(
        Arm(name=arm["name"], revision=arm["revision"], share=arm["share"]) for arm in given
    )
    if not 2 <= len(arms) <= MAX_ARMS:
        raise InvalidInput(
            f"an experiment has 2 to {MAX_ARMS} arms, not {len(arms)}", parameter="arms"
        )
    if len({arm.name for arm in arms}) != len(arms):
        raise InvalidInput("two arms share a name", parameter="arms")
    total = sum(arm.share for arm in arms)
    if any(not 0 < arm.share < WHOLE for arm in arms) or not math.isclose(
        total, WHOLE, abs_tol=1e-9
    ):
        raise InvalidInput(
            f"shares of the arms are above 0 and add up to {WHOLE}, not {total:g}", parameter="arms"
        )
    return arms
