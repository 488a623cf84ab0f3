"""Who is answered by which revision: the traffic document of a function, and the pure rules by
which it is changed and read.

The weights are percents of *units*: of the callers when traffic is sticky, of single requests when
it is not. A unit is hashed to a point from 0 to 100, and `segments` say whose each part of that
range is. A change of weights moves only the parts that it must (what one revision loses goes to
those that gain, and nothing else changes hands), so raising a canary from 5 to 10 moves nobody
back."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pilotlight.errors import InvalidInput

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
    """One side of an experiment: `share` percent of its units are answered by `revision`. The first
    arm is what others are compared to."""

    name: str
    revision: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentTraffic:
    """An experiment that runs: `percent` of all units are in it, by their own hash, the rest follow
    the weights.

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
    """A revision that gets copies of calls, whose answers are compared and thrown away. It answers
    no callers but those that ask for it.

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
        generation: rises with every change; a change names the one that it was made from. weights:
        revision → whole percent; they add up to 100. segments: the same, cut into parts of the
        range of units; keeps units where they are. tags: name → revision: addressed as
        `app/function@tag`, with the header `Pilotlight-Tag`, or `?tag=`. sticky: what a unit is:
        `request`, `key`, `tenant`, or `header:<name>`. salt: of the hash; set once per function.
        pins: tenant's name → the revision that answers it, whatever the weights. max_candidate:
        blast radius: the greatest weight, in percent, of all revisions but the heaviest together;
        100 = no bound. experiment, shadow: None = there is none. stable: while a rollout runs, the
        revision that keeps room for all traffic and one instance warm; "" = there is none. at_once:
        the last change went back: who answered before is not good enough to answer while who
        answers now comes up.
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
    stable: str = ""
    at_once: bool = False

    def named(self) -> frozenset[str]:
        """Every revision that can be called: by weight, tag, pin or arm, as the shadow, or because
        it is the way back."""
        more = [self.shadow.revision] if self.shadow is not None else []
        arms = [arm.revision for arm in self.experiment.arms] if self.experiment is not None else []
        return frozenset(
            {*self.weights, *self.tags.values(), *self.pins.values(), *arms, *more, self.stable}
            - {""}
        )

    def answering(self) -> frozenset[str]:
        """Those that answer callers who did not ask for a revision: by weight, pin or arm."""
        arms = (
            [arm.revision for arm in self.experiment.arms if arm.share]
            if self.experiment is not None
            else []
        )
        return frozenset({*self.weights, *self.pins.values(), *arms})

    def heaviest(self) -> str:
        """The revision with the greatest weight; of equal ones the first by name. "" where there
        are no weights."""
        return min(self.weights, key=lambda name: (-self.weights[name], name), default="")


MAX_NAMES: Final = 256
"""Tags, and pins, of one function: an activator holds each named revision parsed."""
MAX_ARMS: Final = 16
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\Z")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}\Z")
_NO_UNITS = frozenset({"authorization", "cookie", "proxy-authorization"})
_HASH_BYTES = 8
_EXACT_BITS = 53
"""A float holds so many bits: a point is made of no more, so that it stays below 100."""


def single_revision_traffic(revision: str, *, salt: str) -> TrafficDocument:
    """A function's first document: all of it is answered by one revision."""
    return with_weights(TrafficDocument(salt=salt), {revision: WHOLE})


def hash_unit(salt: str, unit: str | bytes) -> bytes:
    """8 bytes that stand for a unit, and cannot be turned back to it without the salt (BLAKE2b, RFC
    7693, keyed)."""
    value = unit if isinstance(unit, bytes) else unit.encode()
    return hashlib.blake2b(value, key=salt.encode()[:64], digest_size=_HASH_BYTES).digest()


def point_from_hash(eight: bytes) -> float:
    """From a digest's 8 bytes to a point in [0, 100)."""
    return (int.from_bytes(eight, "big") >> (8 * _HASH_BYTES - _EXACT_BITS)) * (
        WHOLE / (1 << _EXACT_BITS)
    )


def unit_point(salt: str, unit: str | bytes) -> float:
    """Where a unit stands from 0 (included) to 100 (not included); always the same for the same
    salt."""
    return point_from_hash(hash_unit(salt, unit))


def revision_at(segments: Sequence[Segment], point: float) -> str:
    """Whose the point is; segments are in order and without holes (`validate_document`)."""
    return segments[bisect_right([segment.end for segment in segments], point)].revision


