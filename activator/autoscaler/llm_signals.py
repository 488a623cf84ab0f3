"""Scaling signals of language models, and of functions that gather calls; none of them is CPU. Pure
functions.

* `kv_memory`: an instance runs as many calls at once as its KV memory allows, as reported by its
  engine (`engine_state`);
* `queued_tokens`: the waiting prompts are more than the instances can process while another one
  starts, or within the objective;
* `first_token`: first tokens are late. The allowed concurrency per instance is then cut by a
  quarter, and rises again slowly while they are in time (additive increase, multiplicative
  decrease: Chiu and Jain 1989), so that it settles where the objective holds;
* `occupancy`: batches are full, so calls wait for the next one.

Without a measurement there is no signal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from activator.autoscaler.observation import RevisionObservation
from activator.balancing.wait_queue import EngineLoad

MIN_FIRST_TOKENS = 5
"""Minimum number of answers to evaluate first tokens."""
CUT = 0.75
RISE_PER_S = 0.01
"""Relative rise of the target: doubled after 70 s in time."""
SETTLE_S = 10.0
"""Minimum interval between two cuts: the measurement must include the effect of the first
(`engine_state.RECENT_S`)."""
FULL = 0.8
"""Occupancy of batches from which more instances are requested: at an average of 1 most calls would
wait for the next batch."""
MOST = 2
"""Maximum growth at once for queued tokens: they are an estimate, and the next decision is two
seconds away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTerms:
    """`objective_s`: a first token that took longer is late; `late`: the share that may be
    late."""

    objective_s: float
    late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenState:
    """Concurrency per instance at which first tokens are in time. `cut_at`: when it was last cut;
    `at`: when it was last set."""

    target: float
    cut_at: float
    at: float


def first_token_state(
    now: float,
    observed: RevisionObservation,
    terms: FirstTokenTerms | None,
    state: FirstTokenState | None,
) -> FirstTokenState | None:
    """The target after this decision; None while first tokens set no limit."""
    engine = observed.engine
    if terms is None or engine is None or observed.stable is None:
        return state
    is_told = engine.late is not None and engine.first_tokens >= MIN_FIRST_TOKENS
    is_late = is_told and (engine.late or 0.0) > terms.late
    if is_late and not observed.starting and (state is None or now - state.cut_at >= SETTLE_S):
        each = observed.stable / max(1, observed.ready)
        return FirstTokenState(
            target=max(1.0, CUT * min(each, state.target if state else engine.slots)),
            cut_at=now,
            at=now,
        )
    if state is None or is_late:
        return state
    target = state.target * (1 + RISE_PER_S * (now - state.at))
    return (
        FirstTokenState(target=target, cut_at=state.cut_at, at=now)
        if target < engine.slots
        else None
    )


def engine_wants(
    observed: RevisionObservation,
    *,
    target: float,
    terms: FirstTokenTerms | None,
    state: FirstTokenState | None,
) -> list[tuple[str, int]]:
    """Requests of a language model's own signals, where they apply. `target`: declared concurrency
    per instance."""
    engine, wants = observed.engine, []
    if engine is None:
        return []
    if observed.stable is not None and engine.slots < target:
        wants.append(("kv_memory", math.ceil(observed.stable / engine.slots)))
    tokens = _for_tokens(engine, observed, terms)
    if tokens is not None:
        wants.append(("queued_tokens", tokens))
    if observed.stable is not None and state is not None:
        wants.append(("first_token", math.ceil(observed.stable / state.target)))
    return wants


def _for_tokens(
    engine: EngineLoad, observed: RevisionObservation, terms: FirstTokenTerms | None
) -> int | None:
    """Number of instances that process the waiting prompts in time: within the objective, or before
    an instance that starts now could help."""
    within_s = max(terms.objective_s if terms is not None else 0.0, observed.start_s or 0.0)
    if not engine.queued_tokens or not engine.tokens_per_s or not within_s:
        return None
    wanted = math.ceil(engine.queued_tokens / (engine.tokens_per_s * within_s))
    return min(wanted, MOST * max(1, observed.ready), observed.in_flight + observed.waiting)


def batch_want(observed: RevisionObservation, *, max_batch_size: int) -> tuple[str, int] | None:
    """Request of full batches: enough instances to reduce the occupancy to FULL, at most one per
    batch of the concurrent calls."""
    if observed.occupancy is None or observed.stable is None or not observed.ready:
        return None
    wanted = math.ceil(observed.ready * observed.occupancy / FULL)
    return "occupancy", min(wanted, math.ceil(observed.stable / max_batch_size))
