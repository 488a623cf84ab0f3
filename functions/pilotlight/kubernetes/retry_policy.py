"""Decides which failed calls are retried, and after which delay. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.kubernetes.errors import (
    ClusterError,
    ClusterUnreachable,
    Conflict,
    Forbidden,
    Invalid,
    WebhookDown,
)

_IDEMPOTENT = frozenset({"get", "list", "watch", "patch", "update", "delete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDelays:
    """Delays between attempts: exponential, capped, with jitter between a half and the whole.

    Attributes:
        first_s: upper limit of the first delay.
        most_s: upper limit of all delays.
        attempts: maximum number per call, including the first.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    attempts: int = 6

    def pause_s(self, attempt: int, *, chance: float, retry_after_s: float | None = None) -> float:
        """Seconds before attempt `attempt + 1`.

        Args:
            attempt: the one that failed, from 1.
            chance: uniform in [0, 1).
            retry_after_s: minimum delay that the server requests; up to a quarter is added, so that
                clients do not retry at once.
        """
        whole_s = min(self.most_s, self.first_s * float(2 ** min(attempt - 1, 30)))
        own_s = whole_s * (0.5 + chance / 2)
        return own_s if retry_after_s is None else max(own_s, retry_after_s * (1 + chance / 4))


def is_retryable(
    error: ClusterError, *, verb: str, is_conditional: bool, was_away: bool = False
) -> bool:
    """Whether the same call may succeed later, and is safe if the first one was carried out.

    Args:
        verb: RBAC verb.
        is_conditional: whether it has a resourceVersion, or must not take over fields of other
            managers: a conflict is then a final answer.
        was_away: whether the API server did not answer a moment ago: one that has just started
            refuses everybody until it has read the roles.
    """
    if isinstance(error, Invalid):
        return False  # of apply with status 500
    if isinstance(error, Forbidden):
        return was_away
    if isinstance(error, ClusterUnreachable):
        return verb in _IDEMPOTENT or not error.sent
    if isinstance(error, Conflict):
        return verb == "patch" and not is_conditional and error.reason != "AlreadyExists"
    if isinstance(error, WebhookDown):
        return True  # refused before anything was written
    if error.status == 429 or (error.status == 503 and error.retry_after_s is not None):
        return True  # refused before it was processed
    return error.status >= 500 and verb in _IDEMPOTENT
