"""Names that a worker's environment has in common with its slot or pod: how an instance finds the
socket by which it calls other functions. Standard library only: workers import it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CALLS_DIRECTORY = "calls"
"""Directory of a slot in which the activator serves a socket for each instance."""
AGENT_SOCKET = "agent.sock"
"""Socket in a tenant's directory of a node, at which pods announce themselves to the node agent."""
POD_CALLS_SOCKET = "calls.sock"
"""Socket in a tenant's directory of a node, by which all the tenant's pods there call functions.
The node agent serves it."""
CALLS_VARIABLE = "PILOTLIGHT_CALLS"
"""Environment variable of a worker: the path of CALLS_DIRECTORY, or in a pod of POD_CALLS_SOCKET,
as the worker sees it."""
INSTANCE_VARIABLE = "PILOTLIGHT_INSTANCE"
"""Environment variable of an instance: its id. Set when it begins to serve, never in the process
that is snapshotted or forked."""


def calls_socket(directory: str | Path, instance: str) -> str:
    """The socket by which `instance` calls other functions. It is named for the instance because
    the forks of one slot share its files."""
    return f"{directory}/{instance}.sock"


def calls_socket_here(environ: Mapping[str, str]) -> str | None:
    """The socket of this process; None outside an instance, or where instances have none."""
    place, instance = environ.get(CALLS_VARIABLE), environ.get(INSTANCE_VARIABLE)
    if not place or not instance:
        return None
    return place if place.endswith(f"/{POD_CALLS_SOCKET}") else calls_socket(place, instance)
