"""A CRIU that does what its script says: speaks `swrk` over its socket, dumps and restores nothing.

A real program, so that what is tested is a real process that hangs, dies or talks nonsense.
`install(directory, …)` writes an executable that can be run as `criu`; its behaviour is one of
`SCRIPTS`, chosen when it is written."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from snapshotter.criu.messages import DESCRIPTOR_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SOCKET_FD, WORK_FD = 19, 21
NOTIFICATIONS = {
    "DUMP": ("pre-dump", "query-ext-files", "post-dump"),
    "RESTORE": ("pre-restore", "post-restore", "pre-resume", "post-resume"),
}
RESTORED_PID = 1001
_KINDS = {1: "DUMP", 2: "RESTORE", 10: "VERSION"}


def install(directory: Path, *, script: str, description: Path, version: str = "4.2.1") -> Path:
    """Write the program; `script` is a name of `SCRIPTS`. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "criu"
    program.write_text(
        f"#!{sys.executable} -B\n"
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'functions')!r}]\n"
        "from tests.fakes.fake_criu import main\n"
        f"main(sys.argv, script={script!r}, version={version!r}, "
        f"description={str(description)!r})\n"
    )
    program.chmod(0o755)
    return program


class Talk:
    """Its side of the socket."""

    def __init__(self, connection: socket.socket, description: str) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(
            Path(description).read_bytes()
        ).file:
            pool.Add(file)
        self.request = message_factory.GetMessageClass(pool.FindMessageTypeByName("criu_req"))
        self.response = message_factory.GetMessageClass(pool.FindMessageTypeByName("criu_resp"))
        self.connection = connection
        self.kind = 0

    def receive(self) -> None:
        """The request."""
        body = self.request.FromString(self.connection.recv(1 << 20))
        self.kind = body.type  # type: ignore[attr-defined]

    def notify(self, count: int | None = None) -> bool:
        """Tell the first `count` steps (None: all); whether the other side let us go on each
        time."""
        for step in NOTIFICATIONS[_KINDS[self.kind]][:count]:
            message = self.response(type=6, success=True, notify={"script": step})
            self.connection.send(message.SerializeToString())
            answer = self.request.FromString(self.connection.recv(1 << 20))
            if not answer.notify_success:  # type: ignore[attr-defined]
                return False
        return True

    def answer(self, *, success: bool, errno: int = 0, error: str = "") -> None:
        """The last word."""
        message = self.response(type=self.kind, success=success)
        if errno:
            message.cr_errno = errno  # type: ignore[attr-defined]
        if error:
            message.cr_errmsg = error  # type: ignore[attr-defined]
        if self.kind == 2:
            message.restore.pid = RESTORED_PID  # type: ignore[attr-defined]
        self.connection.send(message.SerializeToString())


def log(*lines: str) -> None:
    """Add to both logs, as CRIU at level 2 does."""
    for name in ("dump.log", "restore.log"):
        fd = os.open(name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600, dir_fd=WORK_FD)
        os.write(fd, "".join(f"{line}\n" for line in lines).encode())
        os.close(fd)


def _good(talk: Talk) -> None:
    talk.answer(success=talk.notify())


def _refuse(talk: Talk) -> None:
    log(
        "Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not "
        "permitted",
        "Error (criu/sk-inet.c:230): inet: Connected TCP socket, consider using --tcp-established "
        "option.",
        "Error (criu/cr-dump.c:1975): Dumping FAILED.",
    )
    talk.answer(success=False, errno=3, error="rlimit: Can't setup RLIMIT_NOFILE for self")


def _refuse_the_request(talk: Talk) -> None:
    # as the shim gives it as standard error
    fd = os.open("criu.err", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600, dir_fd=WORK_FD)
    os.write(fd, b"Error (criu/cr-service.c:414): Can't open images directory: Permission denied\n")
    os.close(fd)
    talk.answer(success=False, errno=errno.EBADRQC)


def _hang(_: Talk) -> None:
    signal.pause()


def _hang_at_notify(talk: Talk) -> None:
    talk.notify(1)
    signal.pause()


def _die(_: Talk) -> None:
    log("Error (criu/x.c:1): something broke")
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_notify(talk: Talk) -> None:
    talk.notify(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_: Talk) -> None:
    os._exit(1)


def _garbage(talk: Talk) -> None:
    talk.connection.send(b"\xff\xfe\xfd no protobuf")


def _empty(talk: Talk) -> None:
    talk.connection.send(
        talk.response(type=0, success=False, cr_errmsg="Invalid req").SerializeToString()
    )


def _wrong_kind(talk: Talk) -> None:
    talk.kind = 3
    talk.answer(success=True)


SCRIPTS: dict[str, Callable[[Talk], None]] = {
    "good": _good,
    "refuse": _refuse,
    "refuse_the_request": _refuse_the_request,
    "hang": _hang,
    "hang_at_notify": _hang_at_notify,
    "die": _die,
    "die_at_notify": _die_at_notify,
    "exit": _exit,
    "garbage": _garbage,
    "empty": _empty,
    "wrong_kind": _wrong_kind,
}


def main(argv: list[str], *, script: str, version: str, description: str) -> None:
    """What the installed program runs."""
    if "--version" in argv:
        print(f"Version: {version}")
        return
    description = os.environ.get(DESCRIPTOR_VARIABLE, description)
    talk = Talk(socket.socket(fileno=SOCKET_FD), description)
    talk.receive()
    SCRIPTS[script](talk)
