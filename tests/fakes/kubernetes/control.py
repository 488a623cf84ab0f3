"""Faults and counts over HTTP (`/-/…`), for an API server that runs in a process of its own."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.http import Answer, Request

if TYPE_CHECKING:
    from tests.fakes.kubernetes.server import ApiServer

Json = dict[str, Any]


def answer(server: ApiServer, request: Request) -> Answer:
    """GET /-/requests (`{"total", "writes", "verbs"}`), DELETE /-/requests, POST /-/faults (fields
    of `Fault`; or of `Faults` in `{"settings": {…}}`), DELETE /-/faults, POST /-/cut, POST
    /-/expire."""
    path, method = request.target, request.method
    body: Json = json.loads(request.body) if request.body else {}
    if path == "/-/requests" and method == "GET":
        return Answer(body=json.dumps(_counts(server)).encode())
    if path == "/-/requests" and method == "DELETE":
        server.requests.clear()
    elif path == "/-/faults" and method == "POST":
        for name, value in body.pop("settings", {}).items():
            setattr(server.faults, name, value)
        if body:
            server.faults.add(Fault(**body))
    elif path == "/-/faults" and method == "DELETE":
        server.faults.clear()
    elif path == "/-/cut":
        server.cut_connections()
    elif path == "/-/expire":
        server.expire_watches()
    else:
        return Answer(status=404, body=b"{}")
    return Answer(body=b"{}")


def _counts(server: ApiServer) -> Json:
    verbs: dict[str, int] = {}
    for asked in server.requests:
        verbs[asked.verb] = verbs.get(asked.verb, 0) + 1
    slowest = [dataclasses.asdict(asked) for asked in list(server.requests)[-20:]]
    return {
        "total": len(server.requests),
        "writes": server.requests.writes(),
        "verbs": verbs,
        "newest": slowest,
    }
