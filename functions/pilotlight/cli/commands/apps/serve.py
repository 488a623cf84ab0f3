"""`pilotlight serve`: deploys an app again whenever a source file changes, without importing the
packages that it uses each time.

A child process of `serve` imports the app once, and waits. For each deploy it forks: the fork
forgets the modules of the app's directory, and runs `pilotlight deploy`, which imports them anew.
What else a deploy has imported, the child imports for the next one. A deploy that is still running
is ended by the next one: its code is out of date. The child has one thread, since a fork takes one
along; should it not start, or end, each deploy is a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import typer

from pilotlight.cli.commands.apps.deploy import File
from pilotlight.cli.commands.apps.deploy_progress import load_user_app
from pilotlight.cli.core.command import command, ended_by_signals
from pilotlight.cli.core.session import Session

_GO = b"d"
_NOT_OURS = frozenset({"site-packages", "dist-packages"})
_END_S = 5.0


def register(root: typer.Typer) -> None:
    """Add the command."""
    command(root, "serve")(serve)


def serve(session: Session, *, file: File) -> None:
    """Deploy an app as APP-serve, redeploy it when a source file changes, and remove it on Ctrl-C.

    A deploy ends when the new code has started; its snapshot follows in the background. A file that
    is saved meanwhile supersedes it. Changes that break callers are accepted.
    """
    from watchfiles import Change, DefaultFilter, watch

    from pilotlight.client.app_lease import LEASE_S, AppLease
    from pilotlight.packaging.ignore import is_in_platform_home

    by_default = DefaultFilter()

    def is_source(change: Change, path: str) -> bool:
        return by_default(change, path) and not is_in_platform_home(Path(path), root)

    app = load_user_app(file)
    root = Path(file.partition("::")[0]).resolve().parent
    name = f"{app.name}-serve"
    argv = [
        *_as_words(session),
        "deploy",
        file,
        "--name",
        name,
        "--message",
        "serve",
    ]
    argv += ["--no-proof"]  # the next change may come sooner
    argv += ["--allow-breaking"]  # its only caller is its developer
    argv += ["--lease", f"{LEASE_S:.0f}s"]  # it ends with this process, also when that is killed

    def on_done(status: int) -> None:
        session.say(
            f"serving {name}; watching {root}; stop with Ctrl-C"
            if status == 0
            else "deploy failed; waiting for the next change"
        )

    with (
        Redeployer(file, root, argv, on_done) as redeployer,
        ended_by_signals(),
        session.client() as client,
    ):
        lease = AppLease(client, name, on_lost=lambda: _explain_lost(session, name))
        try:
            lease.start()
            # In another process, because this one cannot import a changed module again.
            redeployer.deploy()
            for _ in watch(root, watch_filter=is_source, raise_interrupt=True):
                session.say("source changed: deploying again")
                redeployer.deploy()
        finally:
            redeployer.close()  # it would deploy what is removed here
            lease.close()
            with contextlib.suppress(OSError):  # the terminal was closed
                session.say(f"removing {name}")
            client.delete_app(name)


def _explain_lost(session: Session, name: str) -> None:
    session.say(
        f"{name} was deleted: its lease was not renewed in time, or somebody deleted it; save a "
        "file to deploy it again"
    )


def _as_words(session: Session) -> list[str]:
    options = session.options
    named: Mapping[str, Any] = {
        "--profile": options.profile,
        "--profile-file": options.profile_file,
        "--environment": options.environment,
    }
    return [word for flag, value in named.items() if value for word in (flag, str(value))]


class Redeployer:
    """Runs `pilotlight` with `arguments` whenever it is called. Use as a context manager."""

    def __init__(
        self, file: str, root: Path, arguments: Sequence[str], on_done: Callable[[int], None]
    ) -> None:
        """`file`: of the app; `root`: the directory whose modules change. `on_done` receives the
        exit status of each deploy that was not superseded, in a thread."""
        self._arguments = list(arguments)
        self._on_done = on_done
        orders, self._orders = os.pipe()
        self._results, results = os.pipe()
        command = [sys.executable, "-m", __name__, str(orders), str(results), file, str(root)]
        self._child = subprocess.Popen(
            [*command, *arguments], pass_fds=(orders, results), stdin=subprocess.DEVNULL
        )
        os.close(orders)
        os.close(results)
        self._is_running = self._is_closed = False
        self._reader = threading.Thread(target=self._read, name="deploys", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<Redeployer pid {self._child.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the deploy that runs, and begin no other one. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._orders)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(2 * _END_S)
        self._child.kill()
        self._child.wait()
        self._reader.join()
        os.close(self._results)

    def deploy(self) -> None:
        """Begin a deploy, in place of one that is still running."""
        self._is_running = True
        try:
            os.write(self._orders, _GO)
        except BrokenPipeError:
            self._deploy_alone()

    def _read(self) -> None:
        while status := os.read(self._results, 1):
            self._is_running = False
            self._on_done(status[0])
        if self._is_running and not self._is_closed:
            self._deploy_alone()

    def _deploy_alone(self) -> None:
        self._is_running = False
        command = [sys.executable, "-m", "pilotlight", *self._arguments]
        self._on_done(subprocess.run(command, check=False).returncode)


def unload_modules(root: Path) -> None:
    """Forget the modules below `root` that do not belong to an environment there, so that they are
    imported anew."""
    inside = os.path.join(root, "")
    for name, module in list(sys.modules.items()):
        file = str(getattr(module, "__file__", None) or "")
        if file.startswith(inside) and _NOT_OURS.isdisjoint(Path(file).parts):
            del sys.modules[name]
    importlib.invalidate_caches()


def _run_child(orders: int, results: int, file: str, root: Path, arguments: list[str]) -> None:
    from pilotlight.cli import main as command_line
    from pilotlight.packaging.app_loader import load_app

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends `serve`, which closes the pipe
    with contextlib.suppress(Exception):  # the deploy reports what is wrong with the file
        load_app(file)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # a fork would write what is buffered again
    running: _Fork | None = None
    while True:
        ready, _, _ = select.select([orders, *([running.pidfd] if running else [])], [], [])
        if running is not None and running.pidfd in ready:
            os.write(results, bytes([running.end()]))
            running.import_modules()
            running = None
        elif orders in ready:
            is_open = os.read(orders, 4096)  # several orders are one deploy
            if running is not None:
                running.terminate()
            if not is_open:
                return
            running = _Fork()
            if running.pid == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.close(orders)
                os.close(results)
                unload_modules(root)
                sys.argv = ["pilotlight", *arguments]
                try:
                    command_line.main()
                finally:
                    running.send_modules(but=root)


class _Fork:
    """One deploy; `pid` is 0 in the child."""

    def __init__(self) -> None:
        self._before = frozenset(sys.modules)
        self._names = os.memfd_create("modules")
        self.pid = os.fork()
        self.pidfd = os.pidfd_open(self.pid) if self.pid else -1

    def send_modules(self, *, but: Path) -> None:
        """In the child: leave the names of the modules that it has imported."""
        unload_modules(but)
        os.write(self._names, " ".join(sys.modules.keys() - self._before).encode())

    def import_modules(self) -> None:
        """Import the modules that it has left the names of."""
        with open(self._names, "rb") as file:
            file.seek(0)
            for name in file.read().decode().split():
                with contextlib.suppress(Exception):  # the deploy reports what is wrong
                    importlib.import_module(name)

    def terminate(self) -> None:
        """End it, by force if it does not end itself."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)
        if not select.select([self.pidfd], [], [], _END_S)[0]:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.end()
        os.close(self._names)

    def end(self) -> int:
        """Wait for it; returns the exit status as one byte."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    _run_child(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
