"""The user under which the controller runs after it has opened what only root may open:
`platform.controller_uid`, if root started it.

It owns two directories: `<home>/controller` (the database) and that of blobs. Keys, the lock and
sockets stay root's: the controller reads and opens them before it gives up root, so that no root
process reads a key, or a pid, in a directory that another user owns."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa
import uvloop

from pilotlight.controller.database import sqlite_file
from pilotlight.controller.server import leader
from pilotlight.controller.server.database_lock import AlreadyRunning, acquire_lock_file
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig
from pilotlight.core.crypto import (
    ACTIVATOR_KEY_FILE,
    PlatformKey,
    load_platform_key,
    read_platform_key,
)
from pilotlight.core.metrics_server import MetricsAddress, metrics_socket, metrics_token_file
from pilotlight.core.rpc import grant_group_access
from pilotlight.core.transport.listeners import open_tcp_listener
from snapshotter.linux.process_user import ProcessUser, chown_to_root

log = logging.getLogger(__name__)

_OTHERS = ("activator", "controller", "engines", "logs", "node", "run", "weights")
"""Directories in <home> that must not contain blobs."""
_CONNECT_S = 3
"""A database that does not answer for this long counts as unreachable."""
_REACHED, _MAX_REASON = "reached", 300
_AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": ".aws/credentials", "AWS_CONFIG_FILE": ".aws/config"}
"""Files that S3 clients read, relative to HOME, by the variable that overrides the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedResources:
    """Resources that a controller opens as root.

    Attributes:
        key: the platform's key, created at the first start.
        node_key: the key of a cluster's node agents (`controller.node_key_file`); None = they use
            the platform's.
        lock: descriptor of `<home>/controller.lock`, locked.
        metrics: where metrics are served.
        listener: bound to `<run>/controller.sock`, not listening yet.
        elsewhere: bound to `controller.listen`; None = not configured, or not yet bound: with
            `controller.standby` it is bound when the controller becomes active.
    """

    key: PlatformKey
    node_key: PlatformKey | None = None
    lock: int
    metrics: MetricsAddress
    listener: socket.socket
    elsewhere: socket.socket | None = None

    def completed(self, config: ControllerConfig) -> OpenedResources:
        """Return the resources with those of an active controller. Raises SettingsInvalid,
        OSError."""
        return self if self.elsewhere is not None else replace(self, elsewhere=_elsewhere(config))


def open_as_root(config: ControllerConfig) -> OpenedResources:
    """Acquire the lock, read the keys, bind the sockets; with `controller.standby`, wait until
    another controller of the home has exited.

    Raises AlreadyRunning, Conflict, SettingsInvalid, OSError; CancelledError when a signal stops it
    while it stands by."""
    paths = config.paths.make()
    metrics = MetricsAddress(
        socket_path=metrics_socket(paths, "controller"),
        listen=config.settings.metrics_listen,
        token_file=metrics_token_file(config.platform, paths),
        setting="controller.metrics_listen",
    )
    file = paths.home / "controller.lock"
    try:
        lock = acquire_lock_file(file)
    except AlreadyRunning:
        if not config.settings.standby:
            raise
        lock = uvloop.run(leader.wait_for_home_lock(file, metrics=Metrics(), address=metrics))
    key = load_platform_key(config.platform, paths)
    if config.platform.activator_key_file is None:
        key.activator.write(paths.home / ACTIVATOR_KEY_FILE)
    sqlite_file.move_to_own_directory(paths.home)
    return OpenedResources(
        key=key,
        node_key=read_platform_key("controller.node_key_file", config.settings.node_key_file)
        if config.settings.node_key_file
        else None,
        lock=lock,
        metrics=metrics.opened(),
        listener=_bound(config),
        elsewhere=None if config.settings.standby else _elsewhere(config),
    )


def drop_root(config: ControllerConfig) -> None:
    """Continue as `platform.controller_uid` if this process is root on a single machine; if that is
    impossible, continue as root with a warning.

    Call it before any thread starts. Raises OSError, after which the process must exit.
    """
    if os.geteuid() != 0 or config.platform.fleet != "local":
        return
    if config.paths.controller_uid is None:
        restore_root_ownership(config)
        log.warning("controller runs as root reason=platform.controller_uid is null")
        return
    for directory in _own_directories(config):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if why := startup_obstacle(config):
        restore_root_ownership(config)
        log.warning("controller runs as root reason=%s", why)
        return
    for variable, path in _aws_files(os.environ):
        os.environ[variable] = str(path)
    user = controller_user(config)
    user.become()
    # root's home directory is no longer accessible
    os.environ["HOME"] = str(sqlite_file.database_directory(config.paths.home))
    log.info("controller runs without root uid=%d", user.uid)


