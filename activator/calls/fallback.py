"""Fallbacks of a function that cannot answer: its variants and fallbacks, tried in order until one
answers.

A fallback to a function runs as a call of that function: on its instances, at its price, with the
same admission and call id. Its own fallbacks are tried when it fails; cycles are refused, and at
most MAX_RUNGS fallbacks are tried for one call. Where none answers the caller gets the first
failure, with the reason of each fallback."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from activator.arguments.checker import ArgumentChecker
from activator.arguments.validator import ArgumentValidator
from activator.balancing.instance import Reservation
from activator.balancing.throttler import Throttler
from activator.calls.call import AnsweredCall, Call
from activator.calls.fallback_rules import (
    VARIANT,
    fallback_chain,
    may_fall_back,
    name_of,
    static_answer,
)
from activator.calls.response_store import (
    ResponseStore,
    StoredResponse,
    bare,
    fallback_key,
    owner_of,
)
from activator.http.payloads import JSON
from activator.routing.api_keys import FUNCTION_KEY, SCHEDULER, FunctionPrincipal
from activator.routing.call_target import CallTarget
from activator.routing.route_table import RouteTable
from activator.worker_client.connection import WorkerResponse
from pilotlight import errors
from pilotlight.spec.identifiers import FunctionAddress, TenantId
from pilotlight.spec.policies import MAX_FALLBACKS, Fallback

log = logging.getLogger(__name__)


class FallbackResponse(AnsweredCall):
    """A cached or declared response instead of a worker's, which costs nothing."""

    __slots__ = ()

    def __init__(self, call: Call, answer: WorkerResponse) -> None:
        super().__init__(call)
        self.answer = answer
        self.dispatched_ns = call.reserved_ns = time.monotonic_ns()

    def __repr__(self) -> str:
        return f"<FallbackResponse {self.call.degraded} for {self.call!r}>"


@dataclass(slots=True)
class _FallbackRun:
    """State of one call's fallbacks. `why`: the reason of each fallback that did not answer."""

    run: Callable[[Call], Awaitable[AnsweredCall]]
    why: list[str] = field(default_factory=list)
    attempt: int = 0
    tried: int = 0


