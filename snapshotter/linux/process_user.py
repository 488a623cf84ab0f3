"""Drops root: a process of the platform that was started by root continues under its own uid.

The process then sees only part of the file system (`mount_view`), has no capabilities and cannot
gain any, and cannot make system calls that reach other processes (`isolation`). A child process
first tests whether all of this works on the machine, so that the process either drops root
completely or keeps it and can report why. Sources: capabilities(7), prctl(2), credentials(7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotter.linux import mount_view
from snapshotter.shim.sandbox.isolation import confine, drop_bounding_set

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_MAX_REASON_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ProcessUser:
    """The user that a process switches to, and the files that it needs afterwards.

    Attributes:
        uid: uid and gid.
        owns: directories that are chowned to the user, with their content.
        enters: further directories; their modes determine the access.
        writes: further directories in which the user must be able to write.
        uses: files and sockets of other users that it must be able to open for reading; sockets for
            writing as well.
    """

    uid: int
    owns: tuple[Path, ...] = ()
    enters: tuple[Path, ...] = ()
    writes: tuple[Path, ...] = ()
    uses: tuple[Path, ...] = ()

    def obstacle(self) -> str:
        """Why this process cannot switch to that user; "" when it can. Tested in a child, without
        lasting effect.

        Raises OSError when the child ended without an answer. Another process of the same user can
        kill the child and must not thereby make this process keep root.
        """
        for directory in self.owns:
            if (
                directory.stat().st_uid != self.uid
                and (shared := next(_with_several_names(directory), None)) is not None
            ):
                return (
                    f"{shared} has several hard links, and another one may be "
                    f"anywhere: copy it, or remove the other links"
                )
        # from inside the view, directories that are covered appear empty
        existing = [path for path in self.uses if path.exists()]
        found = _run_in_child(
            lambda: self._first_problem(existing).encode()[:_MAX_REASON_BYTES] or b"\0"
        )
        if not found:
            raise OSError(
                f"the process that tested uid {self.uid} was killed: stop all other processes "
                f"of that user, and start again"
            )
        return found.strip(b"\0").decode(errors="replace")

    def become(self) -> None:
        """Drop root permanently, before threads exist. Raises OSError; this process must then
        exit."""
        parent, parents_signal = os.getppid(), ctypes.c_int(0)
        _libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(parents_signal))
        for directory in self.owns:
            give_file_to_user(directory, self.uid)
        self._confine()
        os.chdir("/")
        if parents_signal.value:  # a change of the uid clears it
            _libc.prctl(_PR_SET_PDEATHSIG, parents_signal.value)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    def restore_root_ownership(self) -> None:
        """Chown back to root what an earlier process of this user owned. Raises OSError."""
        for directory in self.owns:
            chown_to_root(directory)

    def run_as_user(self, work: Callable[[], bytes]) -> bytes:
        """What `work` returns in a child process that runs as this user; empty if it failed.
        Directories keep their owners."""

        def as_user() -> bytes:
            self._confine()
            return work()

        return _run_in_child(as_user)

    def _confine(self) -> None:
        mount_view.enter(
            [*self.owns, *self.enters, *self.writes, *code_directories()], uid=self.uid
        )
        drop_bounding_set()
        confine(uid=self.uid, limits={})

    def _first_problem(self, uses: list[Path]) -> str:
        try:
            self._confine()
        except OSError as e:
            return f"this machine does not support it: {e}"
        for file in code_files():
            if not os.access(file, os.R_OK):
                return (
                    f"uid {self.uid} cannot read {file}: install the platform with umask 022, "
                    f"or run chmod -R go+rX on that directory"
                )
        for directory in (*self.owns, *self.enters):
            if not os.access(directory.parent, os.X_OK):
                return f"uid {self.uid} cannot enter {directory.parent}"
        for directory in self.writes:
            if (closed := _not_writable(directory)) is not None:
                return (
                    f"uid {self.uid} cannot write in {closed}: give it to that user (chown -R "
                    f"{self.uid}:{self.uid} {directory})"
                )
        for path in uses:
            if not _is_usable(path):
                return (
                    f"uid {self.uid} cannot use {path}: give group {self.uid} access to it, "
                    f"and to the directories above it"
                )
        return ""


def give_file_to_user(directory: Path, uid: int) -> None:
    """Chown `directory` and its content to `uid`. Does nothing if `uid` already owns the directory
    itself.

    The directory is chowned last, so that its new owner cannot change the content during the
    operation; symbolic links are not followed. Raises OSError, also for a file with several hard
    links.
    """
    if directory.stat().st_uid == uid:
        return
    os.chown(directory, 0, 0)
    if uid and (shared := next(_with_several_names(directory), None)) is not None:
        raise OSError(f"{shared} has several hard links")
    for _, folders, files, descriptor in os.fwalk(directory, follow_symlinks=False):
        for name in (*folders, *files):
            os.chown(name, uid, uid, dir_fd=descriptor, follow_symlinks=False)
    os.chown(directory, uid, uid)


def chown_to_root(directory: Path) -> None:
    """Chown `directory` and its content back to root. Does nothing if root already owns it.

    Raises OSError on this and every later call if the former owner left anything other than files
    and directories: root would follow a link.
    """
    status = directory.stat()
    if (status.st_uid, status.st_gid) == (0, 0):
        return
    # each directory before its content: afterwards the former owner can create nothing in it
    os.chown(directory, 0, -1)
    for root, folders, files, descriptor in os.fwalk(directory, follow_symlinks=False):
        for name in (*folders, *files):
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise OSError(
                    f"{root}/{name} ({stat.filemode(mode)}) was not made by the platform: "
                    f"find out where it comes from, and remove it"
                )
            os.chown(name, 0, 0, dir_fd=descriptor, follow_symlinks=False)
    os.chown(directory, 0, 0)  # last: marks the operation as complete


def _with_several_names(directory: Path) -> Iterator[str]:
    for root, _, files, descriptor in os.fwalk(directory, follow_symlinks=False):
        for name in files:
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_nlink > 1:
                yield f"{root}/{name}"


def code_directories() -> list[Path]:
    """Directories of this interpreter and of the packages whose modules are loaded."""
    loaded = code_files()
    used = [
        each
        for each in map(os.path.abspath, sys.path)
        if any(file.startswith(f"{each}/") for file in loaded)
    ]
    binaries = (os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable)))
    directories = (
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        sys.base_exec_prefix,
        *binaries,
        *used,
    )
    return [path for path in dict.fromkeys(map(Path, directories)) if path.is_dir()]


def code_files() -> list[str]:
    """The interpreter, and the file of each loaded module."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    return [
        os.path.realpath(sys.executable),
        *(file for file in loaded if isinstance(file, str) and os.path.isabs(file)),
    ]


def _run_in_child(work: Callable[[], bytes]) -> bytes:
    """What `work` returns in a forked child process; empty if it raised."""
    readable, writable = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), os.fdopen(writable, "wb") as answer:
            answer.write(work())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        found = pipe.read()
    os.waitpid(pid, 0)
    return found


def _not_writable(directory: Path) -> Path | None:
    """`directory` or its first subdirectory in which this process cannot create files."""
    try:
        each = [
            directory,
            *(
                Path(entry.path)
                for entry in os.scandir(directory)
                if entry.is_dir(follow_symlinks=False)
            ),
        ]
    except OSError:
        return directory
    return next((path for path in each if not os.access(path, os.W_OK | os.X_OK)), None)


def _is_usable(path: Path) -> bool:
    """Whether this process can open the file or connect to the socket."""
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
    return os.access(path, os.R_OK | os.W_OK if is_socket else os.R_OK)
