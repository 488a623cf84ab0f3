"""A complete small worker: speaks the contract of docs/reference/internals/shim.md and answers HTTP
on its listener.

Installed as `pilotlight/worker/boot.py` of a test's runtime. `entry` says how it behaves: `boot`
and `wake` are lists of steps (`print:TEXT`, `raise:TEXT`, `exit:N`, `hang`, `pause:S`, `read:FILE`,
`thread`, `allocate:BYTES`, `ignore_term`, `burn`; `restored:STEP` is done in restored processes
only, `booted:STEP` in all others; `refuse:WHAT` stands in the way of its snapshot, and `tells` says
so at the snapshot point already; `wrong` lets its proof fail). `proof` and `freeze`: `hang`, when
it is asked to prove, or to stand still; `freeze`: `late`, it closes its channel 0.3 s after it said
that it stands still. A request's path does things: see `answer`. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

HOARD: list[bytearray] = []
MEMORY: list[str] = []
OPEN: list[Any] = []
HELPERS: list[subprocess.Popen[str]] = []
OBSTACLES: list[dict[str, Any]] = []
WRONG: list[bool] = []
RESTORED = False


def main() -> None:
    with open(sys.argv[1]) as f:
        launch = json.load(f)
    sys.path[:0] = launch["site"]
    control = socket.socket(fileno=launch["control_fd"])
    os.set_inheritable(control.fileno(), False)
    began = time.perf_counter()
    try:
        for step in launch["entry"].get("boot", []):
            do(step)
    except RuntimeError as e:
        fail(control, None, "enter", e)
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    phases = {"boot": 1.0, "enter": (time.perf_counter() - began) * 1000}
    point = {
        "threads": threads,
        "phases_ms": phases,
        "joins": True,
        "obstacles": OBSTACLES if launch["entry"].get("tells") else [],
    }
    say(control, {"event": "snapshot_point", **point})
    obey(control, launch)


def obey(control: socket.socket, launch: dict[str, Any]) -> None:
    children: dict[int, str] = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        # A Template learns of its dead by looking now and then; the real one waits on signals and
        # orders together.
        control.settimeout(0.05 if children else None)
        try:
            raw, fds, _, _ = socket.recv_fds(control, 128 * 1024, 16)
        except TimeoutError:
            reap(control, children)
            continue
        if not raw:
            os._exit(0)
        order = json.loads(raw)
        if order["op"] == "serve":
            wake(control, launch, order, fds)
        if order["op"] == "prove":
            prove(control, launch, stays=order["records"])
        if order["op"] == "checkpoint_in_place":
            control = stand_still(control, launch, *fds)
            continue
        pid = os.fork()
        if pid == 0:
            if order["op"] == "checkpoint":
                obey(pristine(control, launch, fds), launch)
            if order["op"] == "park":
                order, fds = parked(control, order, fds)
            wake(control, launch, order, fds)
        children[pid] = order["instance"]
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        say(control, {"event": "forked", "instance": order["instance"], "pid": pid}, [pidfd])
        os.close(pidfd)


def reap(control: socket.socket, children: dict[int, str]) -> None:
    for pid in list(children):
        gone, status = os.waitpid(pid, os.WNOHANG)
        if gone:
            say(control, {"event": "exited", "instance": children.pop(pid), "status": status})


def parked(
    control: socket.socket, order: dict[str, Any], fds: list[int]
) -> tuple[dict[str, Any], list[int]]:
    """Wait for the assignment; it comes without `go`, which has been passed already."""
    channel, go, *groups = fds
    enter(groups)
    os.read(go, 1)
    control.settimeout(None)
    say(control, {"event": "parked", "instance": order["instance"]})
    with socket.socket(fileno=channel) as desk:
        raw, given, _, _ = socket.recv_fds(desk, 128 * 1024, 16)
        if not raw:
            os._exit(0)
        say(desk, {"event": "assigned"})
    return json.loads(raw), [*given, go]


def pristine(control: socket.socket, launch: dict[str, Any], fds: list[int]) -> socket.socket:
    """In a fork: let go of everything but where the next shim will be found. Returns in a restored
    copy only."""
    listener, channel, go, *groups = fds
    enter(groups)
    os.read(go, 1)
    os.close(go)
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    if OBSTACLES:
        control.close()
    return stand_still(control, launch, listener, channel)


def stand_still(
    control: socket.socket, launch: dict[str, Any], listener_fd: int, channel_fd: int
) -> socket.socket:
    """Say so, and wait for the next shim; with an obstacle a fork leaves, and the worker itself
    goes on as before."""
    global RESTORED
    if launch["entry"].get("freeze") == "hang":
        signal.pause()
    with socket.socket(fileno=listener_fd) as listener, socket.socket(fileno=channel_fd) as channel:
        if not OBSTACLES:
            control.close()
        say(
            channel,
            {
                "event": "quiesced",
                "obstacles": OBSTACLES,
                "listens": [],
                "phases_ms": {"quiesce": 1.0},
            },
        )
        if launch["entry"].get("freeze") == "late":
            time.sleep(0.3)
        channel.close()
        if OBSTACLES and control.fileno() < 0:
            os._exit(0)
        if OBSTACLES:
            return control
        listener.setblocking(True)
        connection, _ = listener.accept()
        RESTORED = True
        return connection


def prove(control: socket.socket, launch: dict[str, Any], *, stays: bool) -> None:
    if launch["entry"].get("proof") == "hang":
        signal.pause()
    error = (
        {"type": "AssertionError", "message": "another answer", "traceback": ""} if WRONG else None
    )
    say(
        control,
        {
            "event": "proved",
            "instance": "proof",
            "ok": not WRONG,
            "error": error,
            "phases_ms": {"first_answer": 1.0},
            "notes": [],
        },
    )
    if stays:
        control.settimeout(None)
        control.recv(1)
    os._exit(0)


def enter(groups: list[int]) -> None:
    for fd in groups:
        os.write(fd, b"0")
        os.close(fd)


def wake(
    control: socket.socket, launch: dict[str, Any], order: dict[str, Any], fds: list[int]
) -> None:
    began = time.perf_counter()
    listener_fd, stdout, stderr, go, *groups = fds
    enter(groups)
    control.settimeout(None)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    env = order["env"] if order["op"] == "assign" else json.loads(os.read(go, 128 * 1024))["env"]
    for fd in (stdout, stderr, go):
        os.close(fd)
    os.environ.update(env)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        for step in launch["entry"].get("wake", []):
            do(step)
    except RuntimeError as e:
        fail(control, order["instance"], "wake", e)
    first = {"assign": "assign", "serve": "serve"}.get(order["op"], "fork")
    phases = {first: 1.0, "wake": (time.perf_counter() - began) * 1000}
    say(control, {"event": "ready", "instance": order["instance"], "phases_ms": phases})
    serve(socket.socket(fileno=listener_fd), control)


def serve(listener: socket.socket, control: socket.socket) -> None:
    """Until the shim is gone. What `control` receives is for the Template, which has the same
    socket."""
    listener.setblocking(True)
    listener.listen()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(control, 0)  # POLLHUP is reported all the same (poll(2))
    while True:
        if any(fd == control.fileno() for fd, _ in poll.poll()):
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            path = connection.recv(65536).split(b" ", 2)[1].decode()
            body = json.dumps(answer(path.strip("/").split("/"))).encode()
            connection.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
                + body
            )


def answer(words: list[str]) -> Any:  # noqa: C901, PLR0912  # a flat list of requests
    match words:
        case ["env", name]:
            return os.environ.get(name)
        case ["print", text]:
            print(f"\x1ecall-1\x1f{text}", flush=True)
        case ["flood", size]:
            line = b"x" * 99 + b"\n"
            for _ in range(int(size) // 10_000):
                os.write(1, line * 100)
        case ["allocate", size]:
            HOARD.append(bytearray(os.urandom(1024) * (int(size) // 1024)))
        case ["exit", status]:
            os._exit(int(status))
        case ["restored"]:
            return RESTORED
        case ["hoard"]:
            return sum(len(piece) for piece in HOARD)
        case ["status"]:
            with open("/proc/self/status") as f:
                return dict(line.rstrip("\n").split(":\t", 1) for line in f if ":\t" in line)
        case ["syscalls"]:
            return syscalls()
        case ["hostname"]:
            return socket.gethostname()
        case ["read", *parts]:
            with open("/" + "/".join(parts)) as f:
                return f.read()
        case ["open", *parts]:
            return failure(lambda: os.close(os.open("/" + "/".join(parts), os.O_RDWR)))
        case ["mknod", major, minor, *parts]:
            number = os.makedev(int(major), int(minor))
            return failure(lambda: os.mknod("/" + "/".join(parts), 0o20666, number))
        case ["list", *parts]:
            return sorted(os.listdir("/" + "/".join(parts)))
        case ["opened"]:
            return [f.read() for f in OPEN if not f.seek(0)]
        case ["remember", text]:
            MEMORY.append(text)
        case ["memory"]:
            return MEMORY
        case ["threads"]:
            return sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())
        case ["helper", text]:
            print(text, file=HELPERS[0].stdin, flush=True)
            return HELPERS[0].stdout.readline().strip() if HELPERS[0].stdout else None
        case ["spawn"]:
            return subprocess.Popen(["/bin/sleep", "1000"], start_new_session=True).pid
    return os.getpid()


def failure(action: Callable[[], None]) -> str:
    """The name of the errno with which it fails; "" if it does not."""
    try:
        action()
    except OSError as e:
        return errno.errorcode[e.errno or 0]
    return ""


def _continue_by_timer() -> None:
    """Have SIGCONT sent to this process every 0.4 s (timer_create(2)).

    Rarer timers do so, too: SIGSTOP discards a SIGCONT that is pending, as it is for long where the
    process waits for a processor, and a timer goes on only once its signal was delivered
    (signal(7), kernel/time/posix-timers.c)."""
    signal.signal(signal.SIGCONT, lambda *_: None)  # a timer of an ignored signal fires once
    libc = ctypes.CDLL(None)
    event = struct.pack("Pii48x", 0, signal.SIGCONT, 0)  # sigevent, SIGEV_SIGNAL
    for every_ms in (400, 800, 1_600, 3_200, 6_400):
        timer = ctypes.c_void_p()
        each = every_ms // 1000, every_ms % 1000 * 1_000_000
        assert libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0
        assert libc.timer_settime(timer, 0, struct.pack("qqqq", *each, *each), None) == 0


def syscalls() -> dict[str, int]:
    """errno of calls that must be refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    out = {}
    tried = {
        "io_uring_setup": (425, 8, 0),
        "ptrace": (101, 16, 1, 0, 0),
        "mount": (165, 0, 0, 0, 0, 0),
        "unshare": (272, 0x10000000),
    }
    for name, arguments in tried.items():
        ctypes.set_errno(0)
        out[name] = ctypes.get_errno() if libc.syscall(*arguments) < 0 else 0
    return out