def with_weights(document: TrafficDocument, weights: Mapping[str, int]) -> TrafficDocument:
    """The document with other weights; no unit changes hands but those that must. Zeros are left
    out. Raises InvalidInput.

    What a revision loses are its highest points, and who gains takes them in order; so exactly half
    of the sum of all differences moves."""
    wanted = {name: weight for name, weight in weights.items() if weight or _is_no_weight(weight)}
    _check_weights(wanted)
    kept, free = _cut(_whole_segments(document), wanted)
    had = {name: sum(end - begin for begin, end in parts) for name, parts in kept.items()}
    for name, weight in wanted.items():
        need = weight - had.get(name, 0.0)
        while need > _DUST and free:
            begin, end = free.pop(0)
            taken = min(end, begin + need)
            kept.setdefault(name, []).append((begin, taken))
            need -= taken - begin
            if end - taken > _DUST:
                free.insert(0, (taken, end))
    return replace(document, weights=wanted, segments=_joined(kept))


_DUST: Final = 1e-9
_Parts = dict[str, list[tuple[float, float]]]


def _whole_segments(document: TrafficDocument) -> Sequence[Segment]:
    if document.segments or not document.weights:
        return document.segments
    at, out = 0.0, []
    for name, weight in document.weights.items():
        out.append(Segment(revision=name, begin=at, end=at + weight))
        at += weight
    return out


def _cut(
    segments: Sequence[Segment], wanted: Mapping[str, int]
) -> tuple[_Parts, list[tuple[float, float]]]:
    """What each revision keeps of its segments, and what nobody has any more."""
    kept: _Parts = {}
    free: list[tuple[float, float]] = [(0.0, float(WHOLE))] if not segments else []
    left = {name: float(weight) for name, weight in wanted.items()}
    for segment in segments:
        has = max(0.0, min(left.get(segment.revision, 0.0), segment.end - segment.begin))
        if has > _DUST:
            kept.setdefault(segment.revision, []).append((segment.begin, segment.begin + has))
            left[segment.revision] -= has
        if segment.end - segment.begin - has > _DUST:
            free.append((segment.begin + has if has > _DUST else segment.begin, segment.end))
    return kept, free


def _joined(parts: _Parts) -> tuple[Segment, ...]:
    """In order, neighbours of one revision made one."""
    out: list[Segment] = []
    for begin, end, name in sorted(
        (begin, end, name) for name, those in parts.items() for begin, end in those
    ):
        if out and out[-1].revision == name and abs(out[-1].end - begin) <= _DUST:
            out[-1] = replace(out[-1], end=end)
        else:
            out.append(Segment(revision=name, begin=begin, end=end))
    return tuple(out)


def exposed_percent(document: TrafficDocument) -> float:
    """Percent of the units that are answered by another revision than the heaviest: the blast
    radius."""
    heaviest = document.heaviest()
    by_weight = sum(weight for name, weight in document.weights.items() if name != heaviest)
    if (experiment := document.experiment) is None:
        return float(by_weight)
    in_arms = sum(arm.share for arm in experiment.arms if arm.revision != heaviest)
    return (by_weight * (WHOLE - experiment.percent) + experiment.percent * in_arms) / WHOLE


def validate_document(document: TrafficDocument, *, revisions: Collection[str]) -> TrafficDocument:
    """The document, once it is sure that it can be followed. Raises InvalidInput naming what is
    wrong."""
    _check_weights(document.weights)
    _check_segments(document)
    _check_unit("sticky", document.sticky)
    _check_names(document)
    if not _is_percent(document.max_candidate) or document.max_candidate != int(
        document.max_candidate
    ):
        raise InvalidInput(
            f"max_candidate = {document.max_candidate!r}: a whole percent, 0 to 100",
            parameter="max_candidate",
        )
    if (experiment := document.experiment) is not None:
        _check_experiment(experiment)
    if (shadow := document.shadow) is not None:
        if shadow.revision in document.answering():
            raise InvalidInput(
                f"{shadow.revision} answers callers: it cannot be a shadow beside that",
                parameter="shadow",
            )
        for name in ("percent", "max_compute"):
            value, top = getattr(shadow, name), WHOLE if name == "percent" else 1
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= top
            ):
                raise InvalidInput(
                    f"shadow.{name} = {value!r}: must be from 0 to {top}", parameter="shadow"
                )
    if unknown := sorted(document.named() - set(revisions)):
        raise InvalidInput(
            f"there is no revision {unknown[0]!r} of this function",
            parameter="revision",
            unknown=unknown,
        )
    if (out := exposed_percent(document)) > document.max_candidate + _DUST:
        raise InvalidInput(
            f"{out:g} % of the traffic would be on other revisions than {document.heaviest()}: "
            f"max_candidate allows "
            f"{document.max_candidate} %; raise it first, or move all traffic at once",
            parameter="max_candidate",
        )
    return document


def _is_no_weight(weight: Any) -> bool:
    return isinstance(weight, bool) or not isinstance(weight, int)


