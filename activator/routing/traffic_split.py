"""Selects the revision that answers a call, from the function's traffic document.

The order: the tag or revision that the caller named, the pin of its tenant, its experiment, the
weights. A unit of assignment (a key, a tenant, the value of a header) always gets the same decision
from the same document; decisions are cached by unit. A request without a unit gets a random one."""

from __future__ import annotations

import asyncio
import json
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Final, Protocol

from activator.routing.api_keys import Principal
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.protocol import HEADER_ARM, HEADER_REPLAY, HEADER_TAG, FunctionRoute
from pilotlight.spec import traffic
from pilotlight.spec.identifiers import MAX_NAME_LENGTH, Scope
from pilotlight.spec.observations import REPLAY_ARM
from pilotlight.spec.pricing import Rates
from pilotlight.spec.traffic import (
    BY_HEADER,
    BY_KEY,
    BY_TENANT,
    WHOLE,
    Arm,
    ExperimentTraffic,
    TrafficDocument,
)

MAX_UNITS: Final = 4096
"""Most units of a function with a cached decision: computing one costs microseconds, and a flood of
user ids must not fill the memory."""
MAX_NAME_BYTES: Final = 256
"""Longer names of units are not cached: headers may have some tens of KiB."""
_HALF: Final = 4
"""Bytes of a unit's digest that decide whether it is in the experiment; the others decide its arm,
so that the two are independent."""
_HALF_PERCENT: Final = WHOLE / (1 << (8 * _HALF))
_ARM: Final = HEADER_ARM.encode()


class ShadowTarget:
    """Target of copies of calls. Immutable.

    Attributes:
        percent: share of the calls that are copied.
        max_compute: largest share of the function's execution time that copies may use.
    """

    __slots__ = ("max_compute", "percent", "target")

    def __init__(self, target: CallTarget, *, percent: float, max_compute: float) -> None:
        self.target = target
        self.percent = percent
        self.max_compute = max_compute

    def __repr__(self) -> str:
        return f"<ShadowTarget {self.target!r} {self.percent:g} %>"


class RoutingDecision:
    """The routing decision for a call, or for all calls of a unit. Immutable; compared by identity.

    Attributes:
        experiment, arm: where it is in one, else ""; the arm of copies and replays is one of
            `pilotlight.spec.observations.UNCOUNTED_ARMS`.
        unit: 16 hex digits that identify the unit in the experiment; "" without a unit.
        is_override: the caller, or a pin, named the revision.
        shadow: target of a copy of the call; None = no copy.
        mark: mark in the call's usage record.
        head: header line of its response.
        line: header line of its request to the worker (begins with CRLF).
    """

    __slots__ = (
        "arm",
        "experiment",
        "head",
        "is_override",
        "line",
        "mark",
        "shadow",
        "target",
        "unit",
    )

    def __init__(
        self,
        target: CallTarget,
        *,
        experiment: str = "",
        arm: str = "",
        unit: str = "",
        is_override: bool = False,
        shadow: ShadowTarget | None = None,
    ) -> None:
        self.target = target
        self.experiment = experiment
        self.arm = arm
        self.unit = unit
        self.is_override = is_override
        self.shadow = shadow
        fields = {"experiment": experiment, "arm": arm, "unit": unit}
        self.mark = "".join(f',"{k}":{json.dumps(v)}' for k, v in fields.items() if v)
        self.head = b"%b: %b\r\n" % (_ARM, arm.encode()) if arm else b""
        self.line = b"\r\n%b: %b" % (_ARM, arm.encode()) if arm else b""

    def __repr__(self) -> str:
        arm = f" arm {self.arm} of {self.experiment}" if self.experiment else ""
        return f"<RoutingDecision {self.target!r}{arm}>"


def document_of(route: FunctionRoute) -> TrafficDocument:
    """Return the route's traffic document. Raises KeyError, TypeError, ValueError or InvalidInput
    when it is invalid, or differs from the route."""
    weights = {name: weight for name, weight in route.traffic if weight}
    if not route.document:
        return traffic.with_weights(TrafficDocument(salt=route.id), weights)
    document = traffic.validate_document(
        traffic.from_json(route.document), revisions=route.revisions
    )
    if document.weights != weights:
        raise ValueError(
            f"the traffic document of {route.app}/{route.function} has other weights than its route"
        )
    return document


