"""What a tenant's code tries against the platform, its host and another tenant, from inside a
worker and as the worker's uid.

`TABLE` lists the attempts. Each has a category, a name that says what must not be possible, and
code. The code returns text, the evidence that it succeeded, or raises: `Denied`, or an `OSError`
whose error is a refusal (`REFUSALS`, or one that the attempt adds). Any other error means that the
attempt itself is wrong (`broken`): a call with a bad argument proves nothing.

An attempt that succeeds today and will be refused later names in `open_until` the change that
closes it. `needs` names a fact about the machine without which an attempt means nothing.

Only the standard library: the worker's environment has nothing else. Nothing is sent to an address
that is not in `facts`."""

import ctypes
import errno
import fcntl
import http.client
import json
import mmap
import os
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pilotlight

app = pilotlight.App("attacker")

ISOLATION_NETWORK = "the isolation issue: a network of its own for each function"

REFUSALS = frozenset(
    {"EPERM", "EACCES", "ENOENT", "ESRCH", "ENOSYS", "EROFS", "ECONNREFUSED", "EAFNOSUPPORT"}
)
"""Errors that say no, or that there is nothing of that name in reach. EINVAL, EFAULT or ENOTDIR
would be the attempt's own fault."""
PATIENCE_S = 20
"""The longest that one attempt may take."""
THREADS, MEMORY_BYTES = 4300, 768 * 1024**2
"""More than an instance may have: `snapshotter.linux.cgroups.MAX_PIDS`, and what `walk`
declares."""
MARK = ctypes.create_string_buffer(b"as loaded")
"""Loaded before the snapshot point, so it lies at the same address in the Template and in each fork
of it."""

Facts = dict[str, Any]


class Denied(Exception):
    """Raised when an attempt was refused in a way that is no error number."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One thing that must not be possible; see the module's text."""

    category: str
    name: str
    code: Callable[[Facts], str]
    also: frozenset[str] = frozenset()
    open_until: str = ""
    needs: str = ""


TABLE: list[Attempt] = []


def attempt(
    category: str, name: str, *, also: str = "", open_until: str = "", needs: str = ""
) -> Callable[[Callable[[Facts], str]], Callable[[Facts], str]]:
    """Put what is decorated into the table. `also`: further errors, or signals, that refuse it."""

    def add(code: Callable[[Facts], str]) -> Callable[[Facts], str]:
        words = frozenset(also.split())
        TABLE.append(
            Attempt(
                category=category,
                name=name,
                code=code,
                also=words,
                open_until=open_until,
                needs=needs,
            )
        )
        return code

    return add


# -- the tools of the attempts


def read(path: str) -> str:
    """The first bytes of a file, or the names in a directory."""
    if stat.S_ISDIR(os.stat(path).st_mode):
        return f"listed {os.listdir(path)[:5]}"
    with open(path, "rb", buffering=0) as file:
        return f"read {file.read(48)!r}"


def open_to_write(path: str) -> str:
    """Open a file to append to it; nothing is written."""
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
    return "opened to write"


def write(path: str, text: str) -> str:
    """Write text into an existing file."""
    with open(path, "r+b", buffering=0) as file:
        file.write(text.encode())
    return f"wrote {text!r}"


def say_hello(family: int, address: Any) -> str:
    """Connect, and read what a server says first, if it says something."""
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(5)
        client.connect(address)
        return (
            f"connected, heard {client.recv(48)!r}"
            if select.select([client], [], [], 0.2)[0]
            else "connected"
        )


