"""Whether and when a failed call is retried. Pure functions.

A function that declares `retries=` allows its calls to run more than once. Calls are still not
retried after the first streamed byte, past their deadline, or when the error is not a failure: a
refusal (4xx), an open breaker, a spent budget."""

from __future__ import annotations

import random
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
        ...


class TriedTargets(Protocol):
    """A call that failed (`calls.call.Call`).

    Attributes:
        retries: number of retries so far by its policy.
    """

    retries: int

    @property
    def target(self) -> TriedTarget:
        """The target of the call."""
        ...


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
