"""What answers when a function cannot: its variants and fallbacks, tried in order until one does.

A rung that is a function runs as a call of that function: on its instances, at its price, under the
same admission and call id. It has rungs of its own, which are tried when it fails; so that this
ends, a function that is already on the way is refused (the fallbacks go round), and no more than
MAX_RUNGS are tried for one call. Where none answers the caller is told what failed first, and of
each rung why."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from activator.async_calls.records import SCHEDULER
from activator.balancing.reservation import Reservation
from activator.balancing.throttler import Throttler
from activator.calls.argument_checker import ArgumentChecker
from activator.calls.arguments import ArgumentCheck
from activator.calls.fallback_rules import (
    VARIANT,
    fallback_chain,
    may_fall_back,
    name_of,
    static_answer,
)
from activator.calls.runner import Call, Exchange
from activator.http.payloads import PICKLE
from activator.resilience.response_cache import ResponseCache
from activator.routing.api_keys import Principal
from activator.routing.call_target import CallTarget
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.policies import MAX_RUNGS, Fallback
from pilotlight.types import FunctionAddress, TenantId

log = logging.getLogger(__name__)


class Routes(Protocol):
    """Where a function's name leads (the RouteTable)."""

    def target(self, address: FunctionAddress) -> CallTarget:
        """The revision that serves it now. Raises NotFound, Unavailable."""
        ...

    def caller_of(self, key_id: str) -> Principal | None:
        """The caller with this key, if the key is still there."""
        ...


class StandIn(Exchange):
    """An answer that no worker gave: kept, or declared. It has no reservation, no ticket and no
    connection, and costs nothing."""

    __slots__ = ()

    def __init__(self, call: Call, answer: WorkerResponse) -> None:
        self.call = call
        self.answer = answer
        self.dispatched_ns = call.reserved_ns = time.monotonic_ns()
        self.exec_ms = 0.0
        self.cost = "0"
        self.bytes_out = 0
        self.cut_by = None
        self.on_cut = None
        self._is_blameless = False
        self._is_closed = True
        self._clock = None

    def __repr__(self) -> str:
        return f"<StandIn {self.call.degraded} for {self.call!r}>"

    @property
    def held(self) -> None:
        """None: no slot was taken."""
        return

    @property
    def instance(self) -> None:
        """None: no instance answered."""
        return


@dataclass(slots=True)
class _Climb:
    """One call's way up. `why`: of each rung tried, why it did not answer."""

    run: Callable[[Call], Awaitable[Exchange]]
    why: list[str] = field(default_factory=list)
    attempt: int = 0
    tried: int = 0