def get(host: str, port: int, path: str = "/") -> tuple[int, str]:
    """Status and text of a GET without a key."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


NUMBERS = """
clone 56 220
ptrace 101 117
syslog 103 116
capset 126 91
pivot_root 155 41
chroot 161 51
acct 163 89
mount 165 40
umount2 166 39
swapon 167 224
reboot 169 142
init_module 175 105
delete_module 176 106
quotactl 179 60
clock_settime 227 112
kexec_load 246 104
fanotify_init 300 262
add_key 248 217
keyctl 250 219
ioprio_set 251 30
migrate_pages 256 238
unshare 272 97
perf_event_open 298 241
name_to_handle_at 303 264
open_by_handle_at 304 265
setns 308 268
process_vm_readv 310 270
process_vm_writev 311 271
kcmp 312 272
bpf 321 280
userfaultfd 323 282
pidfd_send_signal 424 424
io_uring_setup 425 425
open_tree 428 428
move_mount 429 429
fsopen 430 430
fspick 433 433
clone3 435 435
pidfd_getfd 438 438
process_madvise 440 440
io_setup 206 0
mount_setattr 442 442
open_tree_attr 467 467
"""
"""System calls: name, number on x86_64, number on aarch64."""
_COLUMN = {"x86_64": 1, "aarch64": 2}
_libc = ctypes.CDLL(None, use_errno=True)


def syscall(name: str, *arguments: int | bytes | ctypes.Array[Any] | None) -> int:
    """A system call by its number. Raises OSError."""
    row = next(row for line in NUMBERS.splitlines() if (row := line.split()) and row[0] == name)
    number = int(row[_COLUMN[os.uname().machine]])
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    _libc.syscall.restype = ctypes.c_long
    found = int(_libc.syscall(ctypes.c_long(number), *words))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return found


def refused_call(name: str, *arguments: int | bytes | None) -> Callable[[Facts], str]:
    """An attempt that is one system call."""
    return lambda _: f"{name} answered {syscall(name, *arguments)}"


# -- files of the platform, of the host and of another tenant

for _key, _what in {
    "home": "the platform's home directory",
    "key": "the platform's key",
    "database": "the controller's database",
    "database_log": "the write-ahead log of the controller's database",
    "journal": "the activator's journal of calls",
    "routes": "the activator's copy of the configuration",
    "process_log": "the controller's log",
    "profile": "the operator's profile with the admin key",
    "code": "another tenant's unpacked code",
    "bundle": "another tenant's bundle",
    "image": "another tenant's environment",
    "weights": "another tenant's weights",
    "manifest": "the manifest of another tenant's weights",
    "instance_log": "another tenant's log",
    "snapshots": "the directory of snapshots",
    "run": "the directory of the platform's sockets",
    "slot": "another tenant's slot directory",
    "launch": "another tenant's launch file",
    "shadow": "the host's password hashes",
}.items():
    attempt("files", f"read {_what}")(lambda facts, key=_key: read(facts["paths"][key]))  # type: ignore[misc]

for _key, _what in {
    "key": "the platform's key",
    "database": "the controller's database",
    "journal": "the activator's journal of calls",
    "weights": "another tenant's weights",
    "instance_log": "another tenant's log",
    "passwd": "the host's list of users",
    "program": "a program of the host",
}.items():
    attempt("files", f"write {_what}")(lambda facts, key=_key: open_to_write(facts["paths"][key]))  # type: ignore[misc]

attempt("files", "read a snapshot", needs="snapshot")(lambda facts: read(facts["snapshot"]))
attempt("files", "read a file of the host that anybody may read")(
    lambda facts: read(facts["paths"]["readable"])
)


@attempt("files", "read the host's list of users")
def _users_of_the_host(facts: Facts) -> str:
    with open(facts["paths"]["passwd"]) as file:
        others = [line for line in file if int(line.split(":")[2]) not in (0, os.getuid(), 65534)]
    if not others:
        raise Denied("it lists nobody but root, nobody and the function")
    return f"read {others[0]!r}"


@attempt("files", "find anything of the host outside of its programs and libraries")
def _beside_the_programs(facts: Facts) -> str:
    known = {
        "bin",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "root",
        "run",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "var",
    }
    if os.path.realpath("/root") != os.path.realpath(os.getcwd()):
        return "found /root, which is not the working directory"
    found = [
        *sorted(set(os.listdir("/")) - known),
        *sorted(set(os.listdir("/var")) - {"run", "tmp"}),
    ]
    if not found:
        raise Denied("there is nothing else")
    return f"found {found}"


@attempt("files", "make a directory in the root of its slot")
def _in_the_root(_: Facts) -> str:
    os.mkdir("/made")
    return "made /made"


@attempt("files", "write into a directory of the host that anybody may write")
def _write_for_others(facts: Facts) -> str:
    path = os.path.join(facts["paths"]["writable"], "left-here")
    with open(path, "w") as file:
        file.write("from another tenant")
    os.unlink(path)
    return f"made {path}"


@attempt("files", "run a program of the host that is set-user-id root, with root's rights")
def _set_user_id(facts: Facts) -> str:
    done = subprocess.run(
        [facts["paths"]["set_user_id"], "-u"], capture_output=True, text=True, check=True
    )
    if done.stdout.strip() == str(os.getuid()):
        raise Denied("it ran as the worker's uid")
    return f"effective uid {done.stdout.strip()}"


@attempt("files", "find a file of another tenant in /tmp, /var/tmp or /dev/shm")
def _left_in_shared_directories(facts: Facts) -> str:
    return ", ".join(
        read(f"{folder}/{facts['marker']}") for folder in ("/tmp", "/var/tmp", "/dev/shm")
    )


@attempt("files", "follow a symbolic link of its own to the platform's key")
def _symlink(facts: Facts) -> str:
    os.symlink(facts["paths"]["key"], "link-to-key")
    try:
        return read("link-to-key")
    finally:
        os.unlink("link-to-key")


@attempt("files", "make a hard link to another tenant's weights", also="EXDEV")
def _hard_link(facts: Facts) -> str:
    os.link(facts["paths"]["weights"], "linked")
    return "linked"


@attempt("files", "make a hard link to a file of the host beside it", also="EXDEV")
def _hard_link_beside(facts: Facts) -> str:
    path = "linked-beside"
    os.link(facts["paths"]["set_user_id"], path)
    os.unlink(path)
    return "linked"


@attempt("files", "get a descriptor of the platform among its own")
def _inherited_descriptors(facts: Facts) -> str:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("/") and not target.startswith(
            ("/dev/null", "/proc/", "/run/pilotlight/slot/")
        ):
            found.append(f"{fd} -> {target}")
    if not found:
        raise Denied("none leads out of the slot")
    return ", ".join(found)


# -- what it was given read-only

for _what, _path in {
    "its own code": "code/attacker.py",
    "its launch file": "launch.json",
    "the platform's worker": "runtime/pilotlight/worker/boot.py",
    "the shim's module": "runtime/snapshotter/shim/main.py",
    "its interpreter": "python/bin",
    "its packages": "env/0",
    "its weights": "weights/own/model.txt",
    "where it calls functions": "calls",
}.items():

    @attempt("read-only", f"change {_what}")
    def _change(facts: Facts, path: str = f"/run/pilotlight/slot/{_path}") -> str:
        if os.path.isdir(path):
            os.mkdir(f"{path}/made")
            return "made a directory in it"
        return open_to_write(path)


@attempt("read-only", "change its weights through a shared mapping")
def _map_weights(facts: Facts) -> str:
    with open("/run/pilotlight/slot/weights/own/model.txt", "rb") as file:
        mmap.mmap(file.fileno(), 4, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
    return "mapped to write"


@attempt("read-only", "give itself the right to write its code")
def _chmod_code(facts: Facts) -> str:
    os.chmod("/run/pilotlight/slot/code/attacker.py", 0o666)
    return "changed its mode"


@attempt("read-only", "put a symbolic link where the shim makes its control socket")
def _control_socket(facts: Facts) -> str:
    os.symlink("/tmp/mine.sock", "/run/pilotlight/slot/control.sock")
    return "made it"


@attempt("read-only", "put a directory of its own in place of its code")
def _replace_code(facts: Facts) -> str:
    os.rename("/run/pilotlight/slot/code", "/run/pilotlight/slot/work/code")
    return "moved it"


@attempt("read-only", "take away the socket by which it calls functions")
def _own_calls(facts: Facts) -> str:
    os.unlink(f"{os.environ['PILOTLIGHT_CALLS']}/{os.environ['PILOTLIGHT_INSTANCE']}.sock")
    return "removed it"


@attempt("read-only", "write beside the tree of its slot")
def _beside_slot(facts: Facts) -> str:
    os.mkdir("/run/made")
    os.rmdir("/run/made")
    return "made a directory in /run"


# -- sockets of the platform

for _socket in (
    "weight_cache",
    "snapshotter",
    "controller",
    "metrics-controller",
    "metrics-snapshotter",
    "metrics-weight_cache",
):
    attempt("sockets", f"connect to {_socket}.sock")(
        lambda facts, name=_socket: say_hello(
            socket.AF_UNIX, f"{facts['paths']['run']}/{name}.sock"
        )  # type: ignore[misc]
    )
attempt("sockets", "connect to another tenant's worker")(
    lambda facts: say_hello(socket.AF_UNIX, facts["paths"]["worker_socket"])
)
attempt("sockets", "connect to another tenant's shim")(
    lambda facts: say_hello(socket.AF_UNIX, facts["paths"]["shim_socket"])
)
attempt("sockets", "connect to the socket by which another tenant calls functions")(
    lambda facts: say_hello(
        socket.AF_UNIX, "/calls/".join(facts["paths"]["worker_socket"].rsplit("/", 1))
    )
)
attempt("sockets", "list the sockets by which instances of its slot call functions")(
    lambda _: read("/run/pilotlight/slot/calls")
)
attempt("sockets", "connect to Redis")(
    lambda facts: say_hello(socket.AF_UNIX, facts["paths"]["redis"])
)


@attempt("sockets", "connect to a platform's socket through the root of another process")
def _socket_through_proc(facts: Facts) -> str:
    return say_hello(socket.AF_UNIX, f"/proc/1/root{facts['paths']['run']}/snapshotter.sock")


@attempt("sockets", "connect to another tenant's abstract socket", open_until=ISOLATION_NETWORK)
def _abstract(facts: Facts) -> str:
    return say_hello(socket.AF_UNIX, "\0" + facts["abstract"])


@attempt("sockets", "claim to be root on a Unix socket")
def _claim_root(facts: Facts) -> str:
    left, right = socket.socketpair()
    with left, right:
        left.sendmsg(
            [b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("3i", 1, 0, 0))]
        )
    return "the kernel passed it on"


@attempt("sockets", "send a signal to the process at the other end of one of its sockets")
def _signal_peer(facts: Facts) -> str:
    tried, reached = 0, []
    for fd in os.listdir("/proc/self/fd"):
        try:
            peer = socket.socket(fileno=os.dup(int(fd)))
            pid, uid, _ = struct.unpack(
                "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            pidfd = peer.getsockopt(socket.SOL_SOCKET, 77)  # SO_PEERPIDFD
        except OSError:
            continue  # no socket, or none with another end
        if uid in (os.getuid(), -1, 0xFFFFFFFF):
            continue
        tried += 1
        try:
            syscall("pidfd_send_signal", pidfd, 0, None, 0)
            reached.append(f"process {pid} of uid {uid}")
        except OSError as e:
            # EINVAL: it is not in this PID namespace
            if errno.errorcode[e.errno or 0] not in REFUSALS | {"EINVAL"}:
                raise
    if not reached:
        raise Denied(f"none of {tried}")
    return ", ".join(reached)


# -- other processes, through /proc, signals and memory

for _part in (
    "mem",
    "environ",
    "root",
    "cwd",
    "exe",
    "fd",
    "fdinfo",
    "maps",
    "map_files",
    "auxv",
    "syscall",
    "stack",
    "io",
    "ns/mnt",
):

    @attempt("processes", f"read /proc/<pid>/{_part} of its shim")
    def _read_shim(facts: Facts, part: str = _part) -> str:
        if part in ("exe", "ns/mnt"):
            return f"it is {os.readlink(f'/proc/1/{part}')}"
        return read(f"/proc/1/{part}")


for _who in ("snapshotter", "controller", "activator", "another tenant's worker"):
    for _part in ("mem", "environ", "root", "fd", "cwd", "maps"):

        @attempt("processes", f"read /proc/<pid>/{_part} of {_who}")
        def _read_other(facts: Facts, who: str = _who, part: str = _part) -> str:
            return read(f"/proc/{_stranger(facts, who)}/{part}")

    @attempt("processes", f"send a signal to {_who}")
    def _signal_other(facts: Facts, who: str = _who) -> str:
        os.kill(_stranger(facts, who), 0)
        return "it may be signalled"


def _stranger(facts: Facts, who: str) -> int:
    """The pid of a process outside of the slot. Raises Denied where the number means a process of
    this slot."""
    pid = int(facts["pids"][who])
    try:
        inside = os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except FileNotFoundError:
        inside = False
    if inside:
        raise Denied("the number is one of its own processes")
    return pid


@attempt("processes", "see a process of the host or of another tenant")
def _see_processes(facts: Facts) -> str:
    strangers = [
        pid
        for pid in os.listdir("/proc")
        if pid.isdigit() and pid != "1" and os.stat(f"/proc/{pid}").st_uid != os.getuid()
    ]
    if not strangers:
        raise Denied("it sees its own and the shim")
    return f"sees {strangers}"


@attempt("processes", "send SIGTERM to its shim")
def _signal_shim(facts: Facts) -> str:
    os.kill(1, signal.SIGTERM)
    return "sent"


@attempt("processes", "send SIGTERM to its shim through a pidfd")
def _pidfd_signal(facts: Facts) -> str:
    syscall("pidfd_send_signal", os.pidfd_open(1), signal.SIGTERM, None, 0)
    return "sent"


@attempt("processes", "take a descriptor out of its shim")
def _pidfd_getfd(facts: Facts) -> str:
    return f"got {syscall('pidfd_getfd', os.pidfd_open(1), 0, 0)}"


@attempt("processes", "change the limits of its shim")
def _limits_of_shim(facts: Facts) -> str:
    resource.prlimit(1, resource.RLIMIT_NOFILE, (16, 16))
    return "changed"


@attempt("processes", "change the priority of its shim")
def _priority_of_shim(facts: Facts) -> str:
    os.setpriority(os.PRIO_PROCESS, 1, 19)
    return "changed"


@attempt("processes", "bind its shim to one processor")
def _affinity_of_shim(facts: Facts) -> str:
    os.sched_setaffinity(1, {0})
    return "changed"


@attempt("processes", "move its shim's memory")
def _migrate(facts: Facts) -> str:
    node = (ctypes.c_ulong * 1)(1)
    return f"moved, {syscall('migrate_pages', 1, 2, node, node)} left"


@attempt("processes", "trace its shim")
def _trace_shim(facts: Facts) -> str:
    return f"attached {syscall('ptrace', 16, 1, 0, 0)}"


@attempt("processes", "trace its Template")
def _trace_template(facts: Facts) -> str:
    return f"attached {syscall('ptrace', 16, facts['template'], 0, 0)}"


@attempt("processes", "compare its shim's resources with its own")
def _kcmp(facts: Facts) -> str:
    return f"compared {syscall('kcmp', os.getpid(), 1, 1, 0, 0)}"


def _vector(address: int, length: int) -> ctypes.Array[Any]:
    return (ctypes.c_ulong * 2)(address, length)


@attempt("processes", "write into its Template with process_vm_writev")
def _write_template_by_call(facts: Facts) -> str:
    local = ctypes.create_string_buffer(b"poisoned!")
    source, target = _vector(ctypes.addressof(local), 9), _vector(ctypes.addressof(MARK), 9)
    return f"wrote {syscall('process_vm_writev', facts['template'], source, 1, target, 1, 0)} bytes"


@attempt("processes", "read its shim with process_vm_readv")
def _read_shim_by_call(facts: Facts) -> str:
    local = ctypes.create_string_buffer(16)
    vector = _vector(ctypes.addressof(local), 9)
    return f"read {syscall('process_vm_readv', 1, vector, 1, vector, 1, 0)} bytes"


def _overwrite(pid: int) -> str:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(ctypes.addressof(MARK))
        memory.write(b"poisoned!")
        memory.seek(ctypes.addressof(MARK))
        return f"process {pid} now has {memory.read(9)!r}"


@attempt("Template", "change its Template's memory, and so all later forks and the snapshot")
def _poison_template(facts: Facts) -> str:
    return _overwrite(facts["template"])


@attempt("Template", "change the memory of a fork that waits for its first call")
def _poison_parked(facts: Facts) -> str:
    family = {os.getpid(), os.getppid(), facts["template"]}
    for _ in range(100):
        mine = {int(p) for p in os.listdir("/proc") if p.isdigit() and p != "1"}
        if mine - family:
            return _overwrite(max(mine - family))
        time.sleep(0.05)
    raise LookupError("no fork is parked")


@attempt("Template", "read its Template's environment")
def _template_environment(facts: Facts) -> str:
    return read(f"/proc/{facts['template']}/environ")


@attempt("Template", "list its Template's descriptors")
def _template_descriptors(facts: Facts) -> str:
    return read(f"/proc/{facts['template']}/fd")


@attempt("Template", "find its secret in its Template's environment")
def _secret_in_template(facts: Facts) -> str:
    with open(f"/proc/{facts['template']}/environ", "rb") as file:
        if os.environ["OWN_SECRET"].encode() not in file.read():
            raise Denied("it is not there")
    return "it is there"


@attempt("processes", "reach another tenant's System V shared memory")
def _system_v(facts: Facts) -> str:
    found = _libc.shmget(facts["ipc_key"], 0, 0)
    if found < 0:
        raise OSError(ctypes.get_errno(), "shmget")
    return f"shared memory {found}"


@attempt("processes", "reach another tenant's message queue")
def _message_queue(facts: Facts) -> str:
    found = _libc.mq_open(b"/" + facts["marker"].encode(), os.O_RDWR)
    if found < 0:
        raise OSError(ctypes.get_errno(), "mq_open")
    return f"queue {found}"


# -- rights

ATTEMPTS_BY_ID = {
    "become root": lambda: os.setuid(0),
    "become another tenant": lambda: os.setuid(os.getuid() + 1),
    "become root's group": lambda: os.setgid(0),
    "join root's group": lambda: os.setgroups([0]),
    "raise its hard limit of open files": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (10**6, 10**6)
    ),
    "allow itself core dumps": lambda: resource.setrlimit(resource.RLIMIT_CORE, (1, 1)),
    "raise its priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
    "run with real-time priority": lambda: os.sched_setscheduler(
        0, os.SCHED_FIFO, os.sched_param(1)
    ),
    "change the host's name": lambda: socket.sethostname("taken"),
    "set the clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
}
for _what, _do in ATTEMPTS_BY_ID.items():

    @attempt("rights", _what, also="ValueError")
    def _by_library(facts: Facts, do: Callable[[], object] = _do) -> str:
        do()
        return "it may"


@attempt("rights", "give itself capabilities")
def _capset(facts: Facts) -> str:
    header, everything = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0xFFFFFFFF] * 6)
    return f"set {syscall('capset', header, everything)}"


@attempt("rights", "have a capability")
def _capabilities(facts: Facts) -> str:
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    held = {
        name: status[name]
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")
        if int(status[name], 16)
    }
    if not held:
        raise Denied("it has none")
    return str(held)


@attempt("rights", "gain privileges by exec, or run without the system call filter")
def _privileges(facts: Facts) -> str:
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"):
        raise Denied("no_new_privs is set, and the filter is in force")
    return f"NoNewPrivs {status['NoNewPrivs']}, Seccomp {status['Seccomp']}"


@attempt("rights", "make a process that the kernel kills for want of memory last")
def _oom_score(facts: Facts) -> str:
    return write("/proc/self/oom_score_adj", "-1000")


@attempt("rights", "take real-time priority at the disk")
def _ioprio(facts: Facts) -> str:
    return f"set {syscall('ioprio_set', 1, 0, 1 << 13)}"


@attempt("rights", "leave a core dump", needs="core_in_directory")
def _core_dump(facts: Facts) -> str:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGABRT)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WCOREDUMP(status):
        raise Denied(f"it ended by {signal.Signals(os.WTERMSIG(status)).name} and left none")
    return "left one"


@attempt("rights", "give a program of its own capabilities")
def _file_capabilities(facts: Facts) -> str:
    with open("program", "w"):
        pass
    os.setxattr("program", "security.capability", struct.pack("<5I", 0x02000001, 0x200000, 0, 0, 0))
    return "it has CAP_SYS_ADMIN"


@attempt("rights", "give a file to root")
def _give_away(facts: Facts) -> str:
    with open("program", "w"):
        pass
    os.chown("program", 0, 0)
    return "root owns it"


# -- system calls: mounts, namespaces, the kernel

_NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x20000,
    "network": 0x40000000,
    "PID": 0x20000000,
    "IPC": 0x08000000,
    "cgroup": 0x02000000,
}
for _what, _flag in _NAMESPACES.items():
    attempt("namespaces", f"make a namespace of its own: {_what}")(refused_call("unshare", _flag))
attempt("namespaces", "clone a process into a new user namespace")(
    refused_call("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
)
_CLONE_ARGUMENTS = struct.pack("11Q", 0x10000000, *[0] * 10)
attempt("namespaces", "clone a process into a new user namespace with clone3")(
    refused_call("clone3", _CLONE_ARGUMENTS, 88)
)


@attempt("namespaces", "enter its shim's mount namespace")
def _enter_shim(facts: Facts) -> str:
    return f"entered {syscall('setns', os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)}"


@attempt("namespaces", "enter its shim's namespaces through a pidfd")
def _enter_by_pidfd(facts: Facts) -> str:
    return f"entered {syscall('setns', os.pidfd_open(1), 0x20000)}"


@attempt("namespaces", "enter a network namespace of the host")
def _enter_network(facts: Facts) -> str:
    return f"entered {syscall('setns', os.open(facts['paths']['network'], os.O_RDONLY), 0)}"


@attempt("namespaces", "map root into its user namespace")
def _uid_map(facts: Facts) -> str:
    return write("/proc/self/uid_map", "0 0 1")


for _what, _call in {
    "mount a file system": refused_call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "mount its code so that it may write it": refused_call(
        "mount", None, b"/run/pilotlight/slot/code", None, 32 | 4096, None
    ),
    "bind a directory of the host elsewhere": refused_call(
        "mount", b"/", b"/tmp", None, 4096, None
    ),
    "unmount its /proc": refused_call("umount2", b"/proc", 2),
    "unmount its /run, and see the host's": refused_call("umount2", b"/run", 2),
    "change its root with pivot_root": refused_call("pivot_root", b"/tmp", b"/tmp"),
    "change its root with chroot": refused_call("chroot", b"/tmp"),
    "open a file system": refused_call("fsopen", b"tmpfs", 0),
    "pick a mounted file system to change it": refused_call("fspick", -100, b"/proc", 0),
    "copy a tree of mounts": refused_call("open_tree", -100, b"/", 1),
    "copy a tree of mounts with other attributes": refused_call(
        "open_tree_attr", -100, b"/", 1, bytes(32), 32
    ),
    "move a mount": refused_call("move_mount", -100, b"/proc", -100, b"/tmp", 0),
    "change what a mount allows": refused_call(
        "mount_setattr", -100, b"/run/pilotlight/slot/code", 0, struct.pack("4Q", 0, 1, 0, 0), 32
    ),
    "account for processes": refused_call("acct", b"/tmp/acct"),
    "swap to a file": refused_call("swapon", b"/tmp/swap", 0),
    "set a disk quota": refused_call("quotactl", 0x800002 << 8, b"/dev/vda", 0, None),
}.items():
    attempt("mounts", _what)(_call)

for _what, _call in {
    "load a kernel module": refused_call("init_module", b"", 0, b""),
    "remove a kernel module": refused_call("delete_module", b"none", 0),
    "load another kernel": refused_call("kexec_load", 0, 0, None, 0),
    "restart the machine": refused_call("reboot", 1, 1, 1, None),
    "read the kernel's log": refused_call("syslog", 3, bytes(256), 256),
    "load a BPF program": refused_call("bpf", 5, bytes(128), 128),
    "make a BPF map": refused_call("bpf", 0, struct.pack("4I", 2, 4, 4, 1) + bytes(112), 128),
    "count another process's events": refused_call(
        "perf_event_open", struct.pack("2IQ", 1, 112, 0) + bytes(96), 1, -1, -1, 0
    ),
    "count the machine's events": refused_call(
        "perf_event_open", struct.pack("2IQ", 1, 112, 0) + bytes(96), -1, 0, -1, 0
    ),
    "add a key to the kernel": refused_call("add_key", b"user", b"mine", b"x", 1, -3),
    "read a keyring of the kernel": refused_call("keyctl", 6, -4, 0, 0, 0),
    "set up an io_uring": refused_call("io_uring_setup", 4, bytes(120)),
    "decide on other processes' access to files": refused_call("fanotify_init", 4, 0),
    "handle page faults": refused_call("userfaultfd", 0),
    "handle page faults of the kernel": lambda _: read("/dev/userfaultfd"),
    "set the clock by a system call": refused_call("clock_settime", 0, struct.pack("2q", 1, 0)),
}.items():
    attempt("kernel", _what)(_call)


@attempt("kernel", "adjust the clock")
def _adjust_clock(facts: Facts) -> str:
    request = ctypes.create_string_buffer(struct.pack("I4xq", 2, 1) + bytes(192))  # ADJ_FREQUENCY
    if _libc.adjtimex(request) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return "adjusted"


@attempt("kernel", "open a file by its handle")
def _handle(facts: Facts) -> str:
    handle, mount = (
        ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128)),
        ctypes.create_string_buffer(4),
    )
    syscall("name_to_handle_at", -100, b"/etc/passwd", handle, mount, 0)
    directory = os.open("/etc", os.O_RDONLY)
    return f"opened {syscall('open_by_handle_at', directory, handle, os.O_RDONLY)}"


for _path in (
    "mem",
    "kmsg",
    "port",
    "loop-control",
    "vhost-net",
    "mapper/control",
    "cpu/0/msr",
    "nvidiactl",
    "nvidia0",
):
    attempt("devices", f"open /dev/{_path}", also="ENXIO ENODEV")(
        lambda _, path=_path: open_to_write(f"/dev/{path}")  # type: ignore[misc]
    )
attempt("devices", "read the kernel's log from /dev/kmsg", needs="kernel_log_restricted")(
    lambda _: read("/dev/kmsg")
)


@attempt("devices", "list the host's devices")
def _devices(facts: Facts) -> str:
    known = {
        "fd",
        "full",
        "null",
        "ptmx",
        "pts",
        "random",
        "shm",
        "stderr",
        "stdin",
        "stdout",
        "tty",
        "urandom",
        "zero",
    }
    found = sorted(set(os.listdir("/dev")) - known)
    if not found:
        raise Denied("there are none but those of every slot")
    return f"found {found}"


attempt("devices", "list the host's network interfaces and control groups")(
    lambda _: ", ".join(read(path) for path in ("/sys/class/net", "/sys/fs/cgroup"))
)


@attempt("devices", "open a disk of the host")
def _disks(facts: Facts) -> str:
    disks = [
        f"/dev/{name}"
        for name in os.listdir("/dev")
        if stat.S_ISBLK(os.lstat(f"/dev/{name}").st_mode)
    ]
    opened = []
    for disk in disks:
        try:
            opened.append(f"{disk}: {read(disk)}")
        except OSError as e:
            if errno.errorcode[e.errno or 0] not in REFUSALS | {"ENXIO", "ENOMEDIUM"}:
                raise
    if not opened:
        raise Denied(f"none of {len(disks)}")
    return ", ".join(opened)


@attempt("devices", "make a device of the host's disk")
def _mknod(facts: Facts) -> str:
    os.mknod("disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))
    return "made"


@attempt("devices", "make the device node of a GPU")
def _mknod_gpu(facts: Facts) -> str:
    os.mknod("gpu", stat.S_IFCHR | 0o600, os.makedev(195, 0))
    return "made"


@attempt("devices", "list the host's GPUs in /proc/driver")
def _drivers(facts: Facts) -> str:
    found = sorted(os.listdir("/proc/driver"))
    if not found:
        raise Denied("it is empty")
    return f"found {found}"


@attempt("devices", "make a network interface with /dev/net/tun", also="ENODEV")
def _tun(facts: Facts) -> str:
    with open("/dev/net/tun", "r+b", buffering=0) as device:
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"taken0", 1))
    return "made"


@attempt("devices", "type into the platform's terminal", also="ENXIO")
def _terminal(facts: Facts) -> str:
    with open("/dev/tty", "r+b", buffering=0) as terminal:
        fcntl.ioctl(terminal, 0x5412, b"x")
    return "typed"


for _path, _text in {
    "/proc/sys/kernel/core_pattern": "|/tmp/mine",
    "/proc/sys/kernel/hostname": "taken",
    "/proc/sys/vm/drop_caches": "1",
    "/proc/sys/net/ipv4/ip_forward": "1",
    "/proc/sysrq-trigger": "h",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always",
    "/sys/power/state": "mem",
}.items():
    attempt("kernel", f"write {_path}")(lambda _, path=_path, text=_text: write(path, text))  # type: ignore[misc]
for _path in ("/proc/kcore", "/proc/vmallocinfo", "/proc/timer_list"):
    attempt("kernel", f"read {_path}")(lambda _, path=_path: read(path))  # type: ignore[misc]
for _path in ("/sys/kernel/debug", "/sys/kernel/tracing", "/sys/fs/bpf", "/sys/fs/pstore"):

    @attempt("kernel", f"read what is in {_path}")
    def _kernel_directory(facts: Facts, path: str = _path) -> str:
        if not (found := os.listdir(path)):
            raise Denied("nothing is mounted there")
        return f"listed {found[:5]}"


@attempt("kernel", "learn the kernel's addresses")
def _addresses(facts: Facts) -> str:
    with open("/proc/kallsyms") as symbols:
        address = symbols.readline().split()[0]
    if int(address, 16) == 0:
        raise Denied("they are shown as 0")
    return f"the first is at {address}"


# -- control groups, and what it may use

attempt("cgroups", "read how much memory another tenant uses", needs="groups")(
    lambda facts: read(facts["paths"]["memory_use"])
)
attempt("cgroups", "raise its own limit of memory", needs="groups")(
    lambda facts: open_to_write(facts["paths"]["own_memory_limit"])
)
attempt("cgroups", "move into another tenant's group", needs="groups")(
    lambda facts: open_to_write(facts["paths"]["cgroup_procs"])
)


@attempt("cgroups", "learn the ids of other tenants' instances", needs="groups")
def _ids_of_instances(facts: Facts) -> str:
    groups = os.listdir(os.path.dirname(os.path.dirname(facts["paths"]["memory_use"])))
    found = [name for name in groups if facts["instance"] in name]
    if not found:
        raise Denied("it is not among the groups")
    return f"found {found[0]}"


@attempt("cgroups", "make a group of its own", needs="groups")
def _make_group(facts: Facts) -> str:
    os.mkdir(os.path.join(os.path.dirname(facts["paths"]["own_memory_limit"]), "made"))
    return "made"


@attempt("limits", "have more threads than an instance may have", needs="groups")
def _threads(facts: Facts) -> str:
    import _thread

    _thread.stack_size(32768)
    lock = _thread.allocate_lock()
    lock.acquire()
    for count in range(THREADS):
        try:
            _thread.start_new_thread(lock.acquire, ())
        except RuntimeError as e:
            raise Denied(f"{e} after {count}") from None
    return f"has {THREADS} threads"


@attempt("limits", "take all events of asynchronous I/O of the machine", also="EAGAIN")
def _aio(facts: Facts) -> str:
    for _ in range(16):
        syscall("io_setup", 4096, (ctypes.c_ulong * 1)())
    return "has 65536 of them"


@attempt("limits", "take a hundred pseudo-terminals", also="ENOSPC")
def _terminals(facts: Facts) -> str:
    held = []
    try:
        held += [os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY) for _ in range(100)]
    finally:
        for one in held:
            os.close(one)
    return f"has {len(held)}"


@attempt(
    "limits", "use more memory than it declared", needs="groups", also="SIGKILL ENOMEM MemoryError"
)
def _memory(facts: Facts) -> str:
    block = mmap.mmap(-1, MEMORY_BYTES)
    for offset in range(0, MEMORY_BYTES, 4096):
        block[offset] = 1
    return f"uses {MEMORY_BYTES >> 20} MiB"


for _folder in ("/run/pilotlight/slot/work", "/tmp", "/dev/shm"):

    @attempt("limits", f"fill {_folder} beyond the memory that it declared", also="ENOSPC")
    def _fill(facts: Facts, folder: str = _folder) -> str:
        descriptor = os.open(f"{folder}/large", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, 2 * MEMORY_BYTES)
        finally:
            os.unlink(f"{folder}/large")
        return f"has a file of {2 * MEMORY_BYTES} bytes"


@attempt("limits", "lock memory without a bound", also="ENOMEM")
def _lock_memory(facts: Facts) -> str:
    block = mmap.mmap(-1, 128 * 1024**2)
    if (
        _libc.mlock(
            ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(block))),
            ctypes.c_size_t(len(block)),
        )
        != 0
    ):
        raise OSError(ctypes.get_errno(), "mlock")
    return "locked 128 MiB"


# -- network

for _process, _port in {
    "activator": 8701,
    "controller": 8702,
    "snapshotter": 8703,
    "weight_cache": 8704,
}.items():

    @attempt("network", f"read the metrics of {_process}")
    def _metrics(facts: Facts, port: int = _port) -> str:
        status, text = get("127.0.0.1", port, "/metrics")
        if status != 200:
            raise Denied(f"status {status}")
        return (
            f"{len(text.splitlines())} lines, with the other tenant's name: "
            f"{facts['other_tenant'] in text}"
        )


def bind(
    facts: Facts, family: int, host: str, port: int, *, only_v6: bool = False, reuse: bool = False
) -> str:
    """Listen there for a moment, which is nothing where nobody else is in that network."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        if only_v6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((host, port))
        server.listen()
    if os.stat("/proc/self/ns/net").st_ino != facts["platforms_network"]:
        raise Denied(f"listened at {host} port {port} of a network of its own")
    return f"listened at {host} port {port}"