def previous_route(route: FunctionRoute) -> FunctionRoute | None:
    """Return the route by which calls are answered until the awaited revisions have an instance;
    None when there is none. Raises the errors of `document_of`."""
    document = document_of(route)
    if not document.previous or not document.previous.keys() <= route.revisions.keys():
        return None
    units = TrafficDocument(
        generation=document.generation, salt=document.salt, sticky=document.sticky
    )
    before = traffic.with_weights(units, document.previous)
    return replace(route, traffic=tuple(before.weights.items()), document=traffic.to_json(before))


class FunctionRouter:
    """One function's revisions and the choice between them. Immutable, except for its cache of
    units. Owner: the event loop.

    Attributes:
        targets: every revision that can be called, by its name.
        only: the decision for every call that names no revision; None = it depends on the call.
        answering: the revisions that answer calls that name none.
        handover: the cutover in progress; None = none.
        has_cors: whether web pages of other origins may call some revision.
    """

    __slots__ = (
        "_arms",
        "_pins",
        "_tags",
        "_weights",
        "answering",
        "document",
        "handover",
        "has_cors",
        "only",
        "targets",
    )

    def __init__(self, route: FunctionRoute, rates: Rates) -> None:
        """Raises the errors of `document_of` and `CallTarget`."""
        self.document = document = document_of(route)
        self.targets: Mapping[str, CallTarget] = {
            name: _target(route, document, name, rates) for name in sorted(document.named())
        }
        self.answering = tuple(self.targets[name] for name in sorted(document.answering()))
        self.has_cors = any(target.spec.cors for target in self.targets.values())
        shadow = self._shadow()
        self._weights = _Weights(
            document,
            {name: RoutingDecision(t, shadow=_for(shadow, t)) for name, t in self.targets.items()},
        )
        self._arms = (
            _Arms(document.experiment, self.targets, shadow)
            if document.experiment is not None
            else None
        )
        self._pins = {
            tenant: RoutingDecision(self.targets[name], is_override=True)
            for tenant, name in document.pins.items()
        }
        self._tags = {
            name: RoutingDecision(t, is_override=True) for name, t in self.targets.items()
        }
        self._tags |= {tag: self._tags[name] for tag, name in document.tags.items()}
        is_one = len(document.segments) == 1 and self._arms is None and not self._pins
        self.only = self._weights.choices[0] if is_one else None
        self.handover: Cutover | None = None

    def __repr__(self) -> str:
        cached = len(self._weights.units) + (len(self._arms.units) if self._arms is not None else 0)
        return (
            f"<FunctionRouter {dict(self.document.weights)} generation "
            f"{self.document.generation}, {cached} units cached>"
        )

    @property
    def tenant(self) -> str:
        """The function's tenant."""
        return next(iter(self.targets.values())).tenant

    @property
    def is_plain(self) -> bool:
        """Whether all calls that name no revision get the same one, without copies."""
        return self.only is not None and self.only.shadow is None

    def choose(
        self, caller: Principal, headers: Mapping[bytes, bytes], asked: str = ""
    ) -> RoutingDecision:
        """Return the decision for a call. `asked`: the tag or revision that it names. Raises
        NotFound, Forbidden for another tenant's caller."""
        if asked:
            return self._named(caller, asked)
        if self.only is not None:
            return self.only
        choice = self._default(caller, headers)
        return choice if self.handover is None else self.handover.decide(choice, caller, headers)

    def choose_for_replay(self, caller: Principal, asked: str) -> RoutingDecision:
        """Return the decision for a call that repeats a logged one. Raises InvalidInput where it
        names no revision, Forbidden for a caller that could not delete the log, which the call
        would otherwise be in; NotFound."""
        if not asked:
            raise errors.InvalidInput(
                f"header {HEADER_REPLAY}: name the revision, with {HEADER_TAG} for example",
                parameter=HEADER_REPLAY,
            )
        if not caller.scope.reaches(Scope.DEPLOY):
            raise errors.Forbidden(
                f"this API key has scope {caller.scope.value!r}: header {HEADER_REPLAY} needs "
                f"'deploy'"
            )
        return RoutingDecision(self._named(caller, asked).target, arm=REPLAY_ARM, is_override=True)

    def _default(self, caller: Principal, headers: Mapping[bytes, bytes]) -> RoutingDecision:
        if self._pins and (pinned := self._pins.get(caller.tenant_name)) is not None:
            return pinned
        if self._arms is not None and (in_arm := self._arms.of(caller, headers)) is not None:
            return in_arm
        return self._weights.of(caller, headers)

    def any(self, revision: str = "") -> CallTarget:
        """Return `revision` where it can still be called, else one by weight."""
        return self.targets.get(revision) or self._weights.at(random.random() * WHOLE).target

    def _named(self, caller: Principal, asked: str) -> RoutingDecision:
        some = next(iter(self.targets.values()))
        where = f"{some.app}/{some.function}"
        if len(asked) > MAX_NAME_LENGTH:
            raise errors.NotFound(
                f"{where} has no tag {asked[:MAX_NAME_LENGTH]!r}…: tags have at most "
                f"{MAX_NAME_LENGTH} characters"
            )
        if caller.tenant != some.tenant:
            raise errors.Forbidden(
                f"only callers of its own tenant may name a revision of {where}: remove {asked!r}"
            )
        choice = self._tags.get(asked)
        if choice is None:
            tags = ", ".join(sorted(self.document.tags))
            has = (
                f"its tags are {tags}"
                if tags
                else f"it has none: `pilotlight traffic tag {where} NAME REVISION` makes one"
            )
            raise errors.NotFound(f"{where} has no tag or callable revision {asked!r}; {has}")
        return choice

    def _shadow(self) -> ShadowTarget | None:
        shadow = self.document.shadow
        if shadow is None or not shadow.percent or not shadow.max_compute:
            return None
        return ShadowTarget(
            self.targets[shadow.revision], percent=shadow.percent, max_compute=shadow.max_compute
        )


