"""Quotas counted in Redis for several activators. A decision is one round trip, however many meters
it needs.

One script runs at a time; calls that arrive meanwhile share the next one. So this member always
knows how many calls it runs, and reports absolute numbers: a lost answer, or a Redis that lost its
data, is corrected by the next script, at the latest by the next heartbeat. After a loss of data the
buckets are full. The calls of a dead member expire with it.

When Redis does not answer within ANSWER_S it counts as unreachable until a heartbeat succeeds.
Until then each kind of limit is either counted locally (each activator then grants the whole
quota), or its calls are refused with 503, as configured by `activator.without_redis`."""

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
from activator.quotas import scripts, token_bucket
from activator.quotas.meters import Meters
from activator.quotas.ratelimit_headers import RateLimitHeaders
from activator.quotas.rules import Rules, counted
from activator.quotas.store_protocol import QuotaStatistics
from activator.quotas.token_bucket import Meter, Refusal
from pilotlight import errors
from pilotlight.core.background_tasks import cancel_all

log = logging.getLogger(__name__)

MAX_TOGETHER: Final = 256
"""Calls per script. It blocks Redis for their decisions, some ten microseconds each."""
MAX_PENDING: Final = 20_000
"""Decisions that may wait for a round trip. Further calls are refused with 503."""
GATHER_S: Final = 0.005
"""Ended calls are reported after this delay, or with the next decision."""
_TAKE, _GIVE_BACK, _SETTLE = 0, 1, 2
_QUOTAS = {1: "requests_per_s", 2: "concurrent", 3: "tokens_per_min"}
_MILLION = 1e6


class _Request:
    """One call's request to the script, and the future of its answer (None when no caller waits for
    it)."""

    __slots__ = ("answer", "numbers", "quota_check")

    def __init__(
        self,
        quota_check: RedisQuotaCheck,
        numbers: tuple[int, int, int, int],
        answer: asyncio.Future[_Outcome | None] | None,
    ) -> None:
        self.quota_check = quota_check
        self.numbers = numbers
        self.answer = answer

    @property
    def is_abandoned(self) -> bool:
        """Whether the caller no longer waits."""
        return self.answer is not None and self.answer.done()


_Outcome = tuple[int, int, int]
"""Which rule refused (1 for the first; 0 = admitted), which of its quotas, and the microseconds to
wait."""