@attempt("network", "answer in the platform's place at 127.0.0.1", also="EADDRINUSE")
def _bind_same(facts: Facts) -> str:
    return bind(facts, socket.AF_INET, "127.0.0.1", facts["port"], reuse=True)


@attempt("network", "answer in the platform's place at every address", also="EADDRINUSE")
def _bind_any(facts: Facts) -> str:
    return bind(facts, socket.AF_INET, "0.0.0.0", facts["port"], reuse=True)


@attempt("network", "answer in the platform's place at [::1]", also="EADDRINUSE")
def _bind_loopback_6(facts: Facts) -> str:
    return bind(facts, socket.AF_INET6, "::1", facts["port"])


@attempt("network", "answer in the platform's place at every IPv6 address", also="EADDRINUSE")
def _bind_any_6(facts: Facts) -> str:
    return bind(facts, socket.AF_INET6, "::", facts["port"], only_v6=True)


@attempt(
    "network",
    "answer in the platform's place at another address of 127.0.0.0/8",
    also="EADDRINUSE",
    open_until=ISOLATION_NETWORK,
)
def _bind_other_loopback(facts: Facts) -> str:
    return bind(facts, socket.AF_INET, "127.0.0.2", facts["port"])


@attempt("network", "listen at a port of the system")
def _bind_low(facts: Facts) -> str:
    return bind(facts, socket.AF_INET, "127.0.0.1", 81)