def _target(route: FunctionRoute, document: TrafficDocument, name: str, rates: Rates) -> CallTarget:
    is_stable = name == document.stable
    least = 1 if is_stable else None if name in document.answering() else 0
    is_shadow = document.shadow is not None and name == document.shadow.revision
    return CallTarget(
        route, name, rates, is_stable=is_stable, is_shadow=is_shadow, min_instances=least
    )


def _for(shadow: ShadowTarget | None, target: CallTarget) -> ShadowTarget | None:
    """Return the shadow, unless it is the target itself."""
    return shadow if shadow is not None and shadow.target is not target else None


class _Units:
    """Derives the unit of a call, and caches decisions by unit."""

    __slots__ = ("_find", "_header", "_known", "_may_be_tenant", "_salt")

    def __init__(
        self, unit: str, *, salt: str, find: Callable[[bytes], RoutingDecision | None]
    ) -> None:
        self._header = unit.removeprefix(BY_HEADER).encode() if unit.startswith(BY_HEADER) else b""
        self._may_be_tenant = {BY_KEY: False, BY_TENANT: True}.get(unit)
        self._salt = salt
        self._find = find
        self._known: dict[str | bytes, RoutingDecision | None] = {}

    def __len__(self) -> int:
        return len(self._known)

    def name(self, caller: Principal, headers: Mapping[bytes, bytes]) -> str | bytes:
        """Return the name of a call's unit; empty without one."""
        if self._header:
            return headers.get(self._header, b"")
        if self._may_be_tenant is None:
            return b""
        return caller.tenant if self._may_be_tenant else caller.key_id

    def choice(self, name: str | bytes) -> RoutingDecision | None:
        """Return the decision for a unit."""
        known = self._known
        if name in known:
            return known[name]
        if len(known) >= MAX_UNITS:
            known.clear()
        found = self._find(traffic.hash_unit(self._salt, name))
        if len(name) <= MAX_NAME_BYTES:
            known[name] = found
        return found


