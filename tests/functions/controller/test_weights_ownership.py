"""Weights of a deploy: their files must be the tenant's own, not only known by their hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import spec
from weight_cache.manifest import FileHash
from weight_cache.sources.manifest_builder import build_manifest


async def put(client: httpx.AsyncClient, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    answer = await client.put(f"/v1/blobs/{digest}", content=content)
    assert answer.status_code < 300, answer.text
    return digest


async def put_file(client: httpx.AsyncClient, content: bytes) -> None:
    whole = FileHash()
    whole.update(content)
    answer = await client.put(
        f"/v1/blobs/{whole.hexdigest()}", content=content, params={"chunked": "true"}
    )
    assert answer.status_code == 200


async def deploy(client: httpx.AsyncClient, manifest: str) -> httpx.Response:
    bundle = await put(client, b"a bundle")
    function = spec(bundle=bundle, weights=[{"name": "w", "manifest": manifest}])
    return await client.post("/v1/apps/search/deploy", json={"functions": [function]})


@pytest.fixture(name="manifest")
def _manifest(tmp_path: Path) -> bytes:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(b"secret weights")
    return build_manifest(tmp_path / "model").to_bytes()


async def test_a_manifest_of_another_tenants_files_is_refused(
    controller: Controller, manifest: bytes
) -> None:
    await put_file(controller.http, b"secret weights")
    mine = await deploy(controller.http, await put(controller.http, manifest))
    stranger = controller.client(await controller.other_tenant())
    theirs = await deploy(stranger, await put(stranger, manifest))

    assert mine.status_code == 200
    assert theirs.status_code == 400
    assert "was not uploaded" in theirs.json()["detail"]


async def test_weights_that_are_no_manifest_are_refused(controller: Controller) -> None:
    answer = await deploy(controller.http, await put(controller.http, b"[" * 10_000))

    assert answer.status_code == 400
    assert "not a manifest" in answer.json()["detail"]
