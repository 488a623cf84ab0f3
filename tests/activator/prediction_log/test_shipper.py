"""Ready files reach the store once, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from activator.prediction_log import parquet
from activator.prediction_log.shipper import PredictionShipper, PutResult
from activator.prediction_log.spool import Spool
from activator.prediction_log.writer import make_row
from tests.activator.prediction_log.rows import MemoryStore, logged

KEY = b"k" * 32


@pytest.fixture(name="store")
def _store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(name="shipper")
def _shipper(tmp_path: Path, store: MemoryStore) -> PredictionShipper:
    return PredictionShipper(tmp_path, store)


def fill(directory: Path, *functions: str) -> None:
    """A ready file with one row for each function."""
    spool = Spool(directory, parquet.convert, max_bytes=2**20, max_age_s=60)
    for number, function in enumerate(functions):
        row = make_row(logged(number), KEY)
        spool.append(row, tenant="t-1", function=function, at_s=0.0, keep_s=3600)
    spool.close()


async def test_files_are_shipped_and_removed(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper
) -> None:
    fill(tmp_path, "f-1", "f-2")
    assert await shipper.ship()
    assert store.ids() == ["req-0", "req-1"]
    assert shipper.shipped == 2
    assert not list((tmp_path / "ready").iterdir())
    assert await shipper.ship()
    assert store.puts == 2


async def test_a_dead_store_leaves_files_where_they_are(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper
) -> None:
    fill(tmp_path, "f-1", "f-2")
    store.answers = [httpx.ConnectError("down")]
    assert not await shipper.ship()
    assert store.puts == 1, "others of the same store were tried"
    assert shipper.oldest_at is not None
    assert await shipper.ship()
    assert store.ids() == ["req-0", "req-1"]
    assert shipper.oldest_at is None


@pytest.mark.parametrize("status", [403, 404, 429, 500, 503, 507])
async def test_what_another_attempt_may_change_is_sent_again_and_holds_up_no_other_file(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper, status: int
) -> None:
    fill(tmp_path, "f-1", "f-2")
    store.answers = [PutResult(status, problem="storage-full")]
    assert not await shipper.ship()
    assert len(store.files) == 1
    assert await shipper.ship()
    assert store.ids() == ["req-0", "req-1"]
    assert shipper.dropped.total() == 0


@pytest.mark.parametrize(
    "answer, reason",
    [
        (PutResult(507, problem="storage-quota"), "quota"),
        (PutResult(200, is_stored=False), "deleted"),
        (PutResult(400, problem="invalid-input"), "refused"),
        (PutResult(413, problem="too-large"), "refused"),
    ],
)
async def test_what_is_refused_for_good_is_dropped_and_counted(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper, answer: PutResult, reason: str
) -> None:
    fill(tmp_path, "f-1")
    store.answers = [answer]
    assert await shipper.ship()
    assert shipper.dropped == {reason: 1}
    assert not list((tmp_path / "ready").iterdir())


async def test_other_files_in_the_directory_are_left_alone(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper
) -> None:
    fill(tmp_path, "f-1")
    for name in ("x.parquet", "a~b.parquet", "a~1.part"):
        (tmp_path / "ready" / name).write_bytes(b"x")
    assert await shipper.ship()
    assert store.puts == 1
    assert len(list((tmp_path / "ready").iterdir())) == 3


async def test_a_kill_after_the_store_had_a_file_sends_it_again_under_its_name(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper
) -> None:
    fill(tmp_path, "f-1")
    (path,) = (tmp_path / "ready").iterdir()
    data = path.read_bytes()
    await shipper.ship()
    path.write_bytes(data)  # as if the process had been killed before it removed the file
    await shipper.ship()
    assert store.puts == 2
    assert store.ids() == ["req-0"]


async def test_a_file_that_was_answered_and_not_removed_counts_once(
    tmp_path: Path, store: MemoryStore, shipper: PredictionShipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, "f-1", "f-2")
    store.answers = [PutResult(200, is_stored=False)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", _fails)
        assert not await shipper.ship()
    store.answers = [PutResult(200, is_stored=False)]
    assert await shipper.ship()
    assert (shipper.dropped["deleted"], shipper.shipped, store.puts) == (1, 1, 3)


def _fails(path: Path, missing_ok: bool = False) -> None:
    raise OSError(f"{path}: Input/output error")


async def test_a_store_that_does_not_answer_is_given_up_at_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(MemoryStore):
        async def put(self, name: str, data: bytes) -> PutResult:
            await asyncio.Event().wait()
            raise AssertionError

    monkeypatch.setattr("activator.prediction_log.shipper.LAST_S", 0.05)
    fill(tmp_path, "f-1")
    await PredictionShipper(tmp_path, Silent()).aclose()
    assert len(list((tmp_path / "ready").iterdir())) == 1


async def test_a_file_that_is_refused_for_now_delays_no_other(tmp_path: Path) -> None:
    """Files of others come every second; the one that waits is sent again less and less often."""

    class Picky(MemoryStore):
        refusals = 0

        async def put(self, name: str, data: bytes) -> PutResult:
            if "~f-bad~" in name:
                self.refusals += 1
                return PutResult(503)
            return await super().put(name, data)

    store = Picky()
    shipper = PredictionShipper(tmp_path, store, every_s=0.01)
    fill(tmp_path, "f-bad")
    task = asyncio.create_task(shipper.run())
    try:
        async with asyncio.timeout(20.0):
            while store.refusals < 2:
                await asyncio.sleep(0.01)
            fill(tmp_path, "f-good")
            began = asyncio.get_running_loop().time()
            while not store.ids():
                await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began < 0.4
        assert store.refusals == 2
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
