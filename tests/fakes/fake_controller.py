"""A controller for the activator's tests: keeps what is posted to it, answers for calls that it was
told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest


class FakeController:
    """On a Unix socket.

    Attributes:
        calls: newest state of each call, by id.
        bound: what functions were asked to be bound to.
        is_down: answers 503 to everything.
    """

    def __init__(self, path: Path) -> None:
        self._server = FakeWorker(path, self._answer)
        self.calls: dict[str, dict[str, Any]] = {}
        self.is_down = False
        self.bound: list[dict[str, Any]] = []
        self.seen: list[WorkerRequest] = []

    async def start(self) -> FakeController:
        """Listen."""
        await self._server.start()
        return self

    async def _answer(self, request: WorkerRequest) -> WorkerAnswer:
        self.seen.append(request)
        if self.is_down:
            return WorkerAnswer(status=503, body=b"{}")
        if request.path == "/internal/calls":
            for call in json.loads(request.body)["calls"]:
                known = self.calls.get(call["id"])
                if known is None or known["sequence"] < call["sequence"]:
                    self.calls[call["id"]] = call
            return WorkerAnswer(body=b'{"accepted":1}')
        if request.path == "/internal/bind":
            wanted = json.loads(request.body)
            self.bound.append(wanted)
            if wanted["arguments"].get("size") == "huge":
                body = b'{"type":"invalid-input","status":400,"detail":"size is too large"}'
                return WorkerAnswer(status=400, body=body)
            name = f"{wanted['function']}--0123456789ab"
            return WorkerAnswer(body=json.dumps({"function": name}).encode())
        if request.path.startswith(("/v1/calls/", "/internal/calls/")):
            record = self.calls.get(request.path.rpartition("/")[2].partition("?")[0])
            return (
                WorkerAnswer(body=json.dumps(record).encode())
                if record
                else WorkerAnswer(status=404, body=b"{}")
            )
        return WorkerAnswer(
            body=json.dumps({"path": request.path, "method": request.method}).encode()
        )

    async def aclose(self) -> None:
        """Stop."""
        await self._server.aclose()
