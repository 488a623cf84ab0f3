"""Whether a failed call is tried again, and after how long. Pure.

A function that declares `retries=` consents to its calls being run more than once. Even so nothing
is tried again after its first streamed byte, past its deadline, or when what failed is not a
failure: a refusal (4xx), a breaker that is open, a spent budget."""

from __future__ import annotations

import random
from typing import Protocol

from activator.worker_client.connection import WorkerConnectionLost
from pilotlight import errors
from pilotlight.policies import RetryPolicy
from pilotlight.spec import FunctionSpec


class TriedTarget(Protocol):
    """What was called."""

    @property
    def spec(self) -> FunctionSpec:
        """Its declaration, with its retries."""
        ...


class Tried(Protocol):
    """A call that failed (`dispatch.Call`).

    Attributes:
        retries: how often it was tried again by its policy so far.
    """

    retries: int

    @property
    def target(self) -> TriedTarget:
        """What was called."""
        ...


def delay_s(policy: RetryPolicy, attempt: int, rng: random.Random) -> float:
    """Seconds before retry number `attempt`, from 1: exponential, capped, and drawn down by the
    policy's jitter (0 to 1)."""
    exponent = min(attempt - 1, 1023)  # beyond is no float
    try:
        whole_s = min(
            policy.max_delay_s, policy.initial_delay_s * policy.backoff_coefficient**exponent
        )
    except OverflowError:
        whole_s = policy.max_delay_s
    return whole_s * (1 - policy.jitter * rng.random())


def may_retry(error: BaseException, call: Tried) -> bool:
    """Whether the function's policy has a further attempt for a call that failed with `error`.

    Says nothing of time: `pause_s` does. An attempt that user code failed is
    `errors.FunctionRaised`."""
    policy = call.target.spec.retries
    return policy is not None and call.retries < policy.max_retries and is_failure(error)


def is_failure(error: BaseException) -> bool:
    """Whether another attempt could end otherwise: not a refusal, and not a breaker's word."""
    if isinstance(error, errors.DeadlineExceeded):
        return error.detail.get("clock") != "queue"  # it waited as long as it may: it would again
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


def pause_s(call: Tried, *, left_s: float, rng: random.Random) -> float | None:
    """Seconds to wait before the next attempt; None when nothing would be left of the caller's
    deadline then."""
    policy = call.target.spec.retries
    if policy is None:
        return None
    wait_s = delay_s(policy, call.retries + 1, rng)
    return wait_s if wait_s < left_s else None
