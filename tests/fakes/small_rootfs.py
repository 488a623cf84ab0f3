"""A base root file system without a network: this machine's shell, file tools, dpkg and apt with
their libraries, and a repository of one package. It takes the place of what debootstrap makes
(`snapshotter.images.base_rootfs`); scripts/test-fresh makes a real one."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from snapshotter.images.base_rootfs import base_path, trim

PROGRAMS = (
    *(
        "sh",
        "cat",
        "chmod",
        "chown",
        "cp",
        "cut",
        "diff",
        "grep",
        "id",
        "ln",
        "ls",
        "mkdir",
        "mount",
        "mv",
        "rm",
        "sleep",
        "stat",
        "tar",
    ),
    *(
        "touch",
        "true",
        "unshare",
        "chroot",
        "apt-get",
        "apt-config",
        "dpkg",
        "dpkg-deb",
        "dpkg-split",
        "ldconfig",
        "start-stop-daemon",
    ),
)
HAS_APT = all(shutil.which(name) for name in ("apt-get", "dpkg-deb", "ldd"))
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x[0-9a-f]+\)")
_AUTHORITY = Path(__file__).parents[1] / "no_authority.pem"
_REPOSITORY = "/srv/repository"
_CONTROL = """Package: {name}
Version: {version}
Architecture: all
Maintainer: nobody <nobody@localhost>
Description: a package of a test
"""
_AFTER = """#!/bin/sh
set -e
chown 7:42 /opt/{name}/owned
echo "{name}:x:321:321::/nonexistent:/usr/sbin/nologin" >> /etc/passwd
"""


def make_base(
    directory: Path, work: Path, *, package: str = "plhello", version: str = "1.0"
) -> Path:
    """The base in a directory of bases; `work` is scratch."""
    base = base_path(directory)
    for name in (
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "usr/lib/dpkg",
        "etc/apt/preferences.d",
        "srv/repository",
        "root",
        "home",
        "mnt",
        "opt",
    ):
        (base / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (base / name).symlink_to(f"usr/{name}")
    programs = [
        Path(found) for name in PROGRAMS if (found := shutil.which(name, path=_PATH)) is not None
    ]
    methods = [
        path
        for name in ("copy", "file", "gpgv", "sqv", "store")
        if (path := Path(f"/usr/lib/apt/methods/{name}")).exists()
    ]
    for file in {*programs, *methods, *_libraries([*programs, *methods, *_interpreter()])}:
        _copy(file, base)
    for name in ("cputable", "ostable", "tupletable"):
        _copy(Path("/usr/share/dpkg") / name, base)
    for name in ("info", "updates", "triggers", "alternatives", "parts"):
        (base / "var/lib/dpkg" / name).mkdir(parents=True)
    for name in ("status", "available", "diversions"):
        (base / "var/lib/dpkg" / name).touch()
    names = (
        "root:x:0:0:root:/root:/bin/sh",
        "_apt:x:42:65534::/nonexistent:/usr/sbin/nologin",
        "nobody:x:65534:65534::/:/usr/sbin/nologin",
    )
    (base / "etc/passwd").write_text("".join(f"{line}\n" for line in names))
    (base / "etc/ssl/certs").mkdir(parents=True)
    # Debian's pip reads it when it begins
    shutil.copy(_AUTHORITY, base / "etc/ssl/certs/ca-certificates.crt")
    (base / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    _add_package(base, work / "package", package, version)
    trim(base, [f"deb [trusted=yes] file:{_REPOSITORY} ./"])
    return base


def _add_package(base: Path, work: Path, name: str, version: str) -> None:
    (work / "DEBIAN").mkdir(parents=True)
    (work / "opt" / name).mkdir(parents=True)
    (work / "usr/bin").mkdir(parents=True)
    (work / "usr/bin" / name).write_text("#!/bin/sh\necho hello from a package\n")
    (work / "usr/bin" / name).chmod(0o4755)
    (work / "opt" / name / "owned").write_text("owned\n")
    (work / "DEBIAN/control").write_text(_CONTROL.format(name=name, version=version))
    (work / "DEBIAN/postinst").write_text(_AFTER.format(name=name))
    (work / "DEBIAN/postinst").chmod(0o755)
    file = base / _REPOSITORY[1:] / f"{name}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Zgzip", "--build", str(work), str(file)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    index = (
        _CONTROL.format(name=name, version=version)
        + f"Filename: ./{name}.deb\nSize: {file.stat().st_size}\n"
    )
    index += f"SHA256: {hashlib.sha256(file.read_bytes()).hexdigest()}\n"
    (file.parent / "Packages").write_text(index)


def _interpreter() -> list[Path]:
    """What has the libraries of this interpreter: itself, and its modules."""
    modules = glob.glob(f"{sysconfig.get_path('stdlib')}/lib-dynload/*.so")
    return [Path(os.path.realpath(sys.executable)), *map(Path, modules)]


def _libraries(files: Iterable[Path]) -> set[Path]:
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False)
    return {Path(match[1]) for match in map(_LIBRARY.search, done.stdout.splitlines()) if match}


def _copy(file: Path, base: Path) -> None:
    """Under its own name; a link with what it leads to."""
    target = base / str(file.parent.resolve() / file.name)[1:]
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(file, target)
