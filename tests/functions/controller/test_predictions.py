"""Files of prediction logs: stored once, read by their tenant alone and on record, deleted in time."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.deployments.fleet_checks import check_logs
from pilotlight.controller.predictions import storage
from pilotlight.controller.predictions.files import MAX_FILE_BYTES, hour_name
from pilotlight.core.object_store import DirectoryStore, ObjectStore
from pilotlight.core.object_store.errors import ObjectStoreUnavailable
from pilotlight.core.transport.controller_client import HEADER_PLATFORM_TOKEN
from pilotlight.errors import InvalidInput
from pilotlight.protocol import PREDICTIONS_PATH
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import refused, spec

HOUR_S, DAY_S = 3600, 86_400
LOG: dict[str, Any] = {"sample": 1.0}
READ = "/v1/apps/search/functions/hello/predictions"


class FaultyStore(DirectoryStore):
    """A blob store that fails while `is_down`."""

    is_down = False

    async def put(self, key: str, data: bytes) -> None:
        """See ObjectStore."""
        self._check()
        await super().put(key, data)

    async def delete(self, key: str) -> None:
        """See ObjectStore."""
        self._check()
        await super().delete(key)

    def _check(self) -> None:
        if self.is_down:
            raise ObjectStoreUnavailable("the store does not answer")


@pytest.fixture
def blobs(tmp_path: Path) -> ObjectStore:
    """Where the controller's blobs lie."""
    return FaultyStore(tmp_path / "blobs")


@pytest.fixture(name="deployed")
async def _deployed(controller: Controller) -> Controller:
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [spec(log=LOG)]}
    )
    assert answer.status_code == 200, answer.text
    return controller


def function_id(controller: Controller) -> str:
    with controller.context.store.read() as sql:
        return str(sql.execute(sa.select(tables.functions.c.id)).scalars().first())


async def name_of(
    controller: Controller,
    number: int = 1,
    *,
    hours_ago: int = 0,
    keep_s: int = 7 * DAY_S,
    rows: int = 3,
) -> str:
    hour = int(controller.clock()) // HOUR_S - hours_ago
    tenant = await controller.tenant()
    return f"{tenant}~{function_id(controller)}~{hour}~{keep_s}~{number:024x}~{rows}.parquet"


async def put(controller: Controller, name: str, data: bytes = b"PAR1") -> httpx.Response:
    headers = {HEADER_PLATFORM_TOKEN: controller.context.key.token}
    return await controller.http.put(f"{PREDICTIONS_PATH}/{name}", content=data, headers=headers)


def files_in(answer: httpx.Response) -> dict[str, bytes]:
    assert answer.status_code == 200, answer.text
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        return {
            member.name: file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }


async def used_bytes(controller: Controller) -> int:
    return int((await controller.http.get("/v1/tenant")).json()["use"]["stored_bytes"])


async def audited(controller: Controller, action: str) -> list[dict[str, Any]]:
    answer = await controller.http.get("/v1/audit", params={"action": action})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["entries"])


async def test_a_file_is_stored_once_by_function_and_hour(deployed: Controller) -> None:
    before = await used_bytes(deployed)
    name = await name_of(deployed)
    for _ in range(2):
        answer = await put(deployed, name, b"PAR1 one")
        assert answer.json() == {"stored": True}
    hour = hour_name(deployed.clock())
    assert files_in(await deployed.http.get(READ)) == {f"{hour}/{1:024x}.parquet": b"PAR1 one"}
    keys = await deployed.context.files.objects.keys("predictions/")
    tenant, function = await deployed.tenant(), function_id(deployed)
    assert keys == [f"predictions/{tenant}/{function}/{hour}/{1:024x}.parquet"]
    assert await used_bytes(deployed) - before == 8


