"""Weights by name: what a name means, who sees it, where its bytes are, and what the node is asked
to do with them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.controller import http_app
from pilotlight.controller.registry.launch_spec import function_id
from pilotlight.controller.weights import node_cache
from pilotlight.controller.weights.weight_names import redact_source
from pilotlight.core.object_store import DirectoryStore
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, instance, spec
from weight_cache.errors import OriginUnavailable, StoreFull
from weight_cache.manifest import FileHash
from weight_cache.sources.manifest_builder import build_manifest

CONTENT = b"some weights"


def manifest_of(directory: Path, content: bytes) -> bytes:
    directory.mkdir(exist_ok=True)
    (directory / "weights.bin").write_bytes(content)
    return build_manifest(directory).to_bytes()


async def upload(client: httpx.AsyncClient, directory: Path, content: bytes = CONTENT) -> str:
    """A model of one file, all of it uploaded; its manifest's digest."""
    whole = FileHash()
    whole.update(content)
    answer = await client.put(
        f"/v1/blobs/{whole.hexdigest()}", content=content, params={"chunked": "true"}
    )
    assert answer.status_code == 200, answer.text
    raw = manifest_of(directory, content)
    digest = hashlib.sha256(raw).hexdigest()
    assert (await client.put(f"/v1/blobs/{digest}", content=raw)).status_code == 200
    return digest


async def push(
    client: httpx.AsyncClient,
    manifest: str,
    *,
    name: str = "minilm",
    source: str = "/models/minilm",
) -> dict[str, Any]:
    answer = await client.put(f"/v1/weights/{name}", json={"manifest": manifest, "source": source})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def deploy(
    client: httpx.AsyncClient, manifest: str, *, app: str = "search", name: str = "minilm"
) -> None:
    body = {"functions": [spec(weights=[{"name": name, "manifest": manifest}])]}
    answer = await client.post(f"/v1/apps/{app}/deploy", json=body)
    assert answer.status_code == 200, answer.text