def startup_obstacle(config: ControllerConfig) -> str:
    """Return why the controller cannot run without root; "" if it can. Changes nothing."""
    url = sa.make_url(config.database_url)
    if url.get_backend_name() == "sqlite" and Path(url.database or "") != sqlite_file.database_path(
        config.paths.home
    ):
        return (
            f"controller.database_url names {url.database}: remove the setting, and while the "
            f"platform is down move that file to {sqlite_file.database_path(config.paths.home)}"
        )
    user = controller_user(config)
    if (why := user.obstacle()) or url.get_backend_name() == "sqlite":
        return why
    return _database_obstacle(config, user)


def controller_user(config: ControllerConfig) -> ProcessUser:
    """Return the controller's user and what it needs: its directories, sockets of other processes,
    and files that it opens again at run time."""
    paths, platform = config.paths, config.platform
    assert paths.controller_uid is not None
    blobs = _blobs(config)
    again = [Path(path) for path in (platform.tls_cert, platform.tls_key, platform.tls_ca) if path]
    if (
        platform.blobs is not None
        and platform.blobs.startswith("s3:")
        and "AWS_ACCESS_KEY_ID" not in os.environ
    ):
        again += [path for _, path in _aws_files(os.environ)]
    return ProcessUser(
        uid=paths.controller_uid,
        owns=tuple(path for path in _own_directories(config) if path.is_dir()),
        enters=tuple(path for path in (paths.for_controller,) if path.is_dir()),
        writes=() if _is_ours(blobs, paths.home) or not blobs.is_dir() else (blobs,),
        uses=tuple(again),
    )


def restore_root_ownership(config: ControllerConfig) -> None:
    """Change the owner of the controller's directories back to root. Raises OSError."""
    for directory in _own_directories(config):
        if directory.is_dir():
            chown_to_root(directory)


def _own_directories(config: ControllerConfig) -> tuple[Path, ...]:
    blobs, home = _blobs(config), config.paths.home
    return (sqlite_file.database_directory(home), *((blobs,) if _is_ours(blobs, home) else ()))


def _blobs(config: ControllerConfig) -> Path:
    """Return the directory of blobs, or of uploads to S3 in progress."""
    where = config.platform.blobs
    return (
        config.paths.home / "blobs" if where is None or where.startswith("s3:") else Path(where)
    ).resolve()


def _is_ours(directory: Path, home: Path) -> bool:
    return (
        directory != home
        and directory.is_relative_to(home)
        and directory.relative_to(home).parts[0] not in _OTHERS
    )


def _aws_files(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for variable, usual in _AWS_FILES.items():
        path = Path(environ.get(variable) or Path(environ.get("HOME", "/root")) / usual)
        if path.exists():
            yield variable, path.absolute()


def _database_obstacle(config: ControllerConfig, user: ProcessUser) -> str:
    """Return why PostgreSQL accepts root but not that user, such as peer authentication, or a
    socket or files that it may not access; "" otherwise."""
    url = sa.make_url(config.database_url)

    def refusal() -> str:
        engine = sa.create_engine(
            url, poolclass=sa.NullPool, connect_args={"connect_timeout": _CONNECT_S}
        )
        try:
            engine.connect().close()
        except sa.exc.SQLAlchemyError as e:
            return str(getattr(e, "orig", e)).strip().replace("\n", " ") or type(e).__name__
        return ""

    def check() -> bytes:
        return (refusal() or _REACHED).encode()

    if (why := user.run_as_user(check).decode(errors="replace")) == _REACHED or refusal():
        return ""  # a database that rejects root too is unreachable
    return (
        f"PostgreSQL does not accept uid {user.uid}: {why[:_MAX_REASON]}: use a password "
        "(controller.database_url_file)"
    )


def _bound(config: ControllerConfig) -> socket.socket:
    # Bound under another name and renamed, so that the socket never has a wider mode at its path.
    path = config.paths.socket("controller")
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(fresh))
    grant_group_access(fresh)
    fresh.rename(path)
    return listener


def _elsewhere(config: ControllerConfig) -> socket.socket | None:
    """Return the listener for other machines; None = not configured. Raises SettingsInvalid."""
    return (
        None
        if config.settings.listen is None
        else open_tcp_listener("controller.listen", config.settings.listen)
    )
