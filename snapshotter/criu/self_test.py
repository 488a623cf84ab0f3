"""The CRIU self test: dumps and restores a tiny process in its own namespaces, and verifies that it
runs.

`criu check` passes on machines where a restore fails, so only an actual restore counts. The result
holds for one binary on one boot of one kernel, and is cached in a file under that key, together
with CRIU's cached kernel features (`criu.kdat`), which saves every later run 0.1 s."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pilotlight.core.pid_file import boot_id
from snapshotter.criu import messages, operations
from snapshotter.criu.errors import CriuError, CriuFailed, CriuReason, CriuUnavailable
from snapshotter.criu.processes import Criu
from snapshotter.criu.self_test_sandbox import Sandbox, SandboxProcess, cell
from snapshotter.linux import proc
from snapshotter.linux.short_commands import run_command

LEAST = (4, 1)
"""Older versions do not start on kernels from 6.13, which split [vvar] (coldstart measurements,
docs/reference/criu.md)."""
DEADLINE_S = 10.0
"""Timeout of the whole test, which takes 0.3 s."""
RETRY_S = 300.0
"""How long a negative result is cached: the cause may be temporary (no memory, no space). A
positive one holds until the next boot."""

_INSTALL = "run scripts/install-criu as root"
_STEP_S = 5.0
_SUBJECT_STATUS = 42
_SUBJECT = f"""
import os, signal, socket
status = {_SUBJECT_STATUS}
listening = socket.create_server(("127.0.0.1", 0))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.close(1)
signal.sigwait([signal.SIGUSR1])
os._exit(status)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The result: whether RESTORE works on this machine.

    Attributes:
        why: if off, the reason and the remedy; if on, a remark.
        version: CRIU's, "" if not installed.
        sha256: of its binary.
        binary, descriptor_set: the tested files, None if missing.
        kdat: a copy of CRIU's cached kernel features, for /run/criu.kdat of a slot; None if it
            wrote none.
        seconds: duration of the test.
        at: when it ran (seconds since the epoch).
    """

    on: bool
    why: str
    version: str = ""
    sha256: str = ""
    binary: Path | None = None
    descriptor_set: Path | None = None
    kdat: Path | None = None
    seconds: float = 0.0
    at: float = 0.0

    def criu(self) -> Criu:
        """The CRIU for `operations`. Raises CriuUnavailable."""
        if not self.on or self.binary is None or self.descriptor_set is None:
            raise CriuUnavailable(self.why)
        return Criu(binary=self.binary, messages=messages.load(self.descriptor_set))


def find_binary(environ: Mapping[str, str]) -> Path | None:
    """The `criu` on PATH."""
    found = shutil.which("criu", path=environ.get("PATH", ""))
    return Path(found).resolve() if found else None


async def self_test(
    *, cache: Path, environ: Mapping[str, str], now: float | None = None
) -> SelfTest:
    """The result for this machine, from `cache` (a directory, created if missing) if still valid.
    Never raises because of CRIU failures."""
    now = time.time() if now is None else now
    binary = find_binary(environ)
    if binary is None:
        return SelfTest(
            on=False,
            why=f"criu is not installed (or not on the PATH): {_INSTALL}. FORK and COLD work "
            f"without it",
        )
    if os.geteuid() != 0:
        return SelfTest(
            on=False,
            why="restoring processes needs root: run the agent as root. FORK and COLD work "
            "without it",
            binary=binary,
        )
    sha256 = await asyncio.to_thread(_digest, binary)
    description = messages.find_descriptor_set(environ, binary)
    key = _key(sha256, description)
    if (known := _read(cache / f"{key}.json")) and (known.on or 0 <= now - known.at < RETRY_S):
        # an identical binary may have moved since
        return replace(known, binary=binary, descriptor_set=description)
    started = time.monotonic()
    found = await _prove(binary, description, sha256=sha256, kdat=cache / f"{key}.kdat")
    answer = replace(found, seconds=time.monotonic() - started, at=now)
    await asyncio.to_thread(_write, cache / f"{key}.json", answer)
    return answer


async def _prove(binary: Path, description: Path | None, *, sha256: str, kdat: Path) -> SelfTest:
    version = await _version(binary)
    found = SelfTest(
        on=False, why="", version=version, sha256=sha256, binary=binary, descriptor_set=description
    )
    if _numbers(version) < LEAST:
        least = ".".join(map(str, LEAST))
        return _off(
            found,
            f"criu {version or 'of unknown version'} is too old, need {least}: {_INSTALL}",
        )
    if description is None:
        return _off(found, f"no description of CRIU's RPC is installed: {_INSTALL}")
    try:
        async with asyncio.timeout(DEADLINE_S), cell() as place:
            await _round_trip(place, Criu(binary=binary, messages=messages.load(description)))
            state = await place.kdat()
    except TimeoutError:
        return _off(
            found,
            f"criu {version}: dump and restore of a tiny process took longer than {DEADLINE_S:g} s",
        )
    except CriuFailed as e:
        words = e.cause or e.message if e.reason is CriuReason.OTHER else e.message
        return _off(found, f"criu {version} cannot {e.operation} on this machine: {words}")
    except CriuError as e:
        return _off(found, f"criu {version} does not work on this machine: {e}")
    await asyncio.to_thread(_replace, kdat, state)
    return replace(found, on=True, why=f"criu {version}", kdat=kdat)


async def _round_trip(place: Sandbox, criu: Criu) -> None:
    """Dump the subject, restore it, and let it exit. Raises CriuError."""
    with (
        tempfile.TemporaryDirectory(prefix="pilotlight-criu-") as name,
        contextlib.ExitStack() as held,
    ):
        folders = []
        for part in ("images", "work"):
            (Path(name) / part).mkdir()
            folders.append(os.open(Path(name) / part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            held.callback(os.close, folders[-1])
        images, work = folders
        subject = await _subject(place)
        held.callback(subject.close)
        await operations.dump(
            place,
            criu=criu,
            pid=subject.pid,
            images=images,
            work=work,
            uid=0,
            cgroup={},
            deadline_s=_STEP_S,
        )
        if not (await asyncio.wait([subject.exited], timeout=_STEP_S / 5))[0]:
            raise CriuUnavailable("it reported a dump of a process that still exists")
        restored = await operations.restore(
            place, criu=criu, images=images, work=work, uid=0, cgroup={}, deadline_s=_STEP_S
        )
        again = await place.watch(restored.pid)
        held.callback(again.close)
        await _ends_well(again)


async def _subject(place: Sandbox) -> SandboxProcess:
    """A process that can be dumped: it has a TCP socket, which CRIU 4.1 cannot dump on kernels from
    6.16, and signals readiness by closing its stdout."""
    readable, writable = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        subject = await place.spawn(
            [sys.executable, "-I", "-S", "-B", "-c", _SUBJECT], fds=[writable]
        )
        await proc.wait_readable(readable)
    finally:
        os.close(readable)
    return subject


async def _ends_well(process: SandboxProcess) -> None:
    signal.pidfd_send_signal(process.pidfd, signal.SIGUSR1)
    status = await process.exited
    if status is None or os.waitstatus_to_exitcode(status) != _SUBJECT_STATUS:
        raise CriuUnavailable(f"the restored process does not run correctly: wait status {status}")


async def _version(binary: Path) -> str:
    """CRIU's version; "" if it reports none."""
    try:
        _, out = await run_command(binary, "--version", timeout_s=_STEP_S)
    except OSError:  # TimeoutError too
        return ""
    match = re.search(rb"^Version:\s*(\S+)", out, re.MULTILINE)
    return match[1].decode(errors="replace") if match else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _off(found: SelfTest, why: str) -> SelfTest:
    return replace(found, why=f"{why}. FORK and COLD work without it")


def _digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _key(sha256: str, description: Path | None) -> str:
    boot = boot_id()
    parts = (sha256, os.uname().release, boot, "" if description is None else _digest(description))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> SelfTest | None:
    """A cached result; None if there is no usable one."""
    try:
        body = json.loads(path.read_text())
        paths = {
            name: Path(body[name]) if body[name] else None
            for name in ("binary", "descriptor_set", "kdat")
        }
        known = SelfTest(**{**body, **paths})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return None if known.kdat is not None and not known.kdat.is_file() else known


def _write(path: Path, answer: SelfTest) -> None:
    _replace(path, json.dumps(asdict(answer), default=str).encode())


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(fd, "wb") as f:
        f.write(content)
    os.replace(name, path)
