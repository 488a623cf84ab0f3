"""Traffic splitting: the traffic document of a function, and the pure rules to change and evaluate
it.

Weights are percentages of *units*: callers if traffic is sticky, otherwise requests. A unit is
hashed to a point from 0 to 100, and `segments` assign each part of that range to a revision. A
change of weights reassigns only the necessary parts (what one revision loses goes to those that
gain), so raising a canary from 5 to 10 moves no unit back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from pilotlight.errors import InvalidInput

WHOLE = 100
"""The sum of weights and of segments, in percent."""
PER_REQUEST, BY_KEY, BY_TENANT = "request", "key", "tenant"
BY_HEADER = "header:"
"""Prefix of `header:<name>`: units are values of that request header; a request without it is a
unit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Assigns the units whose point is in [`begin`, `end`), in percent, to `revision`."""

    revision: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An arm of an experiment: `revision` answers `share` percent of its units. The first arm is
    the control."""

    name: str
    revision: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentTraffic:
    """A running experiment: `percent` of all units take part, by their own hash, the rest follow
    the weights.

    Attributes:
        id: its id in records.
        unit: unit of assignment, as in `TrafficDocument.sticky`, but not `request`.
        arms: the arms, whose shares add up to 100."""

    id: str
    salt: str
    unit: str
    percent: float
    arms: tuple[Arm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """A revision that gets copies of calls, whose answers are compared and discarded. It answers
    callers only if they request it explicitly.

    Attributes:
        percent: percentage of calls to copy.
        max_compute: maximum execution time of copies, as a share of that of the function."""

    revision: str
    percent: float = 100.0
    max_compute: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficDocument:
    """Everything that decides which revision answers a call.

    Attributes:
        generation: increases with every change; a change states the one it is based on.
        weights: revision → integer percentage; they add up to 100.
        segments: the weights as parts of the range of units, which keeps units in place.
        tags: name → revision, addressed as `app/function@tag`, with the header `Pilotlight-Tag`, or
            `?tag=`.
        sticky: what a unit is: `request`, `key`, `tenant`, or `header:<name>`.
        salt: salt of the hash; set once per function.
        pins: name of tenant → revision that answers it, regardless of weights.
        max_candidate: blast radius: maximum total weight, in percent, of all revisions except the
            heaviest; 100 = no limit.
        experiment, shadow: None = none.
        stable: during a rollout, the revision that keeps capacity for all traffic and one instance
            warm; "" = none.
        at_once: the last change was a rollback: the previous revision must not answer while
            instances of the new one start.
        awaited: revisions that gained traffic and have not run a call since.
        previous: weights of revisions that ran: they answer until the `awaited` ones have an
            instance; {} = there is none."""

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
    previous: Mapping[str, int] = field(default_factory=dict)
    awaited: tuple[str, ...] = ()

    def kept(self) -> frozenset[str]:
        """Return all revisions that may have to answer: those that can be called, and those that
        answer until these have an instance."""
        return self.named() | frozenset(self.previous)

    def named(self) -> frozenset[str]:
        """Return all revisions that can be called: by weight, tag, pin or arm, as the shadow, or as
        `stable`."""
        more = [self.shadow.revision] if self.shadow is not None else []
        arms = [arm.revision for arm in self.experiment.arms] if self.experiment is not None else []
        return frozenset(
            {*self.weights, *self.tags.values(), *self.pins.values(), *arms, *more, self.stable}
            - {""}
        )

    def answering(self) -> frozenset[str]:
        """Return the revisions that answer callers that request none: by weight, pin or arm."""
        arms = (
            [arm.revision for arm in self.experiment.arms if arm.share]
            if self.experiment is not None
            else []
        )
        return frozenset({*self.weights, *self.pins.values(), *arms})

    def heaviest(self) -> str:
        """Return the revision with the greatest weight; of equal ones the first by name. "" without
        weights."""
        return min(self.weights, key=lambda name: (-self.weights[name], name), default="")


MAX_NAMES: Final = 256
"""Maximum tags, and pins, of one function: an activator holds each named revision in memory."""
MAX_ARMS: Final = 16
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\Z")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}\Z")
_NO_UNITS = frozenset({"authorization", "cookie", "proxy-authorization"})
_HASH_BYTES = 8
_EXACT_BITS = 53
"""Precision of a float: a point has no more bits, so that it stays below 100."""


