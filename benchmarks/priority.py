"""Who goes before whom on the CPU, for processes that stand for another machine.

Linux groups processes by session (sched(7), "autogroup"): niceness counts only between the
processes of one session, and the sessions share the CPU alike unless each group has a niceness of
its own. Both are set here; without autogroup the first is enough."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.programs import program

BEFORE_OTHERS, AFTER_OTHERS = -10, 10


def started(command: list[str], *, niceness: int, **more: Any) -> subprocess.Popen[bytes]:
    """A process in a session of its own, with that niceness; what would go before others goes as
    others do where we are not root."""
    allowed = niceness if os.geteuid() == 0 else max(0, niceness)
    process = subprocess.Popen(
        [program("nice"), "-n", str(allowed), *command], start_new_session=True, **more
    )
    # a kernel without autogroup; or it ended at once, which its user will notice
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/autogroup").write_text(str(allowed))
    return process
