"""Which container image functions of a cluster consist of: who may say so, of which app, and where it
may be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.registry import container_images
from pilotlight.core.settings import PlatformSettings
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.record_json import to_json
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, refused, spec

REGISTRY = "registry.example/functions"
IMAGE = ImageSpec(python="3.11", steps=({"op": "env", "values": {"A": "1"}},))
DIGEST = IMAGE.digest()


def reference(repository: str, digit: str = "1") -> str:
    return f"{repository}@sha256:{digit * 64}"


OWN = reference(f"{REGISTRY}/default")


@pytest.fixture
async def cluster(controller: Controller) -> AsyncIterator[Controller]:
    """The controller of a cluster with a registry."""
    async with on_cluster(controller, REGISTRY).client(controller.key) as http:
        yield replace(on_cluster(controller, REGISTRY), http=http)


def on_cluster(controller: Controller, registry: str | None) -> Controller:
    config = replace(
        controller.context.config,
        platform=PlatformSettings(fleet="knative"),
        cluster=ClusterSettings(registry=registry),
    )
    return replace(controller, context=replace(controller.context, config=config))


async def record(http: httpx.AsyncClient, where: str, app: str = "search") -> httpx.Response:
    body = {"image": to_json(IMAGE), "reference": where}
    return await http.put(f"/v1/apps/{app}/images/{DIGEST}", json=body)


async def known(http: httpx.AsyncClient, app: str = "search") -> dict[str, str | None]:
    answer = await http.get(f"/v1/apps/{app}/images/{DIGEST}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def deploy(http: httpx.AsyncClient, app: str = "search", **changes: object) -> httpx.Response:
    await http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)
    body = {"functions": [spec("embed", image=DIGEST, **changes)]}
    return await http.post(f"/v1/apps/{app}/deploy", json=body)


async def deployed(http: httpx.AsyncClient) -> tuple[str, str]:
    """Deploy; the serving revision, and its container image."""
    answer = await deploy(http)
    assert answer.status_code == 200, answer.text
    revision = str(answer.json()["functions"][0]["revision"])
    shown = await http.get(f"/v1/apps/search/functions/embed/revisions/{revision}")
    return revision, str(shown.json()["lock"]["container_image"])


async def test_a_revision_keeps_the_container_image_that_it_was_made_with(
    cluster: Controller,
) -> None:
    http = cluster.http
    assert await known(http) == {"repository": f"{REGISTRY}/default", "reference": None}
    assert "was not built" in refused(await deploy(http), 400)
    assert (await record(http, OWN)).status_code == 200
    assert (await known(http))["reference"] == OWN
    first = await deployed(http)
    assert first[1] == OWN
    assert await deployed(http) == first

    newer = reference(f"{REGISTRY}/default/below", "2")
    assert (await record(http, newer)).status_code == 200
    shown = await http.get(f"/v1/apps/search/functions/embed/revisions/{first[0]}")
    assert shown.json()["lock"]["container_image"] == OWN
    second = await deployed(http)
    assert second[0] != first[0]
    assert second[1] == newer
    entries = (await http.get("/v1/audit?action=image.push")).json()["entries"]
    assert [(one["before"], one["after"]) for one in entries] == [(OWN, newer), (None, OWN)]
    assert "main/search/embed" in refused(await http.delete(f"/v1/images/{DIGEST}"), 409)


async def test_a_tenant_names_images_of_its_own_repository_only(cluster: Controller) -> None:
    for name, repository in (("acme", "acme"), ("default2", "default2"), ("ACME", "acme--")):
        async with cluster.client(await cluster.other_tenant(name)) as other:
            assert str((await known(other))["repository"]).startswith(f"{REGISTRY}/{repository}")
            for where in (
                OWN,
                OWN.replace("default@", "default/x@"),
                reference(REGISTRY),
                reference("elsewhere.example/functions/acme"),
                reference("registry.example:5000/functions/acme"),
                reference(f"{REGISTRY}/acme/../default"),
            ):
                refused(await record(other, where), 400)
            assert (await known(other))["reference"] is None
            said = refused(await record(other, OWN), 400)
            assert said.startswith(f"{REGISTRY}/default is not a repository of this tenant")
    for where in (f"{REGISTRY}/default:latest", f"{REGISTRY}/default@sha256:1", f"{OWN}\n"):
        assert "digest" in refused(await record(cluster.http, where), 400)


async def test_a_key_chooses_images_only_where_it_may_deploy(cluster: Controller) -> None:
    keys = {
        "another app": {"scope": "deploy", "app": "other"},
        "a function": {"scope": "deploy", "app": "search", "function": "embed"},
        "another environment": {"scope": "deploy", "environment": "staging"},
        "calls": {"scope": "invoke"},
    }
    await cluster.http.post("/v1/environments", json={"name": "staging"})
    for whose, bounds in keys.items():
        async with cluster.client(await cluster.new_key(name=whose, **bounds)) as http:
            answer = await record(http, OWN)
            assert answer.status_code == (200 if "environment" in whose else 403), whose
    assert (await known(cluster.http))["reference"] is None
    async with cluster.client(
        await cluster.new_key(name="app", scope="deploy", app="search")
    ) as http:
        assert (await record(http, OWN)).status_code == 200
    assert (await known(cluster.http))["reference"] == OWN
    assert (await known(cluster.http, "other"))["reference"] is None


async def test_temporary_deployments_of_an_app_share_what_was_pushed(cluster: Controller) -> None:
    await record(cluster.http, OWN, "search-run-3f2a1c")
    assert (await known(cluster.http, "search-run-abcdef"))["reference"] == OWN
    assert (await known(cluster.http))["reference"] is None


async def test_a_deploy_does_not_name_a_container_image_itself(cluster: Controller) -> None:
    await record(cluster.http, OWN)
    answer = await deploy(cluster.http, container_image=reference(f"{REGISTRY}/acme"))
    assert "container_image is set by the platform" in refused(answer, 400)
    body = {"image": to_json(replace(IMAGE, python="3.12")), "reference": OWN}
    answer = await cluster.http.put(f"/v1/apps/search/images/{DIGEST}", json=body)
    assert "but the path names" in refused(answer, 400)


async def test_what_is_not_in_the_registry_of_now_is_pushed_again(
    controller: Controller, cluster: Controller
) -> None:
    await record(cluster.http, OWN)
    moved = on_cluster(controller, "other.example/functions")
    async with moved.client(controller.key) as http:
        assert (await known(http))["reference"] is None
        said = refused(await deploy(http), 400)
        assert said.endswith("was not pushed to other.example/functions/default")
    none = on_cluster(controller, None)
    async with none.client(controller.key) as http:
        answer = await http.get(f"/v1/apps/search/images/{DIGEST}")
        assert "no registry" in refused(answer, 400)
        assert "cluster.registry" in answer.json()["hint"]
        refused(await record(http, OWN), 400)
        refused(await deploy(http), 400)
    assert (await known(controller.http))["repository"] is None  # on one machine
    refused(await record(controller.http, OWN), 400)


async def test_the_number_of_recorded_images_is_bounded(
    cluster: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container_images, "MAX_CONTAINER_IMAGES", 2)
    for app in ("a", "b", "c"):
        cluster.clock.now += 1
        assert (await record(cluster.http, OWN, app)).status_code == 200
    with cluster.context.store.read() as sql:
        apps = sql.execute(sa.select(tables.container_images.c.app)).scalars().all()
    assert sorted(apps) == ["b", "c"]
