"""Whether and when a failed call is retried: pure functions, and the retry budgets of callers.

A function that declares `retries=` allows its calls to run more than once. Calls are still not
retried after the first streamed byte, past their deadline, or when the error is not a failure: a
refusal (4xx), an open breaker, a spent budget.

The retries of a caller are limited to a share of its calls, so that retries do not overload a
failing function (Google SRE Book, ch. 22, "Addressing cascading failures": per-client retry
budget). Each call adds `share` of a token to its caller's bucket, each retry removes one; a bucket
has at most BURST tokens and gains TRICKLE_PER_S, so that callers with few calls can retry, too.
Each activator counts separately."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Protocol

from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.core import backoff
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.policies import RetryPolicy


class TriedTarget(Protocol):
    """The target of a call."""

    @property
    def spec(self) -> FunctionSpec:
        """Its declaration, with its retry policy."""


class TriedTargets(Protocol):
    """A call that failed (`calls.call.Call`).

    Attributes:
        retries: number of retries so far by its policy.
    """

    retries: int

    @property
    def target(self) -> TriedTarget:
        """The target of the call."""


def delay_s(policy: RetryPolicy, attempt: int, rng: random.Random) -> float:
    """Return the seconds before retry number `attempt`, from 1: exponential, capped, and reduced by
    the policy's random jitter (0 to 1)."""
    return backoff.delay_s(
        attempt - 1,
        first_s=policy.initial_delay_s,
        max_s=policy.max_delay_s,
        factor=policy.backoff_coefficient,
        jitter=policy.jitter,
        draw=rng.random,
    )


def may_retry(error: BaseException, call: TriedTargets) -> bool:
    """Return whether the function's policy allows another attempt for a call that failed with
    `error`.

    It does not check the time left: `pause_s` does. An attempt in which user code raised is
    `errors.FunctionRaised`."""
    policy = call.target.spec.retries
    return policy is not None and call.retries < policy.max_retries and is_failure(error)


def is_failure(error: BaseException) -> bool:
    """Return whether another attempt could succeed: not after a refusal or an open breaker."""
    if isinstance(error, errors.DeadlineExceeded):
        return error.detail.get("clock") != "queue"  # it used up its queue time: a retry would, too
    if isinstance(error, errors.CircuitOpen):
        return False
    return isinstance(
        error,
        errors.WorkerCrashed
        | errors.StartFailed
        | errors.Unavailable
        | errors.FunctionRaised
        | errors.RemoteError
        | WorkerConnectionLost,
    )


def pause_s(call: TriedTargets, *, left_s: float, rng: random.Random) -> float | None:
    """Return the seconds to wait before the next attempt; None when the caller's deadline would
    have passed by then."""
    policy = call.target.spec.retries
    if policy is None:
        return None
    wait_s = delay_s(policy, call.retries + 1, rng)
    return wait_s if wait_s < left_s else None


BURST = 10.0
"""Capacity of a bucket, and its initial tokens."""
TRICKLE_PER_S = 0.1
"""Tokens added per second without calls."""
MAX_CALLERS = 16_384
"""Callers tracked; the least recently used is evicted first (and starts again with a full
bucket)."""


class CallerRetryBudget:
    """The retry bucket of one caller. Code that accepts a call increments `calls`. Owner: the event
    loop."""

    __slots__ = ("_at", "_seen", "_share", "_tokens", "calls")

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._tokens = BURST
        self._at = now
        self._seen = 0
        self.calls = 0

    def __repr__(self) -> str:
        return f"<CallerRetryBudget {self.calls} calls, {self._tokens:.1f} retries left>"

    def try_acquire(self, now: float) -> bool:
        """Take one retry; False when none is left."""
        earned = (self.calls - self._seen) * self._share + max(0.0, now - self._at) * TRICKLE_PER_S
        self._seen, self._at = self.calls, now
        self._tokens = min(BURST, self._tokens + earned)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RetryBudgets:
    """The retry buckets of all callers, by key id. Owner: the event loop."""

    def __init__(self, share: float) -> None:
        """`share`: retries per call, 0 to 1; 0 = no retries."""
        self._share = share
        self._tallies: OrderedDict[str, CallerRetryBudget] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RetryBudgets {len(self._tallies)} callers, {self._share:g} per call>"

    def for_caller(self, key_id: str, now: float) -> CallerRetryBudget:
        """Return the bucket of one caller. A stored reference may have been evicted after very many
        other callers; then it has no effect."""
        tally = self._tallies.get(key_id)
        if tally is None:
            tally = self._tallies[key_id] = CallerRetryBudget(self._share, now)
            if len(self._tallies) > MAX_CALLERS:
                self._tallies.popitem(last=False)
        else:
            self._tallies.move_to_end(key_id)
        return tally

    def try_acquire(self, key_id: str, now: float) -> bool:
        """Take one retry of this caller; False when it has none."""
        return self._share > 0 and self.for_caller(key_id, now).try_acquire(now)