class RedisQuotaCheck:
    """`QuotaCheck` in Redis."""

    __slots__ = ("_rules", "_store", "head", "ids", "meters")

    is_immediate = False

    def __init__(self, store: RedisQuotas, rules: Rules, meters: tuple[Meter, ...]) -> None:
        self._store = store
        self._rules = rules
        self.meters = meters
        self.ids = tuple(rule.id for rule in rules)
        self.head = RateLimitHeaders(rules, meters).lines

    def __repr__(self) -> str:
        return f"<RedisQuotaCheck {', '.join(f'{name} {m!r}' for name, m in zip(self.ids, self.meters, strict=True))}>"

    def try_acquire_nowait(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Not supported, see `is_immediate`. Raises TypeError."""
        raise TypeError("a quota check in Redis needs a round trip")

    async def try_acquire(self, requests: int, holds: int, tokens: int) -> Refusal | None:
        """Acquire all amounts, or nothing and return why. Raises Unavailable."""
        outcome = await self._store.request_decision(self, requests, holds, tokens)
        if outcome is None:
            return self._store.decide_locally(self, self._rules, requests, holds, tokens)
        at, quota, wait_us = outcome
        if not at:
            return None
        name, quotas = _QUOTAS[quota], self.meters[at - 1].quotas
        return self._store.count_refusal(
            Refusal(
                rule=self._rules[at - 1],
                quota=name,
                limit=getattr(quotas, name) or 0.0,
                wait_s=wait_us / _MILLION,
            )
        )

    def refund(self, requests: int, holds: int, tokens: int) -> None:
        """Refund what was acquired."""
        self._store.refund(self, requests, holds, tokens)

    def charge(self, requests: int) -> None:
        """Acquire requests that were made already, whatever is left."""
        self._store.refund(self, -requests, 0, 0)

    def release(self) -> None:
        """Release one concurrent call."""
        self._store.refund(self, 0, 1, 0)

    def settle(self, reserved: int, used: int) -> None:
        """Settle reserved tokens with those used."""
        self._store.settle(self, reserved, used)


class RedisQuotas:
    """`QuotaStore` of one of several activators. Owner: the event loop. Only the task `_pump` sends
    scripts to Redis."""

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
        """`is_open`: whether limits of a kind (`requests`, `concurrent`, `tokens`) are counted
        locally while Redis is unreachable.

        `server_clock`: seconds to count with instead of the server's time."""
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
        self._pending: list[_Request] = []
        self._ended: dict[str, Meter] = {}
        self._is_full_due = True
        self._is_unreachable = False
        self._pump: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = ", away" if self._is_unreachable else ""
        return (
            f"<RedisQuotas {self._where} {self._member}: {len(self._meters)} subjects, "
            f"{self._meters.refused.total()} refused{state}>"
        )

    # -- quota checks ------------------------------------------------------------------------------
    def quota_check(self, rules: Rules) -> RedisQuotaCheck | None:
        """Return the check of these rules. None when they require no counting."""
        rules = counted(rules)
        if not rules:
            return None
        now = self._clock()
        return RedisQuotaCheck(
            self, rules, tuple(self._meters.get_or_create(rule, now) for rule in rules)
        )

    async def request_decision(
        self, quota_check: RedisQuotaCheck, requests: int, holds: int, tokens: int
    ) -> _Outcome | None:
        """Return the script's answer, or None while Redis is unreachable. If cancelled, nothing
        stays acquired. Raises Unavailable when too many requests wait."""
        if self._is_unreachable:
            return None
        if len(self._pending) >= MAX_PENDING:
            raise errors.Unavailable(
                f"{MAX_PENDING} calls already wait for a quota decision", retry_after_s=1
            )
        answer: asyncio.Future[_Outcome | None] = asyncio.get_running_loop().create_future()
        self._pending.append(_Request(quota_check, (_TAKE, requests, holds, tokens), answer))
        self._wake()
        try:
            # a granted call is counted already: the pump counts in the order of the answers
            return await answer
        except asyncio.CancelledError:
            if (
                answer.done()
                and not answer.cancelled()
                and (outcome := answer.result()) is not None
                and not outcome[0]
            ):
                self.refund(quota_check, 0, holds, tokens)
            raise

    def decide_locally(
        self, quota_check: RedisQuotaCheck, rules: Rules, requests: int, holds: int, tokens: int
    ) -> Refusal | None:
        """Decide without Redis. Raises Unavailable when a limit that applies must not be counted
        locally."""
        wanted = {"requests": requests, "concurrent": holds, "tokens": tokens}
        for kind, count in wanted.items():
            if (
                count
                and not self._is_open(kind)
                and any(_bounds(meter, kind) for meter in quota_check.meters)
            ):
                raise errors.Unavailable(
                    "quotas cannot be counted while the platform's Redis does not answer "
                    "(activator.without_redis)",
                    retry_after_s=2,
                )
        self._mark_ended(quota_check)
        refusal = token_bucket.acquire(
            quota_check.meters, rules, self._clock(), requests, holds, tokens
        )
        return None if refusal is None else self.count_refusal(refusal)

    def count_refusal(self, refusal: Refusal) -> Refusal:
        """Count a refusal."""
        return self._meters.count_refusal(refusal)

    def refund(self, quota_check: RedisQuotaCheck, requests: int, holds: int, tokens: int) -> None:
        """Refund what was acquired."""
        token_bucket.refund(quota_check.meters, requests, holds, tokens)
        if requests or tokens:
            self._enqueue(quota_check, (_GIVE_BACK, requests, 0, tokens))
        if holds:
            self._mark_ended(quota_check)
            if (
                self._ended
                and not self._is_unreachable
                and self._timer is None
                and not self._is_pumping
            ):
                self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._on_gather_timer)

    def settle(self, quota_check: RedisQuotaCheck, reserved: int, used: int) -> None:
        """Settle reserved tokens with those used."""
        token_bucket.settle(quota_check.meters, reserved, used)
        self._enqueue(quota_check, (_SETTLE, 0, reserved, used))

    def _enqueue(self, quota_check: RedisQuotaCheck, numbers: tuple[int, int, int, int]) -> None:
        if not self._is_unreachable and len(self._pending) < MAX_PENDING:
            self._pending.append(_Request(quota_check, numbers, None))
            self._wake()

    def _mark_ended(self, quota_check: RedisQuotaCheck) -> None:
        self._ended.update(
            (name, meter)
            for name, meter in zip(quota_check.ids, quota_check.meters, strict=True)
            if meter.concurrent != _INF
        )

    def _on_gather_timer(self) -> None:
        self._timer = None
        self._wake()

    # -- communication with Redis ------------------------------------------------------------------
    @property
    def _is_pumping(self) -> bool:
        return self._pump is not None and not self._pump.done()

    def _wake(self) -> None:
        if not self._is_pumping:
            self._pump = asyncio.get_running_loop().create_task(
                self._run_scripts(), name="quotas in Redis"
            )

    async def _run_scripts(self) -> None:
        while self._pending or self._ended or self._is_full_due:
            if not await self._run_script():
                return

    async def _run_script(self) -> bool:
        """Run one script. Returns False when Redis did not answer: it is then unreachable, and
        waiting calls are decided locally."""
        requests = [request for request in self._pending[:MAX_TOGETHER] if not request.is_abandoned]
        del self._pending[:MAX_TOGETHER]
        is_full, self._is_full_due = self._is_full_due, False
        ended, self._ended = self._ended, {}
        meters = {
            name: meter
            for request in requests
            for name, meter in zip(request.quota_check.ids, request.quota_check.meters, strict=True)
        }
        document = self._document(
            requests, meters, self._meters if is_full else ended.items(), is_full=is_full
        )
        try:
            outcome, left = await self._decide(
                keys=self._own_keys(), args=[*self._common_args(), document]
            )
        except (RedisError, OSError) as e:
            self._on_failure(e, requests)
            return False
        self._on_answer(meters, left)
        for request, result in zip(requests, outcome, strict=True):
            self._resolve(request, tuple(result))
        return True

    def _document(
        self,
        requests: list[_Request],
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
                "rules": [_rule_row(name, meter) for name, meter in meters.items()],
                "calls": [
                    [*request.numbers, *(places[name] for name in request.quota_check.ids)]
                    for request in requests
                ],
            }
        )

    def _resolve(self, request: _Request, outcome: tuple[Any, ...]) -> None:
        if request.answer is None:
            return
        if not outcome[0]:
            holds = 0 if request.is_abandoned else request.numbers[2]
            for meter in request.quota_check.meters:
                meter.held += holds
        if request.is_abandoned:
            # Redis counts it as running: the next script corrects that
            self._mark_ended(request.quota_check)
        else:
            request.answer.set_result((outcome[0], outcome[1], outcome[2]))

    def _on_answer(self, meters: dict[str, Meter], left: list[list[int]]) -> None:
        if self._is_unreachable:
            log.info("redis is reachable again; quotas are shared address=%s", self._where)
        self._is_unreachable = False
        now = self._clock()
        for meter, (requests, tokens, others) in zip(meters.values(), left, strict=True):
            meter.at = now
            meter.others = others
            if meter.per_s:
                meter.requests = requests / _MILLION
            if meter.tokens_per_s:
                meter.tokens = tokens / _MILLION

    def _on_failure(self, error: Exception, requests: list[_Request]) -> None:
        if not self._is_unreachable:
            log.warning(
                "redis does not answer; each activator counts quotas by itself address=%s error=%s",
                self._where,
                type(error).__name__,
            )
        self._is_unreachable = self._is_full_due = True
        for _, meter in self._meters:
            meter.others = 0
        requests, self._pending = [*requests, *self._pending], []
        for request in requests:
            if request.answer is not None and not request.is_abandoned:
                request.answer.set_result(None)

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
    async def heartbeat(self) -> None:
        """Report all running calls, so that they count even if Redis lost its data, and check
        whether Redis answers."""
        if self._is_unreachable or any(meter.held for _, meter in self._meters):
            self._is_full_due = True
        await self.flush()

    async def run(self) -> None:
        """Run heartbeats until cancelled."""
        while True:
            await self.heartbeat()
            await asyncio.sleep(BEAT_S)

    async def flush(self) -> None:
        """Wait until Redis has received all reports, or is unreachable."""
        if self._pending or self._ended or self._is_full_due or self._is_pumping:
            self._wake()
            assert self._pump is not None
            await asyncio.shield(self._pump)

    def held(self, rule_id: str) -> int:
        """Number of running calls of a subject."""
        meter = self._meters.get(rule_id)
        return meter.held if meter is not None else 0

    def statistics(self) -> QuotaStatistics:
        """Statistics for metrics."""
        return QuotaStatistics(
            subjects=len(self._meters),
            refused=dict(self._meters.refused),
            is_reachable=not self._is_unreachable,
        )

    async def aclose(self) -> None:
        """Release everything and close the connections."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pump is not None:
            await cancel_all([self._pump])
        if not self._is_unreachable:
            with contextlib.suppress(RedisError, OSError):
                await self._leave(keys=self._own_keys(), args=[self._member])
        await self._redis.aclose()


_INF = float("inf")
_ENDLESS = 1e300
"""Stands for infinity, which JSON lacks."""


def _bounds(meter: Meter, kind: str) -> bool:
    """Whether a meter limits this kind."""
    return {
        "requests": bool(meter.per_s),
        "concurrent": meter.concurrent != _INF,
        "tokens": bool(meter.tokens_per_s),
    }[kind]


def _rule_row(name: str, meter: Meter) -> list[Any]:
    concurrent = -1 if meter.concurrent == _INF else int(meter.concurrent)
    depth, token_depth = min(meter.depth, _ENDLESS), min(meter.token_depth, _ENDLESS)
    return [name, meter.per_s, depth, concurrent, meter.tokens_per_s, token_depth, meter.held]
