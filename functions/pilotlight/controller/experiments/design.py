"""Design of an experiment: named arms, the units that take part, and the guardrails of the arms.
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
QUANTILES = {"latency_p50": 0.5, "latency_p95": 0.95, "latency_p99": 0.99}
METRICS = (*RATIOS, "latency_mean", *QUANTILES, "exec_mean", "cost_per_call", "cost_per_1k_tokens")
"""Latencies are milliseconds of warm calls; costs are in the currency of the function's price."""
FEEDBACK = "feedback:"
"""`feedback:<metric>`, or `feedback:label=<text>` for the share of labelled calls with that
label."""
DEFAULT_GUARDRAILS = ("error_ratio +0.02",)
_GUARDRAIL = re.compile(
    r"(?P<metric>\S+)\s+(?P<sign>[+-])(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<percent>%?)\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guardrail:
    """Bound on an arm's metric relative to the first arm's; an arm beyond it is stopped. As text
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
        """Parse the text form. Raises InvalidInput."""
        found = _GUARDRAIL.match(text)
        if found is None or not (found["metric"] in METRICS or is_feedback(found["metric"])):
            known = f"{', '.join(METRICS)}, {FEEDBACK}<metric>"
            raise InvalidInput(
                f"guardrail {text!r}: must be METRIC +BOUND or METRIC -BOUND[%], METRIC one of "
                f"{known}",
                parameter="guardrails",
            )
        number = float(f"{found['sign']}{found['number']}") / (100 if found["percent"] else 1)
        return cls(metric=found["metric"], allowed=number, is_relative=bool(found["percent"]))

    @property
    def is_ceiling(self) -> bool:
        """Whether a higher value is worse."""
        return math.copysign(1.0, self.allowed) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmStop:
    """When and why an arm was stopped. A stopped arm answers no calls."""

    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """An experiment as created, and the arms that were stopped since.

    Attributes:
        unit: what is assigned to an arm: `key`, `tenant`, or `header:<name>`. All calls of a unit
            go to the same arm.
        percent: share of all units; the others follow the function's weights.
        arms: their shares add up to 100; the others are compared with the first.
        salt: of the units' hash.
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
            f"there is no arm {name!r}: use one of {', '.join(arm.name for arm in self.arms)}",
            parameter="arm",
        )

    def traffic(self, experiment: str) -> ExperimentTraffic | None:
        """The experiment as activators apply it; None when only the first arm is left.

        The units of a stopped arm get the first arm's revision; no other unit changes arms."""
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
    """Whether the metric is feedback of callers."""
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
    """Parse a requested experiment, and check what the traffic document does not check. Raises
    InvalidInput naming the invalid value."""
    if unit not in (BY_KEY, BY_TENANT) and not unit.startswith(BY_HEADER):
        raise InvalidInput(
            f"unit = {unit!r}: use {BY_KEY!r}, {BY_TENANT!r} or '{BY_HEADER}<name>'; single "
            f"requests cannot be units: a caller of two requests would meet both arms",
            parameter="unit",
        )
    if not 0 < percent <= WHOLE:
        raise InvalidInput(
            f"percent = {percent}: must be above 0 and at most {WHOLE}", parameter="percent"
        )
    if len(guardrails) > MAX_GUARDRAILS:
        raise InvalidInput(
            f"{len(guardrails)} guardrails: give at most {MAX_GUARDRAILS}", parameter="guardrails"
        )
    bounds = tuple(Guardrail.parse(text) for text in guardrails)
    return Design(unit=unit, percent=percent, arms=_arms(arms), guardrails=bounds, salt=salt)


def _arms(given: Sequence[Mapping[str, Any]]) -> tuple[Arm, ...]:
    arms = tuple(
        Arm(name=arm["name"], revision=arm["revision"], share=arm["share"]) for arm in given
    )
    if not 2 <= len(arms) <= MAX_ARMS:
        raise InvalidInput(
            f"an experiment must have 2 to {MAX_ARMS} arms, not {len(arms)}", parameter="arms"
        )
    if len({arm.name for arm in arms}) != len(arms):
        raise InvalidInput("two arms share a name: give each its own", parameter="arms")
    total = sum(arm.share for arm in arms)
    if any(not 0 < arm.share < WHOLE for arm in arms) or not math.isclose(
        total, WHOLE, abs_tol=1e-9
    ):
        raise InvalidInput(
            f"shares of the arms must be above 0 and add up to {WHOLE}, not {total:g}",
            parameter="arms",
        )
    return arms
