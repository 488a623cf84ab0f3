"""Why a process exited, as one word and one sentence: pure functions of its wait status and other
facts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

SERVER_DIED = 71
"""Exit status of a worker whose server crashed (EX_OSERR of sysexits.h;
`pilotlight.worker.engine.server_worker`)."""


def reason(
    status: int | None,
    *,
    requested: str | None,
    oom_kills: int,
    lost: bool = False,
    has_server: bool = False,
) -> str:
    """`stopped`, `killed`, `out_of_memory`, `server_died`, `template_lost`, `slot_lost` or
    `exited`.

    `requested`: the reason of an exit that was requested. `has_server`: the worker runs an engine
    or a web server of user code.
    """
    if (
        requested == "stopped"
        and status is not None
        and os.WIFSIGNALED(status)
        and os.WTERMSIG(status) != signal.SIGTERM
    ):
        # the process had crashed before the stop request: such a request is often a consequence of
        # the crash
        requested = None
    if requested is not None:
        return requested
    if oom_kills:
        return "out_of_memory"
    if lost:
        return "template_lost"
    if status is None:
        return "slot_lost"
    if has_server and os.WIFEXITED(status) and os.WEXITSTATUS(status) == SERVER_DIED:
        return "server_died"
    return "killed" if os.WIFSIGNALED(status) else "exited"


def sentence(subject: str, word: str, status: int | None, *, memory_bytes: int) -> str:
    """For people: what happened, to what, and the remedy if there is one."""
    if word == "out_of_memory":
        return (
            f"{subject} needed more than its {memory_bytes // 1024**2} MiB and was killed: "
            f"raise memory=, or reduce its memory use"
        )
    if word == "template_lost":
        return f"{subject}: its Template ended before the fork"
    if word == "server_died":
        return f"{subject}: its server exited; the last lines of its log show why"
    if status is None:
        return f"{subject}: its slot was lost"
    if os.WIFSIGNALED(status):
        return f"{subject} was killed by {signal_name(status)}"
    return f"{subject} ended with exit status {os.waitstatus_to_exitcode(status)}"


def signal_name(status: int) -> str:
    """`SIGKILL` for such a wait status; `signal 40` for a signal without a name."""
    number = os.WTERMSIG(status)
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def detail(status: int | None) -> Mapping[str, Any]:
    """`exit_status` or `signal` for events and errors; empty if the status is unknown."""
    if status is None:
        return {}
    if os.WIFSIGNALED(status):
        return {"signal": signal_name(status)}
    return {"exit_status": os.waitstatus_to_exitcode(status)}
