"""What fails in a drill on this machine: a process of the platform, its routes, or a service that
it uses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pilotlight.errors import Conflict, InvalidInput, PilotlightError

COMMAND_S = 120.0
"""Longest that a command of the operator's may take."""
ROUTES = "activator/*/routes.ndjson"
"""Activators' copies of the routes, in the home. Elsewhere in it are files of tenants."""
_RUBBISH = b'{"seq": "these are no routes"}\n'


class FaultFailed(PilotlightError):
    """Raised when the fault itself could not be made or undone."""

    type = "drill-failed"
    status = 500


class Fault(ABC):
    """Something that fails. The methods may block; they are called in this order, `end` and `close`
    in any case.

    Attributes:
        summary: what it does, as a predicate: `kills the controller`.
        holds: whether it lasts until `end`."""

    holds: ClassVar[bool] = False

    @property
    @abstractmethod
    def summary(self) -> str:
        """What it does."""

    @abstractmethod
    def prepare(self) -> None:
        """Do what the fault needs and what is not part of it. Raises PilotlightError."""

    @abstractmethod
    def begin(self) -> None:
        """Make it fail. Raises FaultFailed."""

    def end(self) -> None:  # noqa: B027 - most faults end by themselves
        """Undo what does not recover by itself. Idempotent. Raises FaultFailed."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether what failed is back."""

    def findings(self) -> list[str]:
        """What else went wrong, a sentence each."""
        return []

    def close(self) -> None:  # noqa: B027
        """Remove what `prepare` made."""


def read_pid(file: Path) -> int:
    """The pid in a process's file; 0 while it is down."""
    try:
        return int(file.read_text().split()[0])
    except (FileNotFoundError, ValueError, IndexError):
        return 0


@dataclass(slots=True, kw_only=True)
class ProcessKill(Fault):
    """A process of the platform is killed with SIGKILL; its supervisor starts it again.

    Attributes:
        process: name, as in `pilotlight status`.
        run: the platform's run directory.
    """

    process: str
    run: Path
    _killed: int = 0

    @property
    def summary(self) -> str:
        """What it does."""
        return f"kills the {self.process} (kill -9)"

    def prepare(self) -> None:
        """Raises Conflict where the process does not run."""
        if not read_pid(self._file):
            raise Conflict(
                f"the {self.process} is not running", hint="See `pilotlight status` and its log."
            )

    def begin(self) -> None:
        """Kill it."""
        pid = read_pid(self._file)
        try:
            os.kill(pid, signal.SIGKILL)
        except (PermissionError, ProcessLookupError) as e:
            raise FaultFailed(
                f"cannot kill the {self.process} (process {pid}): {e.strerror}",
                hint="Run the drill as the user who runs the platform.",
            ) from e
        self._killed = pid

    def is_over(self) -> bool:
        """Whether another process serves in its place."""
        return read_pid(self._file) not in (0, self._killed)

    @property
    def _file(self) -> Path:
        return self.run / f"{self.process}.pid"


@dataclass(slots=True, kw_only=True)
class BadRoutes(ProcessKill):
    """The activator's routes on disk become unreadable, and it is killed: it must get all of them
    from the controller again. `home`: the platform's."""

    process: str = "activator"
    home: Path

    @property
    def summary(self) -> str:
        """What it does."""
        return "overwrites the activator's routes on disk and kills it (kill -9)"

    def begin(self) -> None:
        """Overwrite the beginning of the file in place, then kill."""
        files = sorted(self.home.glob(ROUTES))
        if not files:
            raise FaultFailed(f"no {ROUTES} below {self.home}", hint="Deploy an app first.")
        for file in files:
            with contextlib.ExitStack() as stack:
                try:
                    descriptor = os.open(
                        file, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    )
                except OSError as e:
                    raise FaultFailed(
                        f"cannot write {file}: {e.strerror}",
                        hint="Run the drill as the user who runs the platform.",
                    ) from e
                stack.callback(os.close, descriptor)
                os.pwrite(descriptor, _RUBBISH, 0)
        ProcessKill.begin(self)


@dataclass(slots=True, kw_only=True)
class ServiceStop(Fault):
    """A service that the platform uses is stopped by the operator's command, and started, or
    replaced by its standby, by another.

    Attributes:
        service: its name, for the report.
        stop, start: commands for `sh -c`.
    """

    holds: ClassVar[bool] = True

    service: str
    stop: str
    start: str
    _is_down: bool = field(default=False)

    @property
    def summary(self) -> str:
        """What it does."""
        return f"stops {self.service} with `{self.stop}`, then runs `{self.start}`"

    def prepare(self) -> None:
        """Raises InvalidInput without commands."""
        if not self.stop or not self.start:
            raise InvalidInput(
                f"the drill {self.service} needs --stop and --start",
                hint=f"Such as --stop 'systemctl stop {self.service}' "
                f"--start 'systemctl start {self.service}'; for a standby, --start promotes it.",
            )

    def begin(self) -> None:
        """Stop it."""
        self._is_down = True
        _run(self.stop)

    def end(self) -> None:
        """Start it."""
        if self._is_down:
            _run(self.start)
            self._is_down = False

    def is_over(self) -> bool:
        """Whether `end` was called; the calls show the rest."""
        return not self._is_down


def _run(command: str) -> None:
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise FaultFailed(f"`{command}` has not ended within {COMMAND_S:.0f} s") from e
    if done.returncode:
        raise FaultFailed(
            f"`{command}` ended with status {done.returncode}: {done.stderr.strip()[-500:]}"
        )