def do(step: str) -> None:  # noqa: C901, PLR0912  # a flat list of steps
    word, _, value = step.partition(":")
    match word:
        case "restored" | "booted":
            if (word == "restored") == RESTORED:
                do(value)
        case "print":
            print(value, flush=True)
        case "raise":
            raise RuntimeError(value)
        case "exit":
            os._exit(int(value))
        case "hang":
            signal.pause()
        case "burn":
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
            print("burnt", flush=True)
        case "pause":
            time.sleep(float(value))
        case "read":
            with open(value) as f:
                f.read()
        case "thread":
            threading.Thread(
                target=signal.pause if value else threading.Event().wait,
                name="surplus",
                daemon=True,
            ).start()
        case "process":
            if os.fork() == 0:
                signal.pause()
        case "unstoppable":  # a timer sends it SIGCONT, and it uses its processor
            if os.fork() == 0:
                _continue_by_timer()
                while True:
                    pass
        case "write":
            name, _, text = value.partition("=")
            with open(name, "w") as f:
                f.write(text)
        case "open":
            OPEN.append(open(value))  # noqa: SIM115  it stays open, that is what it is for
        case "open_to_write":
            OPEN.append(os.fdopen(os.open(value, os.O_WRONLY), "wb", 0))
        case "grow":
            name, _, mib = value.partition("=")
            with open(name, "ab") as big:
                for _ in range(int(mib)):
                    big.write(os.urandom(1024) * 1024)
        case "unlinked":
            OPEN.append(open(value, "w+"))  # noqa: SIM115  it stays open, that is what it is for
            OPEN[-1].write(value)
            OPEN[-1].flush()
            os.unlink(value)
        case "remember":
            MEMORY.append(value)
        case "helper":
            HELPERS.append(
                subprocess.Popen(
                    ["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
        case "refuse":
            OBSTACLES.append(
                {
                    "kind": "connection",
                    "fd": 7,
                    "what": value,
                    "where": None,
                    "message": f"{value} is open",
                }
            )
        case "wrong":
            WRONG.append(True)
        case "allocate":
            HOARD.append(bytearray(os.urandom(1024) * (int(value) // 1024)))
        case "ignore_term":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def fail(control: socket.socket, instance: str | None, phase: str, error: Exception) -> None:
    body = {"type": type(error).__name__, "message": str(error), "traceback": "Traceback …"}
    say(control, {"event": "failed", "instance": instance, "phase": phase, "error": body})
    os._exit(1)


def say(control: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], fds or [])


main()
