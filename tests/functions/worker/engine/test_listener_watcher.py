"""A web server is dead when nothing listens at its port, whichever of its processes end."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pilotlight.worker.engine.web_server import ListenerWatcher, StartedProcesses

PATIENCE_S = 20.0
LISTENS = """
import os, socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
server.close() if sys.argv[1] == "child" else None
os.waitpid(child, 0)
"""


@pytest.fixture(params=["child", "parent"])
def processes(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a child, and the port at which the child alone listens, or both do until the
    child ends."""
    command = [sys.executable, "-S", "-c", LISTENS, request.param]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_it_is_dead_once_nothing_listens(processes: tuple[subprocess.Popen[str], int]) -> None:
    process, port = processes
    helper = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    tree = StartedProcesses(port)
    watcher = ListenerWatcher(tree, port)
    assert helper.stdin is not None
    helper.communicate(b"\n")
    assert select.select([watcher], [], [], PATIENCE_S)[0]
    assert watcher.names() == []  # the helper ended, the server listens
    assert not select.select([watcher], [], [], 0)[0]

    process.communicate("")
    assert select.select([watcher], [], [], PATIENCE_S)[0]
    assert any("python" in name for name in watcher.names())
    watcher.close()
    tree.output.close()
