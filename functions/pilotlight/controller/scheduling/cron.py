"""When a schedule is due. Pure: a schedule and a moment in, the next moment out, in seconds since
the epoch.

Cron's fields are read on the clock of the schedule's time zone, as cron(8) does where that clock is
changed. A time that does not exist (the hour that is left out in spring) is due by as much later as
the clock jumped; one that exists twice (autumn) is due the first time only. But an expression whose
minutes or hours are `*` counts on: it is due in both hours of autumn, and has nothing to make up
for in spring."""

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
"""No clock is changed by more than this."""
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


def check_schedule(schedule: Schedule) -> None:
    """Raise InvalidInput for a time zone that there is not, and for an expression that is none or
    never comes."""
    try:
        ZoneInfo(schedule.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as e:
        text = (
            f"schedule: there is no time zone {schedule.timezone!r}: write an IANA name, as "
            f"'Europe/Berlin'"
        )
        raise InvalidInput(text, parameter="schedule") from e
    if not schedule.cron:
        return
    words = {word.lower() for word in _WORDS.findall(schedule.cron)}
    if words - _KNOWN or not croniter.is_valid(schedule.cron):
        text = (
            f"schedule: cron = {schedule.cron!r}: not minute hour day-of-month month "
            f"day-of-week as in crontab(5), such as '0 6 * * 1'"
        )
        raise InvalidInput(text, parameter="schedule")
    try:
        next_after(schedule, 0.0)
    except CroniterBadDateError as e:
        raise InvalidInput(
            f"schedule: cron = {schedule.cron!r} never comes", parameter="schedule"
        ) from e


def next_after(schedule: Schedule, after: float, *, previous: float | None = None) -> float:
    """The first time after `after`. A period counts on from `previous`, or begins at `after`."""
    if schedule.period_s is not None:
        begun = after if previous is None else previous
        return begun + (int(max(0.0, after - begun) // schedule.period_s) + 1) * schedule.period_s
    zone = ZoneInfo(schedule.timezone)
    return min(found for found in _around(schedule.cron, zone, after) if found > after)


def occurrences(schedule: Schedule, first: float, *, until: float, limit: int) -> Iterator[float]:
    """`first`, and what follows up to `until`, at most `limit`."""
    at = first
    for _ in range(limit):
        if at > until:
            return
        yield at
        at = next_after(schedule, at, previous=at)


def _around(cron: str, zone: ZoneInfo, after: float) -> Iterator[float]:
    """Moments among which the next one is. Only where a clock is changed there are more to look at
    than one."""
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