class FallbackChain:
    """See the module. Owner: the event loop."""

    def __init__(
        self,
        *,
        routes: Routes,
        throttler_of: Callable[[CallTarget], Throttler],
        answers: ResponseCache | None = None,
        arguments: ArgumentChecker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = routes
        self._throttler_of = throttler_of
        self._answers = answers if answers is not None else ResponseCache()
        self._arguments = arguments or ArgumentChecker()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<FallbackChain {self._answers!r}>"

    def remember(self, call: Call, answer: WorkerResponse) -> None:
        """Keep an answer of the function itself, where it declares that it may be given again."""
        if (
            answer.status < 400
            and not call.degraded
            and any(rung.kind == "cached" for rung in call.target.spec.fallback)
        ):
            self._answers.keep(call, answer, self._clock())

    def free_variant(self, call: Call) -> tuple[Call, Reservation] | None:
        """A variant that has a free slot for a call whose own function has none, if that is
        acceptable for its priority."""
        for kind, rung in fallback_chain(call.target.spec, call.rank.priority):
            if kind != VARIANT:
                return None
            try:
                other, check = self._call_of(call, kind, rung, call.attempt + 1)
                if check is not None:
                    check.check(call.body)
            except errors.PilotlightError:
                # gone, stopped, or it takes other arguments, or checking these would take long
                continue
            reservation = (
                self._throttler_of(other.target).reserve_nowait()
                if other.target.name != call.target.name
                else None
            )
            if reservation is not None:
                return other, reservation
        return None

    async def climb(
        self,
        call: Call,
        failure: errors.PilotlightError,
        run: Callable[[Call], Awaitable[Exchange]],
    ) -> Exchange:
        """The answer of the first rung that has one; `run` begins a call. Raises `failure`, with
        what became of each rung."""
        if not may_fall_back(failure):
            raise failure
        climb = _Climb(run, attempt=call.attempt)
        exchange = await self._climb(call, climb, (call.target.name,))
        call.attempt = climb.attempt
        if exchange is None:
            raise _with_rungs(failure, climb.why) from failure
        log.info(
            "degraded call=%s answered_by=%s because=%s",
            call.id,
            exchange.call.degraded,
            failure.type,
        )
        return exchange

    async def _climb(self, call: Call, climb: _Climb, path: tuple[str, ...]) -> Exchange | None:
        for kind, rung in fallback_chain(call.target.spec, call.rank.priority):
            if climb.tried >= MAX_RUNGS:
                climb.why.append(f"no more than {MAX_RUNGS} rungs are tried for one call")
                return None
            climb.tried += 1
            exchange = (
                await self._step(call, climb, path, kind, rung)
                if rung.function
                else self._stand_in(call, kind, rung)
            )
            if exchange is not None:
                return exchange
            if not rung.function:
                climb.why.append(f"{kind}: nothing kept for these arguments that is young enough")
        return None

    def _stand_in(self, call: Call, kind: str, rung: Fallback) -> Exchange | None:
        """Of a kept or a declared answer."""
        if kind == "static":
            answer: WorkerResponse | None = static_answer(call, rung)
        else:
            answer = self._answers.find(call, max_age_s=rung.max_age_s, now=self._clock())
        if answer is None:
            return None
        return StandIn(call.stand_in(call.target, kind), answer)

    async def _step(
        self, call: Call, climb: _Climb, path: tuple[str, ...], kind: str, rung: Fallback
    ) -> Exchange | None:
        """Have another function answer, or what it falls back to."""
        name = name_of(kind, rung.function)
        try:
            other, check = self._call_of(call, kind, rung, climb.attempt + 1)
            if check is not None:
                await self._arguments.check(check, call.body, tenant=other.target.tenant)
            if other.target.name in path:
                raise errors.Conflict(f"the fallbacks go round: {_way(*path, other.target.name)}")
            if other.remaining_s(1.0) <= 0:
                raise errors.DeadlineExceeded(
                    "nothing is left of the caller's deadline", clock="queue"
                )
        except errors.PilotlightError as e:
            climb.why.append(f"{name}: {e}")
            return None
        try:
            exchange = await climb.run(other)
        except errors.PilotlightError as e:
            climb.attempt = max(climb.attempt, other.attempt)
            climb.why.append(f"{name}: {e}")
            return (
                await self._climb(other, climb, (*path, other.target.name))
                if may_fall_back(e)
                else None
            )
        climb.attempt = max(climb.attempt, other.attempt)
        if exchange.answer.body is None or not _is_no_answer(exchange.answer):
            return exchange
        exchange.close(
            status=exchange.answer.status, outcome="error", bytes_out=len(exchange.answer.body)
        )
        climb.why.append(f"{name}: it answered {exchange.answer.status}")
        return None

    def _call_of(
        self, call: Call, kind: str, rung: Fallback, attempt: int
    ) -> tuple[Call, ArgumentCheck | None]:
        """The same call, of the rung's function, and the check that its arguments have to pass
        there; None: they are a pickle.

        Raises NotFound, Unavailable; Forbidden: the caller's key is for other functions;
        UnsupportedMediaType: it is another tenant's, and this is a pickle."""
        app, _, function = rung.function.rpartition("/")
        asked = call.target
        address = FunctionAddress(
            tenant=TenantId(asked.tenant),
            environment=asked.environment,
            app=app or asked.app,
            function=function,
            method=call.method,
        )
        self._check_reach(call, address)
        target = self._routes.target(address)
        check = target.check(call.method)
        other = call.stand_in(target, name_of(kind, rung.function))
        other.attempt = attempt
        return other, check if call.content_type is not PICKLE else None

    def _check_reach(self, call: Call, address: FunctionAddress) -> None:
        """A key that is bound to an app or a function calls no other by way of a fallback. Raises
        Forbidden."""
        if call.key_id in ("", SCHEDULER):
            return
        caller = self._routes.caller_of(call.key_id)
        if caller is None:
            raise errors.Forbidden("the API key of this call was revoked")
        caller.check_reach(
            environment=address.environment, app=address.app, function=address.function
        )


def _is_no_answer(answer: WorkerResponse) -> bool:
    """Whether a rung failed itself, or could not take these arguments."""
    return answer.status >= 500 or answer.header(b"pilotlight-outcome") == b"invalid"


def _way(*names: str) -> str:
    return " → ".join("/".join(name.split("/")[2:]) for name in names)


def _with_rungs(failure: errors.PilotlightError, why: list[str]) -> errors.PilotlightError:
    """The failure with what became of each rung; another object, because many calls may share
    one."""
    return type(failure)(
        str(failure), retry_after_s=failure.retry_after_s, **{**failure.detail, "fallbacks": why}
    )
