"""What a call of a language model may use: combines the limits of its model, of its function and of
quotas. Pure.

A call is refused here only if no token count of the engine could allow it; whether its prompt fits
exactly is decided by the engine. Before a call is refused whose function accepts shorter answers
(`pressured_output_tokens`), its answer is shortened, and marked as degraded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from activator.llm.request_size import TokenDemand
from activator.llm.token_estimates import TokenEstimate
from activator.quotas.rules import TokenBound
from pilotlight import errors
from pilotlight.spec.engines import LanguageModel, Task, TokenLimits

NO_LIMITS = TokenLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGrant:
    """The tokens granted to one call.

    Attributes:
        estimated_in: estimated tokens of its prompts.
        max_in: maximum tokens of its prompts: each as long as the model allows.
        each: maximum of one answer.
        answers: number of answers.
        expected: tokens of all answers that are reserved in quotas; usage beyond that becomes debt.
        cap: limit to write into the request, because the call has none; None = no change.
        degraded: `output<=N` of a shortened answer, otherwise ""."""

    estimated_in: int
    max_in: int
    each: int
    answers: int
    expected: int
    cap: int | None = None
    degraded: str = ""

    @property
    def max_out(self) -> int:
        """Maximum tokens of all answers together."""
        return self.each * self.answers

    @property
    def reserve(self) -> int:
        """Tokens to reserve in quotas."""
        return self.estimated_in + self.expected

    def cut(self, limits: TokenLimits) -> TokenGrant | None:
        """The same with answers shortened to the limit under pressure. None if they are that short
        already, or it is not configured."""
        most = limits.pressured_output_tokens
        if most is None or most >= self.each:
            return None
        expected = min(self.expected, most * self.answers)
        return replace(self, each=most, expected=expected, cap=most, degraded=f"output<={most}")


def allow(
    asked: TokenDemand,
    *,
    model: LanguageModel,
    limits: TokenLimits = NO_LIMITS,
    estimate: TokenEstimate,
    bound: TokenBound | None = None,
    waiting: int = 0,
) -> TokenGrant:
    """Grant tokens to a call while `waiting` calls wait. Raises InvalidInput naming the exceeded
    limit."""
    least = [estimate.least(size) for size in asked.prompts]
    _check_prompts(least, model, limits)
    if asked.max_tokens is not None:
        _check_answer(asked.max_tokens, model, limits)
    allowed = _granted(asked, max(least), model, limits, estimate)
    if waiting >= limits.pressured_above:
        allowed = allowed.cut(limits) or allowed
    if bound is not None and _is_beyond(allowed, asked, sum(least), bound):
        short = allowed.cut(limits)
        if short is None or _is_beyond(short, asked, sum(least), bound):
            raise _never(allowed, sum(least), bound)
        allowed = short
    return allowed if bound is None else _bounded(allowed, asked, sum(least), bound)


def _bounded(allowed: TokenGrant, asked: TokenDemand, least: int, bound: TokenBound) -> TokenGrant:
    """Limit a call without a requested length to a full bucket. Usage beyond it becomes debt of at
    most one minute's amount."""
    if (
        asked.max_tokens is not None
        or not allowed.answers
        or allowed.max_out + least <= bound.limit
    ):
        return allowed
    each = max(1, (bound.limit - least) // allowed.answers)
    return replace(
        allowed, each=each, expected=min(allowed.expected, each * allowed.answers), cap=each
    )


def _granted(
    asked: TokenDemand,
    longest: int,
    model: LanguageModel,
    limits: TokenLimits,
    estimate: TokenEstimate,
) -> TokenGrant:
    estimated_in = sum(estimate.tokens(size) for size in asked.prompts)
    max_in = model.max_model_len * len(asked.prompts)
    if not asked.answers:
        return TokenGrant(estimated_in=estimated_in, max_in=max_in, each=0, answers=0, expected=0)
    leaves = max(1, model.max_model_len - longest)
    if asked.max_tokens is not None:
        each = min(asked.max_tokens, leaves)
        return TokenGrant(
            estimated_in=estimated_in,
            max_in=max_in,
            each=each,
            answers=asked.answers,
            expected=each * asked.answers,
        )
    own = leaves if asked.default_tokens is None else min(leaves, asked.default_tokens)
    configured = [
        most
        for most in (limits.default_output_tokens, limits.max_output_tokens)
        if most is not None
    ]
    each = min(leaves, limits.default_output_tokens or own, *configured)
    cap = each if configured and each != own else None
    return TokenGrant(
        estimated_in=estimated_in,
        max_in=max_in,
        each=each,
        answers=asked.answers,
        expected=min(each, estimate.answer()) * asked.answers,
        cap=cap,
    )


def _check_prompts(least: list[int], model: LanguageModel, limits: TokenLimits) -> None:
    room = model.max_model_len - (1 if model.task is not Task.EMBED else 0)
    if max(least) > room:
        raise errors.InvalidInput(
            f"the prompt has more than {max(least)} tokens, and this model accepts "
            f"{model.max_model_len} for prompt and answer together "
            "(max_model_len): shorten it",
            parameter="prompt",
            limit=model.max_model_len,
            bound="max_model_len",
        )
    most = limits.max_input_tokens
    if most is not None and sum(least) > most:
        raise errors.InvalidInput(
            f"the prompt has more than {sum(least)} tokens, and this function accepts {most} "
            f"(max_input_tokens): shorten it",
            parameter="prompt",
            limit=most,
            bound="max_input_tokens",
        )


def _check_answer(max_tokens: int, model: LanguageModel, limits: TokenLimits) -> None:
    for name, most in (
        ("max_output_tokens", limits.max_output_tokens),
        ("max_model_len", model.max_model_len),
    ):
        if most is not None and max_tokens > most:
            raise errors.InvalidInput(
                f"max_tokens = {max_tokens}: this function generates at most {most} ({name})",
                parameter="max_tokens",
                limit=most,
                bound=name,
            )


def _is_beyond(allowed: TokenGrant, asked: TokenDemand, least: int, bound: TokenBound) -> bool:
    """Whether it exceeds a full bucket. A call without a requested length is limited instead."""
    out = allowed.max_out if asked.max_tokens is not None or allowed.degraded else 0
    return least + out > bound.limit


def _never(allowed: TokenGrant, least: int, bound: TokenBound) -> errors.InvalidInput:
    what = f"its prompt of at least {least} tokens and answers of up to {allowed.max_out}"
    if not bound.is_shown:
        return errors.InvalidInput(
            f"this call can never run: {what} are more than the tenant of this function may use "
            f"in a minute (tokens_per_min)",
            parameter="max_tokens",
            bound="tokens_per_min",
        )
    return errors.InvalidInput(
        f"this call can never run: {what} are more than the quota tokens_per_min = "
        f"{bound.limit:g} of this {bound.of} allows: request "
        "fewer tokens, or ask for a higher quota",
        parameter="max_tokens",
        limit=bound.limit,
        bound="tokens_per_min",
    )