async def stream(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    answer = await client.post(path)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(name="manifest")
async def _manifest(controller: Controller, tmp_path: Path) -> str:
    return await upload(controller.http, tmp_path / "model")


async def test_what_ones_own_instances_hold_in_gpus_is_listed_and_what_others_hold_is_not(
    controller: Controller, manifest: str
) -> None:
    await push(controller.http, manifest)
    (known,) = (await controller.http.get("/v1/weights")).json()["weights"]
    assert known["hbm"] is None, "the node has no GPU"

    def gpu(number: int, **labels: str) -> dict[str, Any]:
        held = {"manifest": manifest, "state": "delivered", "bytes": 7, "is_pinned": False}
        return {
            "uuid": f"GPU-{number}",
            "kind": "H100",
            "model": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 80 * 1024**3,
            "used_bytes": None,
            "sm_utilisation": None,
            "delivered_bytes": 7,
            "pinned_bytes": 0,
            "instance": f"i-{number}" if labels else None,
            "labels": labels,
            "weights": [held] if labels else [],
        }

    tenant = await controller.tenant()
    controller.agent.gpus = [
        gpu(0),
        gpu(1, tenant="t-other", environment="main"),
        gpu(2, tenant=tenant, environment="staging"),
    ]
    (known,) = (await controller.http.get("/v1/weights")).json()["weights"]
    assert known["hbm"] == []
    controller.agent.gpus.append(gpu(3, tenant=tenant, environment="main", app="chat"))
    assert (await controller.http.get("/v1/weights/minilm")).json()["hbm"] == [
        {
            "gpu": "H100",
            "uuid": "GPU-3",
            "memory_bytes": 80 * 1024**3,
            "bytes": 7,
            "state": "delivered",
            "instance": "i-3",
        }
    ]


async def test_a_pushed_name_is_listed_with_what_it_means_and_where_it_is(
    controller: Controller, manifest: str
) -> None:
    pushed = await push(controller.http, manifest)

    assert pushed == {
        "name": "minilm",
        "manifest": manifest,
        "size_bytes": len(CONTENT),
        "files": 1,
        "source": "/models/minilm",
        "app": None,
        "is_pinned": False,
        "created_at": controller.clock.now,
        "updated_at": controller.clock.now,
        "tier": "origin",
        "expected_s": None,
        "instances": 0,
        "hbm": None,
    }
    controller.cache.here.add(manifest)
    assert (await controller.http.get("/v1/weights")).json()["weights"] == [
        {**pushed, "tier": "nvme", "expected_s": 0.5}
    ]
    controller.cache.in_memory.add(manifest)
    assert (await controller.http.get("/v1/weights/minilm")).json()["tier"] == "dram"
    entries = (await controller.http.get("/v1/audit")).json()["entries"]
    assert (entries[0]["action"], entries[0]["subject"], entries[0]["after"]) == (
        "weights.put",
        "main/minilm",
        {"manifest": manifest},
    )


async def test_a_name_keeps_its_first_date_when_it_comes_to_mean_another_model(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    first = await push(controller.http, manifest)
    controller.clock.now += 60
    second = await push(
        controller.http, await upload(controller.http, tmp_path / "next", b"other weights")
    )

    assert second["created_at"] == first["created_at"]
    assert second["updated_at"] == first["updated_at"] + 60
    assert second["manifest"] != manifest


async def test_names_are_of_one_tenant_and_one_environment(
    controller: Controller, manifest: str
) -> None:
    await push(controller.http, manifest)
    stranger = controller.client(await controller.other_tenant())
    await controller.http.post("/v1/environments", json={"name": "dev"})
    elsewhere = controller.client(controller.key, environment="dev")

    for other in (stranger, elsewhere):
        assert (await other.get("/v1/weights")).json() == {"weights": []}
        for method, path in [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/verify"),
            ("POST", "/prefetch"),
            ("POST", "/pin"),
            ("POST", "/unpin"),
        ]:
            answer = await other.request(method, f"/v1/weights/minilm{path}")
            assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (
                404,
                "not-found",
            )
    assert controller.cache.asked == []


async def test_another_tenants_manifest_cannot_be_named_nor_pinned_nor_fetched(
    controller: Controller, manifest: str
) -> None:
    stranger = controller.client(await controller.other_tenant())
    refused = await stranger.put("/v1/weights/mine", json={"manifest": manifest})

    assert refused.status_code == 400
    assert "not uploaded" in refused.json()["detail"]
    assert (await stranger.get(f"/v1/blobs/{manifest}")).status_code == 404


async def test_a_manifest_whose_files_are_another_tenants_is_refused(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    stranger = controller.client(await controller.other_tenant())
    raw = manifest_of(tmp_path / "known", CONTENT)
    assert (await stranger.put(f"/v1/blobs/{manifest}", content=raw)).status_code == 200
    refused = await stranger.put("/v1/weights/mine", json={"manifest": manifest})

    assert refused.status_code == 400
    assert "was not uploaded" in refused.json()["detail"]


@pytest.mark.parametrize(
    "name, body",
    [
        ("no good", {}),
        ("x" * 64, {}),
        ("w-", {}),
        ("ok", {"manifest": "abc"}),
        ("ok", {"source": "s" * 2001}),
        ("ok", {"size_bytes": 1}),
    ],
)
async def test_bad_names_and_bodies_are_refused(
    controller: Controller, manifest: str, name: str, body: dict[str, Any]
) -> None:
    answer = await controller.http.put(f"/v1/weights/{name}", json={"manifest": manifest, **body})
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (400, "invalid-input")


async def test_scopes(controller: Controller, manifest: str) -> None:
    await push(controller.http, manifest)
    invoker = controller.client(await controller.new_key(scope="invoke"))
    deployer = controller.client(await controller.new_key(scope="deploy"))

    assert (await invoker.get("/v1/weights")).status_code == 403
    assert (await deployer.post("/v1/weights/minilm/prefetch")).status_code == 200
    for verb in ("pin", "unpin"):
        assert (await deployer.post(f"/v1/weights/minilm/{verb}")).status_code == 403


async def test_a_deploy_enters_its_weights_and_leaves_pushed_names_alone(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    other = await upload(controller.http, tmp_path / "other", b"other weights")
    await push(controller.http, other, name="pushed")
    await deploy(controller.http, manifest)
    await deploy(controller.http, manifest, app="thief", name="pushed")

    rows = {
        row["name"]: row for row in (await controller.http.get("/v1/weights")).json()["weights"]
    }
    assert (rows["minilm"]["app"], rows["minilm"]["source"], rows["minilm"]["size_bytes"]) == (
        "search",
        "deploy of search",
        len(CONTENT),
    )
    assert (rows["pushed"]["app"], rows["pushed"]["manifest"]) == (None, other)

    await deploy(controller.http, other)
    assert (await controller.http.get("/v1/weights/minilm")).json()["manifest"] == other, (
        "a deploy takes over what a deploy named"
    )
    await push(controller.http, manifest)
    assert (await controller.http.get("/v1/weights/minilm")).json()["app"] is None, (
        "a push takes every name"
    )


async def test_instances_are_counted_by_the_revisions_that_map_them(
    controller: Controller, manifest: str
) -> None:
    tenant = await controller.tenant()
    await deploy(controller.http, manifest)
    revision = (await controller.http.get("/v1/apps/search")).json()["functions"][0]["traffic"][0][
        "revision"
    ]
    function = function_id(tenant=tenant, environment="main", app="search", function="hello")
    controller.agent.instances = [
        instance(tenant, name="i-1", revision=f"{function}@{revision}"),
        instance(tenant, name="i-2", revision=f"{function}@{revision}"),
        instance("t-other", name="i-3", revision=f"{function}@{revision}"),
        instance(tenant, name="i-4"),
    ]
    assert (await controller.http.get("/v1/weights/minilm")).json()["instances"] == 2


async def test_what_only_the_node_knows_is_null_while_it_is_away(
    controller: Controller, manifest: str, short_tmp: Path
) -> None:
    await push(controller.http, manifest)
    await controller.context.cache.aclose()
    for name in ("weight_cache", "snapshotter"):
        (short_tmp / f"{name}.sock").unlink()
    (row,) = (await controller.http.get("/v1/weights")).json()["weights"]
    away = await controller.http.post("/v1/weights/minilm/prefetch")

    assert (row["tier"], row["expected_s"]) == (None, None)
    assert (away.status_code, away.headers["retry-after"]) == (503, "1")
    assert "weight cache does not answer" in away.json()["detail"]


async def test_prefetch_streams_how_far_it_is_and_ends_with_where_it_is(
    controller: Controller, manifest: str
) -> None:
    await push(controller.http, manifest)
    *steps, last = await stream(controller.http, "/v1/weights/minilm/prefetch")

    assert [(s["done_bytes"], s["total_bytes"]) for s in steps if "done_bytes" in s] == [(50, 100)]
    assert last["weights"]["tier"] == "nvme"
    assert controller.cache.asked == [("prefetch", manifest)]


@pytest.mark.parametrize(
    "failure, kind",
    [
        (StoreFull("9 bytes do not fit into 5"), "storage-full"),
        (OriginUnavailable("the origin is away"), "unavailable"),
    ],
)
async def test_a_fetch_that_fails_says_why_in_its_last_line(
    controller: Controller, manifest: str, failure: Any, kind: str
) -> None:
    await push(controller.http, manifest)
    controller.cache.failure = failure
    last = (await stream(controller.http, "/v1/weights/minilm/prefetch"))[-1]["error"]

    assert (last["type"].rpartition("/")[2], last["detail"]) == (kind, str(failure))


async def test_a_silent_fetch_still_sends_lines_and_leaving_ends_it(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_cache, "BEAT_S", 0.01)
    controller.cache.gate.clear()

    async def work(tell: node_cache.ReportProgress) -> dict[str, Any]:
        await node_cache.prefetch(controller.context.cache, "ab" * 32, tell)
        return {}

    lines = node_cache.stream_progress(work)
    seen = [await anext(lines) for _ in range(3)]
    assert all("elapsed_s" in line for line in seen)
    await lines.aclose()
    await asyncio.wait_for(controller.cache.cancelled.wait(), 30)


async def test_verify_names_the_paths_that_are_damaged(
    controller: Controller, manifest: str
) -> None:
    await push(controller.http, manifest)
    assert (await stream(controller.http, "/v1/weights/minilm/verify"))[-1] == {
        "is_here": False,
        "corrupt": [],
    }

    controller.cache.here.add(manifest)
    assert (await stream(controller.http, "/v1/weights/minilm/verify"))[-1] == {
        "is_here": True,
        "corrupt": [],
    }
    whole = FileHash()
    whole.update(CONTENT)
    controller.cache.corrupt = [whole.hexdigest()]
    assert (await stream(controller.http, "/v1/weights/minilm/verify"))[-1] == {
        "is_here": True,
        "corrupt": ["weights.bin"],
    }


async def test_pin_fetches_and_keeps_and_unpin_lets_go(
    controller: Controller, manifest: str
) -> None:
    await push(controller.http, manifest)
    pinned = (await stream(controller.http, "/v1/weights/minilm/pin"))[-1]["weights"]
    assert (pinned["is_pinned"], pinned["tier"], controller.cache.pinned) == (
        True,
        "nvme",
        {manifest},
    )

    unpinned = (await controller.http.post("/v1/weights/minilm/unpin")).json()
    assert (unpinned["is_pinned"], controller.cache.pinned) == (False, set())
    actions = [e["action"] for e in (await controller.http.get("/v1/audit")).json()["entries"]]
    assert actions[:2] == ["weights.unpin", "weights.pin"]


async def test_a_pin_that_fails_is_none(controller: Controller, manifest: str) -> None:
    await push(controller.http, manifest)
    controller.cache.failure = StoreFull("too large")
    assert "error" in (await stream(controller.http, "/v1/weights/minilm/pin"))[-1]
    assert (await controller.http.get("/v1/weights/minilm")).json()["is_pinned"] is False


async def test_the_node_keeps_what_another_tenant_still_pins(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    other = controller.client(await controller.other_tenant())
    await upload(other, tmp_path / "same")
    for client in (controller.http, other):
        await push(client, manifest)
        await stream(client, "/v1/weights/minilm/pin")

    await controller.http.post("/v1/weights/minilm/unpin")
    assert controller.cache.pinned == {manifest}
    await other.post("/v1/weights/minilm/unpin")
    assert controller.cache.pinned == set()


async def test_a_pin_belongs_to_the_model_not_to_the_name(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    await push(controller.http, manifest)
    await stream(controller.http, "/v1/weights/minilm/pin")
    assert (await push(controller.http, manifest))["is_pinned"] is True
    replaced = await push(
        controller.http, await upload(controller.http, tmp_path / "next", b"next weights")
    )

    assert (replaced["is_pinned"], controller.cache.pinned) == (False, set())


async def test_a_deploy_of_another_model_ends_the_pin_of_the_one_before(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    await deploy(controller.http, manifest)
    await stream(controller.http, "/v1/weights/minilm/pin")
    await deploy(controller.http, await upload(controller.http, tmp_path / "next", b"next weights"))

    assert controller.cache.pinned == set()


async def test_a_pin_that_the_node_kept_while_it_was_away_is_swept(
    controller: Controller, manifest: str
) -> None:
    await push(controller.http, manifest)
    await stream(controller.http, "/v1/weights/minilm/pin")
    controller.cache.here.add("cd" * 32)
    controller.cache.pinned.add("cd" * 32)
    await node_cache.sweep(controller.context.cache, controller.context.store)

    assert controller.cache.pinned == {manifest}


async def test_deleting_frees_the_node_unless_it_is_in_use_or_pinned(
    controller: Controller, manifest: str
) -> None:
    await deploy(controller.http, manifest)
    await stream(controller.http, "/v1/weights/minilm/pin")
    pinned = await controller.http.delete("/v1/weights/minilm")
    assert (pinned.status_code, "unpin" in pinned.json()["hint"]) == (409, True)

    await controller.http.post("/v1/weights/minilm/unpin")
    used = await controller.http.delete("/v1/weights/minilm")
    assert (used.status_code, used.json()["functions"]) == (409, ["search/hello"])

    await controller.http.delete("/v1/apps/search")
    assert (await controller.http.delete("/v1/weights/minilm")).status_code == 204
    assert controller.cache.here == set()
    assert (await controller.http.get(f"/v1/blobs/{manifest}")).status_code == 404, (
        "the app that referred to it is deleted, too"
    )


async def test_one_of_two_names_goes_though_the_model_is_in_use_and_the_node_keeps_it(
    controller: Controller, manifest: str
) -> None:
    await deploy(controller.http, manifest)
    await push(controller.http, manifest, name="second")
    controller.cache.here.add(manifest)

    assert (await controller.http.delete("/v1/weights/second")).status_code == 204
    assert controller.cache.here == {manifest}


async def test_an_environment_takes_its_names_with_it(
    controller: Controller, manifest: str
) -> None:
    await controller.http.post("/v1/environments", json={"name": "dev"})
    await push(controller.client(controller.key, environment="dev"), manifest)
    assert (await controller.http.delete("/v1/environments/dev")).status_code == 204
    await controller.http.post("/v1/environments", json={"name": "dev"})
    assert (
        await controller.client(controller.key, environment="dev").get("/v1/weights")
    ).json() == {"weights": []}


@pytest.mark.parametrize(
    "source, shown",
    [
        (
            "https://me:hunter2@models.example/a/b.bin?X-Signature=s#f",
            "https://models.example/a/b.bin",
        ),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("hf://org/name@main", "hf://org/name@main"),
        ("/home/me/model", "/home/me/model"),
        ("https://a/x?k=1, https://u:p@b/y", "https://a/x, https://b/y"),
        ("https://me:hunter2@[bad", "https://[bad"),
        ("https://me:hunt, er?2@a/x?k=1,2#f", "https://a/x"),
        ("a copy of HTTPS://me:hunter2@a/x?k=1 of May", "a copy of HTTPS://a/x of May"),
    ],
)
def test_addresses_lose_what_may_be_secret(source: str, shown: str) -> None:
    assert redact_source(source) == shown


async def test_the_document_names_every_path(controller: Controller) -> None:
    paths = (await controller.http.get("/openapi.json")).json()["paths"]
    verbs = {
        (method, path)
        for path, operations in paths.items()
        if path.startswith("/v1/weights")
        for method in operations
    }
    named = "/v1/weights/{name}"
    expected = {("get", "/v1/weights"), *((m, named) for m in ("get", "put", "delete"))}
    assert verbs == expected | {
        ("post", f"{named}/{verb}") for verb in ("verify", "prefetch", "pin", "unpin")
    }


class TellingStore(DirectoryStore):
    """Tells before an object is read."""

    def __init__(self, root: Path, tell: Callable[[], Awaitable[None]]) -> None:
        super().__init__(root)
        self._tell = tell

    async def get(self, key: str, *, max_bytes: int) -> bytes:
        """See ObjectStore."""
        await self._tell()
        return await super().get(key, max_bytes=max_bytes)


async def test_a_manifest_that_comes_while_a_deploy_is_checked_is_not_believed(
    controller: Controller, manifest: str, tmp_path: Path
) -> None:
    stranger = controller.client(await controller.other_tenant())
    assert (await stranger.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)).status_code == 200
    own = await upload(stranger, tmp_path / "own", b"their own")
    await push(stranger, own, name="theirs")  # a name that a deploy leaves as it is
    raw = manifest_of(tmp_path / "known", CONTENT)

    async def send() -> None:
        assert (await stranger.put(f"/v1/blobs/{manifest}", content=raw)).status_code == 200

    telling = replace(controller.context.files, objects=TellingStore(tmp_path / "blobs", send))
    transport = httpx.ASGITransport(
        http_app.build_app(replace(controller.context, files=telling)), raise_app_exceptions=False
    )
    async with httpx.AsyncClient(
        transport=transport, base_url="http://controller", headers=stranger.headers
    ) as late:
        weights = [{"name": "own", "manifest": own}, {"name": "theirs", "manifest": manifest}]
        refused = await late.post(
            "/v1/apps/search/deploy", json={"functions": [spec(weights=weights)]}
        )

    assert refused.status_code == 400, refused.text
    assert refused.json()["missing"] == {"blob": manifest}