@attempt("network", "connect to another tenant's server on TCP", open_until=ISOLATION_NETWORK)
def _other_server(facts: Facts) -> str:
    return say_hello(socket.AF_INET, ("127.0.0.1", facts["other_port"]))


for _what, _key in {
    "a service of the host on 127.0.0.1": "host_service",
    "the metadata service of a cloud": "metadata_service",
    "a server of a private network": "private_service",
}.items():

    @attempt("network", f"read from {_what}", open_until=ISOLATION_NETWORK)
    def _service(facts: Facts, key: str = _key) -> str:
        return f"read {get(*facts[key])[1]!r}"


for _path in ("tcp", "unix"):

    @attempt(
        "network",
        f"see other tenants' and the platform's sockets in /proc/net/{_path}",
        open_until=ISOLATION_NETWORK,
    )
    def _table_of_sockets(facts: Facts, path: str = _path) -> str:
        with open(f"/proc/net/{path}") as file:
            text = file.read()
        wanted = f"{facts['other_port']:04X}" if path == "tcp" else facts["abstract"]
        if wanted not in text:
            raise Denied("it is not there")
        return f"{len(text.splitlines())} sockets, another tenant's among them"


@attempt("network", "send any packet (AF_INET, SOCK_RAW)")
def _raw(facts: Facts) -> str:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "made the socket"


