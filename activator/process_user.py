"""Drops root privileges: an activator that root started continues as `platform.activator_uid` once
everything that only root may open is open."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from activator.context import ActivatorContext
from activator.settings import ActivatorSettings
from pilotlight.core.settings import PlatformSettings
from snapshotter.linux.process_user import ProcessUser, chown_to_root

log = logging.getLogger(__name__)


def drop_root(
    context: ActivatorContext, platform: PlatformSettings, settings: ActivatorSettings
) -> None:
    """Continue as `platform.activator_uid` where this process is root on the local fleet; if that
    is not possible, log a warning and stay root.

    Call before starting threads. Raises OSError: the process must then exit.
    """
    if os.geteuid() != 0 or platform.fleet != "local":
        return
    if context.paths.activator_uid is None:
        chown_to_root(context.home)
        log.warning("activator runs as root reason=platform.activator_uid is null")
        return
    user = user_of(context, platform, settings)
    if why := user.obstacle():
        user.restore_root_ownership()
        log.warning("activator runs as root reason=%s", why)
        return
    user.become()
    # root's home is not readable from here on: a library that looks for a file there would fail
    os.environ["HOME"] = str(context.home)
    log.info("activator runs without root uid=%d", user.uid)


def user_of(
    context: ActivatorContext, platform: PlatformSettings, settings: ActivatorSettings
) -> ProcessUser:
    """Return the user of an activator and the paths it needs: its directory, the sockets in <run>,
    and the files that it reopens at run time."""
    assert context.paths.activator_uid is not None
    again = [platform.tls_cert, platform.tls_key, platform.tls_ca, _socket_of(settings.redis_url)]
    return ProcessUser(
        uid=context.paths.activator_uid,
        owns=(context.home,),
        enters=(context.paths.run,),
        uses=tuple(Path(path) for path in again if path),
    )


def _socket_of(redis_url: str | None) -> str | None:
    if redis_url is None:
        return None
    from redis import connection

    parts: Mapping[str, Any] = connection.parse_url(redis_url)
    path = parts.get("path")
    return str(path) if path else None
