"""What must happen to the devices of a process tree before it is dumped, and after it was restored: a seam for accelerators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DevicesRefused(Exception):
    """Raised when what a process holds on a device cannot be saved or brought back; the message says what, and what would help."""


class Devices(Protocol):
    """Pids are those of the agent's own PID namespace, parents first.

    A function that asks for no accelerator never gets here.
    """

    async def before_dump(self, pids: Sequence[int]) -> None:
        """Take everything off the devices; the processes are still running. Raises DevicesRefused, with the processes as they were."""
        ...

    async def dump_failed(self, pids: Sequence[int]) -> None:
        """Put everything back: the processes go on."""
        ...

    async def after_restore(self, pids: Sequence[int]) -> None:
        """Put everything back onto the devices of this node. Raises DevicesRefused."""
        ...


class NoDevices:
    """For nodes without accelerators: whoever asks for one is refused before anything is touched."""

    async def before_dump(self, pids: Sequence[int]) -> None:
        """Always refused."""
        raise DevicesRefused("this node cannot save what a process holds on a GPU: `pilotlight doctor` says why")

    async def dump_failed(self, pids: Sequence[int]) -> None:
        """Nothing was done."""

    async def after_restore(self, pids: Sequence[int]) -> None:
        """Always refused."""
        raise DevicesRefused("this node cannot bring back what a process held on a GPU: `pilotlight doctor` says why")