@attempt("network", "see every packet (AF_PACKET)")
def _packet(facts: Facts) -> str:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    return "made the socket"


@attempt("network", "reach the machine's hypervisor (AF_VSOCK)", needs="vsock")
def _vsock(facts: Facts) -> str:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return "made the socket"


def netlink(protocol: int, kind: int, body: bytes) -> str:
    """Send one request that changes something, and read the kernel's answer. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as kernel:
        kernel.settimeout(5)
        # REQUEST | ACK | CREATE | EXCL
        kernel.send(struct.pack("=LHHLL", 16 + len(body), kind, 0x605, 1, 0) + body)
        code = struct.unpack_from("=i", kernel.recv(4096), 16)[0]
    if code < 0:
        raise OSError(-code, os.strerror(-code))
    return "the kernel did it"


@attempt("network", "change a route")
def _route(facts: Facts) -> str:
    destination = struct.pack("=HH4s", 8, 1, socket.inet_aton("192.0.2.77")) + struct.pack(
        "=HHI", 8, 4, 1
    )
    return netlink(
        socket.NETLINK_ROUTE,
        24,
        struct.pack("=8BI", socket.AF_INET, 32, 0, 0, 254, 4, 253, 1, 0) + destination,
    )


@attempt("network", "take an interface down")
def _link_down(facts: Facts) -> str:
    return netlink(socket.NETLINK_ROUTE, 16, struct.pack("=BxHiII", socket.AF_UNSPEC, 0, 1, 0, 1))


@attempt("network", "give itself an address")
def _address(facts: Facts) -> str:
    attribute = struct.pack("=HH4s", 8, 2, socket.inet_aton("127.9.9.9"))
    return netlink(
        socket.NETLINK_ROUTE, 20, struct.pack("=4BI", socket.AF_INET, 8, 0, 254, 1) + attribute
    )


@attempt("network", "mark its packets for other rules")
def _mark(facts: Facts) -> str:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, 36, 1)
    return "marked"


@attempt("network", "answer for addresses that are not the machine's")
def _transparent(facts: Facts) -> str:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_IP, 19, 1)
    return "transparent"


@attempt("network", "watch the audit messages of the kernel")
def _audit(facts: Facts) -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9) as kernel:
        kernel.bind((0, 1))
    return "joined"


# -- secrets and keys

_KEY = re.compile(r"pl_[A-Za-z0-9_-]{16,}")


@attempt("secrets", "find a key of the platform in its environment")
def _key_in_environment(facts: Facts) -> str:
    with open("/proc/self/environ", errors="replace") as file:
        found = _KEY.findall(file.read() + json.dumps(dict(os.environ)))
    if not found:
        raise Denied("there is none")
    return f"{len(found)} keys"


@attempt("secrets", "find a key of the platform in its launch file")
def _key_in_launch(facts: Facts) -> str:
    with open("/run/pilotlight/slot/launch.json") as file:
        text = file.read()
    if not _KEY.findall(text) and os.environ["OWN_SECRET"] not in text:
        raise Denied("neither a key nor a secret")
    return text[:200]


@attempt("secrets", "find a secret of another app of its own tenant")
def _other_apps_secret(facts: Facts) -> str:
    if "OTHER_SECRET" not in os.environ:
        raise Denied("it is not in the environment")
    return os.environ["OTHER_SECRET"]


@attempt("secrets", "find credentials of the operator in its environment")
def _operator_environment(facts: Facts) -> str:
    found = [
        name
        for name in os.environ
        if name.startswith(
            ("AWS_", "PIP_", "REDIS", "PILOTLIGHT_HOME", "PILOTLIGHT_CONFIG", "OPERATOR_")
        )
    ]
    if not found:
        raise Denied("there are none")
    return ", ".join(found)


# -- the platform's own URL, with its own key


def ask(
    facts: Facts,
    method: str,
    path: str,
    body: Any = None,
    *,
    refused: tuple[int, ...] = (),
    key: bool = True,
) -> str:
    """Ask the platform with the tenant's own admin key. Raises Denied for a refusal, LookupError
    for an answer that proves nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", facts["port"], timeout=10)
    headers = {
        "content-type": "application/json",
        **({"authorization": f"Bearer {facts['api_key']}"} if key else {}),
    }
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    finally:
        connection.close()
    if response.status in (401, 403, 404, 405, *refused):
        raise Denied(f"status {response.status}: {text[:160]}")
    if not 200 <= response.status < 300:
        raise LookupError(f"status {response.status}: {text[:300]}")
    return text


