"""Every change through the public API is in the audit log, with who, from where and under which
request: all routes, one after the other.

`ROUTES` has a line for every route that is not a GET; a new one without a line fails here. What is
not in the log, and why: the data plane's calls (they are in the ledger), feedback on them (as
frequent as they are, and a row that never changes is its own record), renewals of an app's lease
(as frequent as a heartbeat), signing in to the dashboard
(a session is a sealed cookie: nothing is stored), and the platform's own processes under /internal
(no person stands behind them)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.controller.server.dataplane_openapi import TAG
from pilotlight.spec.record_json import to_json
from pilotlight.spec.sketches import Sketch
from snapshotter.types import RevisionKey, TemplateInfo
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import instance, snapshot, spec, usage
from tests.functions.controller.test_container_images import (
    DIGEST,
    IMAGE,
    OWN,
    REGISTRY,
    on_cluster,
)
from tests.functions.controller.test_weights import upload

ADDRESS = "203.0.113.7"
DATA = {("POST", "/v1/feedback"), ("PUT", "/v1/volume-chunks/{digest}")}
"""Kept as data of calls; parts of files, until a commit, which is in the log, names them."""
RENEWALS = {("POST", "/v1/apps/{app}:renew")}
"""As frequent as a heartbeat; the deploy with a lease and the deletion are in the log."""
SIGN_INS = {
    ("POST", "/v1/sign-in-codes"),
    ("POST", "/v1/device-sign-ins"),
    ("POST", "/v1/device-sign-ins:redeem"),
}
"""They change nothing that is stored; the key of a sign-in by an issuer is in the log
(`sign_in/test_device_sign_ins.py`)."""
FREED = "blob.collect"
"""Written after the change that a deletion is, when blobs were freed by it."""
LAST_MONTH_S = 40 * 86_400.0
NEW_BLOB = b"another archive"

EXPERIMENT = {
    "app": "search",
    "function": "hello",
    "name": "greeting",
    "arms": [
        {"name": "a", "revision": "@revision", "share": 50},
        {"name": "b", "revision": "@revision", "share": 50},
    ],
}

HELLO, SEARCH = "/v1/apps/{app}/functions/{function}", {"app": "search", "function": "hello"}
HELLO_0 = {"app": "search", "function": "hello", "number": "0"}
DEAD = {
    "id": "req-dead",
    "environment": "main",
    "app": "search",
    "function": "hello",
    "method": "",
    "state": "FAILED",
    "sequence": 3,
    "submitted_at": 1_800_000_000.0,
    "expires_at": 1_900_000_000.0,
    "is_dead": True,
    "payload": {"body": ""},
}

MONITORED = {"sample": 1.0, "monitor": {"prediction": "$"}}
BASELINE = {"rows": 500, "features": {"prediction": Sketch.of([1.0]).to_json()}}
LINES = ("lines.jsonl", b"{}")
"""A batch file, which is sent as a form."""
PUSHED = "/v1/apps/{app}/images/{digest}"
"""Only for a cluster with a registry."""

# (method, route, what its names stand for, body, action in the log): in an order in which each can
# succeed
ROUTES: list[tuple[str, str, dict[str, str], Any, str]] = [
    (
        "PUT",
        "/v1/blobs/{digest}",
        {"digest": hashlib.sha256(NEW_BLOB).hexdigest()},
        NEW_BLOB,
        "blob.put",
    ),
    ("POST", "/v1/images", {}, {"python": "3.11", "steps": []}, "image.build"),
    ("DELETE", "/v1/images/{digest}", {"digest": "ab" * 32}, None, "image.delete"),
    ("POST", "/v1/environments", {}, {"name": "staging"}, "environment.create"),
    ("DELETE", "/v1/environments/{name}", {"name": "staging"}, None, "environment.delete"),
    ("POST", "/v1/dicts/{name}", {"name": "seen"}, {"op": "count", "create": True}, "dict.create"),
    ("DELETE", "/v1/dicts/{name}", {"name": "seen"}, None, "dict.delete"),
    (
        "POST",
        "/v1/queues/{name}",
        {"name": "todo"},
        {"op": "count", "create": True},
        "queue.create",
    ),
    ("DELETE", "/v1/queues/{name}", {"name": "todo"}, None, "queue.delete"),
    ("POST", "/v1/files", {}, LINES, "batch_file.create"),
    (
        "POST",
        "/v1/batches",
        {},
        {"input_file_id": "@id", "endpoint": "/v1/functions/search/hello:invoke"},
        "batch.create",
    ),
    ("POST", "/v1/batches/{batch}/cancel", {"batch": "@id"}, None, "batch.cancel"),
    ("POST", "/v1/files", {}, LINES, "batch_file.create"),
    ("DELETE", "/v1/files/{file}", {"file": "@id"}, None, "batch_file.delete"),
    ("PUT", "/v1/volumes/{name}", {"name": "data"}, None, "volume.create"),
    ("POST", "/v1/volumes/{name}/commit", {"name": "data"}, {}, "volume.commit"),
    ("DELETE", "/v1/volumes/{name}", {"name": "data"}, None, "volume.delete"),
    ("PUT", "/v1/secrets/{name}", {"name": "token"}, {"value": "hush"}, "secret.put"),
    ("DELETE", "/v1/secrets/{name}", {"name": "token"}, None, "secret.delete"),
    ("PUT", "/v1/weights/{name}", {"name": "minilm"}, {"manifest": "@manifest"}, "weights.put"),
    ("POST", "/v1/weights/{name}/verify", {"name": "minilm"}, None, "weights.verify"),
    ("POST", "/v1/weights/{name}/prefetch", {"name": "minilm"}, None, "weights.prefetch"),
    ("POST", "/v1/weights/{name}/pin", {"name": "minilm"}, None, "weights.pin"),
    ("POST", "/v1/weights/{name}/unpin", {"name": "minilm"}, None, "weights.unpin"),
    ("DELETE", "/v1/weights/{name}", {"name": "minilm"}, None, "weights.delete"),
    (
        "PUT",
        PUSHED,
        {"app": "search", "digest": DIGEST},
        {"image": to_json(IMAGE), "reference": OWN},
        "image.push",
    ),
    (
        "POST",
        "/v1/apps/{app}/deploy",
        {"app": "search"},
        {"functions": [spec(schedules=[{"period_s": 60}], log=MONITORED)]},
        "app.deploy",
    ),
    (
        "PUT",
        "/v1/apps/{app}/functions/{function}/drift/baseline",
        {"app": "search", "function": "hello"},
        BASELINE,
        "drift.baseline",
    ),
    ("POST", "/v1/schedules/{app}/{function}/{number}:pause", HELLO_0, None, "schedule.pause"),
    ("POST", "/v1/schedules/{app}/{function}/{number}:resume", HELLO_0, None, "schedule.resume"),
    ("POST", "/v1/schedules/{app}/{function}/{number}:run", HELLO_0, None, "schedule.run"),
    ("POST", "/v1/calls/{call}:redrive", {"call": "req-dead"}, None, "call.redrive"),
    ("POST", "/v1/calls:redrive", {}, {"app": "search"}, "call.redrive"),
    (
        "PUT",
        "/v1/webhooks/{name}",
        {"name": "ops"},
        {"url": "https://alerts.invalid/here"},
        "webhook.set",
    ),
    ("POST", "/v1/webhooks/{name}:test", {"name": "ops"}, None, "webhook.test"),
    ("DELETE", "/v1/webhooks/{name}", {"name": "ops"}, None, "webhook.delete"),
    ("POST", "/v1/experiments", {}, EXPERIMENT, "experiment.create"),
    ("POST", "/v1/experiments/{experiment}:start", {"experiment": "@id"}, None, "experiment.start"),
    ("POST", "/v1/experiments/{experiment}:stop", {"experiment": "@id"}, {}, "experiment.stop"),
    (
        "POST",
        "/v1/experiments/{experiment}:conclude",
        {"experiment": "@id"},
        {"arm": "a"},
        "experiment.conclude",
    ),
    (
        "POST",
        "/v1/apps/{app}/deploy",
        {"app": "search"},
        {"functions": [spec(description="the second")]},
        "app.deploy",
    ),
    ("POST", f"{HELLO}:rollback", SEARCH, {"to": "v1"}, "rollback"),
    ("POST", f"{HELLO}:promote", SEARCH, {"revision": "v2"}, "promote"),
    ("POST", "/v1/apps/{app}:rollback", {"app": "search"}, {}, "app.rollback"),
    ("POST", f"{HELLO}:pin", SEARCH, {"tenant": "default", "revision": "v1"}, "pin"),
    (
        "POST",
        HELLO + "/revisions/{revision}:approve",
        {**SEARCH, "revision": "v1"},
        {"note": "good"},
        "app.approve",
    ),
    (
        "PUT",
        HELLO + "/aliases/{alias}",
        {**SEARCH, "alias": "blessed"},
        {"revision": "v1"},
        "alias.set",
    ),
    ("DELETE", HELLO + "/aliases/{alias}", {**SEARCH, "alias": "blessed"}, None, "alias.delete"),
    ("PUT", "/v1/apps/{app}/policy", {"app": "search"}, {"approvals": 0}, "app.protect"),
    ("POST", "/v1/deployments", {}, {"modelId": "search/hello", "version": "v1"}, "app.promote"),
    (
        "POST",
        "/v1/apps/{app}:promote",
        {"app": "search"},
        {"from_environment": "main", "to_environment": "canary"},
        "app.promote",
    ),
    (
        "PUT",
        "/v1/quotas/functions/{app}/{function}",
        {"app": "search", "function": "hello"},
        {"concurrent": 3},
        "quota.set",
    ),
    (
        "DELETE",
        "/v1/quotas/functions/{app}/{function}",
        {"app": "search", "function": "hello"},
        None,
        "quota.set",
    ),
    (
        "PUT",
        "/v1/quotas/customers/{customer}",
        {"customer": "ana"},
        {"concurrent": 3},
        "quota.set",
    ),
    (
        "PUT",
        "/v1/functions/{app}/{function}/traffic",
        {"app": "search", "function": "hello"},
        {"weights": {"stable": 100}, "tags": {"next": "stable"}},
        "traffic.change",
    ),
    (
        "PATCH",
        "/v1/functions/{app}/{function}/traffic",
        {"app": "search", "function": "hello"},
        {"sticky": "key"},
        "traffic.change",
    ),
    (
        "POST",
        "/v1/apps/{app}/deploy",
        {"app": "search"},
        {"functions": [spec(resources={"cpu": 2.0})], "rollout": {}},
        "app.deploy",
    ),
    ("POST", "/v1/rollouts/{rollout}:pause", {"rollout": "@id"}, None, "rollout.pause"),
    ("POST", "/v1/rollouts/{rollout}:resume", {"rollout": "@id"}, None, "rollout.resume"),
    ("POST", "/v1/rollouts/{rollout}:promote", {"rollout": "@id"}, None, "rollout.promote"),
    (
        "POST",
        "/v1/apps/{app}/deploy",
        {"app": "search"},
        {"functions": [spec()], "rollout": {}},
        "app.deploy",
    ),
    ("POST", "/v1/rollouts/{rollout}:abort", {"rollout": "@id"}, None, "rollout.rollback"),
    (
        "PUT",
        "/v1/functions/{app}/{function}/snapshots",
        {"app": "search", "function": "hello"},
        {"enabled": False},
        "snapshots.disable",
    ),
    (
        "DELETE",
        "/v1/functions/{app}/{function}/snapshots",
        {"app": "search", "function": "hello"},
        None,
        "snapshots.delete",
    ),
    ("POST", "/v1/apps/{app}:prune", {"app": "search"}, {"keep": 1}, "app.prune"),
    ("POST", "/v1/apps/{app}:stop", {"app": "search"}, None, "app.stop"),
    (
        "DELETE",
        "/v1/apps/{app}/functions/{function}/predictions",
        {"app": "search", "function": "hello"},
        None,
        "predictions.delete",
    ),
    ("DELETE", "/v1/apps/{app}", {"app": "search"}, None, "app.delete"),
    (
        "POST",
        "/v1/instances/{instance}:exec",
        {"instance": "i-1"},
        {"argv": ["ls"]},
        "instance.exec",
    ),
    ("POST", "/v1/instances/{instance}:stop", {"instance": "i-1"}, None, "instance.stop"),
    ("DELETE", "/v1/templates/{revision}", {"revision": "f-1@v1-abcdef"}, None, "template.drop"),
    ("POST", "/v1/snapshots/{snapshot}:prove", {"snapshot": "sn-1"}, None, "snapshot.prove"),
    (
        "POST",
        "/v1/snapshots/{snapshot}:quarantine",
        {"snapshot": "sn-1"},
        {"reason": "it answers wrongly"},
        "snapshot.quarantine",
    ),
    ("DELETE", "/v1/snapshots/{snapshot}", {"snapshot": "sn-1"}, None, "snapshot.delete"),
    ("POST", "/v1/keys", {}, {"scope": "invoke"}, "key.create"),
    ("PATCH", "/v1/keys/{key}", {"key": "@id"}, {"quotas": {"concurrent": 1}}, "key.change"),
    ("POST", "/v1/keys/{key}:rotate", {"key": "@id"}, {"grace_s": 60}, "key.rotate"),
    ("DELETE", "/v1/keys/{key}", {"key": "@id"}, None, "key.revoke"),
    ("POST", "/v1/tenants", {}, {"name": "acme"}, "key.create"),
    ("POST", "/v1/cluster:adopt", {}, {"platform": "unlabelled"}, "cluster.adopt"),
    ("POST", "/v1/tenants/{name}/keys", {"name": "acme"}, {"scope": "admin"}, "key.create"),
    ("PATCH", "/v1/tenants/{name}", {"name": "acme"}, {"plan": "free"}, "tenant.change"),
    ("DELETE", "/v1/tenants/{name}", {"name": "acme"}, None, "tenant.delete"),
    (
        "POST",
        "/v1/billing/corrections",
        {},
        {"record": "req-1/1", "amount": "-0.01", "note": "a gift"},
        "billing.correct",
    ),
    ("POST", "/v1/billing/invoices", {}, {"month": "2026-12"}, "invoice.issue"),
    ("POST", "/v1/billing/rollups:rebuild", {}, None, "billing.rebuild"),
    (
        "PUT",
        "/v1/budgets",
        {},
        {"amount": "5", "webhook": "https://alerts.invalid/here"},
        "budget.put",
    ),
    ("POST", "/v1/budgets/{budget}:test", {"budget": "@id"}, None, "budget.test"),
    ("DELETE", "/v1/budgets/{budget}", {"budget": "@id"}, None, "budget.delete"),
    (
        "POST",
        "/v1/credits/{customer}/grants",
        {"customer": "ana"},
        {"amount": "5"},
        "credit.grant",
    ),
    (
        "POST",
        "/v1/credits/{customer}/withdrawals",
        {"customer": "ana"},
        {"grant": "@id", "amount": "1"},
        "credit.withdraw",
    ),
    ("DELETE", "/v1/credits/{customer}", {"customer": "ana"}, None, "credit.close"),
    ("POST", "/v1/storage:collect", {}, {"unused_s": 0}, "blob.collect"),
]


async def prepare(controller: Controller, tmp_path: Path) -> str:
    """What the routes are about, as far as they do not make it themselves; the digest of a
    manifest."""
    tenant = await controller.tenant()
    labels = {"tenant": tenant, "environment": "main", "app": "search", "function": "hello"}
    template = TemplateInfo(
        revision=RevisionKey("f-1@v1-abcdef"),
        pid=1,
        pss_bytes=1,
        threads=(),
        phases_ms={},
        forks=0,
        last_used_at=0.0,
        labels=labels,
    )
    controller.agent.instances, controller.agent.templates = [instance(tenant)], [template]
    controller.agent.snapshots = [snapshot(tenant)]
    record = usage(tenant=tenant, started_at=controller.clock.now - LAST_MONTH_S, cost="0.5")
    assert (
        await controller.internal(
            "/internal/usage", {"activator": "a", "records": [record.to_json()]}
        )
    ).status_code == 200
    assert (
        await controller.internal("/internal/calls", {"calls": [{**DEAD, "tenant": tenant}]})
    ).status_code == 200
    # another's work can be approved
    author = controller.client(await controller.new_key(scope="deploy"))
    assert (
        await author.post("/v1/apps/search/deploy", json={"functions": [spec()]})
    ).status_code == 200
    await controller.http.post("/v1/environments", json={"name": "canary"})
    return await upload(controller.http, tmp_path / "model")


async def newest(controller: Controller) -> dict[str, Any]:
    return dict(
        (await controller.http.get("/v1/audit", params={"tenant": "*", "limit": 1})).json()[
            "entries"
        ][0]
    )


async def since(controller: Controller, entry: int) -> list[dict[str, Any]]:
    """Entries after that one, newest first."""
    listed = (await controller.http.get("/v1/audit", params={"tenant": "*", "limit": 20})).json()[
        "entries"
    ]
    return [one for one in listed if one["id"] > entry]


@pytest.mark.slow  # walks all routes
async def test_every_change_is_in_the_log_with_who_what_and_from_where(
    controller: Controller, tmp_path: Path
) -> None:
    manifest = await prepare(controller, tmp_path)
    key = (await controller.http.get("/v1/whoami")).json()["key"]
    made = revision = ""
    for number, (method, route, names, body, action) in enumerate(ROUTES):
        before = await newest(controller)
        path = route.format(
            **{name: made if value == "@id" else value for name, value in names.items()}
        )
        content: dict[str, Any]
        if isinstance(body, bytes):
            content = {"content": body}
        elif body is LINES:
            content = {"files": {"file": body}, "data": {"purpose": "batch"}}
        else:
            content = _json(body, manifest=manifest, revision=revision, id=made)
        headers = {"x-forwarded-for": f"198.51.100.1, {ADDRESS}", "x-request-id": f"walk-{number}"}
        answered_by = on_cluster(controller, REGISTRY) if route == PUSHED else controller
        async with answered_by.client(controller.key) as http:
            answer = await http.request(method, path, headers=headers, **content)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        entries = await since(controller, before["id"])
        assert entries, f"{method} {path} left no entry"
        told = [
            (entry["action"], entry["actor"], entry["address"], entry["request"])
            for entry in entries
        ]
        assert (action, key, ADDRESS, f"walk-{number}") in told, f"{method} {path}"
        assert {told[0][0], action} <= {action, FREED}, (
            f"{method} {path}: it comes last, but for what it freed"
        )
        revision = answer.json()["functions"][0]["revision"] if action == "app.deploy" else revision
        made = _id(answer) if method in ("POST", "PUT") and "@id" not in names.values() else made


def _json(body: Any, **names: str) -> dict[str, Any]:
    """What to post: strings `@name` stand for the names."""
    if body is None:
        return {}
    text = json.dumps(body)
    for name, value in names.items():
        text = text.replace(f'"@{name}"', json.dumps(value))
    return {"json": json.loads(text)}


def _id(answer: httpx.Response) -> str:
    body = answer.json() if answer.headers.get("content-type") == "application/json" else {}
    if isinstance(body, dict) and "rollout" in (body.get("functions") or [{}])[0]:
        return str(body["functions"][0]["rollout"])
    return str(body.get("id", "")) if isinstance(body, dict) else ""


@pytest.mark.slow  # walks all routes
async def test_no_route_is_missing_here(controller: Controller) -> None:
    document = (await controller.http.get("/openapi.json")).json()
    public = {
        (verb.upper(), path)
        for path, operations in document["paths"].items()
        for verb, operation in operations.items()
        if verb not in ("get", "head", "options") and TAG not in operation.get("tags", ())
    }
    assert public - DATA - RENEWALS - SIGN_INS == {(method, route) for method, route, *_ in ROUTES}


async def test_what_is_refused_is_not_in_the_log(controller: Controller) -> None:
    before = await newest(controller)
    stranger = controller.client(await controller.new_key(scope="invoke"))
    after_key = await newest(controller)
    assert before["id"] < after_key["id"]
    for method, route, names, _, _ in ROUTES:
        await stranger.request(method, route.format(**names), json={})
    assert (await newest(controller))["id"] == after_key["id"]
