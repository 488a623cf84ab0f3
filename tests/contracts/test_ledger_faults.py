"""A database that dies while records are on their way: the journal keeps them, and nothing is lost
or counted twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from activator.billing.errors import LedgerUnavailable
from activator.billing.journal import Journal
from activator.billing.shipping import Shipper, usage_body
from pilotlight.controller import http_app
from pilotlight.controller.analytics import usage_reports
from pilotlight.controller.billing import rollups
from pilotlight.controller.context import Context
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.settings import Paths
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.protocol import USAGE_PATH, BudgetState
from snapshotter.client import AgentClient
from tests.activator.billing_world import SECOND, account, records_on_disk
from tests.fakes.postgres_server import PostgresServer
from tests.functions.controller.parts import ManualClock
from weight_cache.client import WeightCacheClient

CALLS = 2500


class HttpLedger:
    """A `shipping.Ledger`: the controller's application, in this process."""

    def __init__(self, context: Context) -> None:
        transport = httpx.ASGITransport(http_app.build_app(context), raise_app_exceptions=False)
        self._http = httpx.AsyncClient(
            transport=transport,
            base_url="http://c",
            headers={HEADER_PLATFORM_TOKEN: context.key.token},
        )
        self.answers: list[int] = []

    async def accept(self, records: Sequence[bytes]) -> Mapping[str, BudgetState]:
        """Take all or none."""
        answer = await self._http.post(USAGE_PATH, content=usage_body("a-0", records))
        self.answers.append(answer.status_code)
        if answer.status_code != 200:
            raise LedgerUnavailable(answer.text)
        return {}

    async def aclose(self) -> None:
        """Close the client."""
        await self._http.aclose()


@pytest.fixture(name="store")
def _store(mortal_postgres: PostgresServer) -> Iterator[Store]:
    opened = Store(
        mortal_postgres.url.replace("postgresql://", "postgresql+psycopg://"), clock=ManualClock()
    )
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture(name="ledger")
async def _ledger(store: Store, tmp_path: Path, short_tmp: Path) -> AsyncIterator[HttpLedger]:
    paths = Paths(home=tmp_path, run=short_tmp)
    blobs = DirectoryStore(tmp_path / "blobs")
    context = Context(
        config=ControllerConfig(
            settings=ControllerSettings(), paths=paths, trust="isolated", uid_base=None
        ),
        store=store,
        files=BlobStore(objects=blobs, incoming=tmp_path / "incoming", limit_bytes=1000),
        key=PlatformKey.load_or_create(tmp_path / "platform.key"),
        agent=AgentClient(paths.socket("snapshotter")),
        cache=WeightCacheClient(paths.socket("weight_cache")),
        notifier=ChangeNotifier(),
        metrics=Metrics(),
        clock=ManualClock(),
    )
    ledger = HttpLedger(context)
    yield ledger
    await ledger.aclose()
    await context.agent.aclose()
    await context.cache.aclose()


@pytest.fixture(name="journal")
def _journal(tmp_path: Path) -> Iterator[Journal]:
    journal, _ = Journal.open(tmp_path / "journal", activator="a-0")
    busy = account(journal)
    for n in range(CALLS):
        began = n * SECOND
        times: dict[str, Any] = {
            "queued_ms": 0,
            "start_ms": 0,
            "now_ns": began,
            "at_ns": 1_000 * SECOND + began,
        }
        ticket = busy.open(
            call=f"req-{n}", attempt=1, key="k-1", method="", start_kind="WARM", **times
        )
        ended = began + 1_234_567
        busy.close(ticket, status=200, outcome="ok", now_ns=ended, at_ns=1_000 * SECOND + ended)
    yield journal
    journal.close()


async def test_postgresql_killed_in_the_middle_of_a_batch_catches_up(
    mortal_postgres: PostgresServer,
    store: Store,
    ledger: HttpLedger,
    journal: Journal,
    tmp_path: Path,
) -> None:
    batches = 0

    def strike(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        nonlocal batches
        batches += statement.startswith("INSERT INTO usage_days")
        # the records of the second batch are in, its sums are not, and nothing of it is committed
        if batches == 2:
            batches += 1
            mortal_postgres.kill()

    sa.event.listen(store.engine, "before_cursor_execute", strike)
    shipper = Shipper(journal, ledger)
    with pytest.raises(LedgerUnavailable):
        await shipper.flush()
    with pytest.raises(LedgerUnavailable):  # nobody there at all
        await shipper.flush()
    assert (ledger.answers, shipper.lag().records) == ([200, 503, 503], CALLS - 1000)

    mortal_postgres.start()
    await shipper.flush()

    written = records_on_disk(tmp_path / "journal")
    assert (shipper.lag().records, shipper.refused, len(written)) == (0, 0, CALLS)
    with store.read() as sql:
        lines = usage_reports.report(
            sql, tenant="t-1", by="function", since=None, until=None, environment=None
        )
        assert rollups.verify(sql) == []
    assert sum(line.records for line in lines) == CALLS
    assert sum(line.cost for line in lines) == sum(Decimal(one["cost"]) for one in written)
