"""Runs a platform under one supervisor, in the terminal or detached from it.

The detached form is `python -m pilotlight.cli.supervisor.run_platform --config FILE --home DIR
--notices-fd N`. It writes each notice as a JSON line to the descriptor, and last `{"kind": "up"}`
or `{"kind": "refused", …}`, so that `pilotlight up --detach` can print them and return."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pilotlight.cli.supervisor.child import ProcessFailed
from pilotlight.cli.supervisor.local_platform import (
    HomeLock,
    LocalPlatform,
    activator_count,
    find_platform,
)
from pilotlight.cli.supervisor.process_log import ProcessLog
from pilotlight.cli.supervisor.supervisor import (
    Announce,
    Notice,
    Supervisor,
    platform_processes,
    stop_on_signals,
    stop_orphans,
)
from pilotlight.core.logging_config import escape_control_characters
from pilotlight.core.transport.public_listener import (
    AddressInUse,
    open_functions_socket,
    reserve_addresses,
)
from pilotlight.errors import Conflict, PilotlightError


async def supervise(
    platform: LocalPlatform, *, announce: Announce, started: Callable[[], None]
) -> None:
    """Run the four processes until a stop signal arrives. Raises Conflict (already running) or
    ProcessFailed."""
    lock = HomeLock(platform)
    lock.acquire()
    held: list[socket.socket] = []
    try:
        count, run = activator_count(platform.config), platform.paths.make().run
        # one that still finishes its calls has the address
        await stop_orphans(
            platform_processes(platform.config, activators=count), run=run, announce=announce
        )
        held += _hold(platform.listen)
        held.append(shared := open_functions_socket(platform.paths.socket_for_functions))
        processes = platform_processes(
            platform.config, activators=count, listen=platform.listen, listen_fds=(shared.fileno(),)
        )
        supervisor = Supervisor(processes, run=run, logs=platform.logs, announce=announce)
        with stop_on_signals(supervisor):
            await supervisor.run(started=started)
    finally:
        for each in held:
            each.close()
        lock.release()


def _hold(listen: str) -> list[socket.socket]:
    """Reserve the public address while the platform is up, so that no other process can take it
    while activators restart."""
    try:
        return reserve_addresses(listen)
    except AddressInUse as e:
        hint = (
            "Stop the process that listens there (another platform?), or choose another address: "
            "`pilotlight up --listen 127.0.0.1:PORT`."
        )
        raise Conflict(f"cannot listen on {e.strerror}", hint=hint) from e


def prepare_home(platform: LocalPlatform) -> str | None:
    """Create the home, the platform key and, in a new home, the first admin key. Return the admin
    key, or None if keys exist and one was saved.

    The database has only the key's hash, so its text stays in the home until it is in a profile: a
    start that fails after this does not lose it."""
    from pilotlight.controller.server.bootstrap import first_admin_key
    from pilotlight.core.crypto import PlatformKey

    platform.paths.make()
    PlatformKey.load_or_create(platform.paths.home / "platform.key")
    unsaved = unsaved_key_file(platform)
    if (key := first_admin_key(platform.config)) is not None:
        descriptor = os.open(unsaved, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key)
        return key
    try:
        return unsaved.read_text() or None
    except FileNotFoundError:
        return None


def unsaved_key_file(platform: LocalPlatform) -> Path:
    """The file of a first admin key that is not in a profile yet."""
    return platform.paths.home / "first-admin.key"


def process_environment(platform: LocalPlatform) -> dict[str, str]:
    """Environment variables of the platform's processes: those of this process, and the home."""
    return {**os.environ, "PILOTLIGHT_HOME": str(platform.paths.home)}


def detach(platform: LocalPlatform) -> Iterator[Notice]:
    """Start a supervisor in its own session; yield its notices until the platform is up. Raises
    ProcessFailed."""
    log = ProcessLog(path=platform.logs / "supervisor.log")
    log.rotate()
    read_end, write_end = os.pipe()
    output = log.open()
    argv = [
        sys.executable,
        "-m",
        "pilotlight.cli.supervisor.run_platform",
        "--config",
        str(platform.config),
        "--notices-fd",
        str(write_end),
    ]
    try:
        process = subprocess.Popen(
            [*argv, "--home", str(platform.paths.home)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(write_end,),
            start_new_session=True,
            cwd="/",
            env=process_environment(platform),
        )
    finally:
        os.close(write_end)
        os.close(output)
    with os.fdopen(read_end) as lines:
        for line in lines:
            body: dict[str, Any] = json.loads(line)
            if body["kind"] == "up":
                # the supervisor keeps running: prevent Popen from waiting for it
                process.returncode = 0
                return
            if body["kind"] == "refused":
                raise ProcessFailed(body["message"], **body["detail"])
            yield Notice(**body)
    raise ProcessFailed(
        f"the supervisor exited with status {process.wait()}",
        log_tail=log.tail(20),
        log=str(log.path),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the detached supervisor."""
    parser = argparse.ArgumentParser(prog="pilotlight.cli.supervisor.run_platform")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--notices-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    os.environ["PILOTLIGHT_HOME"] = str(arguments.home)
    platform = find_platform(
        config=arguments.config, home=arguments.home, environ=os.environ, cwd=Path("/")
    )
    reporter = _Reporter(arguments.notices_fd)
    try:
        asyncio.run(
            supervise(
                platform, announce=reporter.notice, started=lambda: reporter.last({"kind": "up"})
            )
        )
    except PilotlightError as e:
        reporter.last({"kind": "refused", "message": str(e), "detail": dict(e.detail)})
        print(f"{e}", file=sys.stderr)
        return 1
    return 0


class _Reporter:
    """Writes notices to the log, and to the command that started the platform until it is up."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def notice(self, notice: Notice) -> None:
        print(
            f"{notice.kind} process={notice.process} seconds={notice.seconds:.3f} "
            f"{escape_control_characters(notice.text)}",
            flush=True,
        )
        self._send(dataclasses.asdict(notice))

    def last(self, body: dict[str, Any]) -> None:
        self._send(body)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _send(self, body: dict[str, Any]) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(BrokenPipeError):  # the command has ended; keep running
                os.write(self._descriptor, json.dumps(body).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
