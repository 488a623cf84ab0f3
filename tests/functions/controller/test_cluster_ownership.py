"""Who sees whose objects are in the cluster, and who may take them over."""

from __future__ import annotations

from pilotlight.controller.database import platform_identity
from pilotlight.controller.kubernetes.ownership import ClusterOwnership
from tests.functions.controller.conftest import Controller

OTHER = "p-0123456789abcdef"


async def test_an_administrator_takes_over_what_another_platform_left(
    controller: Controller,
) -> None:
    context = controller.context
    with context.store.read() as sql:
        own = platform_identity.read(sql).id
    shown = (await controller.http.get("/v1/cluster")).json()
    assert (shown["platform"], shown["is_checked"], shown["foreign"]) == (own, False, [])
    context.statuses.ownership = ClusterOwnership(platform=own, foreign={OTHER: ("fn-acme",)})
    shown = (await controller.http.get("/v1/cluster")).json()
    assert shown["foreign"] == [{"platform": OTHER, "namespaces": ["fn-acme"]}]
    assert f"pilotlight cluster adopt {OTHER}" in shown["message"]

    ring = context.notifier.next_change()
    for _ in range(2):  # again is the same
        answer = await controller.http.post("/v1/cluster:adopt", json={"platform": OTHER})
        assert (answer.status_code, answer.json()["foreign"]) == (200, [])
    assert ring.is_set()
    with context.store.read() as sql:
        assert platform_identity.read(sql).adopted == {OTHER}
    entries = (await controller.http.get("/v1/audit?action=cluster.adopt")).json()["entries"]
    assert [(one["subject"], one["after"]) for one in entries] == [(OTHER, {"platform": own})]


async def test_nobody_else_may_and_an_id_that_is_none_is_refused(controller: Controller) -> None:
    async with controller.client(await controller.other_tenant()) as other:
        assert (await other.get("/v1/cluster")).status_code == 403
        answer = await other.post("/v1/cluster:adopt", json={"platform": OTHER})
        assert answer.status_code == 403
    answer = await controller.http.post("/v1/cluster:adopt", json={"platform": "acme"})
    assert answer.status_code == 400
    assert "16 hex digits" in answer.json()["detail"]
