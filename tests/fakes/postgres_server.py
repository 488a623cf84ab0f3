"""A PostgreSQL cluster of a test's own, on a Unix socket only: started, killed and started again at
will."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psycopg

START_S = 30.0
"""Longest time that a server may take to accept connections on a busy machine."""


def programs() -> Path | None:
    """Directory of `initdb` and `postgres`; Debian keeps it off the PATH, one per version."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3])
    )
    return versions[-1].parent if versions else None


class PostgresServer:
    """One cluster in the directory `home` (a short path: the socket lies there). Owner: one test or
    session, which stops it.

    Attributes:
        url: of the maintenance database, without a driver's name.
    """

    def __init__(
        self, home: Path, binaries: Path, *, replicates: bool = False, of: Path | None = None
    ) -> None:
        """`replicates`: standbys may follow it. `of`: home of the cluster that it is a standby of."""
        self.url = f"postgresql://postgres@/postgres?host={home}"
        self.home = home
        self._home = home
        self._binaries = binaries
        self._replicates = replicates
        self._user = _owner_of_cluster(home)
        self._server: subprocess.Popen[bytes] | None = None
        made = (
            ("initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
            if of is None
            else ("pg_basebackup", "-R", "-U", "postgres", "-h", of, "-c", "fast", "--no-sync")
        )
        subprocess.run(
            [binaries / made[0], "-D", home / "data", *made[1:]],
            user=self._user,
            cwd=home,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
            capture_output=True,
        )

    @property
    def pid(self) -> int:
        """Of the running server, which leads its process group."""
        assert self._server is not None
        return self._server.pid

    def wait_for_standby(self) -> None:
        """From now on each commit waits for a standby, which must be running."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")

    def start(self) -> None:
        """Returns when it accepts connections. Raises RuntimeError with its log."""
        # Durability is not what these tests are about, nor old rows: without them a database is
        # made in half of the time (`databases.FAST_COPY`).
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._home),
            "fsync": "off",
            "full_page_writes": "off",
            "wal_level": "replica" if self._replicates else "minimal",
            "max_wal_senders": "4" if self._replicates else "0",
            "autovacuum": "off",
            "max_connections": "50",
            "dynamic_shared_memory_type": "mmap",  # in its directory: nothing stays after a kill
        }
        arguments = [part for key, value in options.items() for part in ("-c", f"{key}={value}")]
        deadline = time.monotonic() + START_S
        while not self._try(arguments, deadline):
            # after a kill its children hold the memory for a moment: the new one is refused until
            # they are gone
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL it with all its sessions: nothing is flushed, nobody is told."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A fast shutdown: open sessions are disconnected."""
        self._end(signal.SIGINT)

    def _try(self, arguments: list[str], deadline: float) -> bool:
        with (self._home / "log").open("wb") as log:
            command = [str(self._binaries / "postgres"), "-D", str(self._home / "data"), *arguments]
            self._server = subprocess.Popen(
                command,
                user=self._user,
                cwd=self._home,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while self._server.poll() is None:
            try:
                psycopg.connect(self.url).close()
                return True
            except psycopg.OperationalError:
                time.sleep(0.02)  # another program's start can only be asked for
            if time.monotonic() > deadline:
                break
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"server did not start: {(self._home / 'log').read_text(errors='replace')[-2000:]}"
            )
        return False

    def _end(self, number: signal.Signals) -> None:
        if self._server is None:
            return
        if number is signal.SIGKILL:
            os.killpg(self._server.pid, number)
        else:
            self._server.send_signal(number)
        self._server.wait(START_S)
        self._server = None


def _owner_of_cluster(directory: Path) -> int | None:
    """PostgreSQL refuses to run as root: give the directory to its own user. None = run as we
    are."""
    if os.geteuid() != 0:
        return None
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        user = pwd.getpwnam("nobody")
    os.chown(directory, user.pw_uid, user.pw_gid)
    return user.pw_uid
