"""Why a process is gone, in one word and one sentence: pure functions of its wait status and what
we know beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

ENGINE_DIED = 71
"""Exit status of a worker whose engine died under it (EX_OSERR of sysexits.h;
`pilotlight.worker.engine.life`)."""


def reason(
    status: int | None,
    *,
    asked: str | None,
    oom_kills: int,
    lost: bool = False,
    engine: bool = False,
) -> str:
    """`stopped`, `killed`, `out_of_memory`, `engine_died`, `template_lost`, `slot_lost` or
    `exited`.

    `asked`: the word for an end that we asked for. `engine`: it is the worker of an engine.
    """
    if (
        asked == "stopped"
        and status is not None
        and os.WIFSIGNALED(status)
        and os.WTERMSIG(status) != signal.SIGTERM
    ):
        # it had died of something else before it could obey: whoever asks for a stop often does so
        # because of that
        asked = None
    if asked is not None:
        return asked
    if oom_kills:
        return "out_of_memory"
    if lost:
        return "template_lost"
    if status is None:
        return "slot_lost"
    if engine and os.WIFEXITED(status) and os.WEXITSTATUS(status) == ENGINE_DIED:
        return "engine_died"
    return "killed" if os.WIFSIGNALED(status) else "exited"


def sentence(subject: str, word: str, status: int | None, *, memory_bytes: int) -> str:
    """For people: what happened, to what, and what to do where something can be done."""
    if word == "out_of_memory":
        return (
            f"{subject} needed more than its {memory_bytes // 1024**2} MiB and was killed: "
            f"raise memory=, or use less"
        )
    if word == "template_lost":
        return f"{subject}: its Template ended before the fork"
    if word == "engine_died":
        return f"{subject}: its engine died; the last lines of its log say of what"
    if status is None:
        return f"{subject}: its slot is gone"
    if os.WIFSIGNALED(status):
        return f"{subject} was killed by {signal_name(status)}"
    return f"{subject} ended with exit status {os.waitstatus_to_exitcode(status)}"


def signal_name(status: int) -> str:
    """`SIGKILL` for a wait status that says so; `signal 40` for one without a name."""
    number = os.WTERMSIG(status)
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def detail(status: int | None) -> Mapping[str, Any]:
    """`exit_status` or `signal` for events and errors; neither when nobody knows."""
    if status is None:
        return {}
    if os.WIFSIGNALED(status):
        return {"signal": signal_name(status)}
    return {"exit_status": os.waitstatus_to_exitcode(status)}