async def test_only_processes_of_the_platform_store_files(deployed: Controller) -> None:
    answer = await deployed.http.put(f"{PREDICTIONS_PATH}/{await name_of(deployed)}", content=b"x")
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "name",
    ["x", "..~f~1~3600~" + "a" * 24 + "~1.parquet", "t~f~1~1~" + "a" * 24 + "~1.parquet"],
)
async def test_names_that_activators_do_not_make_are_refused(
    deployed: Controller, name: str
) -> None:
    assert "not the name of a file" in refused(await put(deployed, name), 400)


async def test_a_file_has_a_limit(deployed: Controller) -> None:
    answer = await put(deployed, await name_of(deployed), bytes(MAX_FILE_BYTES + 1))
    assert "at most" in refused(answer, 413)


async def test_reads_have_whole_hours_and_are_in_the_audit_log(deployed: Controller) -> None:
    for number in range(4):
        await put(deployed, await name_of(deployed, number, hours_ago=number), b"%d" % number)
    half = deployed.clock() // HOUR_S * HOUR_S + HOUR_S / 2
    answer = await deployed.http.get(
        READ, params={"since": str(half - 2 * HOUR_S), "until": str(half - HOUR_S)}
    )
    assert sorted(files_in(answer).values()) == [b"1", b"2"]
    assert len(files_in(await deployed.http.get(READ))) == 4
    newest, first = await audited(deployed, "predictions.read")
    assert (first["subject"], first["after"]["files"], first["after"]["rows"]) == (
        "main/search/hello",
        2,
        6,
    )
    assert newest["after"]["files"] == 4
    assert newest["actor"]


async def test_another_tenant_reads_and_deletes_nothing(deployed: Controller) -> None:
    await put(deployed, await name_of(deployed))
    async with deployed.client(await deployed.other_tenant()) as other:
        assert files_in(await other.get(READ)) == {}
        assert (await other.delete(READ)).json() == {"files": 0, "rows": 0}
    assert len(files_in(await deployed.http.get(READ))) == 1


async def test_a_file_of_a_function_of_another_tenant_is_not_stored(deployed: Controller) -> None:
    name = await name_of(deployed)
    other = name.replace(await deployed.tenant(), "t-other")
    assert (await put(deployed, other)).json() == {"stored": False}
    assert await deployed.context.files.objects.keys("predictions/") == []


async def test_keys_read_what_they_may_deploy(deployed: Controller) -> None:
    await put(deployed, await name_of(deployed))
    async with deployed.client(await deployed.new_key(scope="invoke")) as caller:
        assert "scope" in refused(await caller.get(READ), 403)
    async with deployed.client(await deployed.new_key(scope="deploy", app="other")) as bound:
        assert "bound to" in refused(await bound.get(READ), 403)
        assert (await bound.delete(READ)).status_code == 403
    async with deployed.client(await deployed.new_key(scope="deploy"), environment="lab") as lab:
        assert files_in(await lab.get(READ)) == {}
    async with deployed.client(await deployed.new_key(scope="deploy", app="search")) as bound:
        assert len(files_in(await bound.get(READ))) == 1


async def test_files_are_deleted_when_their_window_ends(deployed: Controller) -> None:
    before = await used_bytes(deployed)
    await put(deployed, await name_of(deployed, 1, keep_s=HOUR_S))
    await put(deployed, await name_of(deployed, 2, keep_s=2 * DAY_S))
    assert await storage.delete_expired(deployed.context) == 0
    deployed.clock.now += 3 * HOUR_S
    assert len(files_in(await deployed.http.get(READ))) == 1, "it is not read after its window"
    assert await storage.delete_expired(deployed.context) == 1
    assert len(await deployed.context.files.objects.keys("predictions/")) == 1
    assert await used_bytes(deployed) - before == 4
    late = await name_of(deployed, 3, hours_ago=5, keep_s=HOUR_S)
    assert (await put(deployed, late)).json() == {"stored": False}


