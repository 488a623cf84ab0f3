"""Calls the function of a guard: a call of its own, made by the guarded function, with `stage` and
`text`, which answers `{"allow": true}` or `{"allow": false, "rule": "…"}`.

It is a call like any other that a function makes: of the same tenant and environment, on the
instances of the guard's function, at its price and within its quotas, and part of the caller's
trace. All of it, also waiting for an instance, has one short deadline."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, Final

from activator.access.grants import AccessCache
from activator.arguments.checker import ArgumentChecker
from activator.calls.attempt_end import ResponseReader
from activator.calls.call import AnsweredCall, Call
from activator.calls.runner import CallRunner
from activator.guards.checks import GuardFailed
from activator.http.payloads import JSON, Payload
from activator.metrics.metrics import Metrics
from activator.routing.api_keys import FUNCTION_KEY, FunctionPrincipal
from activator.routing.call_origin import CallOrigin
from activator.routing.call_target import CallTarget
from activator.routing.route_table import RouteTable
from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.protocol import new_call_id
from pilotlight.spec.identifiers import FunctionAddress, TenantId

MAX_ANSWER_BYTES: Final = 4096
MAX_RULE_CHARS: Final = 64
UNNAMED: Final = "function"
"""The rule of a refusal that names none."""


class GuardFunctionClient:
    """Calls the functions of guards (`checks.FunctionClient`). Owner: the event loop."""

    def __init__(
        self,
        *,
        runner: CallRunner,
        table: RouteTable,
        access: AccessCache,
        arguments: ArgumentChecker,
        metrics: Metrics,
        max_depth: int,
        deadline_s: float,
    ) -> None:
        """`max_depth`: most calls between the first function and the last. `deadline_s`: of one
        check."""
        self._runner = runner
        self._table = table
        self._access = access
        self._arguments = arguments
        self._metrics = metrics
        self._max_depth = max_depth
        self._deadline_s = deadline_s

    def __repr__(self) -> str:
        return f"<GuardFunctionClient within {self._deadline_s:g} s>"

    async def check(self, call: Call, function: str, *, stage: str, text: str) -> str:
        """Return the rule by which it refuses a text; "" = it allows it. Raises GuardFailed."""
        body = json.dumps({"stage": stage, "text": text}).encode()
        try:
            async with asyncio.timeout(self._deadline_s):
                status, answer = await self._call(call, function, body)
        except TimeoutError as e:
            raise GuardFailed(f"{function} did not answer in {self._deadline_s:g} s") from e
        except errors.PilotlightError as e:
            raise GuardFailed(f"{function}: {e}") from e
        if status != 200:
            raise GuardFailed(f"{function} answered {status}")
        return parse_rule(function, answer)

    async def _call(self, call: Call, function: str, body: bytes) -> tuple[int, bytes]:
        target, method = self._resolve(call.target, function)
        principal = FunctionPrincipal(f"{FUNCTION_KEY}{call.target.name}")
        grant = self._access.entry(principal, target)
        if len(body) > grant.body_bytes:
            raise errors.TooLarge(f"a text of {len(body)} bytes is too long for it")
        try:
            await self._arguments.check(target.check(method), body, tenant=target.tenant)
        except errors.InvalidInput as e:  # whose message quotes the text
            raise GuardFailed(f"{function} does not take stage and text, two strings") from e
        origin = _origin_of(call)
        origin.require_depth(f"{target.app}/{target.function}", self._max_depth)
        caller = grant.caller_of({})
        rank = replace(caller.rank, priority=call.caller.rank.priority)
        with await grant.admit() as admission:
            guard_call = Call(
                id=new_call_id(),
                target=target,
                method=method,
                payload=Payload(body, JSON, JSON),
                caller=replace(caller, origin=origin, rank=rank, customer=call.caller.customer),
                admission=admission,
                deadline_s=min(self._deadline_s, call.remaining_s(self._deadline_s)),
            )
            return await self._read_response(await self._runner.begin(guard_call))

    def _resolve(self, guarded: CallTarget, function: str) -> tuple[CallTarget, str]:
        """The function of a guard, and its method. Raises NotFound, Unavailable, InvalidInput."""
        app, _, name = function.rpartition("/")
        name, _, method = name.partition(".")
        target = self._table.target(
            FunctionAddress(
                tenant=TenantId(guarded.tenant),
                environment=guarded.environment,
                app=app or guarded.app,
                function=name,
                method=method,
            )
        )
        if target.spec.language_model is not None or target.spec.sandbox:
            raise errors.InvalidInput(f"{function} is no function that takes arguments")
        return target, method

    async def _read_response(self, attempt: AnsweredCall) -> tuple[int, bytes]:
        """Read an answer, and end the attempt."""
        pieces: list[bytes] = []
        try:
            with ResponseReader(attempt, attempt.call.reading(attempt.answer)) as response:
                if attempt.answer.body is None:
                    async for piece in response:
                        pieces.append(piece)
                        if attempt.bytes_out > MAX_ANSWER_BYTES:
                            raise errors.TooLarge("its answer is too long")
                whole = response.whole(b"".join(pieces) if attempt.answer.body is None else None)
        except WorkerConnectionLost as e:
            raise attempt.cut_by or await attempt.crash_error() from e
        self._metrics.answered(attempt, response.status)
        self._runner.log_answer(attempt, response.status, whole)
        return response.status, whole


def parse_rule(function: str, answer: bytes) -> str:
    """The rule in the answer of a guard's function; "" = it allows the text. Raises GuardFailed for
    anything but an object with `allow`, true or false, and `rule`, a short text."""
    document: Any = None
    if len(answer) <= MAX_ANSWER_BYTES:
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):
            document = None
    allow = document.get("allow") if isinstance(document, dict) else None
    if not isinstance(allow, bool):
        raise GuardFailed(f'{function} must answer {{"allow": true or false, "rule": "…"}}')
    if allow:
        return ""
    rule = document.get("rule")
    if rule is not None and (
        not isinstance(rule, str) or len(rule) > MAX_RULE_CHARS or not rule.isprintable()
    ):
        raise GuardFailed(
            f"{function}: rule must be a text of at most {MAX_RULE_CHARS} printable characters"
        )
    return rule or UNNAMED


def _origin_of(call: Call) -> CallOrigin:
    before = call.caller.origin
    chain = before.chain if before is not None else ()
    return CallOrigin(
        f"{call.id}/{call.attempt}", (*chain, f"{call.target.app}/{call.target.function}")
    )
