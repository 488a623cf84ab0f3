"""Questions to the engine: each leaves no connection behind, on either side."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from pilotlight.worker.engine.client import ServerClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


def test_answer_is_returned_after_the_engine_closed_its_end(short_tmp: Path) -> None:
    """A connection that the engine still holds refuses a snapshot."""
    closed_at: list[float] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(ANSWER)
            time.sleep(0.2)  # the engine is busy
            closed_at.append(time.monotonic())

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_tmp / "engine.sock"))
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        assert ServerClient(str(short_tmp / "engine.sock")).ask("GET", "/", within_s=10) == {}
        answered_at = time.monotonic()
        server.join()
    assert answered_at >= closed_at[0]
