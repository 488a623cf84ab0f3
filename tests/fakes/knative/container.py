"""Runs one container: `python container.py SPEC.json` in namespaces of its own (mounts, PIDs, host
name, and the network where it has an `address`), then becomes its process.

Its root is an empty file system with the image's directories bound into it (the machine's own,
where the image is none that was pulled), its volumes over them, read-only. Standard library only: it runs before anything else is there. The first process
waits, passes signals on, and ends as the container did."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

Json = dict[str, Any]
NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
GATEWAY = "169.254.79.1"
"""The machine, as a pod with a network of its own sees it."""
RDONLY, REMOUNT, BIND, REC, PRIVATE = 1, 32, 4096, 16384, 1 << 18
PIVOT_ROOT, DETACH = {"x86_64": 155, "aarch64": 41}, 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
_OWN = ("proc", "sys", "dev", "tmp", "run", "etc", "root", "home")
_OWN_OF_IMAGES = ("proc", "sys", "dev")
_ETC = (
    "passwd",
    "group",
    "hosts",
    "resolv.conf",
    "nsswitch.conf",
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "ssl",
    "alternatives",
    "mime.types",
)
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """See the module."""
    with open(sys.argv[1], encoding="utf-8") as file:
        spec: Json = json.load(file)
    _check(_libc.unshare(NEWNS | NEWUTS | NEWIPC | NEWPID), "unshare")
    _mount("none", "/", "", REC | PRIVATE)
    alive, held = os.pipe()  # `held` closes when this process ends, however it ends
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _die_with_parent(alive)
        for path in spec["groups"]:  # its parent waits outside, as a runtime does
            with open(path, "w", encoding="utf-8") as group:
                group.write("0")
        if spec["address"]:
            _check(_libc.unshare(NEWNET), "unshare")
            os.write(tells, b".")
            _await_network(alive)
        _become(spec, alive)
    os.close(alive)
    link = f"plw-{pid}"
    if spec["address"] and os.read(told, 1):
        _connect(spec["address"], link, pid)
        os.write(held, b".")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda got, _frame: os.kill(pid, got))
    _, status = os.waitpid(pid, 0)
    # its link ends with its network namespace
    if os.WIFSIGNALED(status):
        os._exit(128 + os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _connect(address: str, link: str, pid: int) -> None:
    """A veth pair between the machine and the container's network, without other ways out of it."""
    _ip(
        f"link add {link} type veth peer name eth0 netns /proc/{pid}/ns/net",
        f"address add {GATEWAY}/32 dev {link}",
        f"link set {link} up",
        f"route add {address}/32 dev {link} src {GATEWAY}",
    )
    inside = f"address add {address}/32 dev eth0\nlink set eth0 up\nlink set lo up\n"
    inside += f"route add {GATEWAY}/32 dev eth0 src {address}\n"
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-"]
    subprocess.run(command, input=inside.encode(), check=True)


def _ip(*orders: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(orders).encode(), check=True)


def _await_network(alive: int) -> None:
    if os.read(alive, 1) == b"":  # the other process ended
        os._exit(128 + signal.SIGKILL)


def _die_with_parent(alive: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if the parent ended before the
    kernel knew.

    getppid() cannot tell: it is always 0 for the first process of a PID namespace.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([alive], [], [], 0)[0]:
        os._exit(128 + signal.SIGKILL)


def _become(spec: Json, alive: int) -> None:
    root = spec["root"]
    _mount("tmpfs", root, "tmpfs", 0, "mode=755")
    _furnish(root, spec)
    for volume in spec["volumes"]:
        _bind(volume["source"], root + volume["target"], read_only=volume["read_only"])
    if spec["read_only_root"]:
        _mount("none", root, "", REMOUNT | BIND | RDONLY)
    _libc.sethostname(spec["hostname"].encode(), len(spec["hostname"].encode()))
    _enter(root)
    os.chdir(spec["cwd"])
    os.setgroups([])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _die_with_parent(alive)  # again: setuid() cleared the signal
    os.execve(spec["argv"][0], spec["argv"], spec["env"])


def _enter(root: str) -> None:
    """Make `root` the root of the mount namespace, with nothing of the machine's left behind it, as
    container runtimes do (pivot_root(2), `pivot_root(".", ".")`). Where the kernel refuses that,
    because the machine itself runs from an initial ramdisk, chroot."""
    os.chdir(root)
    if _libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b".") != 0:
        os.chroot(root)
        return
    _check(_libc.umount2(b".", DETACH), "umount the machine's root")
    os.chdir("/")


def _furnish(root: str, spec: Json) -> None:
    taken = {
        volume["target"].split("/")[1]
        for volume in spec["volumes"]
        if volume["target"].count("/") == 1
    }
    image, own = spec["image"], _OWN_OF_IMAGES if spec["image"] else _OWN
    for name in os.listdir(image or "/"):
        if name in own or name in taken:
            continue
        if os.path.islink(f"{image}/{name}"):
            os.symlink(os.readlink(f"{image}/{name}"), f"{root}/{name}")
        elif os.path.isdir(f"{image}/{name}"):
            _bind(f"{image}/{name}", f"{root}/{name}", read_only=bool(image))
    for name in (*own, "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    if not image:
        os.chmod(f"{root}/tmp", 0o1777)
    _bind_if_there("/dev", _DEVICES, root)
    if not image:
        _bind_if_there("/etc", _ETC, root)
        for place in spec["visible"]:
            if place.split("/")[1] in _OWN:
                _bind(place, root + place, read_only=True)
    _bind("/sys", f"{root}/sys", read_only=True)
    _mount("tmpfs", f"{root}/dev/shm", "tmpfs", 0, "mode=1777")
    # a machine that is a container itself may not allow that
    if _libc.mount(b"proc", f"{root}/proc".encode(), b"proc", 0, None) != 0:
        _bind("/proc", f"{root}/proc", read_only=False)


def _bind_if_there(directory: str, names: tuple[str, ...], root: str) -> None:
    for name in names:
        if os.path.exists(f"{directory}/{name}"):
            _bind(f"{directory}/{name}", f"{root}{directory}/{name}", read_only=False)


def _bind(source: str, target: str, *, read_only: bool) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with contextlib.suppress(FileExistsError), open(target, "xb"):
            pass
    _mount(source, target, "", BIND | REC)
    if read_only:
        _mount("none", target, "", REMOUNT | BIND | RDONLY)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _check(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode() or None),
        f"mount {source} at {target}",
    )


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
