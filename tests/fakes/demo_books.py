"""A month of a small company's records, as its activators would have sent them: for the dashboard's
tests and its pictures.

Everything follows from one seed and from `now`. Costs are priced by the platform's own rates, so
bills add up."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pilotlight.protocol import UsageRecord, new_call_id
from pilotlight.spec.pricing import GIB, Footprint, Rates, price_duration, rate_per_s

DAY_S = 86_400
MIB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """How one function is used.

    Attributes:
        per_hour: calls in its busiest hour of a working day.
        exec_ms: median of its execution; `spread`: sigma of the logarithm.
        starts: how calls come up: kind → weight.
        start_ms: what each kind takes; `failing`: share of calls that answer 500.
        idle, reserved: seconds of such time per day.
    """

    app: str
    function: str
    per_hour: float
    exec_ms: float
    spread: float = 0.4
    starts: tuple[tuple[str, float], ...] = (("WARM", 95.0), ("FORK", 5.0))
    start_ms: tuple[tuple[str, float], ...] = (
        ("FORK", 34.0),
        ("RESTORE", 180.0),
        ("COLD", 5400.0),
        ("WAKE", 60.0),
    )
    failing: float = 0.002
    cpu: float = 1.0
    memory_bytes: int = GIB
    gpu: str | None = None
    tokens: tuple[int, int] = (0, 0)
    idle: float = 0.0
    reserved: float = 0.0
    growth: float = 0.0


HABITS = (
    Habit(
        app="search",
        function="embed",
        per_hour=34,
        exec_ms=23,
        starts=(("WARM", 90), ("FORK", 8), ("RESTORE", 2)),
        memory_bytes=2 * GIB,
        idle=6,
        growth=0.5,
    ),
    Habit(
        app="search",
        function="rank",
        per_hour=22,
        exec_ms=64,
        starts=(("WARM", 96), ("FORK", 4)),
        idle=4,
    ),
    Habit(
        app="chat",
        function="Assistant",
        per_hour=19,
        exec_ms=5200,
        spread=0.6,
        starts=(("WARM", 88), ("WAKE", 9), ("RESTORE", 3)),
        cpu=4,
        memory_bytes=16 * GIB,
        gpu="L4",
        tokens=(820, 260),
        reserved=420,
        growth=0.7,
    ),
    Habit(
        app="media",
        function="transcribe",
        per_hour=3,
        exec_ms=14_000,
        spread=0.5,
        starts=(("WARM", 60), ("RESTORE", 32), ("COLD", 8)),
        cpu=4,
        memory_bytes=12 * GIB,
        gpu="L4",
        idle=110,
    ),
    Habit(
        app="images",
        function="thumbnail",
        per_hour=16,
        exec_ms=140,
        failing=0.03,
        memory_bytes=512 * MIB,
    ),
    Habit(
        app="reports",
        function="nightly",
        per_hour=1,
        exec_ms=48_000,
        spread=0.2,
        starts=(("COLD", 70), ("RESTORE", 30)),
        cpu=2,
        memory_bytes=4 * GIB,
    ),
)


def _pulse(habit: Habit, hour_s: float, age_days: float, days: int) -> float:
    """Calls expected in an hour: people work by day and on weekdays, and a product grows."""
    local = (hour_s / 3600) % 24
    weekday = int(hour_s // DAY_S + 4) % 7  # day 0 was a Thursday
    if habit.function == "nightly":
        return 2.0 if 2 <= local < 4 else 0.0
    day = 0.12 + 0.88 * math.exp(-(((local - 14) / 4.2) ** 2))
    week = 0.35 if weekday in (0, 6) else 1.0
    return habit.per_hour * day * week * (1 - habit.growth * age_days / days)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """One function of one tenant, and the chance that its records follow."""

    habit: Habit
    tenant: str
    identity: str
    revision: str
    rates: Rates
    dice: random.Random

    def record(
        self, *, call: str, kind: str, at: float, billed_ns: int, **more: Any
    ) -> dict[str, Any]:
        """One record, priced."""
        habit, rates = self.habit, self.rates
        values = {
            **dict.fromkeys(
                ("queued_ms", "start_ms", "exec_ms", "status", "tokens_in", "tokens_out"), 0
            ),
            "outcome": "span",
            **more,
        }
        gpus = 1 if habit.gpu else 0
        per_s = rate_per_s(
            Footprint(
                cpu=habit.cpu, memory_bytes=habit.memory_bytes, gpu=habit.gpu, gpu_count=gpus
            ),
            rates,
        )
        tokens = values["tokens_in"] * rates.token_in + values["tokens_out"] * rates.token_out
        factors = {
            "START": rates.start_factor,
            "IDLE": rates.idle_factor,
            "RESERVED": rates.reserved_factor,
        }
        cost = price_duration(
            billed_ns,
            per_s * factors.get(kind, Decimal(1)),
            (rates.request if kind == "CALL" else Decimal(0)) + tokens,
        )
        instance = f"i-{self.identity[2:12]}"
        return UsageRecord(
            id=f"{call}/1" if call else f"{instance}/{kind}/{round(at * 1e6)}",
            kind=kind,
            call=call,
            attempt=1,
            tenant=self.tenant,
            environment="main",
            app=habit.app,
            function=habit.function,
            function_id=self.identity,
            method="",
            revision=self.revision,
            instance=instance,
            key="k-demo",
            started_at=at,
            billed_ns=billed_ns,
            cpu=habit.cpu,
            memory_bytes=habit.memory_bytes,
            gpu=habit.gpu,
            gpu_count=gpus,
            bytes_in=420,
            bytes_out=3100,
            price_version=rates.version,
            currency=rates.currency,
            rate_per_s=str(per_s),
            cost=f"{cost:.12f}",
            **values,
        ).to_json()


def records(
    *,
    tenant: str,
    ids: dict[str, str],
    revisions: dict[str, str],
    rates: Rates,
    now: float,
    days: int = 30,
    seed: int = 7,
    scale: float = 1.0,
) -> Iterator[dict[str, Any]]:
    """Records of `days` days up to `now`, as JSON; `ids` and `revisions` by `app/function`, `scale`
    times as many as habits say."""
    dice = random.Random(seed)
    for habit in HABITS:
        name = f"{habit.app}/{habit.function}"
        if name in ids:
            source = _Source(
                habit=habit,
                tenant=tenant,
                identity=ids[name],
                revision=revisions[name],
                rates=rates,
                dice=dice,
            )
            yield from _calls(source, now=now, days=days, scale=scale)
            yield from _held(source, now=now, days=days)


def _calls(source: _Source, *, now: float, days: int, scale: float) -> Iterator[dict[str, Any]]:
    dice, first = source.dice, now - days * DAY_S
    hour = first - first % 3600
    while hour < now:
        expected = scale * _pulse(source.habit, hour, (now - hour) / DAY_S, days)
        for _ in range(int(expected) + (dice.random() < expected % 1)):
            at = hour + dice.random() * 3600
            if first <= at < now - 2:
                yield from _call(source, at)
        hour += 3600


def _call(source: _Source, at: float) -> Iterator[dict[str, Any]]:
    habit, dice = source.habit, source.dice
    kinds, weights = zip(*habit.starts, strict=True)
    kind = dice.choices(kinds, weights)[0]
    start_ms = (
        0 if kind == "WARM" else round(dict(habit.start_ms)[kind] * math.exp(dice.gauss(0, 0.25)))
    )
    exec_ms = max(1, round(habit.exec_ms * math.exp(dice.gauss(0, habit.spread))))
    failed = dice.random() < habit.failing
    tokens = [round(n * math.exp(dice.gauss(0, 0.5))) for n in habit.tokens]
    yield source.record(
        call=new_call_id(),
        kind="CALL",
        at=at,
        billed_ns=exec_ms * 10**6,
        start_kind=kind,
        queued_ms=dice.choice((0, 0, 0, 1, 2)),
        start_ms=start_ms,
        exec_ms=exec_ms,
        status=500 if failed else 200,
        outcome="error" if failed else "ok",
        tokens_in=tokens[0],
        tokens_out=tokens[1],
        finish=("length" if tokens[1] > 400 else "stop") if any(tokens) else "",
        first_token_ms=start_ms + exec_ms // 30 if any(tokens) else 0,
    )
    if start_ms:
        yield source.record(
            call="", kind="START", at=at, billed_ns=start_ms * 10**6, start_kind=kind
        )


def _held(source: _Source, *, now: float, days: int) -> Iterator[dict[str, Any]]:
    first = now - days * DAY_S
    for kind, seconds in (("IDLE", source.habit.idle), ("RESERVED", source.habit.reserved)):
        for step in range(days * 6 if seconds else 0):
            billed_ns = round(seconds / 6 * math.exp(source.dice.gauss(0, 0.3)) * 1e9)
            yield source.record(
                call="", kind=kind, at=first + step * 14_400, billed_ns=billed_ns, start_kind=""
            )