def ask_in_vain(facts: Facts, method: str, path: str, wanted: str) -> str:
    """The same, of an answer that must not name something."""
    text = ask(facts, method, path)
    if wanted not in text:
        raise Denied("it is not in the answer")
    return f"found {wanted} in {text[:160]}"


_REQUESTS: dict[str, tuple[str, str, Any]] = {
    "call another tenant's function by its name": ("POST", "/v1/functions/holder/hold:invoke", {}),
    "call another tenant's function under the tenant's name": (
        "POST",
        "/t/{other_tenant}/v1/functions/holder/hold:invoke",
        {},
    ),
    "submit a call of another tenant's function": (
        "POST",
        "/t/{other_tenant}/v1/functions/holder/hold:submit",
        {},
    ),
    "warm up another tenant's function": (
        "POST",
        "/t/{other_tenant}/v1/functions/holder/hold:warmup",
        {},
    ),
    "read another tenant's call": ("GET", "/v1/calls/{call}", None),
    "read another tenant's call under the tenant's name": (
        "GET",
        "/t/{other_tenant}/v1/calls/{call}",
        None,
    ),
    "cancel another tenant's call": ("POST", "/v1/calls/{call}:cancel", None),
    "repeat another tenant's call": ("POST", "/v1/calls/{call}:redrive", None),
    "read the trace of another tenant's call": ("GET", "/v1/traces/{call}", None),
    "run a command in another tenant's sandbox": (
        "POST",
        "/v1/sandboxes/{sandbox}/exec",
        {"args": ["id"]},
    ),
    "read a file of another tenant's sandbox": (
        "GET",
        "/v1/sandboxes/{sandbox}/files?path=/etc/passwd",
        None,
    ),
    "end another tenant's sandbox": ("POST", "/v1/calls/{sandbox}:cancel", None),
    "make a sandbox by another tenant's function": (
        "POST",
        "/t/{other_tenant}/v1/functions/box/{sandbox_function}:submit",
        {},
    ),
    "read another tenant's dict": ("POST", "/v1/dicts/{collection}", {"op": "list"}),
    "take values of another tenant's queue": ("POST", "/v1/queues/{collection}", {"op": "get"}),
    "download another tenant's bundle": ("GET", "/v1/blobs/{bundle}", None),
    "download another tenant's weights": ("GET", "/v1/blobs/{weights_file}", None),
    "download the manifest of another tenant's weights": ("GET", "/v1/blobs/{manifest}", None),
    "see another tenant's app": ("GET", "/v1/apps/holder", None),
    "delete another tenant's app": ("DELETE", "/v1/apps/holder", None),
    "see another tenant's revisions": ("GET", "/v1/apps/holder/functions/hold/revisions", None),
    "stop another tenant's instance": ("POST", "/v1/instances/{instance}:stop", None),
    "run a command beside another tenant's instance": (
        "POST",
        "/v1/instances/{instance}:exec",
        {"argv": ["id"]},
    ),
    "drop another tenant's Template": ("DELETE", "/v1/templates/{revision}", None),
    "see another tenant's plan": ("GET", "/v1/tenants/{other_tenant}", None),
    "change another tenant": ("PATCH", "/v1/tenants/{other_tenant}", {"plan": "free"}),
    "list the tenants": ("GET", "/v1/tenants", None),
    "make a tenant": ("POST", "/v1/tenants", {"name": "third"}),
    "make itself a key of another tenant": ("POST", "/v1/tenants/{other_tenant}/keys", {}),
    "see another tenant's key": ("GET", "/v1/keys/{other_key}", None),
    "rotate another tenant's key": ("POST", "/v1/keys/{other_key}:rotate", {}),
    "revoke another tenant's key": ("DELETE", "/v1/keys/{other_key}", None),
    "read another tenant's weights by name": ("GET", "/v1/weights/private", None),
    "read the platform's feed": ("GET", "/internal/feed", None),
    "read the platform's feed behind a public prefix": ("GET", "/v1/../internal/feed", None),
    "read the platform's feed under an encoded name": ("GET", "/v1/%2e%2e/internal/feed", None),
    "read the platform's feed under a tenant's name": (
        "GET",
        "/t/{other_tenant}/internal/feed",
        None,
    ),
    "report usage to the ledger": ("POST", "/internal/usage", {"records": []}),
    "correct an invoice": (
        "POST",
        "/v1/billing/corrections",
        {"record": "r", "amount": "1", "note": "mine"},
    ),
}
for _what, (_method, _path, _body) in _REQUESTS.items():

    @attempt("API", _what)
    def _asked(facts: Facts, method: str = _method, path: str = _path, body: Any = _body) -> str:
        return ask(facts, method, path.format(**facts), body)


