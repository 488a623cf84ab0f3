"""Who makes a call, and what follows from it for the call."""

from __future__ import annotations

from dataclasses import dataclass

from activator.fairness.queue_priority import DEFAULT_RANK, QueuePriority
from activator.routing.call_origin import CallOrigin


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of one call. Calls of one access grant share one for each priority.

    Attributes:
        key_id: of its key; "" = it has none.
        tenant: id of the tenant that calls another one's function; "" = the function's own. The
            function's tenant pays in either case.
        rank: its priority in queues.
        accepts_pickle: whether the function accepts pickles of it; a worker refuses a pickle
            without this.
        origin: the call of a function that makes the call; None = a caller outside does.
        customer: of the function's tenant, for which the call is made; "" = none was named.
    """

    key_id: str
    tenant: str = ""
    rank: QueuePriority = DEFAULT_RANK
    accepts_pickle: bool = False
    origin: CallOrigin | None = None
    customer: str = ""