def single_revision_traffic(revision: str, *, salt: str) -> TrafficDocument:
    """Return the first document of a function, with all traffic on one revision."""
    return with_weights(TrafficDocument(salt=salt), {revision: WHOLE})


def hash_unit(salt: str, unit: str | bytes) -> bytes:
    """Hash a unit to 8 bytes, which cannot be reversed without the salt (keyed BLAKE2b, RFC
    7693)."""
    value = unit if isinstance(unit, bytes) else unit.encode()
    return hashlib.blake2b(value, key=salt.encode()[:64], digest_size=_HASH_BYTES).digest()


def point_from_hash(eight: bytes) -> float:
    """Convert a hash of 8 bytes to a point in [0, 100)."""
    return (int.from_bytes(eight, "big") >> (8 * _HASH_BYTES - _EXACT_BITS)) * (
        WHOLE / (1 << _EXACT_BITS)
    )


def with_weights(document: TrafficDocument, weights: Mapping[str, int]) -> TrafficDocument:
    """Return the document with other weights, with as few units reassigned as possible. Zeros are
    omitted. Raises InvalidInput.

    A revision loses its highest points, and those that gain take them in order, so exactly half of
    the sum of all differences moves."""
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


def begin_cutover(before: TrafficDocument, after: TrafficDocument) -> TrafficDocument:
    """Return `after` with who answers until the revisions that gained traffic run: those that
    answer in `before` and ran; none after a rollback."""
    if after.at_once:
        return replace(after, previous={}, awaited=())
    serving = before.previous or ({} if before.awaited else before.weights)
    awaited = tuple(sorted(after.weights.keys() - serving.keys()))
    return replace(after, previous=dict(serving) if awaited else {}, awaited=awaited)


def has_served(document: TrafficDocument, revisions: Collection[str]) -> TrafficDocument:
    """Return the document after these revisions have run a call or started an instance."""
    awaited = tuple(name for name in document.awaited if name not in revisions)
    return replace(document, awaited=awaited, previous=document.previous if awaited else {})


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
    """Return what each revision keeps of its segments, and the freed parts."""
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
    """Return the parts as segments in order, with adjacent parts of a revision merged."""
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
    """Return the blast radius: the percentage of units answered by revisions other than the
    heaviest."""
    heaviest = document.heaviest()
    by_weight = sum(weight for name, weight in document.weights.items() if name != heaviest)
    if (experiment := document.experiment) is None:
        return float(by_weight)
    in_arms = sum(arm.share for arm in experiment.arms if arm.revision != heaviest)
    return (by_weight * (WHOLE - experiment.percent) + experiment.percent * in_arms) / WHOLE


def validate_document(document: TrafficDocument, *, revisions: Collection[str]) -> TrafficDocument:
    """Return the document if it is valid. Raises InvalidInput naming the problem."""
    _check_weights(document.weights)
    _check_segments(document)
    _check_unit("sticky", document.sticky)
    _check_names(document)
    if not _is_percent(document.max_candidate) or document.max_candidate != int(
        document.max_candidate
    ):
        raise InvalidInput(
            f"max_candidate = {document.max_candidate!r}: must be an integer percentage, 0 to 100",
            parameter="max_candidate",
        )
    if (experiment := document.experiment) is not None:
        _check_experiment(experiment)
    if (shadow := document.shadow) is not None:
        if shadow.revision in document.answering():
            raise InvalidInput(
                f"{shadow.revision} answers callers, so it cannot be a shadow",
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
            f"this function has no revision {unknown[0]!r}",
            parameter="revision",
            unknown=unknown,
        )
    if (out := exposed_percent(document)) > document.max_candidate + _DUST:
        raise InvalidInput(
            f"{out:g} % of the traffic would go to other revisions than {document.heaviest()}, but "
            f"max_candidate allows {document.max_candidate} %: raise it first, or move all traffic "
            f"at once",
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
                f"weight of {name!r} = {weight!r}: must be an integer percentage, 1 to 100",
                parameter="weights",
            )
    if (total := sum(weights.values())) != WHOLE:
        raise InvalidInput(
            f"the weights add up to {total}, but must add up to 100", parameter="weights"
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
                "the segments are not contiguous, or refer to a revision without a weight",
                parameter="segments",
            )
        sums[segment.revision] += segment.end - segment.begin
        at = segment.end
    if any(abs(sums[name] - weight) > 1e-6 for name, weight in document.weights.items()):
        raise InvalidInput("the segments do not match the weights", parameter="segments")


