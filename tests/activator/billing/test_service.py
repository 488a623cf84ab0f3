"""The way to the ledger, over the controller's socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.billing.errors import LedgerRefused, LedgerUnavailable
from activator.billing.service import ControllerLedger
from pilotlight.core.transport.endpoint import Endpoint
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest


class FakeLedgerServer:
    """Answers with `status`; keeps what was posted."""

    def __init__(self) -> None:
        self.status = 200
        self.bodies: list[dict[str, object]] = []
        self.tokens: list[str] = []

    async def answer(self, request: WorkerRequest) -> WorkerAnswer:
        self.tokens.append(request.headers["pilotlight-platform-token"])
        self.bodies.append(json.loads(request.body))
        return WorkerAnswer(status=self.status, body=b"{}")


@pytest.fixture(name="server")
async def _server(short_tmp: Path) -> AsyncIterator[FakeLedgerServer]:
    fake = FakeLedgerServer()
    worker = await FakeWorker(short_tmp / "c.sock", fake.answer).start()
    yield fake
    await worker.die()


@pytest.fixture(name="ledger")
async def _ledger(short_tmp: Path) -> AsyncIterator[ControllerLedger]:
    ledger = ControllerLedger(
        controller=Endpoint.at(short_tmp / "c.sock"), token="secret", activator="a-0"
    )
    yield ledger
    await ledger.aclose()


async def test_records_arrive_as_they_were_written(
    server: FakeLedgerServer, ledger: ControllerLedger
) -> None:
    await ledger.accept([b'{"id":"1"}', b'{"id":"2"}'])

    assert server.bodies == [{"activator": "a-0", "records": [{"id": "1"}, {"id": "2"}]}]
    assert server.tokens == ["secret"]


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refusal_is_final(
    server: FakeLedgerServer, ledger: ControllerLedger, status: int
) -> None:
    server.status = status

    with pytest.raises(LedgerRefused):
        await ledger.accept([b"{}"])


@pytest.mark.parametrize("status", [401, 500, 503, 507])
async def test_trouble_at_the_ledger_is_not(
    server: FakeLedgerServer, ledger: ControllerLedger, status: int
) -> None:
    server.status = status

    with pytest.raises(LedgerUnavailable):
        await ledger.accept([b"{}"])


async def test_a_controller_that_is_down_is_not_either(ledger: ControllerLedger) -> None:
    with pytest.raises(LedgerUnavailable):
        await ledger.accept([b"{}"])