def _is_percent(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= WHOLE


def _check_weights(weights: Mapping[str, int]) -> None:
    for name, weight in weights.items():
        if _is_no_weight(weight) or not 0 < weight <= WHOLE:
            raise InvalidInput(
                f"weight of {name!r} = {weight!r}: a whole percent, 1 to 100", parameter="weights"
            )
    if (total := sum(weights.values())) != WHOLE:
        raise InvalidInput(
            f"the weights add up to {total}: they must add up to 100", parameter="weights"
        )


def _check_segments(document: TrafficDocument) -> None:
    at, sums = 0.0, dict.fromkeys(document.weights, 0.0)
    for segment in document.segments:
        if (
            segment.revision not in sums
            or abs(segment.begin - at) > _DUST
            or segment.end <= segment.begin
        ):
            raise InvalidInput(
                "the segments do not follow each other, or name a revision without a weight",
                parameter="segments",
            )
        sums[segment.revision] += segment.end - segment.begin
        at = segment.end
    if any(abs(sums[name] - weight) > 1e-6 for name, weight in document.weights.items()):
        raise InvalidInput("the segments are not what the weights say", parameter="segments")


def _check_unit(key: str, unit: str, *, may_be_request: bool = True) -> None:
    if unit in (BY_KEY, BY_TENANT) or (unit == PER_REQUEST and may_be_request):
        return
    header = unit.removeprefix(BY_HEADER)
    if not unit.startswith(BY_HEADER) or not _HEADER.match(header) or header in _NO_UNITS:
        kinds = "'request', " if may_be_request else ""
        raise InvalidInput(
            f"{key} = {unit!r}: write {kinds}'key', 'tenant' or 'header:<name>' in small letters",
            parameter=key,
        )


def _check_names(document: TrafficDocument) -> None:
    for kind, names in (("tags", document.tags), ("pins", document.pins)):
        if len(names) > MAX_NAMES:
            raise InvalidInput(f"{len(names)} {kind}: at most {MAX_NAMES}", parameter=kind)
        for name in names:
            if not _NAME.match(name):
                raise InvalidInput(
                    f"{kind}: {name!r} is no name: small letters, digits, - and _, at most 63",
                    parameter=kind,
                )
    for tag in document.tags:
        if tag in document.named():
            raise InvalidInput(f"tag {tag!r} is the name of a revision", parameter="tags")


def _check_experiment(experiment: ExperimentTraffic) -> None:
    _check_unit("experiment.unit", experiment.unit)
    if not experiment.id or not experiment.salt or not _is_percent(experiment.percent):
        raise InvalidInput(
            "an experiment has an id, a salt, and a percent from 0 to 100", parameter="experiment"
        )
    arms = experiment.arms
    # A stopped arm's part goes to another in its place, so that nobody else changes sides: one arm
    # may have several parts.
    if not 1 <= len(arms) <= MAX_ARMS or len({arm.name for arm in arms}) != len(
        {(arm.name, arm.revision) for arm in arms}
    ):
        raise InvalidInput(
            f"an experiment has 1 to {MAX_ARMS} arms with names and revisions of their own",
            parameter="experiment",
        )
    for arm in arms:
        if not _NAME.match(arm.name) or not _is_percent(arm.share):
            raise InvalidInput(
                f"arm {arm.name!r}: a name in small letters, and a share from 0 to 100",
                parameter="experiment",
            )
    if abs(sum(arm.share for arm in arms) - WHOLE) > 1e-6:
        raise InvalidInput(
            "the shares of an experiment's arms must add up to 100", parameter="experiment"
        )


def to_json(document: TrafficDocument) -> dict[str, Any]:
    """As JSON values."""
    return asdict(document)


def from_json(body: Mapping[str, Any]) -> TrafficDocument:
    """The reverse of `to_json`; its values are looked at by `validate_document`. Raises KeyError,
    TypeError or ValueError when it is broken."""
    experiment, shadow = body.get("experiment"), body.get("shadow")
    if experiment is not None:
        experiment = ExperimentTraffic(
            **{**experiment, "arms": tuple(Arm(**arm) for arm in experiment["arms"])}
        )
    return TrafficDocument(
        **{
            **body,
            "weights": {
                str(name): weight for name, weight in dict(body.get("weights", {})).items()
            },
            "tags": {
                str(name): str(revision) for name, revision in dict(body.get("tags", {})).items()
            },
            "pins": {
                str(name): str(revision) for name, revision in dict(body.get("pins", {})).items()
            },
            "segments": tuple(Segment(**segment) for segment in body.get("segments", ())),
            "experiment": experiment,
            "shadow": Shadow(**shadow) if shadow is not None else None,
        }
    )
