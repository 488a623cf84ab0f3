"""The instance's listener in front of an engine: what is owed is delivered before it leaves, and a
death is told."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pilotlight.worker.engine.errors import ServerDied
from pilotlight.worker.engine.process_tree import ExitWatcher
from pilotlight.worker.engine.server import SpliceServer

PATIENCE_S = 20.0
ANSWER = os.urandom(1 << 20) * 4
"""More than the buffers between an engine and its caller hold."""


@dataclass
class Scripted:
    """An engine that answers the first bytes of each connection with ANSWER, or with two pieces of
    which the second comes when it is let, and says of itself what `metrics` has."""

    path: str
    metrics: bytes = b'vllm:num_requests_running{a="b"} 0.0\n'
    may_end: threading.Event = field(default_factory=threading.Event)
    _listener: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX))
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._listener.bind(self.path)
        self._listener.listen()
        self._run(self._accept)

    def close(self) -> None:
        """No more; whoever is still sending is waited for."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _run(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._run(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            asked = connection.recv(4)
            if asked == b"GET ":
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + self.metrics)
                return
            try:
                if asked == b"SLOW":
                    connection.sendall(b"one ")
                    self.may_end.wait(PATIENCE_S)
                    connection.sendall(b"two")
                    return
                connection.sendall(ANSWER)
            except OSError:  # it was cut off
                return
            connection.recv(1)


@dataclass
class World:
    """A splice server, ready to run in this thread. `child`: a process that stands for one of the
    engine's."""

    engine: Scripted
    front: str
    server: SpliceServer
    shim: socket.socket
    child: subprocess.Popen[bytes]
    _listener: socket.socket

    def run(self) -> None:
        """Until it is drained."""
        deaths = ExitWatcher([self.child.pid])
        try:
            self.server.wake(self._listener)
            self.server.run(on_ready=lambda: None, shim=self.shim.fileno(), deaths=deaths)
        finally:
            deaths.close()
            self.server._loop.close()


@pytest.fixture
def world(short_tmp: Path) -> Iterator[World]:
    engine = Scripted(str(short_tmp / "engine"))
    engine.start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short_tmp / "front"))
    listener.listen()
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    server = SpliceServer(engine.path)
    yield World(engine, str(short_tmp / "front"), server, ours, child, listener)
    assert child.stdin is not None
    child.stdin.close()
    child.wait()
    ours.close()
    theirs.close()
    engine.close()


def test_a_caller_that_reads_slowly_gets_all_of_its_answer_although_the_instance_was_told_to_end(
    world: World,
) -> None:
    """The engine has long done its work, and says so; only its caller has not read it yet."""
    got = bytearray()

    def read() -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(PATIENCE_S)
            caller.connect(world.front)
            caller.sendall(b"DATA")
            select.select([caller], [], [], PATIENCE_S)
            with socket.socket(socket.AF_UNIX) as activator:
                activator.settimeout(PATIENCE_S)
                activator.connect(world.front)
                activator.sendall(b"POST /pilotlight/end HTTP/1.1\r\nhost: worker\r\n\r\n")
                assert activator.recv(100).startswith(b"HTTP/1.1 200 ")
            threading.Event().wait(0.5)  # slow, so that everything in between is full, and quiet
            while len(got) < len(ANSWER) and (piece := caller.recv(65536)):
                got.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    world.run()
    reader.join(PATIENCE_S)

    assert len(got) == len(ANSWER)


def test_of_an_engine_that_says_nothing_of_itself_streams_are_not_cut_between_two_tokens(
    world: World,
) -> None:
    world.engine.metrics = b""
    got = bytearray()

    def read() -> None:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(PATIENCE_S)
            caller.connect(world.front)
            caller.sendall(b"SLOW")
            got.extend(caller.recv(4))
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(1.0)
            world.engine.may_end.set()
            while piece := caller.recv(64):
                got.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    world.run()
    reader.join(PATIENCE_S)

    assert got == b"one two"


def test_the_death_of_a_process_of_the_engine_ends_it_with_its_name(world: World) -> None:
    world.child.kill()
    with pytest.raises(ServerDied, match=r"python.*ended"):
        world.run()


def test_the_shims_end_is_its_own(world: World) -> None:
    world.shim.shutdown(socket.SHUT_RDWR)
    world.run()
