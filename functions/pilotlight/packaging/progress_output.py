"""Shows on stderr what happens while a caller waits: the steps of a deploy and a start, and the
lines that the functions of an ephemeral app print.

In a terminal the current step is a status line below the output; in a pipe each step is a line.
Results are never printed here, so stdout stays free for them. With JSON each line of output is an
object `{"log": {…}}`, and steps are left out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

from pilotlight.client import sessions
from pilotlight.errors import PilotlightError
from pilotlight.packaging.progress import IMAGE, NOTICE, ProgressEvent

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

    from pilotlight.profile import Profile

T = TypeVar("T")

_RETRY_BUDGET_S = 5.0
_RECONNECT_S = 0.5
_LATE_S = 5.0
"""How long before the newest line a line may have been written that did not arrive yet: instances
write to logs of their own."""
_MIB = 1024**2


_is_enabled = False
"""Set by `enable_output`, for this process."""


@contextlib.contextmanager
def enable_output() -> Iterator[None]:
    """Print the steps of `app.deploy()` to stderr in this `with` block. Those of `app.run()`, and
    what the app's functions print, are shown without it."""
    global _is_enabled
    before, _is_enabled = _is_enabled, True
    try:
        yield
    finally:
        _is_enabled = before


def is_output_enabled() -> bool:
    """Whether this process is in a block of `enable_output`."""
    return _is_enabled


class ProgressOutput:
    """Prints steps and log lines. `step`, `progress` and `close` belong to the caller's thread; log
    lines are printed in the thread of `sessions.background_loop`, which the console permits."""

    def __init__(self, file: IO[str] | None = None, *, is_json: bool = False) -> None:
        """`file`: by default stderr."""
        from pilotlight.core.terminal import terminal_of

        self._console = terminal_of(file or sys.stderr)
        self._is_json = is_json
        self._live: Live | None = None
        self._status = _Status()
        self._shown: set[str] = set()
        self._app = ""
        self._reader: asyncio.Task[None] | None = None
        self._last: dict[str, tuple[float, int]] = {}
        """By instance: the time of its last printed line, and the number of lines of that time."""

    def __repr__(self) -> str:
        return f"<ProgressOutput {self._app or 'without logs'}>"

    # -- steps -------------------------------------------------------------------------------------
    def step(self, text: str) -> None:
        """Show what happens now. In a pipe a step that was shown is not repeated."""
        if self._console.is_terminal and not self._is_json:
            self._show_status(text)
        elif text not in self._shown:
            self._shown.add(text)
            self._print_line(text)

    def progress(self, event: ProgressEvent) -> None:
        """Show a step of a deploy (`pilotlight.packaging.progress.Progress`)."""
        if event.stage == NOTICE:
            self._print_line(event.text)
        elif event.stage == IMAGE and not self._console.is_terminal:
            self._print_line(f"image: {event.text}")  # output of the build, which may repeat itself
        elif event.stage == IMAGE:
            self.step(f"image: {event.text}")
        elif not event.total_bytes:
            self.step(event.text)
        elif self._console.is_terminal:
            self.step(f"{event.text} {event.done_bytes * 100 // event.total_bytes} %")
        else:  # one line for each stage instead of one for each piece
            self.step(f"{event.stage}: {_size(event.total_bytes)}")

    def _print_line(self, text: str) -> None:
        if not self._is_json:
            self._console.print(text, markup=False, soft_wrap=True)

    def clear(self) -> None:
        """Remove the status line: the caller prints to stdout now."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_status(self, text: str) -> None:
        from rich.live import Live

        self._status.set(text)
        if self._live is None:
            # without redirection: it would send stdout, the result, to stderr
            self._live = Live(
                self._status,
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    # -- log lines ---------------------------------------------------------------------------------
    def follow(self, app: str) -> None:
        """Print the log lines of an app with the current profile as they arrive, until `close`."""
        self._app, profile = app, sessions.current_profile()

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(self._read(profile), name=f"output of {app}")

        self._reader = _in_background(start())

    async def _read(self, profile: Profile) -> None:
        from pilotlight.client.async_client import AsyncClient

        async with AsyncClient(profile, retry_budget_s=_RETRY_BUDGET_S) as client:
            try:
                while True:  # proxies end a log that is silent for minutes
                    is_new = self._position()
                    async for line in client.follow_logs(self._app, since=self._since()):
                        if is_new(line):
                            self._print(line)
                    await asyncio.sleep(_RECONNECT_S)
            except PilotlightError as e:
                self._print_line(f"the output of {self._app} is shown at its end only: {e}")
            except OSError:
                return  # nothing can be shown: stderr is closed

    def close(self) -> None:
        """Print the lines that have not arrived yet, and stop."""
        import httpx

        reader, self._reader = self._reader, None
        if reader is not None:
            _in_background(_stop(reader))
            with contextlib.suppress(PilotlightError, httpx.TransportError, OSError):
                is_new = self._position()
                for line in sessions.client().logs(app=self._app, since=self._since()):
                    if is_new(line):
                        self._print(line)
        self.clear()

    def _since(self) -> float | None:
        """From when on lines may be new; None = from the first one."""
        times = [at for at, _ in self._last.values()]
        return max(times) - _LATE_S if times else None

    def _position(self) -> Callable[[Mapping[str, Any]], bool]:
        """A predicate of the lines of one more request: whether a line was not printed by an
        earlier one. The lines of an instance are in the order of their times."""
        before, seen = dict(self._last), Counter[str]()

        def is_new(line: Mapping[str, Any]) -> bool:
            instance, at = _origin(line)
            last, count = before.get(instance, (-1.0, 0))
            seen[instance] += at == last
            return at > last or (at == last and seen[instance] > count)

        return is_new

    def _print(self, line: Mapping[str, Any]) -> None:
        from pilotlight.core.terminal import program_output

        instance, at = _origin(line)
        last, count = self._last.get(instance, (-1.0, 0))
        self._last[instance] = (at, count + 1 if at == last else 1)
        if self._is_json:
            self._console.file.write(json.dumps({"log": line}, ensure_ascii=False) + "\n")
            self._console.file.flush()
        else:
            self._console.print(program_output(line), soft_wrap=True)


def _origin(line: Mapping[str, Any]) -> tuple[str, float]:
    """The instance and the time of a log line."""
    return str(line.get("instance", "")), float(line.get("time") or 0)


class _Status:
    """The current step with the seconds that it has taken, drawn again by `Live`."""

    def __init__(self) -> None:
        self._text = ""
        self._began = 0.0
        self._spinner: Spinner | None = None

    def set(self, text: str) -> None:
        """Show this step; the seconds of the same step go on."""
        if text != self._text:
            self._text, self._began = text, time.monotonic()

    def __rich__(self) -> Spinner:
        from rich.spinner import Spinner
        from rich.text import Text

        seconds = int(time.monotonic() - self._began)
        text = f"{self._text} ({seconds} s)" if seconds else self._text
        shown = Text(text, no_wrap=True, overflow="ellipsis")
        if self._spinner is None:
            self._spinner = Spinner("dots", text=shown)
        self._spinner.update(text=shown)
        return self._spinner


def _size(count: int) -> str:
    return f"{count / _MIB:,.1f} MiB" if count >= _MIB else f"{-(-count // 1024)} KiB"


def _in_background(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, sessions.background_loop()).result()


async def _stop(reader: asyncio.Task[None]) -> None:
    """Cancel and wait until its connection is closed."""
    reader.cancel()
    await asyncio.wait([reader])
