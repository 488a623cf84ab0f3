"""The base root file system of images that install Debian packages: a minimal system of this
machine's own release, built once.

debootstrap(8) builds it from the package sources that this machine's apt uses for its own
distribution, verified by its keyrings (apt-secure(8)). Tenants have no influence on it. Each image
with an `apt` step gets a copy in which user ids are shifted (user_namespaces(7)): its steps run as
root there, and as unprivileged ids on the machine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotlight.core.openat2 import open_file_beneath
from pilotlight.core.threads import finish_in_thread
from snapshotter.errors import Unsupported
from snapshotter.images.pip_config import without_credentials
from snapshotter.linux.atomic_directory import (
    delete_atomically,
    remove_tree,
    staged_in_thread,
    sweep,
)

ID_COUNT = 65536
"""Users and groups per image: as many as Debian's packages expect."""
FIRST_ID, _ID_RANGES = 1_900_000_000, 256
"""Host ids of images being built: ranges that no distribution assigns (systemd, "Users, Groups,
UIDs and GIDs")."""
PACKAGES = ("ca-certificates", "libgomp1", "libstdc++6", "python3")
"""Packages added to the minimal system: what interpreters and the libraries in wheels link against;
python3 for the libraries of its modules."""
_FRESH_S = 30 * 86400.0
"""An older base is rebuilt for the next image, to include package updates."""
_RECIPE = 1
"""Increment when the content of the base changes."""
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TARGET = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
_PROXY = re.compile(r"Acquire::https?::([^ ]*::)?Proxy ", re.IGNORECASE)
"""Lines of `apt-config dump` that set a proxy for packages."""
_FOLDERS = (
    "dev",
    "etc/apt/apt.conf.d",
    "etc/apt/sources.list.d",
    "etc/dpkg/dpkg.cfg.d",
    "proc",
    "run",
    "sys",
    "tmp",
    "var/tmp",
)
_FILES = {
    "etc/apt/apt.conf.d/01small": 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n',
    "etc/dpkg/dpkg.cfg.d/01small": "force-unsafe-io\npath-exclude=/usr/share/man/*\npath-exclude=/usr/share/info/*\n"
    "path-exclude=/usr/share/locale/*\npath-exclude=/usr/share/doc/*\npath-include=/usr/share/doc/*/copyright\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost\n",
    "etc/hostname": "localhost\n",
    "etc/resolv.conf": "",
    # no service is started on installation (Debian: policy-rc.d, invoke-rc.d(8))
    "usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",
}
CACHES = ("var/cache/apt", "var/lib/apt/lists")
_DROPPED = (*CACHES, "usr/share/man", "usr/share/info", "usr/share/locale", "var/log")
_log = logging.getLogger(__name__)

OnLines = Callable[[Sequence[str]], Awaitable[None]]
RunOnMachine = Callable[[Sequence[str], OnLines], Awaitable[int]]
"""Runs a command on the machine itself, as root, to completion; returns its exit status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A package source of the distribution: an entry of sources.list(5)."""

    uri: str
    release: str
    component: str

    @property
    def line(self) -> str:
        """As in sources.list(5)."""
        return f"deb {self.uri} {self.release} {self.component}"


