"""Identity and location of one activator of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from activator.coordination.peers import socket_of
from activator.settings import ActivatorSettings
from pilotlight.core.crypto import ActivatorKey, load_activator_key
from pilotlight.core.settings import Paths, PlatformSettings
from pilotlight.core.transport.endpoint import Endpoint, TlsCredentials, controller_endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivatorContext:
    """Identity and location of an activator.

    Attributes:
        id: its name among the activators: `a-0`.
        index: number of this activator on this machine, from 0.
        home: directory of its journal and its copy of the routes.
        key: the activators' key.
        controller: address of the controller.
        credentials: credentials for other machines; None = there are no other machines.
    """

    id: str
    index: int
    paths: Paths
    home: Path
    key: ActivatorKey
    controller: Endpoint
    credentials: TlsCredentials | None


def load_context(paths: Paths, index: int, platform: PlatformSettings) -> ActivatorContext:
    """Return the context of activator `index`, creating its directory. Raises SettingsInvalid."""
    home = paths.home / "activator" / f"a-{index}"
    home.mkdir(parents=True, exist_ok=True)
    key = load_activator_key(platform, paths)
    controller, credentials = controller_endpoint(platform, paths), TlsCredentials.of(platform)
    return ActivatorContext(
        id=f"a-{index}",
        index=index,
        paths=paths,
        home=home,
        key=key,
        controller=controller,
        credentials=credentials,
    )


def own_socket(settings: ActivatorSettings, context: ActivatorContext) -> Path | None:
    """Return the socket at which the other activators of this machine reach this one; None where
    there are none, or they are on other machines."""
    is_alone = settings.activators == 1 or settings.redis_url is None
    return (
        None
        if is_alone or settings.sibling_url is not None
        else socket_of(context.paths.run, context.index)
    )