async def test_a_tenant_deletes_its_log(deployed: Controller) -> None:
    for number in range(3):
        await put(deployed, await name_of(deployed, number, hours_ago=number))
    old = str(deployed.clock() // HOUR_S * HOUR_S - HOUR_S)
    assert (await deployed.http.delete(READ, params={"until": old})).json() == {
        "files": 1,
        "rows": 3,
    }
    assert (await deployed.http.delete(READ)).json() == {"files": 2, "rows": 6}
    assert files_in(await deployed.http.get(READ)) == {}
    assert (await put(deployed, await name_of(deployed, 0))).json() == {"stored": False}
    assert await storage.delete_expired(deployed.context) == 3
    assert await deployed.context.files.objects.keys("predictions/") == []
    assert len(await audited(deployed, "predictions.delete")) == 2


async def test_a_log_does_not_outlive_its_environment(controller: Controller) -> None:
    assert (await controller.http.post("/v1/environments", json={"name": "lab"})).is_success
    async with controller.client(controller.key, environment="lab") as lab:
        await lab.post("/v1/apps/search/deploy", json={"functions": [spec(log=LOG)]})
        assert (await put(controller, await name_of(controller))).json() == {"stored": True}
        assert (await lab.delete("/v1/apps/search")).is_success
        assert len(files_in(await lab.get(READ))) == 1, "its window goes on"
        answer = await controller.http.delete("/v1/environments/lab")
        assert answer.is_success, answer.text
    assert (await controller.http.post("/v1/environments", json={"name": "lab"})).is_success
    async with controller.client(controller.key, environment="lab") as lab:
        assert files_in(await lab.get(READ)) == {}


async def test_a_tenant_without_room_loses_rows_and_nothing_else(deployed: Controller) -> None:
    used = await used_bytes(deployed)
    answer = await deployed.http.patch(
        "/v1/tenants/default", json={"overrides": {"stored_bytes": used + 4}}
    )
    assert answer.status_code == 200, answer.text
    assert (await put(deployed, await name_of(deployed, 1), b"1234")).json() == {"stored": True}
    full = await put(deployed, await name_of(deployed, 2), b"5")
    assert "more bytes do not fit" in refused(full, 507)
    assert full.json()["type"].endswith("storage-quota")


async def test_a_dead_store_refuses_a_file_that_is_stored_later(
    deployed: Controller, blobs: FaultyStore
) -> None:
    name = await name_of(deployed)
    blobs.is_down = True
    assert (await put(deployed, name)).status_code == 503
    assert files_in(await deployed.http.get(READ)) == {}, "a reader skips what has not arrived"
    blobs.is_down = False
    assert (await put(deployed, name)).json() == {"stored": True}
    assert len(files_in(await deployed.http.get(READ))) == 1


async def test_a_store_that_dies_while_files_are_deleted_leaves_none_behind(
    deployed: Controller, blobs: FaultyStore
) -> None:
    await put(deployed, await name_of(deployed))
    await deployed.http.delete(READ)
    blobs.is_down = True
    with pytest.raises(ObjectStoreUnavailable):
        await storage.delete_expired(deployed.context)
    blobs.is_down = False
    assert await storage.delete_expired(deployed.context) == 1
    assert await blobs.keys("predictions/") == []


async def test_one_read_has_a_limit(deployed: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotlight.controller.predictions.files.MAX_READ_BYTES", 4)
    await put(deployed, await name_of(deployed, 1), b"12345")
    assert "choose a later `since`" in refused(await deployed.http.get(READ), 413)


def test_a_platform_without_pyarrow_refuses_a_log_by_name() -> None:
    declared = from_json(FunctionSpec, spec(log=LOG))
    check_logs([declared])
    with pytest.raises(InvalidInput, match="log: this platform cannot write Parquet") as refusal:
        check_logs([declared], library="no_such_library")
    assert "pilotlight[predictions]" in str(refusal.value.detail)
    check_logs([from_json(FunctionSpec, spec())], library="no_such_library")
