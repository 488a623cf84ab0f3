"""The latest use of the node's GPUs by NVML: a helper process (`sampling`) prints it regularly.

What is not known is absent, never zero: without GPUs, without NVML, or while the helper does not
answer there are no samples."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pilotlight.core.backoff import Backoff
from snapshotter.gpus.sampling import GpuSample, parse

_log = logging.getLogger(__name__)

EVERY_S = 5.0
STALE_S = 20.0
"""A sample of this age is not used: four rounds, as a busy driver answers late."""
SILENT_S = 60.0
"""A helper that printed nothing for so long hangs, and is replaced. The first line takes seconds
for each GPU where the driver sleeps."""
_KILLED_S = 1.0
HELPER: Final = (sys.executable, "-m", "snapshotter.gpus.sampling")
NO_SAMPLES: Mapping[str, GpuSample] = {}


class GpuSampler:
    """Reads the helper's lines. Owner: the event loop; `run` it as a task."""

    def __init__(
        self,
        *,
        helper: Sequence[str] = HELPER,
        every_s: float = EVERY_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = (*helper, str(every_s))
        self._silent_s = silent_s
        self._clock = clock
        self._samples: Mapping[str, GpuSample] = NO_SAMPLES
        self._at = -STALE_S
        self._failure = ""

    def __repr__(self) -> str:
        return f"<GpuSampler {len(self.latest())} devices{self._failure and ': '}{self._failure}>"

    def latest(self) -> Mapping[str, GpuSample]:
        """The latest sample of each GPU and MIG instance, by UUID; none when the last round is
        older than STALE_S."""
        return self._samples if self._clock() - self._at < STALE_S else NO_SAMPLES

    async def run(self) -> None:
        """Sample until cancelled. A helper that ends or hangs is replaced, less and less often."""
        backoff = Backoff(first_s=1.0, max_s=300.0)
        while True:
            began = self._clock()
            reason = await self._follow()
            if self._at > began:
                backoff.reset()
            if reason != self._failure:
                self._failure = reason
                _log.warning("gpus.not_sampled reason=%s", reason)
            await backoff.pause()

    async def _follow(self) -> str:
        """Read a helper's lines until it ends; returns why."""
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as e:
            return f"the helper cannot be started: {e.strerror}"
        assert child.stdout is not None
        assert child.stderr is not None
        errors = asyncio.create_task(child.stderr.read(), name="errors of the GPU sampler")
        try:
            while True:
                async with asyncio.timeout(self._silent_s):
                    line = await child.stdout.readline()
                if not line:
                    text = (await errors).decode(errors="replace").strip()
                    return text[-200:] or f"the helper ended with status {await child.wait()}"
                self._samples, self._at, self._failure = parse(line), self._clock(), ""
        except TimeoutError:
            return f"no answer within {self._silent_s:g} s"
        except (ValueError, TypeError, KeyError) as e:
            return f"the helper printed what is no sample: {e}"
        finally:
            errors.cancel()
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            # one that is stuck in the driver does not die: it is not waited for
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _KILLED_S)