class BaseRootfs:
    """The base of this machine. Owner: one event loop; one task at a time copies or replaces the
    base."""

    def __init__(self, directory: Path, *, run: RunOnMachine) -> None:
        self._directory = directory
        self._run = run
        self._busy = asyncio.Lock()
        self._making: asyncio.Task[None] | None = None
        self._listeners: list[OnLines] = []
        self._ranges: set[int] = set()

    def __repr__(self) -> str:
        return f"<BaseRootfs {self._directory}>"

    def why_not(self) -> str | None:
        """Why images cannot install packages on this machine, and the remedy; None if they can."""
        return why_not(self._directory)

    def acquire_ids(self) -> range:
        """Reserve an id range for an image being built, until `release_ids`. Raises Unsupported."""
        for number in range(_ID_RANGES):
            if number not in self._ranges:
                self._ranges.add(number)
                first = FIRST_ID + number * ID_COUNT
                return range(first, first + ID_COUNT)
        raise Unsupported(
            f"{_ID_RANGES} images with Debian packages are being built on this node: "
            f"deploy again later"
        )

    def release_ids(self, ids: range) -> None:
        """Release the ids: the image is finished or abandoned."""
        self._ranges.discard((ids.start - FIRST_ID) // ID_COUNT)

    async def copy(self, to: Path, ids: range, on_lines: OnLines) -> None:
        """Copy the base, building it if there is none, to the directory `to`, owned by `ids`.
        Raises Unsupported, OSError."""
        self._listeners.append(on_lines)
        try:
            base = await self._ready()
        finally:
            self._listeners.remove(on_lines)
        async with self._busy:
            if (
                await self._run(
                    ["/bin/cp", "--archive", "--reflink=auto", "--", str(base), str(to)], on_lines
                )
                != 0
            ):
                raise OSError(f"cannot copy the base root file system {base}")
        await finish_in_thread(shift_owners, to, ids)

    async def _ready(self) -> Path:
        """The base. Building it continues if the caller is cancelled, because all images share
        it."""
        if (why := self.why_not()) is not None:
            raise Unsupported(why)
        base = base_path(self._directory)
        if self._making is None or self._making.done():
            if _is_fresh(base):
                return base
            self._making = asyncio.create_task(
                self._renew(base), name="make the base root file system"
            )
        await asyncio.shield(self._making)
        return base

    async def _renew(self, base: Path) -> None:
        """Build the base, or keep an old one if that fails. Raises Unsupported, OSError."""
        try:
            await self._make_at(base, release_name())
        except (Unsupported, OSError) as e:
            if not base.exists():
                raise
            _log.warning("base_rootfs.not_renewed path=%s error=%s", base, e)

    async def _make_at(self, base: Path, release: str) -> None:
        sources = await package_sources()
        if not sources:
            raise Unsupported(
                f"apt on this machine has no source of {release}: run apt-get update on the machine"
            )
        await finish_in_thread(sweep, self._directory)
        await self._report(
            [
                (
                    f"building the base root file system of this machine's images, once: "
                    f"{release}, takes about a minute"
                )
            ]
        )
        async with staged_in_thread(base.with_name(f"{base.name}.new")) as temp:
            await self._make(temp / "root", release, sources)
        async with self._busy:
            await finish_in_thread(_replace, base)
        _log.info("base_rootfs.made release=%s path=%s", release, base)

    async def _report(self, lines: Sequence[str]) -> None:
        for listener in list(self._listeners):
            await listener(lines)

    async def _make(self, root: Path, release: str, sources: Sequence[Source]) -> None:
        first = next((s for s in sources if s.release == release), sources[0])
        options = ["--variant=minbase", f"--include={','.join(PACKAGES)}"]
        if (
            await self._run([_debootstrap(), *options, release, str(root), first.uri], self._report)
            != 0
        ):
            log = root / "debootstrap" / "debootstrap.log"
            said = (
                (await asyncio.to_thread(log.read_text, errors="replace"))[-500:]
                if log.exists()
                else ""
            )
            raise Unsupported(
                f"debootstrap could not build {release} from {first.uri}: "
                f"{said.strip() or 'see its output above'}"
            )
        await finish_in_thread(trim, root, [source.line for source in sources])


def base_path(directory: Path) -> Path:
    """The path of this machine's base in the directory of bases. Raises Unsupported."""
    key = f"{_RECIPE} {platform.machine()} {' '.join(PACKAGES)}"
    return directory / f"{release_name()}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def why_not(directory: Path) -> str | None:
    """Why images cannot install packages on this machine, and the remedy; None if they can.
    `directory`: of bases."""
    if os.geteuid() != 0:
        return (
            "the platform runs without root: install system libraries on the machine "
            "(sudo apt-get install …)"
        )
    if shutil.which("apt-get") is None:
        return (
            "this machine is neither Debian nor Ubuntu: use a Python package that contains the "
            "library (pip_install)"
        )
    try:
        if not _debootstrap() and not _is_fresh(base_path(directory)):
            return "debootstrap is not installed: apt-get install debootstrap"
    except Unsupported as e:
        return str(e)
    return why_no_root_of_its_own()


def why_no_root_of_its_own() -> str | None:
    """Why no image can have a root file system of its own on this machine, and the remedy; None if
    images can."""
    if os.geteuid() != 0:
        return (
            "the platform runs without root, and images have no root file system of their own: run "
            "it as root"
        )
    try:
        most = int(Path("/proc/sys/user/max_user_namespaces").read_text())
    except (OSError, ValueError):
        most = 0
    return (
        None
        if most > 0
        else "the kernel does not allow user namespaces: sysctl -w user.max_user_namespaces=15000"
    )


def _debootstrap() -> str:
    """The path of debootstrap; "" if it is not installed."""
    return shutil.which("debootstrap", path=_SYSTEM_PATH) or ""


def release_name() -> str:
    """The codename of this machine's release, as debootstrap uses it ("bookworm"). Raises
    Unsupported."""
    name = _os_release().get("VERSION_CODENAME", "")
    if not name:
        raise Unsupported(
            "cannot choose the base of images: /etc/os-release has no VERSION_CODENAME"
        )
    return name


async def package_sources() -> list[Source]:
    """The sources from which this machine's apt gets its own distribution, without credentials and
    third parties."""
    try:
        child = await asyncio.create_subprocess_exec(
            *("apt-get", "indextargets", "--format", _TARGET, "Identifier: Packages"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return []
    out, _ = await child.communicate()
    return chosen_sources(
        out.decode(errors="replace"),
        distribution=_os_release().get("ID", ""),
        release=release_name(),
    )


async def package_proxies() -> str:
    """The proxies of this machine's apt as an apt.conf(5), without credentials; "" if there are
    none."""
    try:
        child = await asyncio.create_subprocess_exec(
            "apt-config", "dump", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError:
        return ""
    out, _ = await child.communicate()
    lines = [line for line in out.decode(errors="replace").splitlines() if _PROXY.match(line)]
    return "".join(f"{without_credentials(line)}\n" for line in lines)


def chosen_sources(text: str, *, distribution: str, release: str) -> list[Source]:
    """The entries of `apt-get indextargets` of `distribution` for `release`; if none can be
    identified by origin, the main components."""
    rows = [row for line in text.splitlines() if len(row := line.split(maxsplit=3)) == 4]
    rows = [
        row
        for row in rows
        if row[1] == release or row[1].startswith((f"{release}-", f"{release}/"))
    ]
    ours = [row for row in rows if row[3].lower() == distribution] or [
        row for row in rows if row[3].startswith("$") and row[2] == "main"
    ]
    found = [
        Source(uri=without_credentials(row[0]), release=row[1], component=row[2]) for row in ours
    ]
    return list(dict.fromkeys(found))


def trim(root: Path, sources: Sequence[str]) -> None:
    """Turn a fresh debootstrap at `root` into the base: own settings, no devices, no caches,
    nothing of this machine. Blocking."""
    for name in (*_DROPPED, "dev", "debootstrap"):
        if (root / name).is_dir():
            shutil.rmtree(root / name)
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial", "var/log"):
        (root / name).mkdir(parents=True)
    for name, text in {
        **_FILES,
        "etc/apt/sources.list": "".join(f"{line}\n" for line in sources),
    }.items():
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(text)
        (root / name).chmod(0o755 if name.endswith("policy-rc.d") else 0o644)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)


def shift_owners(root: Path, ids: range) -> None:
    """Assign each file below `root` to the user and group of the same number in `ids`, keeping
    set-id bits. Blocking. Raises OSError."""
    _shift(root, ids, os.lstat(root))
    for folder, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(folder, name)
            _shift(path, ids, os.lstat(path))


def _shift(path: str | Path, ids: range, status: os.stat_result) -> None:
    if status.st_uid >= len(ids) or status.st_gid >= len(ids):
        return  # a hard link that was already shifted under another name
    os.lchown(path, ids[status.st_uid], ids[status.st_gid])
    if status.st_mode & 0o6000:
        os.chmod(path, status.st_mode & 0o7777)


def packages_digest(rootfs: Path) -> str:
    """sha256 (hex) of the packages and versions that dpkg reports as installed, independent of
    their order. Blocking. Raises OSError."""
    found, package = set[str](), ""
    with open(open_file_beneath(rootfs, "var/lib/dpkg/status"), errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(": ")
            package = value.strip() if key == "Package" else package
            if key == "Version":
                found.add(f"{package} {value.strip()}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def _is_fresh(base: Path) -> bool:
    try:
        return time.time() - base.stat().st_mtime < _FRESH_S
    except OSError:
        return False


def _replace(base: Path) -> None:
    """Replace an older base by the new one. Blocking."""
    made = base.with_name(f"{base.name}.new")
    if base.exists():
        delete_atomically(base)
    (made / "root").rename(base)
    base.touch()
    remove_tree(made)


def _os_release() -> Mapping[str, str]:
    """os-release(5)."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}
