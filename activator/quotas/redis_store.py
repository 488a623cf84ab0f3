"""Quotas counted in Redis, for several activators: a decision is one round trip, whatever it looks
at.

One script is under way at a time; calls that come meanwhile go together in the next one. So this
member always knows what it holds, and states it in absolute numbers: an answer that was lost, or a
Redis that lost its memory, heals with the next script, at the latest with the next beat. The
buckets of a Redis that lost its memory are full again. What a dead member held lapses with it.

When Redis does not answer within ANSWER_S it is away until a beat is answered. Until then each kind
of bound is either counted here alone (each activator then grants the whole quota), or its calls are
refused with 503: `activator.without_redis` says which."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from redis.exceptions import RedisError

from activator.coordination.redis_client import redis_client
from activator.coordination.redis_state import address_of
from activator.coordination.state import BEAT_S, TTL_S
from activator.quotas import decision, scripts
from activator.quotas.decision import Meter, Refusal
from activator.quotas.meters import Meters
from activator.quotas.ratelimit_headers import RateLimitHeaders
from activator.quotas.rules import Rules, counted
from activator.quotas.store import QuotaStatistics
from pilotlight import errors

log = logging.getLogger(__name__)

MAX_TOGETHER: Final = 256
"""Calls in one script: it blocks Redis for their decisions, some ten microseconds each."""
MAX_ASKS: Final = 20_000
"""Decisions that may wait for a round trip; beyond it calls are refused with 503."""
GATHER_S: Final = 0.005
"""Calls that ended are told together after this, or with the next decision."""
_TAKE, _GIVE_BACK, _SETTLE = 0, 1, 2
_QUOTAS = {1: "requests_per_s", 2: "concurrent", 3: "tokens_per_min"}
_MILLION = 1e6


class _Ask:
    """One call's request to the script, and the future of its answer (None where nobody waits for
    one)."""

    __slots__ = ("answer", "gate", "numbers")

    def __init__(
        self,
        gate: RedisGate,
        numbers: tuple[int, int, int, int],
        answer: asyncio.Future[_Became | None] | None,
    ) -> None:
        self.gate = gate
        self.numbers = numbers
        self.answer = answer

    @property
    def is_left(self) -> bool:
        """Whether who asked does not wait any more."""
        return self.answer is not None and self.answer.done()


_Became = tuple[int, int, int]
"""Which rule refused (1 for the first; 0 = none did), which of its quotas, and the microseconds to
wait."""


class RedisGate:
    """See `Gate`."""

    __slots__ = ("_rules", "_store", "head", "ids", "meters")

    is_immediate = False

    def __init__(self, store: RedisQuotas, rules: Rules, meters: tuple[Meter, ...]) -> None:
        self._store = store
        self._rules = rules
        self.meters = meters
        self.ids = tuple(rule.id for rule in rules)
        self.head = RateLimitHeaders(rules, meters).lines

    def __repr__(self) -> str:
        return f"<RedisGate {', '.join(f'{name} {m!r}' for name, m in zip(self.ids, self.meters, strict=True))}>"

    def take_nowait(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Never: see `is_immediate`."""
        raise TypeError("a gate in Redis takes a round trip")

    async def take(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """See Gate. Raises Unavailable."""
        became = await self._store.ask(self, requests, holds, tokens)
        if became is None:
            return self._store.take_alone(self, self._rules, requests, holds, tokens)
        at, quota, wait_us = became
        if not at:
            return None
        name, quotas = _QUOTAS[quota], self.meters[at - 1].quotas
        return self._store.note(
            Refusal(
                rule=self._rules[at - 1],
                quota=name,
                limit=getattr(quotas, name) or 0.0,
                wait_s=wait_us / _MILLION,
            )
        )

    def give_back(self, requests: int, holds: int, tokens: int) -> None:
        """See Gate."""
        self._store.give_back(self, requests, holds, tokens)

    def leave(self) -> None:
        """See Gate."""
        self._store.give_back(self, 0, 1, 0)

    def settle(self, reserved: int, used: int) -> None:
        """See Gate."""
        self._store.settle(self, reserved, used)


class RedisQuotas:
    """`QuotaStore` of one of several activators. Owner: the event loop; `_pump` alone talks to
    Redis."""

    def __init__(
        self,
        url: str,
        *,
        platform: str,
        member: str,
        is_open: Callable[[str], bool],
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
        server_clock: Callable[[], float] | None = None,
    ) -> None:
        """`is_open`: whether bounds of a kind (`requests`, `concurrent`, `tokens`) are counted here
        while Redis is away.

        `server_clock`: seconds to count with instead of the server's time.
        """
        self._where = address_of(url)
        self._member = member
        self._prefix = f"pilotlight:{{{platform}}}:quota:"
        self._is_open = is_open
        self._ttl_ms = int(ttl_s * 1000)
        self._clock = clock
        self._server_clock = server_clock
        self._redis = redis_client(url)
        self._decide, self._leave = (
            self._redis.register_script(text) for text in (scripts.DECIDE, scripts.LEAVE)
        )
        self._meters = Meters()
        self._asks: list[_Ask] = []
        self._ended: dict[str, Meter] = {}
        self._is_full_due = True
        self._is_away = False
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = ", away" if self._is_away else ""
        return (
            f"<RedisQuotas {self._where} {self._member}: {len(self._meters)} subjects, "
            f"{self._meters.refused.total()} refused{state}>"
        )

    # -- the gates' side ---------------------------------------------------------------------------
    def gate(self, rules: Rules) -> RedisGate | None:
        """See QuotaStore."""
        rules = counted(rules)
        if not rules:
            return None
        now = self._clock()
        return RedisGate(self, rules, tuple(self._meters.of(rule, now) for rule in rules))

    async def ask(self, gate: RedisGate, requests: int, holds: int, tokens: int) -> _Became | None:
        """The script's answer; None while Redis is away. Cancelled, nothing is held. Raises
        Unavailable when too many ask."""
        if self._is_away:
            return None
        if len(self._asks) >= MAX_ASKS:
            raise errors.Unavailable(
                f"{MAX_ASKS} calls wait for their quotas to be looked at", retry_after_s=1
            )
        answer: asyncio.Future[_Became | None] = asyncio.get_running_loop().create_future()
        self._asks.append(_Ask(gate, (_TAKE, requests, holds, tokens), answer))
        self._wake()
        try:
            # what was granted is held already: the pump counts in the order of the answers
            return await answer
        except asyncio.CancelledError:
            if (
                answer.done()
                and not answer.cancelled()
                and (became := answer.result()) is not None
                and not became[0]
            ):
                self.give_back(gate, 0, holds, tokens)
            raise

    def take_alone(
        self, gate: RedisGate, rules: Rules, requests: int, holds: int, tokens: int
    ) -> Refusal | None:
        """The decision without Redis. Raises Unavailable where a bound that applies may not be
        counted here."""
        wanted = {"requests": requests, "concurrent": holds, "tokens": tokens}
        for kind, count in wanted.items():
            if (
                count
                and not self._is_open(kind)
                and any(_bounds(meter, kind) for meter in gate.meters)
            ):
                raise errors.Unavailable(
                    "quotas cannot be counted while the platform's Redis does not answer "
                    "(activator.without_redis)",
                    retry_after_s=2,
                )
        self._note_ended(gate)
        refusal = decision.take(gate.meters, rules, self._clock(), requests, holds, tokens)
        return None if refusal is None else self.note(refusal)

    def note(self, refusal: Refusal) -> Refusal:
        """Count a refusal."""
        return self._meters.note(refusal)

    def give_back(self, gate: RedisGate, requests: int, holds: int, tokens: int) -> None:
        """See Gate."""
        decision.give_back(gate.meters, requests, holds, tokens)
        if requests or tokens:
            self._tell(gate, (_GIVE_BACK, requests, 0, tokens))
        if holds:
            self._note_ended(gate)
            if self._ended and not self._is_away and self._timer is None and not self._is_pumping:
                self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._gathered)

    def settle(self, gate: RedisGate, reserved: int, used: int) -> None:
        """See Gate."""
        decision.settle(gate.meters, reserved, used)
        self._tell(gate, (_SETTLE, 0, reserved, used))

    def _tell(self, gate: RedisGate, numbers: tuple[int, int, int, int]) -> None:
        if not self._is_away and len(self._asks) < MAX_ASKS:
            self._asks.append(_Ask(gate, numbers, None))
            self._wake()

    def _note_ended(self, gate: RedisGate) -> None:
        self._ended.update(
            (name, meter)
            for name, meter in zip(gate.ids, gate.meters, strict=True)
            if meter.concurrent != _INF
        )

    def _gathered(self) -> None:
        self._timer = None
        self._wake()

    # -- talking to Redis --------------------------------------------------------------------------
    @property
    def _is_pumping(self) -> bool:
        return self._pump is not None and not self._pump.done()

    def _wake(self) -> None:
        if not self._is_pumping:
            self._pump = asyncio.get_running_loop().create_task(
                self._talk(), name="quotas in Redis"
            )

    async def _talk(self) -> None:
        while self._asks or self._ended or self._is_full_due:
            if not await self._round():
                return

    async def _round(self) -> bool:
        """One script. False when Redis did not answer: then it is away, and who waited decides
        alone."""
        asks = [ask for ask in self._asks[:MAX_TOGETHER] if not ask.is_left]
        del self._asks[:MAX_TOGETHER]
        is_full, self._is_full_due = self._is_full_due, False
        ended, self._ended = self._ended, {}
        meters = {
            name: meter
            for ask in asks
            for name, meter in zip(ask.gate.ids, ask.gate.meters, strict=True)
        }
        document = self._document(
            asks, meters, self._meters if is_full else ended.items(), is_full=is_full
        )
        try:
            became, left = await self._decide(
                keys=self._own_keys(), args=[*self._common_args(), document]
            )
        except (RedisError, OSError) as e:
            self._failed(e, asks)
            return False
        self._answered(meters, left)
        for ask, result in zip(asks, became, strict=True):
            self._resolve(ask, tuple(result))
        return True

    def _document(
        self,
        asks: list[_Ask],
        meters: dict[str, Meter],
        stated: Iterable[tuple[str, Meter]],
        *,
        is_full: bool,
    ) -> str:
        places = {name: at for at, name in enumerate(meters, start=1)}
        return json.dumps(
            {
                "is_full": is_full,
                "held": {
                    name: meter.held
                    for name, meter in stated
                    if meter.concurrent != _INF and (meter.held or not is_full)
                },
                "rules": [_as_row(name, meter) for name, meter in meters.items()],
                "calls": [[*ask.numbers, *(places[name] for name in ask.gate.ids)] for ask in asks],
            }
        )

    def _resolve(self, ask: _Ask, became: tuple[Any, ...]) -> None:
        if ask.answer is None:
            return
        if not became[0]:
            holds = 0 if ask.is_left else ask.numbers[2]
            for meter in ask.gate.meters:
                meter.held += holds
        if ask.is_left:
            # Redis counts it as held: told otherwise with the next script
            self._note_ended(ask.gate)
        else:
            ask.answer.set_result((became[0], became[1], became[2]))

    def _answered(self, meters: dict[str, Meter], left: list[list[int]]) -> None:
        if self._is_away:
            log.info("redis answers again; quotas are counted together address=%s", self._where)
        self._is_away = False
        now = self._clock()
        for meter, (requests, tokens, others) in zip(meters.values(), left, strict=True):
            meter.at = now
            meter.others = others
            if meter.per_s:
                meter.requests = requests / _MILLION
            if meter.tokens_per_s:
                meter.tokens = tokens / _MILLION

    def _failed(self, error: Exception, asks: list[_Ask]) -> None:
        if not self._is_away:
            log.warning(
                "redis does not answer; quotas are counted by each activator address=%s error=%s",
                self._where,
                type(error).__name__,
            )
        self._is_away = self._is_full_due = True
        for _, meter in self._meters:
            meter.others = 0
        asks, self._asks = [*asks, *self._asks], []
        for ask in asks:
            if ask.answer is not None and not ask.is_left:
                ask.answer.set_result(None)

    def _own_keys(self) -> list[str]:
        return [f"{self._prefix}members", f"{self._prefix}held:{self._member}"]

    def _common_args(self) -> list[Any]:
        return [
            self._member,
            self._ttl_ms,
            self._prefix,
            "" if self._server_clock is None else repr(self._server_clock()),
        ]

    # -- the loop ----------------------------------------------------------------------------------
    async def beat(self) -> None:
        """State all that is held, so that it counts although Redis forgot it, and see whether Redis
        answers."""
        if self._is_away or any(meter.held for _, meter in self._meters):
            self._is_full_due = True
        await self.flush()

    async def run(self) -> None:
        """Beat forever."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def flush(self) -> None:
        """Returns once Redis was told all that is to be told, or is away."""
        if self._asks or self._ended or self._is_full_due or self._is_pumping:
            self._wake()
            assert self._pump is not None
            await asyncio.shield(self._pump)

    def held(self, rule_id: str) -> int:
        """See QuotaStore."""
        meter = self._meters.get(rule_id)
        return meter.held if meter is not None else 0

    def statistics(self) -> QuotaStatistics:
        """See QuotaStore."""
        return QuotaStatistics(
            subjects=len(self._meters),
            refused=dict(self._meters.refused),
            is_reachable=not self._is_away,
        )

    async def aclose(self) -> None:
        """Hold nothing any more, and close the connections."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        if not self._is_away:
            with contextlib.suppress(RedisError, OSError):
                await self._leave(keys=self._own_keys(), args=[self._member])
        await self._redis.aclose()


_INF = float("inf")
_ENDLESS = 1e300
"""Stands for infinity, which JSON does not have."""


def _bounds(meter: Meter, kind: str) -> bool:
    """Whether a meter bounds this kind."""
    return {
        "requests": bool(meter.per_s),
        "concurrent": meter.concurrent != _INF,
        "tokens": bool(meter.tokens_per_s),
    }[kind]


def _as_row(name: str, meter: Meter) -> list[Any]:
    concurrent = -1 if meter.concurrent == _INF else int(meter.concurrent)
    depth, token_depth = min(meter.depth, _ENDLESS), min(meter.token_depth, _ENDLESS)
    return [name, meter.per_s, depth, concurrent, meter.tokens_per_s, token_depth, meter.held]
