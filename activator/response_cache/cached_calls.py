"""Calls of functions with a response cache: an equal call's answer, or a run that is stored.

    found in memory (or in Redis) ─▶ charged as a hit ─▶ answered
    equal call runs               ─▶ waits for it     ─▶ a hit, or runs
    neither                       ─▶ runs             ─▶ whole, successful answers are stored

What comes before (authentication, quotas, the check of the arguments) is the same for all calls.
Submitted calls, copies of calls and fallbacks do not come here: they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from activator.billing.budgets.applicable import borrow_and_retry
from activator.billing.instance_account import Charge
from activator.calls.call import AnsweredCall, Call
from activator.calls.degradation import degradation_of
from activator.calls.response_store import (
    ResponseOwner,
    ResponseStore,
    StoredResponse,
    bare,
    owner_of,
)
from activator.calls.runner import CallRunner
from activator.response_cache.cache_hits import CacheHit, CacheHitAccount
from activator.response_cache.keys import CacheControl, cache_control, cache_key, forbids_storing
from activator.response_cache.single_flight import SingleFlight, Turn
from activator.worker_client.connection import WorkerResponse
from pilotlight.spec.policies import ResponseCacheSpec

HIT: Final = "hit"
MISS: Final = "miss"
BYPASS: Final = "bypass"


class SharedResponses(Protocol):
    """Answers that several activators share (`redis_store.RedisResponses`)."""

    async def find(self, key: bytes, *, max_age_s: float) -> StoredResponse | None:
        """Return the answer under a key; None when there is none, or the store does not say."""

    def store(
        self,
        key: bytes,
        owner: ResponseOwner,
        answer: WorkerResponse,
        *,
        ttl_s: float,
    ) -> None:
        """Store an answer without delaying its call."""


class CacheObserver(Protocol):
    """Counts, by the function's name (`CallTarget.name`)."""

    def count(self, function: str, result: str) -> None:
        """Count a call: it was a HIT, a MISS or a BYPASS."""

    def count_evicted(self, function: str) -> None:
        """Count an answer that made room for others."""


class CachedResponse(AnsweredCall):
    """A stored answer, which was charged as a hit."""

    __slots__ = ()
    is_hit = True

    def __init__(self, call: Call, answer: WorkerResponse, charge: Charge) -> None:
        super().__init__(call)
        self.answer = answer
        self.dispatched_ns = call.reserved_ns
        self.cost, self.picos = charge.cost, charge.picos

    def __repr__(self) -> str:
        return f"<CachedResponse {self.call.cache_age_s} s old for {self.call!r}>"


class CachedCalls:
    """Runs calls of functions with a response cache. Owner: the event loop."""

    def __init__(
        self,
        *,
        runner: CallRunner,
        store: ResponseStore,
        flights: SingleFlight,
        account: CacheHitAccount,
        observer: CacheObserver,
        shared: SharedResponses | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shared`: None = nothing is shared. `clock`: seconds, that of `store`."""
        self._runner = runner
        self._store = store
        self._flights = flights
        self._account = account
        self._observer = observer
        self._shared = shared
        self._clock = clock
        store.on_dropped = lambda owner: observer.count_evicted(owner.function)

    def __repr__(self) -> str:
        return f"<CachedCalls {self._store!r} {self._flights!r} {self._shared!r}>"

    async def begin(
        self, call: Call, terms: ResponseCacheSpec, headers: Mapping[bytes, bytes]
    ) -> AnsweredCall:
        """Return the answer of an equal call, or run it (`CallRunner.begin`). `headers`: of its
        request.

        Raises what `CallRunner.begin` raises, and for a hit JournalFull, OverBudget,
        BudgetReserved."""
        control = cache_control(headers)
        if control is CacheControl.BYPASS or not call.is_cacheable:
            self._count(call, BYPASS)
            return await self._runner.begin(call)
        key = cache_key(call)
        if control is CacheControl.REFRESH:
            self._count(call, BYPASS)
            attempt = await self._runner.begin(call)
            self._store_response(key, attempt, terms)
            return attempt
        found = self._store.find(key, max_age_s=terms.ttl_s, now=self._clock())
        turn = found if found is not None else await self._flights.join(key, call)
        if isinstance(turn, StoredResponse):
            return await self._answer_from_cache(call, turn)
        if turn is Turn.LEAD:
            return await self._lead(key, call, terms)
        self._count(call, MISS)
        return await self._runner.begin(call)

    async def _lead(self, key: bytes, call: Call, terms: ResponseCacheSpec) -> AnsweredCall:
        """Run a call for which others may wait."""
        try:
            found = await self._find_shared(key, call, terms)
            if found is None:
                self._count(call, MISS)
                attempt = await self._runner.begin(call)
        except BaseException:
            self._flights.fail(key)
            raise
        if found is not None:
            self._flights.complete(key, found)
            return await self._answer_from_cache(call, found)
        stored = self._store_response(key, attempt, terms)
        if stored is not None:
            self._flights.complete(key, stored)
        elif _is_success(attempt):
            self._flights.complete_unshared(key)
        else:
            self._flights.fail(key)
        return attempt

    async def _find_shared(
        self, key: bytes, call: Call, terms: ResponseCacheSpec
    ) -> StoredResponse | None:
        if self._shared is None or not terms.shared:
            return None
        found = await self._shared.find(key, max_age_s=terms.ttl_s)
        if found is not None:
            self._store.store(key, owner_of(call), found, max_bytes=terms.max_bytes)
        return found

    def _store_response(
        self, key: bytes, attempt: AnsweredCall, terms: ResponseCacheSpec
    ) -> StoredResponse | None:
        """Store a whole answer of the function itself. Returns None for others."""
        answer = attempt.answer
        if (
            answer.body is None
            or not _is_success(attempt)
            or forbids_storing(answer.header(b"cache-control"))
        ):
            return None
        stored, owner = StoredResponse(bare(answer), self._clock()), owner_of(attempt.call)
        self._store.store(key, owner, stored, max_bytes=terms.max_bytes)
        if self._shared is not None and terms.shared:
            self._shared.store(key, owner, stored.answer, ttl_s=terms.ttl_s)
        return stored

    async def _answer_from_cache(self, call: Call, found: StoredResponse) -> CachedResponse:
        """Charge a call as a hit, and answer it."""
        call.reserved_ns = time.monotonic_ns()
        charge = await self._charge(call, found.answer)
        self._count(call, HIT)
        call.cache_age_s = max(0, int(self._clock() - found.at))
        return CachedResponse(call, found.answer, charge)

    async def _charge(self, call: Call, answer: WorkerResponse) -> Charge:
        hit = CacheHit(
            call=call.id,
            attempt=call.attempt,
            key=call.caller.key_id,
            method=call.method,
            caller=call.caller.tenant,
            at_ns=call.at_ns,
            queued_ms=int(call.queued_ms),
            status=answer.status,
            bytes_in=len(call.body),
            bytes_out=len(answer.body or b""),
            mark=call.mark,
            customer=call.caller.customer,
        )
        return await borrow_and_retry(lambda: self._account.charge(call.target, hit))

    def _count(self, call: Call, result: str) -> None:
        call.cache_result = result
        self._observer.count(call.target.name, result)


def _is_success(attempt: AnsweredCall) -> bool:
    """Return whether an instance of the function answered as asked."""
    return (
        attempt.held is not None
        and 200 <= attempt.answer.status < 300
        and not degradation_of(attempt)
    )
