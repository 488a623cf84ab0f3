"""The activator process: settings → objects (`activator.app`) → `activator.lifecycle`.

`python -m activator --config platform.yaml [--ready-fd N] [--index I|from-hostname]
[--drain-journal]`"""

from __future__ import annotations

from pilotlight.core.startup import import_gc

# isort: split
import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from activator.app import ActivatorApp
from activator.billing.errors import JournalFull, JournalInUse
from activator.billing.journal_drain import drain_journal
from activator.billing.segments import require_unused
from activator.context import ActivatorContext, load_context, own_socket
from activator.coordination.identity import ANY, FROM_HOSTNAME, IdentityInvalid, identity_of
from activator.coordination.state import SharedStateUnreachable
from activator.lifecycle import Activator
from activator.open_inference.grpc.process import open_grpc_sockets
from activator.process_user import drop_root
from activator.settings import ActivatorSettings
from pilotlight.core import logging_config
from pilotlight.core.dashboard.dashboard_origin import read_dashboard_origin
from pilotlight.core.metrics_server import (
    MetricsAddress,
    MetricsServer,
    metrics_socket,
    metrics_token_file,
)
from pilotlight.core.oidc.settings import read_issuers
from pilotlight.core.rpc import grant_group_access
from pilotlight.core.settings import (
    Paths,
    PlatformSettings,
    SettingsInvalid,
    load_section,
    require_defaults,
)
from pilotlight.core.transport.public_listener import open_functions_socket, open_listeners
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.pricing import PriceSettings
from snapshotter.settings import SnapshotterSettings

import_gc.imported()

log = logging.getLogger("activator")


def listen(settings: ActivatorSettings, passed: Sequence[int] = ()) -> list[socket.socket]:
    """Return the listening sockets: those whose descriptors a supervisor `passed`, else newly
    opened ones. Raises OSError when an address is in use."""
    if passed:
        return [socket.socket(fileno=descriptor) for descriptor in passed]
    return open_listeners(settings.listen, is_shared=settings.activators > 1)


