"""The check of one text: by the patterns of a guard, then by its function.

Patterns run on the event loop where that takes microseconds, and otherwise in a process with a
deadline (`arguments.checker`), since tenants choose patterns and texts. A check that fails (the
guard's function is missing or slow, or its answer invalid) refuses the text, or allows it where the
operator says so (`activator.guard_on_error`)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from activator.arguments.checker import ArgumentChecker
from activator.calls.call import Call
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.engines import GuardSpec
from pilotlight.validation.guard_patterns import KNOWN_GUARDS, patterns_of

log = logging.getLogger(__name__)

INPUT, OUTPUT = "input", "output"
"""Stages: a prompt, generated text."""
FAILED: Final = "guard-failed"
"""The rule of a text that was refused because its check failed."""
SLICE_S: Final = 0.004
"""Time of the event loop that checks use before others have a turn."""
SHARE_S: Final = 0.25
"""Time of the event loop that the checks of one tenant use in a second."""
COSTLY_S: Final = 0.025
"""A check of this time shows that texts and expressions of a guard were made for one another."""
COSTLY_FOR_S: Final = 60.0
SHORT_CHARS: Final = 64
"""Texts up to which also such a guard's checks are short."""


class GuardFailed(Exception):
    """Raised when a text could not be checked. The message says why."""


class FunctionClient(Protocol):
    """Calls the functions of guards."""

    async def check(self, call: Call, function: str, *, stage: str, text: str) -> str:
        """Return the rule by which it refuses a text; "" = it allows it. Raises GuardFailed."""


class CheckRecorder(Protocol):
    """Gets the outcome of each check."""

    def count_check(self, target: CallTarget, stage: str, outcome: str) -> None:
        """Count a check: "allowed", "refused" or "failed"."""

    def record_refusal(self, call: Call, stage: str, rule: str) -> None:
        """Record who was refused what, and by which rule."""


class TextCheck:
    """Checks the texts of one call at one stage. Owner: the task of the call.

    Attributes:
        spec: of the guard.
        patterns: its patterns."""

    def __init__(self, terms: CheckTerms, call: Call, spec: GuardSpec, stage: str) -> None:
        """Raises InvalidInput for patterns that cannot be compiled, which no deploy accepts."""
        self._terms = terms
        self._call = call
        self._stage = stage
        self.spec = spec
        self.patterns = patterns_of(call.target.guard)
        self._is_function_down = False

    def __repr__(self) -> str:
        return f"<TextCheck of {self._stage} by {self.patterns!r}>"

    async def find_refusal(self, text: str) -> str:
        """Return the rule by which a whole text is refused; "" = it is allowed. Errors are decided
        by the operator's setting, and everything is counted."""
        rule = await self.apply_failure_policy(
            self.match_patterns(text)
        ) or await self.apply_failure_policy(self.call_function(text))
        self.record_decision(rule)
        return rule

    async def apply_failure_policy(self, step: Coroutine[Any, Any, str]) -> str:
        """Return the rule that `step` returns, or, where it raises GuardFailed, what the operator
        has decided for that: FAILED, or "" to allow the text."""
        try:
            return await step
        except GuardFailed as e:
            return self._on_failure(e)

    async def match_patterns(self, text: str, *, is_end: bool = True) -> str:
        """Return the first rule whose pattern matches; "" = none. Raises GuardFailed."""
        if not text:
            return ""
        target, time_of_loop = self._call.target, self._terms.time_of_loop
        if len(text) <= SHORT_CHARS or not time_of_loop.is_costly(target.guard):
            await time_of_loop.turn(target.tenant)
            with time_of_loop.used(target.tenant, target.guard):
                if self.patterns.is_inexpensive(text):
                    return self.patterns.find(text, is_end=is_end)
        try:
            return await self._terms.checker.find_rule(
                target.guard, text, is_end=is_end, tenant=target.tenant
            )
        except errors.PilotlightError as e:
            raise GuardFailed(f"patterns: {e}") from e

    async def call_function(self, text: str) -> str:
        """Return the rule by which the guard's function refuses a text; "" = it allows it, or there
        is none. Raises GuardFailed."""
        if not self.spec.function or not text or self._is_function_down:
            return ""
        try:
            return await self._terms.function.check(
                self._call, self.spec.function, stage=self._stage, text=text
            )
        except GuardFailed:  # the rest of the call does not wait for it again
            self._is_function_down = True
            raise

    def record_decision(self, rule: str) -> None:
        """Count a text that was checked to its end, or refused, and record a refusal."""
        outcome = "refused" if rule else "allowed"
        self._terms.recorder.count_check(self._call.target, self._stage, outcome)
        if rule:
            self._terms.recorder.record_refusal(self._call, self._stage, rule)

    def _on_failure(self, why: GuardFailed) -> str:
        call, terms = self._call, self._terms
        terms.recorder.count_check(call.target, self._stage, "failed")
        log.warning(
            "guard_failed call=%s function=%s stage=%s is_allowed=%s reason=%s",
            call.id,
            call.target.name,
            self._stage,
            terms.is_open,
            why,
        )
        return "" if terms.is_open else FAILED


class LoopTime:
    """What checks use of the event loop: some milliseconds at a time, and of a second a share for
    each tenant, whose checks wait beyond it. Their number is chosen by callers, and by servers of
    tenants: of pieces of a stream, of choices. Owner: the event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock`: seconds. `processor`: seconds of processor time."""
        self._clock = clock
        self._processor = processor
        self._costly: dict[bytes, float] = {}
        self._until = 0.0
        self._used: defaultdict[str, float] = defaultdict(float)
        self._since_turn_s = 0.0

    def __repr__(self) -> str:
        return f"<LoopTime of {len(self._used)} tenants>"

    async def turn(self, tenant: str) -> None:
        """Wait until this tenant may use the event loop, and let others use it."""
        if self._since_turn_s >= SLICE_S:
            self._since_turn_s = 0.0
            await asyncio.sleep(0)
        while True:
            wait_s = self._wait_s(tenant)
            if wait_s <= 0.0:
                return
            await asyncio.sleep(wait_s)

    @contextmanager
    def used(self, tenant: str, guard: bytes) -> Iterator[None]:
        """Measure a check by a guard (`CallTarget.guard`), which is run inside."""
        began = self._processor()
        try:
            yield
        finally:
            took = self._processor() - began
            self._used[tenant] += took
            self._since_turn_s += took
            if took >= COSTLY_S:
                if len(self._costly) >= KNOWN_GUARDS:
                    self._costly.clear()
                self._costly[guard] = self._clock() + COSTLY_FOR_S

    def is_costly(self, guard: bytes) -> bool:
        """Whether a check by this guard took long lately: the next ones are run elsewhere."""
        return bool(self._costly) and self._costly.get(guard, 0.0) > self._clock()

    def _wait_s(self, tenant: str) -> float:
        """Seconds until this tenant has a share again; 0 = it has."""
        now = self._clock()
        if now >= self._until:
            self._until = now + 1.0
            self._used.clear()
        return self._until - now if self._used[tenant] >= SHARE_S else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTerms:
    """What checks need.

    Attributes:
        checker: the processes for long texts.
        function: calls the functions of guards.
        recorder: gets outcomes.
        is_open: a check that fails allows the text.
        time_of_loop: of all checks."""

    checker: ArgumentChecker
    function: FunctionClient
    recorder: CheckRecorder
    is_open: bool
    time_of_loop: LoopTime = field(default_factory=LoopTime)