def _check_unit(key: str, unit: str) -> None:
    if unit in (BY_KEY, BY_TENANT, PER_REQUEST):
        return
    header = unit.removeprefix(BY_HEADER)
    if not unit.startswith(BY_HEADER) or not _HEADER.match(header) or header in _NO_UNITS:
        raise InvalidInput(
            f"{key} = {unit!r}: must be 'request', 'key', 'tenant' or 'header:<name>' in lower "
            f"case",
            parameter=key,
        )


def _check_names(document: TrafficDocument) -> None:
    for kind, names in (("tags", document.tags), ("pins", document.pins)):
        if len(names) > MAX_NAMES:
            raise InvalidInput(f"{len(names)} {kind}: at most {MAX_NAMES}", parameter=kind)
        for name in names:
            if not _NAME.match(name):
                raise InvalidInput(
                    f"{kind}: {name!r} is not valid: use at most 63 lower-case letters, digits, - "
                    f"and _",
                    parameter=kind,
                )
    for tag in document.tags:
        if tag in document.named():
            raise InvalidInput(f"tag {tag!r} is the name of a revision", parameter="tags")


def _check_experiment(experiment: ExperimentTraffic) -> None:
    _check_unit("experiment.unit", experiment.unit)
    if not experiment.id or not experiment.salt or not _is_percent(experiment.percent):
        raise InvalidInput(
            "an experiment must have an id, a salt, and a percent from 0 to 100",
            parameter="experiment",
        )
    arms = experiment.arms
    # The share of a stopped arm is given to another arm in place, so that no other unit changes its
    # arm: one arm may have several parts.
    if not 1 <= len(arms) <= MAX_ARMS or len({arm.name for arm in arms}) != len(
        {(arm.name, arm.revision) for arm in arms}
    ):
        raise InvalidInput(
            f"an experiment must have 1 to {MAX_ARMS} arms with different names and revisions",
            parameter="experiment",
        )
    for arm in arms:
        if not _NAME.match(arm.name) or not _is_percent(arm.share):
            raise InvalidInput(
                f"arm {arm.name!r}: must have a lower-case name, and a share from 0 to 100",
                parameter="experiment",
            )
    if abs(sum(arm.share for arm in arms) - WHOLE) > 1e-6:
        raise InvalidInput(
            "the shares of the arms of an experiment must add up to 100", parameter="experiment"
        )


def to_json(document: TrafficDocument) -> dict[str, Any]:
    """Convert to JSON values."""
    return asdict(document)


def from_json(body: Mapping[str, Any]) -> TrafficDocument:
    """Parse the output of `to_json`; `validate_document` checks the values. Raises KeyError,
    TypeError or ValueError for a wrong structure."""
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
            "previous": {
                str(name): int(weight) for name, weight in dict(body.get("previous", {})).items()
            },
            "awaited": tuple(str(name) for name in body.get("awaited", ())),
            "segments": tuple(Segment(**segment) for segment in body.get("segments", ())),
            "experiment": experiment,
            "shadow": Shadow(**shadow) if shadow is not None else None,
        }
    )
