"""Requests to the launcher of a promoted pod, at its control port (`pilotlight.protocol`,
POD_FORK). The pod runs a tenant's code: its answers are bounded, and checked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from activator.knative.pod_watcher import Pod
from activator.knative.readiness_probe import WORKER_PORT, exchange
from activator.worker_client.address import tcp_address
from activator.worker_client.connection import WorkerConnectionLost, WorkerResponse
from pilotlight.protocol import (
    POD_CONTROL_PORT,
    POD_FORK,
    POD_INSTANCES,
    POD_STOP,
    WORKER_STATUS,
)

DEADLINE_S = 5.0
"""Timeout of one request: the launcher answers at once."""
FORK_PORTS = range(WORKER_PORT + 1, WORKER_PORT + 16)
_MAX_INSTANCES = 64
_MAX_TEXT = 500


class NotForked(Exception):
    """Raised when a pod makes no further instance; the message says why."""


class TooEarly(NotForked):
    """Raised when the first instance of a pod does not serve yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedInstance:
    """An instance as the launcher reports it. `status`: its exit status, if it has ended and that
    is known. `error`: what its code raised while it started."""

    name: str
    has_ended: bool
    status: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReport:
    """The instances of a pod: the living ones, and the last that have ended, by port."""

    living: Mapping[int, ReportedInstance] = field(default_factory=dict)
    ended: Mapping[int, ReportedInstance] = field(default_factory=dict)
    has_template: bool = False

    @classmethod
    def parse(cls, body: bytes) -> PodReport:
        """Parse an answer. Raises ValueError, TypeError, KeyError, AttributeError."""
        found: dict[bool, dict[int, ReportedInstance]] = {True: {}, False: {}}
        document: Any = json.loads(body)
        for one in list(document["instances"])[:_MAX_INSTANCES]:
            port, status, error = one["port"], one.get("status"), one.get("error") or {}
            if port != WORKER_PORT and port not in FORK_PORTS:
                raise ValueError("an instance has an impossible port")
            reported = ReportedInstance(
                name=str(one["instance"])[:_MAX_TEXT],
                has_ended=one["state"] == "ended",
                status=status if isinstance(status, int) else None,
                error=": ".join(
                    str(error[part])[:_MAX_TEXT] for part in ("type", "message") if error.get(part)
                ),
            )
            found[reported.has_ended][port] = reported
        return cls(living=found[False], ended=found[True], has_template=bool(document["template"]))


async def fork(pod: Pod, instance: str, secrets: Mapping[str, str]) -> int:
    """Have a further instance made; returns its port, where connections wait until it serves.
    Raises NotForked, and TooEarly where it may be asked again at once."""
    answer = await _request(pod, "POST", POD_FORK, {"instance": instance, "secrets": dict(secrets)})
    try:
        body: Any = json.loads(answer.body or b"null")
        if answer.status == 200 and body["port"] in FORK_PORTS:
            return int(body["port"])
        reason = str(body.get("detail") or body.get("reason") or answer.status)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise NotForked(f"its launcher's answer is invalid: {type(e).__name__}") from e
    raise (TooEarly if answer.status == 503 else NotForked)(reason[:_MAX_TEXT])


async def report(pod: Pod) -> PodReport | None:
    """The instances of a pod; None when it does not answer."""
    try:
        answer = await _request(pod, "GET", POD_INSTANCES, None)
        return PodReport.parse(answer.body or b"") if answer.status == 200 else None
    except (NotForked, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


async def is_warm(pod: Pod) -> bool:
    """Whether its launcher says that it still waits for a launch document."""
    try:
        answer = await _request(pod, "GET", WORKER_STATUS, None)
        return bool(json.loads(answer.body or b"null")["state"] == "warm")
    except (NotForked, ValueError, TypeError, KeyError, RecursionError):
        return False


async def stop(pod: Pod, port: int, *, grace_s: float) -> bool:
    """Have one instance finish its calls and exit, and killed after `grace_s`; whether the launcher
    took the order."""
    try:
        answer = await _request(pod, "POST", POD_STOP, {"port": port, "grace_s": grace_s})
    except NotForked:
        return False
    return answer.status == 202


async def _request(
    pod: Pod, method: str, path: str, document: Mapping[str, Any] | None
) -> WorkerResponse:
    """Raises NotForked when there is no answer."""
    if pod.ip is None:
        raise NotForked("the pod has no address")
    body = json.dumps(document).encode() if document is not None else b""
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: launcher\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await exchange(tcp_address(pod.ip, POD_CONTROL_PORT), head.encode() + body)
    except (OSError, WorkerConnectionLost) as e:  # TimeoutError is an OSError
        raise NotForked(f"its launcher does not answer: {e or type(e).__name__}") from e
