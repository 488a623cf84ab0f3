"""`pilotlight WORDS` in a process of its own, forked from one that has imported the command line:
to import it takes four fifths of a command's CPU time, and the tests of whole platforms run hundreds.

What starts `python -m pilotlight` itself is tested beside it: `test_cli.py` does so where it needs a
terminal or signals."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MESSAGE_BYTES = 128 * 1024
"""The longest message: words and environment."""


def run(
    words: Sequence[str], *, env: Mapping[str, str], input: str | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -m pilotlight WORDS` would. Raises TimeoutExpired."""
    request = json.dumps({"words": words, "env": dict(env), "cwd": os.getcwd()}).encode()
    ours, theirs = socket.socketpair()
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as error,
        ours,
    ):
        given.write(input or "")
        given.seek(0)
        files = [given.fileno(), out.fileno(), error.fileno(), theirs.fileno()]
        socket.send_fds(_server()[0], [request], files)
        theirs.close()
        status = _status(ours, timeout_s, words)
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(words, status, out.read(), error.read())


def _status(reply: socket.socket, timeout_s: float, words: Sequence[str]) -> int:
    """Of the command: it says its pid when it begins and its status at the end, then ends."""
    reply.settimeout(timeout_s)
    said = b""
    try:
        while more := reply.recv(100):
            said += more
    except TimeoutError:
        if said:
            os.kill(int(said.split()[0]), signal.SIGKILL)
        raise subprocess.TimeoutExpired(words, timeout_s) from None
    _, status, *_ = [*said.split(), b"-9"]
    return int(status)


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, and a connection to it. It ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.command_line", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_end, ours, process)
    return ours, process


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until nobody is there to make one; in a child, return its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        message, files, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 4)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _command(json.loads(message), files)
            return
        for descriptor in files:
            os.close(descriptor)


def _command(request: dict[str, Any], files: list[int]) -> None:
    """Become the process of a command."""
    from pilotlight.cli.main import main

    *streams, reply = files
    os.set_inheritable(reply, False)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["pilotlight", *request["words"]]
    os.write(reply, b"%d\n" % os.getpid())
    status: object = 1
    try:
        main()
    except SystemExit as e:
        status = e.code
    finally:  # of what is raised, Python itself tells
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(reply, b"%d\n" % (status if isinstance(status, int) else status is not None))


def _import_everything() -> None:
    """All commands, and what they import when they run."""
    import pydantic

    from pilotlight.cli import commands

    for module in pkgutil.walk_packages(commands.__path__, f"{commands.__name__}."):
        importlib.import_module(module.name)
    for name in ("pilotlight.client.client", "httpcore", "httpx", "typer._adapters"):
        importlib.import_module(name)
    _ = pydantic.TypeAdapter  # imports itself by parts
    gc.freeze()


if __name__ == "__main__":
    _import_everything()
    _serve(socket.socket(fileno=int(sys.argv[1])))
