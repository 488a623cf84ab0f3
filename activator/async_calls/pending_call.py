"""A submitted call that is pending here, and what it has streamed."""

from __future__ import annotations

import asyncio

from activator.balancing.instance import Instance
from activator.calls.call import Call
from pilotlight.protocol import CallRecord


class StreamBuffer:
    """Output that one attempt has streamed so far. It only grows; each reader has its own position
    in it.

    Attributes:
        data: the result's bytes.
    """

    __slots__ = ("attempt", "content_type", "data")

    def __init__(self, attempt: int, content_type: str) -> None:
        self.attempt = attempt
        self.content_type = content_type
        self.data = bytearray()

    def __repr__(self) -> str:
        return f"<StreamBuffer of attempt {self.attempt}, {len(self.data)} bytes>"


class PendingCall:
    """One submitted call that has not been shipped to its end.

    Attributes:
        task: the task that runs it; None = it has not begun, or has ended.
        is_uncounted: whether its first attempt must count as a request of its key's quotas, because
            the control plane queued it and nothing has counted it yet.
        needs_tokens: whether its tokens must be counted before its first attempt: the control plane
            queued a call of a language model.
        is_patient: whether it waits for capacity until `retry_until`, not only for its function's
            queue time: a line of a batch.
        changed: set at the next change of `record`, and when more of its result has arrived.
        retry_until: wall clock after which it is not retried.
        call: the call, once it was begun.
        instance: where its attempt runs, or ran; None before it.
        log: streamed output of its current or last attempt; None = none, or it has ended.
        size: bytes of its body, or of its result once it has ended.
    """

    __slots__ = (
        "call",
        "changed",
        "instance",
        "is_patient",
        "is_uncounted",
        "log",
        "needs_tokens",
        "record",
        "retry_until",
        "size",
        "task",
    )

    def __init__(self, record: CallRecord, size: int = 0) -> None:
        self.record = record
        self.size = size
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self.retry_until = record.expires_at
        self.is_uncounted = False
        self.needs_tokens = False
        self.is_patient = False
        self.call: Call | None = None
        self.instance: Instance | None = None
        self.log: StreamBuffer | None = None

    def opened(self, instance: Instance) -> None:
        """Its attempt has opened its record (`Call.on_open`)."""
        self.instance = instance
        self.notify()

    @property
    def running_on(self) -> Instance | None:
        """The instance on which its attempt runs; None where none does."""
        instance = self.instance
        return instance if instance is not None and self.record.id in instance.running else None

    def notify(self) -> None:
        """Wake the tasks that wait for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()

    def begin_log(self, attempt: int, content_type: str) -> StreamBuffer:
        """Start the buffer of an attempt whose response streams."""
        self.log = StreamBuffer(attempt, content_type)
        self.notify()
        return self.log

    def __repr__(self) -> str:
        return f"<PendingCall {self.record.id} {self.record.state}>"
