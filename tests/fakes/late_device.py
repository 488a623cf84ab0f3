"""A device that does everything as late as it may: bytes leave their source when somebody waits for
them, and not before.

Whoever touches a source too early, or looks at a tensor before `settle`, sees it here and not once
a month on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from weight_cache.errors import DeviceFailed
from weight_cache.tensors.pool import Pin


class LateDevice:
    """Memory of the host, filled late.

    Attributes:
        fails_after: transfers after which it is lost; None = never.
        sent_bytes, settled: what happened.
    """

    name = "late:0"

    def __init__(self, *, fails_after: int | None = None, pin: Pin | None = None) -> None:
        self.pin = pin
        self.fails_after = fails_after
        self.sent_bytes = 0
        self.settled = 0
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()

    def allocate(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """See Device; full of nonsense."""
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(0xA5)
        return tensor

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See Device; nothing is copied yet."""
        with self._lock:
            if self.fails_after is not None and self.fails_after <= 0:
                raise DeviceFailed("late:0 was lost")
            if self.fails_after is not None:
                self.fails_after -= 1
            assert source.dtype == target.dtype == torch.uint8
            assert source.shape == target.shape
            self._waiting.append((source, target))

    def mark(self) -> Callable[[], None]:
        """See Device: all that was sent until now, by whomever."""
        with self._lock:
            count = self.sent_bytes + sum(source.numel() for source, _ in self._waiting)
        return lambda: self._copy_until(count)

    def settle(self) -> None:
        """See Device."""
        self.settled += 1
        self._copy_until(1 << 62)

    def _copy_until(self, count: int) -> None:
        with self._lock:
            while self._waiting and self.sent_bytes < count:
                source, target = self._waiting.pop(0)
                target.copy_(source)
                self.sent_bytes += source.numel()