class _Weights:
    """The weights: maps points to revisions."""

    __slots__ = ("_ends", "choices", "units")

    def __init__(self, document: TrafficDocument, by_name: Mapping[str, RoutingDecision]) -> None:
        self._ends = [segment.end for segment in document.segments]
        self._ends[-1] = float(WHOLE)  # rounding may leave it slightly below
        self.choices = [by_name[segment.revision] for segment in document.segments]
        self.units = _Units(
            document.sticky,
            salt=document.salt,
            find=lambda digest: self.at(traffic.point_from_hash(digest)),
        )

    def at(self, point: float) -> RoutingDecision:
        """Return the decision for a point."""
        return self.choices[bisect_right(self._ends, point)]

    def of(self, caller: Principal, headers: Mapping[bytes, bytes]) -> RoutingDecision:
        """Return the decision for a call."""
        name = self.units.name(caller, headers)
        return (self.units.choice(name) if name else None) or self.at(random.random() * WHOLE)


class _Arms:
    """An experiment: assigns units to arms."""

    __slots__ = ("_ends", "_experiment", "_plain", "_shadow", "_targets", "units")

    def __init__(
        self,
        experiment: ExperimentTraffic,
        targets: Mapping[str, CallTarget],
        shadow: ShadowTarget | None,
    ) -> None:
        self._experiment = experiment
        self._targets = targets
        self._shadow = shadow
        self._ends = list(accumulate(arm.share for arm in experiment.arms))
        self._ends[-1] = float(WHOLE)
        self._plain = [self._choice(arm, "") for arm in experiment.arms]
        self.units = _Units(experiment.unit, salt=experiment.salt, find=self._found)

    def of(self, caller: Principal, headers: Mapping[bytes, bytes]) -> RoutingDecision | None:
        """Return the decision for a call; None when it is not in the experiment."""
        name = self.units.name(caller, headers)
        if name:
            return self.units.choice(name)
        if random.random() * WHOLE >= self._experiment.percent:
            return None
        return self._plain[bisect_right(self._ends, random.random() * WHOLE)]

    def _found(self, digest: bytes) -> RoutingDecision | None:
        if int.from_bytes(digest[:_HALF], "big") * _HALF_PERCENT >= self._experiment.percent:
            return None
        point = int.from_bytes(digest[_HALF:], "big") * _HALF_PERCENT
        return self._choice(self._experiment.arms[bisect_right(self._ends, point)], digest.hex())

    def _choice(self, arm: Arm, unit: str) -> RoutingDecision:
        target = self._targets[arm.revision]
        return RoutingDecision(
            target,
            experiment=self._experiment.id,
            arm=arm.name,
            unit=unit,
            shadow=_for(self._shadow, target),
        )


class Cutover:
    """The cutover of one function: `previous` answers for the `awaited` revisions, by revision key.

    Attributes:
        lacking: keys of revisions whose last start was refused for lack of capacity.
        broken: keys of revisions whose last start failed for another reason.
    """

    __slots__ = ("_serves", "awaited", "broken", "held", "lacking", "previous", "ticker", "timer")

    def __init__(
        self,
        previous: FunctionRouter,
        awaited: Mapping[str, CallTarget],
        held: tuple[CallTarget, ...],
        serves: Callable[[CallTarget], bool],
    ) -> None:
        """`serves`: returns whether a revision has an instance now, and may get calls."""
        self._serves = serves
        self.previous = previous
        self.awaited = dict(awaited)
        self.held = held
        self.lacking: set[str] = set()
        self.broken: set[str] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.ticker: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Cutover to {', '.join(sorted(self.awaited))}>"

    def decide(
        self, choice: RoutingDecision, caller: Principal, headers: Mapping[bytes, bytes]
    ) -> RoutingDecision:
        """Return the decision during the cutover; a unit of an experiment waits for its arm's own
        revision."""
        if choice.is_override or choice.arm or choice.target.key not in self.awaited:
            return choice
        before = self.previous.choose(caller, headers)
        may_come_back = choice.target.key in self.broken
        return (
            before
            if before.target.key not in self.awaited
            and (may_come_back or self._serves(before.target))
            else choice
        )


class Cutovers(Protocol):
    """Begins and ends the cutovers of functions."""

    def begin(self, name: str, routed: FunctionRouter, before: FunctionRouter) -> None:
        """Move a function from `before` to `routed`."""

    def cancel(self, name: str) -> None:
        """Cancel the cutover of a function that was removed or whose route was replaced."""

    def clear(self) -> None:
        """Cancel all cutovers."""
