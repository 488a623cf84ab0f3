"""A stand-in for one of the four processes: `python supervised.py MODE NAME JOURNAL --ready-fd N`.

Modes: `serve` (ready at once, ends on SIGTERM), `mute` (never ready), `broken` (says why and exits
3), `stubborn` (ignores SIGTERM), `answer` (accepts at `--listen-fd` and sends its pid). Each start and each end is appended to JOURNAL, a line each, so
that order can be asserted."""

import os
import signal
import socket
import sys
import threading
from pathlib import Path


def main(mode: str, name: str, journal: Path, ready_fd: int) -> int:
    """Run the mode."""

    def note(what: str) -> None:
        with journal.open("a") as f:
            f.write(f"{what}\n")

    if mode == "broken":
        print("the database is on fire", file=sys.stderr)
        return 3
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    note(f"start {name}")
    if mode == "answer":
        listener = socket.socket(fileno=int(sys.argv[sys.argv.index("--listen-fd") + 1]))
        listener.setblocking(True)
        listener.listen()
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
    if mode != "mute":
        os.write(ready_fd, b"\n")
    while signal.sigwait({signal.SIGTERM, signal.SIGUSR2}) == signal.SIGTERM and mode == "stubborn":
        note(f"ignored {name}")
    note(f"stop {name}")
    return 0


def answer(listener: socket.socket) -> None:
    """Send the pid to each connection."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"%d" % os.getpid())


if __name__ == "__main__":
    sys.exit(
        main(
            sys.argv[1],
            sys.argv[2],
            Path(sys.argv[3]),
            int(sys.argv[sys.argv.index("--ready-fd") + 1]),
        )
    )
