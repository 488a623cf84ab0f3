"""Admits calls of language models: measures a request, applies limits, reserves tokens in quotas,
and settles them at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from activator.access.grants import AccessGrant
from activator.llm.request_size import TokenDemand, token_demand_of
from activator.llm.token_estimates import TokenEstimate, TokenEstimates, learn
from activator.llm.token_limits import NO_LIMITS, TokenGrant, allow
from activator.quotas.admission import Admission
from activator.quotas.token_reservation import TokenReservation
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.engines import LanguageModel

_ENDED_BY_ITSELF = ("stop", "tool_calls")


class TokenAdmission:
    """Owner: the event loop.

    use = await admission.admit(entry, path, body, began_ns=request.began_ns)
    try:
        write_cap(path, body, use.cap)
        ...
    finally:
        use.settle()
    """

    def __init__(self, *, waiting_of: Callable[[CallTarget], int]) -> None:
        """`waiting_of`: number of calls of a revision that wait for a slot."""
        self._waiting_of = waiting_of
        self._estimates = TokenEstimates()

    def __repr__(self) -> str:
        return f"<TokenAdmission {self._estimates!r}>"

    async def admit(
        self,
        entry: AccessGrant,
        path: str,
        body: Mapping[str, Any],
        *,
        began_ns: int,
        holds: int = 1,
    ) -> TokenReservation:
        """Admit one call of a language model. The caller must call `settle` of the result once.

        `holds`: 0 for a call that does not begin to run now. Raises InvalidInput, OverQuota with
        the time to wait, Unavailable."""
        asked = token_demand_of(path, body)
        allowed = self._allow(entry, asked)
        admission, allowed = await _admitted(entry, allowed, holds=holds)
        use = TokenReservation(
            estimated_in=allowed.estimated_in,
            max_out=allowed.max_out,
            expected=allowed.expected,
            began_ns=began_ns,
            cap=allowed.cap,
            degraded=allowed.degraded,
            admission=admission,
            on_end=lambda use: self._learn(asked, use),
        )
        use.max_in = allowed.max_in
        return use

    def _learn(self, asked: TokenDemand, use: TokenReservation) -> None:
        if use.is_counted and use.revision:
            is_ended = use.finish in _ENDED_BY_ITSELF
            learn(
                self._estimates.of(use.revision),
                asked,
                tokens_in=use.tokens_in,
                tokens_out=use.tokens_out,
                is_ended=is_ended,
            )

    def _allow(self, entry: AccessGrant, asked: TokenDemand) -> TokenGrant:
        target = entry.target
        model = model_of(target)
        limits = target.spec.limits or NO_LIMITS
        waiting = self._waiting_of(target) if limits.pressured_output_tokens is not None else 0
        return allow(
            asked,
            model=model,
            limits=limits,
            estimate=self._estimates.of(target.key),
            bound=entry.token_bound,
            waiting=waiting,
        )


async def _admitted(
    entry: AccessGrant, allowed: TokenGrant, *, holds: int
) -> tuple[Admission, TokenGrant]:
    """Reserve the granted tokens, or, if the quotas have too few left, the reduced amount for load
    peaks."""
    try:
        return await entry.admit(holds=holds, tokens=allowed.reserve), allowed
    except errors.OverQuota as e:
        short = (
            allowed.cut(entry.target.spec.limits or NO_LIMITS)
            if e.detail.get("quota") == "tokens_per_min"
            else None
        )
        if short is None:
            raise
    return await entry.admit(holds=holds, tokens=short.reserve), short


def restore_reservation(
    target: CallTarget, path: str, body: Mapping[str, Any], *, began_ns: int
) -> TokenReservation:
    """The reservation of a submitted call that a previous process admitted: it is counted in quotas
    already, and budgets check it again.

    Raises InvalidInput when its function is no longer a language model."""
    asked = token_demand_of(path, body)
    model = model_of(target)
    size = TokenEstimate()
    most = (
        model.max_model_len
        if asked.max_tokens is None
        else min(asked.max_tokens, model.max_model_len)
    )
    use = TokenReservation(
        estimated_in=sum(size.tokens(one) for one in asked.prompts),
        max_out=most * asked.answers,
        began_ns=began_ns,
    )
    use.max_in = model.max_model_len * len(asked.prompts)
    return use


def model_of(target: CallTarget) -> LanguageModel:
    """The model of a function. Raises InvalidInput."""
    model = target.spec.language_model
    if model is None:
        raise errors.InvalidInput(
            f"{target.app}/{target.function} is not a language model: call it by its own name"
        )
    return model