for _what, (_path, _key) in {
    "see another tenant's instances": ("/v1/instances", "instance"),
    "see another tenant's instances by the app's name": ("/v1/instances?app=holder", "instance"),
    "read the log of another tenant's instance": (
        "/v1/logs?instance={instance}&tail=100",
        "marker",
    ),
    "read the log of another tenant's call": ("/v1/logs?call={call}&tail=100", "marker"),
    "see another tenant's Templates": ("/v1/templates", "revision"),
    "see another tenant's snapshots": ("/v1/snapshots", "revision"),
    "see another tenant's calls": ("/v1/calls", "call"),
    "see another tenant's keys": ("/v1/keys", "other_key"),
    "see what another tenant did": ("/v1/audit", "other_key"),
    "see another tenant's apps": ("/v1/apps", "holder"),
    "see another tenant's weights": ("/v1/weights", "manifest"),
    "see other tenants in the description of the node": ("/v1/node", "other_tenant"),
    "read a secret of its own back": ("/v1/secrets", "own_secret"),
}.items():

    @attempt("API", _what)
    def _listed(facts: Facts, path: str = _path, key: str = _key) -> str:
        return ask_in_vain(facts, "GET", path.format(**facts), str(facts.get(key, key)))


for _what, _key in {
    "deploy another tenant's bundle by its digest": "with_bundle",
    "deploy with another tenant's weights by their digest": "with_weights",
    "deploy with another tenant's environment by its digest": "with_image",
    "deploy with another tenant's secret by its name": "with_secret",
}.items():

    @attempt("API", _what)
    def _stolen(facts: Facts, key: str = _key) -> str:
        return ask(
            facts,
            "POST",
            "/v1/apps/stolen/deploy",
            {"functions": [facts[key]], "message": ""},
            refused=(400,),
        )


