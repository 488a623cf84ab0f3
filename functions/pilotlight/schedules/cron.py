"""Computation of when a schedule is due. Pure: from a schedule and a time to the next time, in
seconds since the epoch.

Cron fields apply to the clock of the schedule's time zone, with the rules of cron(8) for clock
changes. A time that does not exist (the hour skipped in spring) is due later by the length of the
jump; one that exists twice (autumn) is due the first time only. But an expression whose minutes or
hours are `*` runs continuously: it is due in both hours of autumn, and has nothing to catch up in
spring."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import croniter
from croniter.croniter import CroniterBadDateError

from pilotlight.errors import InvalidInput
from pilotlight.spec.policies import Schedule

_NEAR_S = 3 * 3600.0
"""No clock change exceeds this."""
_WORDS = re.compile(r"[A-Za-z]+")
_KNOWN = frozenset(
    [
        "jan",
        "feb",
        "mar",
        "apr",
        "may",
        "jun",
        "jul",
        "aug",
        "sep",
        "oct",
        "nov",
        "dec",
        "sun",
        "mon",
        "tue",
        "wed",
        "thu",
        "fri",
        "sat",
        "l",
    ]
)


def check_schedule(schedule: Schedule, parameter: str = "schedule") -> None:
    """Raise InvalidInput, which names `parameter`, for an unknown time zone, and for a cron
    expression that is invalid or never matches."""
    try:
        ZoneInfo(schedule.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as e:
        text = (
            f"{parameter}: unknown time zone {schedule.timezone!r}: use an IANA name such as "
            "'Europe/Berlin'"
        )
        raise InvalidInput(text, parameter=parameter) from e
    if not schedule.cron:
        return
    words = {word.lower() for word in _WORDS.findall(schedule.cron)}
    if words - _KNOWN or not croniter.is_valid(schedule.cron):
        text = (
            f"{parameter}: cron = {schedule.cron!r}: write minute hour day-of-month month "
            "day-of-week as in crontab(5), such as '0 6 * * 1'"
        )
        raise InvalidInput(text, parameter=parameter)
    try:
        next_after(schedule, 0.0)
    except CroniterBadDateError as e:
        raise InvalidInput(
            f"{parameter}: cron = {schedule.cron!r} never matches", parameter=parameter
        ) from e


def next_after(schedule: Schedule, after: float, *, previous: float | None = None) -> float:
    """Return the first time after `after`. A period continues from `previous`, or begins at
    `after`."""
    if schedule.period_s is not None:
        begun = after if previous is None else previous
        return begun + (int(max(0.0, after - begun) // schedule.period_s) + 1) * schedule.period_s
    zone = ZoneInfo(schedule.timezone)
    return min(found for found in _around(schedule.cron, zone, after) if found > after)


def occurrences(schedule: Schedule, first: float, *, until: float, limit: int) -> Iterator[float]:
    """Yield `first` and the following times up to `until`, at most `limit`."""
    at = first
    for _ in range(limit):
        if at > until:
            return
        yield at
        at = next_after(schedule, at, previous=at)


def _around(cron: str, zone: ZoneInfo, after: float) -> Iterator[float]:
    """Yield times that include the next one: several near a clock change, otherwise one."""
    local = _local(after, zone)
    following = croniter(cron, local).get_next(dt.datetime)
    moment = _moment(following, zone)
    offsets = {
        _offset(at, zone)
        for at in (after - _NEAR_S, after, moment - _NEAR_S, moment, moment + _NEAR_S)
    }
    if len(offsets) == 1:
        yield moment
        return
    counts_on = any(field.startswith("*") for field in cron.split()[:2])
    near = dt.timedelta(seconds=_NEAR_S)
    walk = croniter(cron, local - near)
    while True:
        naive = walk.get_next(dt.datetime)
        yield from _moments(naive, zone, counts_on=counts_on)
        if naive > following + near and naive > local + near:
            return


def _moments(naive: dt.datetime, zone: ZoneInfo, *, counts_on: bool) -> Iterator[float]:
    first, second = _moment(naive, zone), _moment(naive.replace(fold=1), zone)
    exists = _local(first, zone) == naive
    if exists or not counts_on:
        yield first
    if exists and counts_on and second != first:
        yield second


def _local(at: float, zone: ZoneInfo) -> dt.datetime:
    return dt.datetime.fromtimestamp(at, zone).replace(tzinfo=None, fold=0)


def _moment(naive: dt.datetime, zone: ZoneInfo) -> float:
    return naive.replace(tzinfo=zone).timestamp()


def _offset(at: float, zone: ZoneInfo) -> dt.timedelta | None:
    return dt.datetime.fromtimestamp(at, zone).utcoffset()
