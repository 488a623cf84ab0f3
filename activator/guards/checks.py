"""The check of one text: by the patterns of a guard, then by its function.

Patterns run on the event loop where that takes microseconds, and otherwise in a process with a
deadline (`arguments.checker`), since tenants choose patterns and texts. A check that fails (the
guard's function is missing or slow, or its answer invalid) refuses the text, or allows it where the
operator says so (`activator.guard_on_error`)."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol

from activator.arguments.checker import ArgumentChecker
from activator.calls.call import Call
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.engines import GuardSpec
from pilotlight.validation.guard_patterns import patterns_of

log = logging.getLogger(__name__)

INPUT, OUTPUT = "input", "output"
"""Stages: a prompt, generated text."""
FAILED: Final = "guard-failed"
"""The rule of a text that was refused because its check failed."""


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
        if self.patterns.is_inexpensive(text):
            return self.patterns.find(text, is_end=is_end)
        try:
            return await self._terms.checker.find_rule(
                self._call.target.guard, text, is_end=is_end, tenant=self._call.target.tenant
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTerms:
    """What checks need.

    Attributes:
        checker: the processes for long texts.
        function: calls the functions of guards.
        recorder: gets outcomes.
        is_open: a check that fails allows the text."""

    checker: ArgumentChecker
    function: FunctionClient
    recorder: CheckRecorder
    is_open: bool
