"""Logs denied system calls of functions from the kernel's log: by function and number
(`snapshotter.log_refused_calls`).

The filter makes the kernel's audit record each denial (SECCOMP_FILTER_FLAG_LOG, seccomp(2)).
Without an audit daemon the records are lines of /dev/kmsg: `audit: type=1326 … uid=20001 … pid=77
comm="python3" … syscall=101 …`. A process is identified by its cgroup while it runs, otherwise by
its uid. Each call of each function is logged once a minute.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from snapshotter.shim.sandbox.isolation import ABSENT
from snapshotter.shim.sandbox.system_calls import ALLOWED, DENIED, MACHINES, numbers

KERNEL_LOG = Path("/dev/kmsg")
AGAIN_S = 60.0
_RECORD_BYTES = 8192
"""A read of /dev/kmsg returns one record, of at most this size."""
_REFUSED = re.compile(
    r"audit: type=1326 .*\buid=(?P<uid>\d+) .*\bpid=(?P<pid>\d+) .*\bsyscall=(?P<number>\d+) "
    r".*\bcode=0x5"
)
"""An action that returns an error (SECCOMP_RET_ERRNO)."""
_log = logging.getLogger(__name__)

FindLabels = Callable[[str], Mapping[str, str] | None]
"""Labels of the function whose group has one of these names (lines of /proc/<pid>/cgroup); None:
not one of ours."""


class SeccompLog:
    """Logs denied system calls. Owner: the event loop."""

    def __init__(
        self,
        find: FindLabels,
        *,
        machine: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find
        self._clock = clock
        machine = machine or os.uname().machine
        known = (
            {**numbers(ALLOWED, machine), **numbers(DENIED, machine)} if machine in MACHINES else {}
        )
        self._names = {number: name for name, number in {**known, **ABSENT}.items()}
        self._logged_at: dict[tuple[str, int], float] = {}

    async def watch(self, file: Path = KERNEL_LOG) -> None:
        """Watch until cancelled; returns after a warning if the kernel's log cannot be read."""
        loop = asyncio.get_running_loop()
        try:
            source = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            _log.warning("refused_calls.off reason=%s: %s", file, e.strerror)
            return
        try:
            os.lseek(source, 0, os.SEEK_END)
            while True:
                ready = loop.create_future()
                loop.add_reader(source, ready.set_result, None)
                try:
                    await ready
                finally:
                    loop.remove_reader(source)
                self._read(source)
        finally:
            os.close(source)

    def _read(self, source: int) -> None:
        while True:
            try:
                record = os.read(source, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # unread records were overwritten
                continue
            if not record:
                return
            self.on_record(record.decode(errors="replace"))

    def on_record(self, record: str) -> None:
        """Handle one record of the kernel's log."""
        match = _REFUSED.search(record)
        # libraries try these first and can do without
        if match is None or int(match["number"]) in ABSENT.values():
            return
        number, labels = int(match["number"]), self._labels_of(int(match["pid"]))
        function = (
            f"uid {match['uid']}"
            if labels is None
            else f"{labels.get('app')}/{labels.get('function')}"
        )
        now = self._clock()
        if now - self._logged_at.get((function, number), -AGAIN_S) >= AGAIN_S:
            self._logged_at = {
                key: at for key, at in self._logged_at.items() if now - at < AGAIN_S
            } | {(function, number): now}
            tenant = "" if labels is None else labels.get("tenant", "")
            _log.warning(
                "system_call.refused call=%s number=%d function=%s tenant=%s pid=%s",
                self._names.get(number, "unknown"),
                number,
                function,
                tenant,
                match["pid"],
            )

    def _labels_of(self, pid: int) -> Mapping[str, str] | None:
        try:
            return self._find(Path(f"/proc/{pid}/cgroup").read_text())
        except OSError:
            return None