@attempt("API", "give a name to another tenant's weights")
def _name_weights(facts: Facts) -> str:
    return ask(facts, "PUT", "/v1/weights/mine", {"manifest": facts["manifest"]}, refused=(400,))


@attempt("API", "have the platform send a webhook to itself")
def _webhook(facts: Facts) -> str:
    return ask(
        facts,
        "PUT",
        "/v1/webhooks/mine",
        {"url": f"https://127.0.0.1:{facts['port']}/"},
        refused=(400,),
    )


@attempt("API", "have the platform send a webhook to the metadata service of a cloud")
def _webhook_metadata(facts: Facts) -> str:
    return ask(
        facts, "PUT", "/v1/webhooks/mine", {"url": "https://169.254.169.254/"}, refused=(400,)
    )


@attempt("API", "list its instances without a key")
def _without_key(facts: Facts) -> str:
    return ask(facts, "GET", "/v1/instances", key=False)


# -- running them


@app.function(
    memory="512MiB",
    max_instances=1,
    scaledown_window=600,
    timeout=120,
    weights=pilotlight.Weights("own"),
    secrets=[pilotlight.Secret.from_name("own")],
)
def walk(names: list[str], facts: dict[str, Any]) -> dict[str, str]:
    """Name → `denied: <why>`, `succeeded: <evidence>`, or `broken: <why>` where the attempt proves
    nothing."""
    known = {one.name: one for one in TABLE}
    if names and os.getppid() == 1:
        raise RuntimeError(
            "the worker is no fork of a Template: nothing is learned about Templates"
        )
    facts = {**facts, "template": os.getppid()}
    return {name: run(known[name], facts) for name in names}


def run(one: Attempt, facts: Facts) -> str:
    """Make one attempt, in a process of its own: what it does to itself does not matter to the next
    one."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        _attempt_and_exit(one, facts, writable)
    os.close(writable)
    pieces = []
    deadline = time.monotonic() + PATIENCE_S
    while select.select([readable], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not (piece := os.read(readable, 65536)):
            break
        pieces.append(piece)
    else:
        os.kill(child, signal.SIGKILL)
    os.close(readable)
    status = os.waitpid(child, 0)[1]
    if pieces:
        return b"".join(pieces).decode(errors="replace")
    if time.monotonic() >= deadline:
        return f"broken: no answer in {PATIENCE_S} s"
    word = (
        signal.Signals(os.WTERMSIG(status)).name
        if os.WIFSIGNALED(status)
        else f"exit status {os.WEXITSTATUS(status)}"
    )
    return f"{'denied' if word in one.also else 'broken'}: ended by {word}"


def _attempt_and_exit(one: Attempt, facts: Facts, report: int) -> None:
    try:
        said = _outcome(one, facts)
    except BaseException as e:  # noqa: BLE001 - whatever it is, it is reported, and this process ends
        said = f"broken: {type(e).__name__}: {e}"
    os.write(report, said[:2000].encode(errors="replace"))
    os._exit(0)


def _outcome(one: Attempt, facts: Facts) -> str:
    try:
        return f"succeeded: {one.code(facts)}"
    except Denied as e:
        return f"denied: {e}"
    except OSError as e:
        word = errno.errorcode.get(e.errno or 0, "") or type(e).__name__
        return f"{'denied' if word in REFUSALS | one.also else 'broken'}: {word}: {e}"
    except (ValueError, MemoryError) as e:
        word = type(e).__name__
        return f"{'denied' if word in one.also else 'broken'}: {word}: {e}"


__all__ = ["TABLE", "Attempt", "app", "walk"]