def listen_unix(path: Path) -> socket.socket:
    """Open the socket at which the other activators of this machine reach this one, replacing a
    socket left by an earlier process."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    grant_group_access(path)
    listener.setblocking(False)
    return listener


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="activator", description="The data plane of pilotlight.")
    parser.add_argument("--config", type=Path, default=None, help="platform.yaml")
    parser.add_argument(
        "--ready-fd",
        type=int,
        default=None,
        help="descriptor that gets a newline once requests are served",
    )
    parser.add_argument(
        "--listen-fd",
        type=int,
        action="append",
        default=[],
        help="bound socket to serve at, instead of activator.listen",
    )
    parser.add_argument(
        "--index",
        default="0",
        help=f"which activator, from 0; {FROM_HOSTNAME}: the number at the end of the host name",
    )
    parser.add_argument(
        "--drain-journal",
        action="store_true",
        help="ship the contents of that activator's journal, then exit",
    )
    return parser.parse_args(argv)


def _drain_journal(
    paths: Paths, index: int, platform: PlatformSettings, settings: ActivatorSettings
) -> str | None:
    """Ship the journal. Returns None when the controller has all of it, else what is left or why it
    failed."""
    try:
        context = load_context(paths, index, platform)
        require_unused(context.home)
        drop_root(context, platform, settings)
        done = uvloop.run(
            drain_journal(
                context.home,
                activator=context.id,
                controller=context.controller,
                token=context.key.token,
            )
        )
    except JournalInUse as e:
        return f"activator: the journal of a-{index} is in use, stop its activator first: {e}"
    except (JournalFull, SettingsInvalid) as e:
        return f"activator: {e}"
    log.info("journal drained id=%s %s", context.id, done)
    return (
        f"activator: not all of {context.id}'s journal was shipped to the controller; run it "
        f"again: {done.left}"
        if done.left
        else None
    )


def _metrics_address(
    paths: Paths, platform: PlatformSettings, settings: ActivatorSettings, offset: int
) -> MetricsAddress:
    """`offset`: number of this activator on this machine, added to the port of
    `activator.metrics_listen`."""
    return MetricsAddress(
        socket_path=metrics_socket(paths, f"activator-{offset}" if offset else "activator"),
        listen=settings.metrics_listen_of(offset),
        token_file=metrics_token_file(platform, paths),
        setting="activator.metrics_listen"
        + (f" (activator {offset} counts up from it)" if offset else ""),
    )


def _open_sockets(
    context: ActivatorContext,
    platform: PlatformSettings,
    settings: ActivatorSettings,
    listeners: list[socket.socket],
    *,
    offset: int,
    is_given: bool,
) -> MetricsAddress:
    """Open the sockets in <run>, which only its owner may create: for metrics, for the other
    activators, and for functions unless a supervisor passed one (`is_given`). Raises
    JournalInUse."""
    require_unused(context.home)
    if not is_given and settings.activators == 1 and platform.fleet == "local":
        listeners.append(open_functions_socket(context.paths.socket_for_functions))
    if (own := own_socket(settings, context)) is not None:
        listeners.append(listen_unix(own))
    return _metrics_address(context.paths, platform, settings, offset).opened()


def _settings(platform: PlatformSettings, config: Path | None) -> ActivatorSettings:
    """Load section `activator`. Raises SettingsInvalid, also for a Redis that workers could use
    where tenants have their own uids, and for settings that have no effect on this fleet."""
    settings = load_section(ActivatorSettings, "activator", config)
    if settings.redis_url is not None and os.geteuid() == 0 and platform.fleet == "local":
        from activator.coordination.redis_protection import require_protected

        require_protected(settings.redis_url)
    if platform.fleet == "local":
        require_defaults(
            "activator", settings, ("agents_listen",), why="only node agents of a cluster use it"
        )
    if settings.freeze_idle_s is not None and platform.fleet != "local":
        raise SettingsInvalid(
            f"activator.freeze_idle_s = {settings.freeze_idle_s:g}: pods cannot be frozen: remove "
            f"the setting, or write null"
        )
    return settings


def _configure_logging() -> None:
    logging_config.configure_logging("%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("httpx", "httpcore", "uvicorn.error", "websockets"):
        logging.getLogger(name).setLevel(logging.WARNING)


async def _live(
    app: ActivatorApp,
    metrics: MetricsAddress,
    listeners: Sequence[socket.socket],
    ready_fd: int | None,
) -> None:
    activator = Activator(app)
    await activator.startup()
    exposed = await MetricsServer(registry=app.metrics.registry, in_thread=True).serve(metrics)
    try:
        await activator.run(listeners, ready_fd)
    finally:
        for server in exposed:
            server.close()


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    os.umask(0o077)  # files are private to this user unless their mode is set explicitly
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    _configure_logging()
    try:
        platform = load_section(PlatformSettings, "platform", arguments.config)
        settings = _settings(platform, arguments.config)
        load_section(SnapshotterSettings, "snapshotter", arguments.config).check_uids(platform)
        prices = load_section(PriceSettings, "prices", arguments.config)
    except SettingsInvalid as e:
        sys.exit(f"activator: {e}")
    try:
        issuers = read_issuers(arguments.config)
        cluster = (
            load_section(ClusterSettings, "cluster", arguments.config)
            if platform.fleet == "knative"
            else None
        )
        most = ANY if arguments.drain_journal else settings.activators
        identity = identity_of(arguments.index, hostname=socket.gethostname(), activators=most)
    except (SettingsInvalid, IdentityInvalid) as e:
        sys.exit(f"activator: {e}")
    paths = Paths.of(platform, os.environ).make()
    if arguments.drain_journal:
        sys.exit(_drain_journal(paths, identity.index, platform, settings))
    try:
        listeners = listen(settings, arguments.listen_fd)
    except OSError as e:
        sys.exit(
            f"activator: cannot listen on {e.strerror}: is another platform running? Set "
            f"activator.listen"
        )
    try:
        context, dashboard = (
            load_context(paths, identity.index, platform),
            read_dashboard_origin(arguments.config),
        )
        offset, is_given = (
            0 if identity.is_alone_here else identity.index,
            bool(arguments.listen_fd),
        )
        metrics = _open_sockets(
            context, platform, settings, listeners, offset=offset, is_given=is_given
        )
        grpc = open_grpc_sockets(settings, context.paths.run / f"grpc-{context.index}.sock")
        if grpc is not None:
            listeners.append(listen_unix(grpc.activator))
        drop_root(context, platform, settings)
        app = ActivatorApp(
            settings=settings,
            prices=prices,
            context=context,
            cluster=cluster,
            dashboard=dashboard,
            issuers=issuers,
            grpc=grpc,
        )
    except JournalInUse as e:
        sys.exit(f"activator: a-{identity.index} is already served: {e}")
    except (JournalFull, SettingsInvalid) as e:
        sys.exit(f"activator: {e}")
    try:
        uvloop.run(_live(app, metrics, listeners, arguments.ready_fd))
    except (SharedStateUnreachable, SettingsInvalid) as e:
        sys.exit(f"activator: {e}")


if __name__ == "__main__":
    main()
