"""The root directory of a slot, made by a process of its own that then looks around in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UID = 20_077
LOOK = """
import json, os, sys
from snapshotter import mount, tree

def refused(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as e:
        return os.strerror(e.errno)

uid, gpu, code, directory = json.loads(sys.argv[1])
tree.unshare()
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
tree.enter_as_init()
nodes = {name: os.stat(f"/dev/{name}").st_rdev for name in ("null", "zero", "full", "random", "urandom", "tty")}
mount.mount("tmpfs", "/dev", "tmpfs", 0, "size=64k")
for name, number in {**nodes, "nvidia0": nodes["null"], "nvidiactl": nodes["null"], "sda": nodes["null"]}.items():
    os.mknod(f"/dev/{name}", 0o20666, number)
mount.mount("tmpfs", "/usr/local/share", "tmpfs", 0, "size=64k")
open("/usr/local/share/libcuda.so.1", "w").close()
held = os.open("/etc/debian_version" if os.path.exists("/etc/debian_version") else "/etc/passwd", os.O_RDONLY)
at = tree.prepare(directory)
tree.build(at, [(code, "code")], uid=uid, writable_bytes=1024**2, gpu=gpu)
work = os.stat(f"{tree.ROOT}/work")
print(json.dumps({
    **{name: sorted(os.listdir(path)) for name, path in (("root", "/"), ("dev", "/dev"), ("sys", "/sys"), ("etc", "/etc"))},
    "machine": sorted(os.listdir("/sys/devices/system")), "users": open("/etc/passwd").read(), "code": os.listdir(f"{tree.ROOT}/code"),
    "refused": {
        path: refused(path) for path in ("/x", "/etc/x", "/usr/x", "/usr/local/share/x", "/dev/x", f"{tree.ROOT}/code/x", "/sys/x")
    },
    "made": {path: refused(path) for path in ("/tmp/x", "/var/tmp/y", "/run/x", "/dev/shm/x", f"{tree.ROOT}/work/x")},
    "shared": sorted(os.listdir("/tmp")), "work": [work.st_uid, work.st_mode & 0o777], "held": bool(os.read(held, 1)),
    "zero": list(open("/dev/zero", "rb").read(2)), "mounts": [line.split()[4] for line in open("/proc/self/mountinfo")],
    "below": os.listdir("/usr/local/share"), "shell": os.system("/bin/sh -c true"), "terminals": os.ttyname(os.openpty()[1]),
}))
"""

pytestmark = pytest.mark.root


@pytest.fixture
def code(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    made.mkdir()
    (made / "app.py").write_text("x = 1")
    return made


def look(code: Path, *, gpu: bool = False) -> dict[str, Any]:
    """What a process finds in the root that it made. It is root still: what it cannot do, nobody in a slot can."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps([UID, gpu, str(code), str(code.parent)])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_of_the_host_there_are_programs_libraries_and_public_settings(code: Path) -> None:
    seen = look(code)
    assert set(seen["root"]) <= {"bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "tmp", "usr", "var"}
    assert seen["dev"] == [
        "fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero",
    ]  # fmt: skip
    assert seen["below"] == ["libcuda.so.1"]
    assert seen["sys"] == ["devices"]
    assert "cpu" in seen["machine"]
    assert {"group", "hosts", "nsswitch.conf", "passwd", "ssl"} <= set(seen["etc"])
    assert set(seen["etc"]).isdisjoint({"hostname", "shadow", "machine-id", "ssh", "fstab", "sudoers"})
    assert [line.split(":")[0] for line in seen["users"].splitlines()] == ["root", "nobody", "function"]
    assert f":{UID}:{UID}:" in seen["users"]
    assert (seen["code"], seen["shell"]) == (["app.py"], 0)


def test_only_its_own_directories_can_be_written(code: Path) -> None:
    seen = look(code)
    assert set(seen["refused"].values()) <= {"Read-only file system", "Operation not permitted", "Permission denied"}, seen["refused"]
    assert set(seen["made"].values()) == {None}
    assert {"x", "y"} <= set(seen["shared"]), "/tmp and /var/tmp are one"
    assert seen["work"] == [UID, 0o700]


def test_nothing_of_the_host_stays_mounted_and_what_was_held_open_stays_good(code: Path) -> None:
    seen = look(code)
    assert seen["mounts"].count("/") == 1
    host = ("/home", "/root", "/boot", "/srv", "/opt", "/mnt", "/sys/fs", "/dev/mqueue", "/dev/hugepages")
    assert [at for at in seen["mounts"] if at.startswith(host)] == []
    assert seen["held"] is True
    assert (seen["zero"], seen["terminals"]) == ([0, 0], "/dev/pts/0")


def test_who_asked_for_a_gpu_sees_its_nodes(code: Path) -> None:
    seen = look(code, gpu=True)
    assert {"nvidia0", "nvidiactl"} <= set(seen["dev"])
    assert "sda" not in seen["dev"]
    assert {"class", "devices"} <= set(seen["sys"])
    assert seen["refused"]["/sys/x"] is not None