class FallbackChain:
    """Runs fallbacks. Owner: the event loop."""

    def __init__(
        self,
        *,
        routes: RouteTable,
        throttler_of: Callable[[CallTarget], Throttler],
        answers: ResponseStore | None = None,
        arguments: ArgumentChecker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = routes
        self._throttler_of = throttler_of
        self._answers = answers if answers is not None else ResponseStore()
        self._arguments = arguments or ArgumentChecker()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<FallbackChain {self._answers!r}>"

    def remember(self, call: Call, answer: WorkerResponse) -> None:
        """Store a response of the function itself, where it declares a cached fallback."""
        if (
            answer.status < 400
            and not call.degraded
            and any(rung.kind == "cached" for rung in call.target.spec.fallback)
        ):
            stored = StoredResponse(bare(answer), self._clock())
            self._answers.store(fallback_key(call), owner_of(call), stored)

    def try_reserve_variant(self, call: Call) -> tuple[Call, Reservation] | None:
        """Return a variant with a free slot for a call whose own function has none, if the variant
        accepts its priority."""
        for kind, rung in fallback_chain(call.target.spec, call.caller.rank.priority):
            if kind != VARIANT:
                return None
            try:
                other, check = self._call_of(call, kind, rung, call.attempt + 1)
                if check is not None:
                    check.check(call.body)
            except errors.PilotlightError:
                # removed, stopped, takes other arguments, or the check is too expensive
                continue
            reservation = (
                self._throttler_of(other.target).reserve_nowait()
                if other.target.name != call.target.name
                else None
            )
            if reservation is not None:
                return other, reservation
        return None

    async def run_fallbacks(
        self,
        call: Call,
        failure: errors.PilotlightError,
        run: Callable[[Call], Awaitable[AnsweredCall]],
    ) -> AnsweredCall:
        """Return the response of the first fallback that answers; `run` begins a call. Raises
        `failure` with the reason of each fallback."""
        if not may_fall_back(failure):
            raise failure
        run_fallbacks = _FallbackRun(run, attempt=call.attempt)
        attempt = await self._run_fallbacks(call, run_fallbacks, (call.target.name,))
        call.attempt = run_fallbacks.attempt
        if attempt is None:
            raise _with_rungs(failure, run_fallbacks.why) from failure
        log.info(
            "degraded call=%s answered_by=%s because=%s",
            call.id,
            attempt.call.degraded,
            failure.type,
        )
        return attempt

    async def _run_fallbacks(
        self, call: Call, run_fallbacks: _FallbackRun, path: tuple[str, ...]
    ) -> AnsweredCall | None:
        for kind, rung in fallback_chain(call.target.spec, call.caller.rank.priority):
            if run_fallbacks.tried >= MAX_FALLBACKS:
                run_fallbacks.why.append(
                    f"at most {MAX_FALLBACKS} fallbacks are tried for one call"
                )
                return None
            run_fallbacks.tried += 1
            attempt = (
                await self._step(call, run_fallbacks, path, kind, rung)
                if rung.function
                else self._stand_in(call, kind, rung)
            )
            if attempt is not None:
                return attempt
            if not rung.function:
                run_fallbacks.why.append(
                    f"{kind}: no recent enough response is stored for these arguments"
                )
        return None

    def _stand_in(self, call: Call, kind: str, rung: Fallback) -> AnsweredCall | None:
        """Return an attempt with a cached or a declared response; None where there is none."""
        if kind == "static":
            answer: WorkerResponse | None = static_answer(call, rung)
        else:
            found = self._answers.find(
                fallback_key(call), max_age_s=rung.max_age_s, now=self._clock()
            )
            answer = found.answer if found is not None else None
        if answer is None:
            return None
        return FallbackResponse(call.stand_in(call.target, kind), answer)

    async def _step(
        self,
        call: Call,
        run_fallbacks: _FallbackRun,
        path: tuple[str, ...],
        kind: str,
        rung: Fallback,
    ) -> AnsweredCall | None:
        """Call another function, or its own fallbacks; None where none answers."""
        name = name_of(kind, rung.function)
        try:
            other, check = self._call_of(call, kind, rung, run_fallbacks.attempt + 1)
            if check is not None:
                await self._arguments.check(check, call.body, tenant=other.target.tenant)
            if other.target.name in path:
                raise errors.Conflict(
                    f"the fallbacks form a cycle: {_way(*path, other.target.name)}"
                )
            if other.remaining_s(1.0) <= 0:
                raise errors.DeadlineExceeded("the caller's deadline has passed", clock="queue")
        except errors.PilotlightError as e:
            run_fallbacks.why.append(f"{name}: {e}")
            return None
        try:
            attempt = await run_fallbacks.run(other)
        except errors.PilotlightError as e:
            run_fallbacks.attempt = max(run_fallbacks.attempt, other.attempt)
            run_fallbacks.why.append(f"{name}: {e}")
            return (
                await self._run_fallbacks(other, run_fallbacks, (*path, other.target.name))
                if may_fall_back(e)
                else None
            )
        run_fallbacks.attempt = max(run_fallbacks.attempt, other.attempt)
        if attempt.answer.body is None or not _is_no_answer(attempt.answer):
            return attempt
        attempt.discard()
        run_fallbacks.why.append(f"{name}: it answered {attempt.answer.status}")
        return None

    def _call_of(
        self, call: Call, kind: str, rung: Fallback, attempt: int
    ) -> tuple[Call, ArgumentValidator | None]:
        """Return the call for the fallback's function, and the check of its arguments there; None
        for a body that is not JSON.

        Raises NotFound, Unavailable; Forbidden when the caller's key is for other functions;
        UnsupportedMediaType for a pickle when it is another tenant's."""
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
        return other, check if call.content_type is JSON else None

    def _check_reach(self, call: Call, address: FunctionAddress) -> None:
        """Check that the caller's key may access the fallback's function. Raises Forbidden."""
        if call.caller.key_id in ("", SCHEDULER):
            return
        caller = (
            FunctionPrincipal(call.caller.key_id)
            if call.caller.key_id.startswith(FUNCTION_KEY)
            else self._routes.caller_of(call.caller.key_id)
        )
        if caller is None:
            raise errors.Forbidden("the API key of this call was revoked")
        caller.check_reach(
            environment=address.environment, app=address.app, function=address.function
        )


def _is_no_answer(answer: WorkerResponse) -> bool:
    """Return whether a fallback failed, or refused these arguments."""
    return answer.status >= 500 or answer.header(b"pilotlight-outcome") == b"invalid"


def _way(*names: str) -> str:
    return " → ".join("/".join(name.split("/")[2:]) for name in names)


def _with_rungs(failure: errors.PilotlightError, why: list[str]) -> errors.PilotlightError:
    """Return a copy of the failure with the reason of each fallback; many calls may share the
    original."""
    return type(failure)(
        str(failure), retry_after_s=failure.retry_after_s, **{**failure.detail, "fallbacks": why}
    )
