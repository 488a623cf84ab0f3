"""The root directory of a slot, made by a process of its own that then looks around in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshotter.shim.sandbox.root_directory import MAX_PTYS, complete
from tests.fakes.small_rootfs import HAS_APT, make_base

ROOT = Path(__file__).parents[3]
UID = 20_077
LOOK = """
import json, os, sys
from snapshotter.shim.sandbox import (mount, mounts)

def refused(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as e:
        return os.strerror(e.errno)

uid, devices, code, directory, rootfs = json.loads(sys.argv[1])
mounts.unshare()
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
mounts.enter_as_init()
nodes = {name: os.stat(f"/dev/{name}").st_rdev for name in ("null", "zero", "full", "random", "urandom", "tty")}
mount.mount("tmpfs", "/dev", "tmpfs", 0, "size=64k")
others = ("nvidia0", "nvidia1", "nvidiactl", "sda")
for name, number in {**nodes, **dict.fromkeys(others, nodes["null"])}.items():
    os.mknod(f"/dev/{name}", 0o20666, number)
os.mkdir("/dev/nvidia-caps")
os.mknod("/dev/nvidia-caps/nvidia-cap21", 0o20666, nodes["null"])
mount.mount("tmpfs", "/usr/local/share", "tmpfs", 0, "size=64k")
open("/usr/local/share/libcuda.so.1", "w").close()
held = os.open("/etc/debian_version" if os.path.exists("/etc/debian_version") else "/etc/passwd", os.O_RDONLY)
at = mounts.prepare(directory)
mounts._DRIVER_LIBRARIES = ("/usr/local/share/libcuda*",)
mounts.build(at, [(code, "code")], uid=uid, writable_bytes=1024**2, rootfs=rootfs, links={"data": f"{mounts.ROOT}/code"},
    devices=[(f"/dev/{name}", name) for name in devices],
    driver_files=[(f"{directory}/code/app.py", "nvidia/gpus/0/information")] if devices else [],
)
work = os.stat(f"{mounts.ROOT}/work")
name = os.ttyname(os.openpty()[1])
terminals = 0
try:
    while terminals < 100:
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        terminals += 1
except OSError:
    pass
try:
    import colorsys
    imported = True
except ImportError:
    imported = False
print(json.dumps({
    "imported": imported, "caps": os.path.exists("/dev/nvidia-caps") and os.listdir("/dev/nvidia-caps"),
    "drivers": [os.path.join(at, name) for at, _, names in os.walk("/proc/driver") for name in names],
    "driver": sorted(os.listdir(mounts.DRIVER)) if os.path.exists(mounts.DRIVER) else None,
    **{name: sorted(os.listdir(path)) for name, path in (("root", "/"), ("dev", "/dev"), ("sys", "/sys"), ("etc", "/etc"))},
    "machine": sorted(os.listdir("/sys/devices/system")), "users": open("/etc/passwd").read(), "code": os.listdir(f"{mounts.ROOT}/code"),
    "refused": {
        path: refused(path) for path in ("/x", "/etc/x", "/usr/x", "/usr/local/share/x", "/dev/x", f"{mounts.ROOT}/code/x", "/sys/x")
    },
    "made": {path: refused(path) for path in ("/tmp/x", "/var/tmp/y", "/run/x", "/dev/shm/x", f"{mounts.ROOT}/work/x")},
    "shared": sorted(os.listdir("/tmp")), "work": [work.st_uid, work.st_mode & 0o777], "held": bool(os.read(held, 1)),
    "zero": list(open("/dev/zero", "rb").read(2)), "mounts": [line.split()[4] for line in open("/proc/self/mountinfo")],
    "below": os.listdir("/usr/local/share") if not rootfs else [],
    "links": {name: os.readlink(f"/{name}") for name in ("data", "root") if os.path.islink(f"/{name}")},
    "shell": os.system("/bin/sh -c true"), "terminals": [name, terminals + 1],
}))
"""

pytestmark = pytest.mark.root


@pytest.fixture
def code(tmp_path: Path) -> Path:
    made = tmp_path / "code"
    made.mkdir()
    (made / "app.py").write_text("x = 1")
    return made


def look(code: Path, *, devices: Sequence[str] = (), rootfs: str = "") -> dict[str, Any]:
    """What a process finds in the root that it made. It is root still: what it cannot do, nobody in
    a slot can."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LOOK,
            json.dumps([UID, devices, str(code), str(code.parent), rootfs]),
        ],
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
    assert set(seen["root"]) <= {
        "bin",
        "data",
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
    slot = "/run/pilotlight/slot"
    assert seen["links"] == {"data": f"{slot}/code", "root": f"{slot}/work"}
    assert seen["dev"] == [
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
    ]
    assert seen["below"] == ["libcuda.so.1"]
    assert seen["drivers"] == []
    assert seen["sys"] == ["devices"]
    assert "cpu" in seen["machine"]
    assert {"group", "hosts", "nsswitch.conf", "passwd", "ssl"} <= set(seen["etc"])
    assert set(seen["etc"]).isdisjoint(
        {"hostname", "shadow", "machine-id", "ssh", "fstab", "sudoers"}
    )
    assert [line.split(":")[0] for line in seen["users"].splitlines()] == [
        "root",
        "nobody",
        "function",
    ]
    assert f":{UID}:{UID}:" in seen["users"]
    assert (seen["code"], seen["shell"]) == (["app.py"], 0)


def test_only_its_own_directories_can_be_written(code: Path) -> None:
    seen = look(code)
    assert set(seen["refused"].values()) <= {
        "Read-only file system",
        "Operation not permitted",
        "Permission denied",
    }, seen["refused"]
    assert set(seen["made"].values()) == {None}
    assert {"x", "y"} <= set(seen["shared"]), "/tmp and /var/tmp are one"
    assert seen["work"] == [UID, 0o700]


def test_nothing_of_the_host_stays_mounted_and_what_was_held_open_stays_good(code: Path) -> None:
    seen = look(code)
    assert seen["mounts"].count("/") == 1
    host = (
        "/home",
        "/root",
        "/boot",
        "/srv",
        "/opt",
        "/mnt",
        "/sys/fs",
        "/dev/mqueue",
        "/dev/hugepages",
    )
    assert [at for at in seen["mounts"] if at.startswith(host)] == []
    assert seen["held"] is True
    assert (seen["zero"], seen["terminals"]) == ([0, 0], ["/dev/pts/0", MAX_PTYS])


def test_a_slot_with_a_grant_sees_its_nodes_and_files_of_the_driver(code: Path) -> None:
    seen = look(code, devices=["nvidiactl", "nvidia1", "nvidia-caps/nvidia-cap21"])
    assert {"nvidia1", "nvidiactl"} <= set(seen["dev"])
    assert set(seen["dev"]).isdisjoint({"nvidia0", "sda"})
    assert seen["caps"] == ["nvidia-cap21"]
    assert seen["drivers"] == ["/proc/driver/nvidia/gpus/0/information"]
    assert {"class", "devices"} <= set(seen["sys"])
    assert seen["refused"]["/sys/x"] is not None


@pytest.mark.skipif(not HAS_APT, reason="made of programs of Debian")
def test_an_images_root_file_system_is_shown_whole_and_nobody_writes_into_it(
    code: Path, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    base = make_base(tmp_path / "bases", tmp_path / "work")
    (base / "opt/mine").write_text("mine")
    complete(str(base), uid=UID, home="/home")
    found = look(code, devices=["nvidia0", "nvidiactl"], rootfs=str(base))
    assert "opt" in found["root"]
    assert "work" not in found["root"]
    assert {"passwd", "apt"} <= set(found["etc"])
    assert f"function:x:{UID}:" in found["users"]
    assert {"nvidia0", "nvidiactl", "null", "pts", "shm"} <= set(found["dev"])
    assert set(found["dev"]).isdisjoint({"nvidia1", "nvidia-caps", "sda"})
    assert found["drivers"] == ["/proc/driver/nvidia/gpus/0/information"]
    assert found["driver"] == ["libcuda.so.1"]
    assert found["code"] == ["app.py"]
    assert set(found["refused"].values()) <= {"Read-only file system", "No such file or directory"}
    assert set(found["made"].values()) == {None}
    assert (found["shell"], found["held"], found["work"]) == (0, True, [UID, 0o700])
    assert not found["imported"]
    assert not [path for path in found["mounts"] if path.startswith(str(tmp_path))]


def test_a_module_of_the_tenants_is_not_imported_as_root(code: Path) -> None:
    """Whatever lies where this interpreter's library is on the machine."""
    assert look(code)["imported"] is False
