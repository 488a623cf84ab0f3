"""Which refused calls are made again, and after how long. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pilotlight.kubernetes.errors import ClusterError, ClusterUnreachable, Conflict, WebhookDown

_IDEMPOTENT = frozenset({"get", "list", "watch", "patch", "update", "delete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDelays:
    """Pauses between attempts: exponential, full jitter above a half, capped.

    Attributes:
        first_s: the longest first pause.
        most_s: the longest pause at all.
        attempts: of one call, the first included.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    attempts: int = 6

    def pause_s(self, attempt: int, *, chance: float, retry_after_s: float | None = None) -> float:
        """Seconds before attempt `attempt + 1`.

        Args:
            attempt: the one that failed, from 1. chance: uniform in [0, 1). retry_after_s: what the
            server asks for: waited at least, and up to a quarter longer, so that not all come at
            once.
        """
        whole_s = min(self.most_s, self.first_s * float(2 ** min(attempt - 1, 30)))
        own_s = whole_s * (0.5 + chance / 2)
        return own_s if retry_after_s is None else max(own_s, retry_after_s * (1 + chance / 4))


def is_retryable(error: ClusterError, *, verb: str, is_conditional: bool) -> bool:
    """Whether the same call may succeed later, and does no harm if the first one was carried out
    after all.

    Args:
        verb: of RBAC. is_conditional: it names a resourceVersion, or must not take fields from
        others: a conflict is an answer, not an accident.
    """
    if isinstance(error, ClusterUnreachable):
        return verb in _IDEMPOTENT or not error.sent
    if isinstance(error, Conflict):
        return verb == "patch" and not is_conditional and error.reason != "AlreadyExists"
    if isinstance(error, WebhookDown):
        return True  # refused before anything was written
    if error.status == 429 or (error.status == 503 and error.retry_after_s is not None):
        return True  # turned away at the door
    return error.status >= 500 and verb in _IDEMPOTENT
