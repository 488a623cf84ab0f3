"""Runs a command in a pod's container over the API server's WebSocket protocol `v4.channel.k8s.io`,
in which a message begins with its channel.

1 is standard output, 2 standard error, 3 a `Status` document at the end.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.transport import Transport

NO_STATUS = 255
"""Exit status if the connection ended without one."""
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STREAMS = {1: "stdout", 2: "stderr"}
_STATUS = 3


def parts(message: bytes) -> Iterator[Mapping[str, Any]]:
    """Parse one message: `{"stream", "text"}`, or `{"exit_status"}` at the end."""
    channel, data = message[:1], message[1:]
    if not channel or not data:
        return
    if channel[0] in _STREAMS:
        yield {"stream": _STREAMS[channel[0]], "text": data.decode("utf-8", "replace")}
    elif channel[0] == _STATUS:
        yield {"exit_status": exit_status(data)}


def exit_status(data: bytes) -> int:
    """Exit status of a `Status` document."""
    try:
        status = json.loads(data)
    except ValueError:
        return NO_STATUS
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
            return int(cause["message"])
    return NO_STATUS


async def run(
    transport: Transport, deed: ApiRequest, argv: Sequence[str], *, container: str, open_s: float
) -> AsyncGenerator[Mapping[str, Any], None]:
    """Run a command; yields its output, and `{"exit_status"}` last. Closing this closes the
    connection and thereby the command's streams.

    Raises:
        ClusterError: it was refused, or the connection broke.
    """
    query = [
        ("container", container),
        ("stdout", "true"),
        ("stderr", "true"),
        *(("command", word) for word in argv),
    ]
    is_told = False
    async with transport.socket(deed, query=query, protocols=PROTOCOLS, open_s=open_s) as messages:
        async for message in messages:
            for part in parts(message):
                is_told = is_told or "exit_status" in part
                yield part
    if not is_told:
        yield {"exit_status": NO_STATUS}
