"""The public API: scopes, tenants apart from each other, problems, and what each route does."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from prometheus_client import CollectorRegistry

from pilotlight.controller.server import dataplane_openapi
from pilotlight.core.object_store import blob_key
from pilotlight.protocol import CONTENT_PROBLEM, PROBLEM_BASE, CallRecord
from snapshotter.errors import ImageBuildFailed, LogsBusy
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE_DIGEST, instance, refused, spec, usage


def problem_of(answer: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert (answer.status_code, answer.headers["content-type"]) == (status, CONTENT_PROBLEM), (
        answer.text
    )
    body = dict(answer.json())
    assert body["type"] == PROBLEM_BASE + kind
    assert body["instance"] == answer.headers["x-request-id"]
    return body


async def deploy(
    controller: Controller, *specs: dict[str, Any], app: str = "search", **headers: str
) -> httpx.Response:
    return await controller.http.post(
        f"/v1/apps/{app}/deploy", json={"functions": list(specs)}, headers=headers
    )


# -- who may come in -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "pl_wrong", "pl_" + "A" * 43])
async def test_without_a_valid_key_nothing_opens(controller: Controller, key: str | None) -> None:
    answer = await controller.client(key).get("/v1/apps")
    problem_of(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_key_has_256_bits_and_is_stored_as_a_hash_only(controller: Controller) -> None:
    assert re.fullmatch(r"pl_[A-Za-z0-9_-]{43}", controller.key)
    with controller.context.store.read() as sql:
        dump = "\n".join(str(row) for row in sql.exec_driver_sql("SELECT * FROM api_keys"))
    assert controller.key not in dump
    assert hashlib.sha256(controller.key.encode()).hexdigest() in dump


@pytest.mark.parametrize(
    "scope,allowed,refused",
    [
        ("invoke", ["/v1/whoami"], ["/v1/apps", "/v1/logs", "/v1/keys"]),
        ("deploy", ["/v1/apps", "/v1/secrets"], ["/v1/keys", "/v1/audit"]),
    ],
)
async def test_a_scope_reaches_as_far_as_it_says(
    controller: Controller, scope: str, allowed: list[str], refused: list[str]
) -> None:
    client = controller.client(await controller.new_key(scope=scope))
    assert [(await client.get(path)).status_code for path in allowed] == [200] * len(allowed)
    for path in refused:
        problem_of(await client.get(path), 403, "forbidden")


async def test_a_revoked_or_expired_key_is_refused(controller: Controller) -> None:
    answer = (
        await controller.http.post("/v1/keys", json={"scope": "invoke", "expires_in_s": 60})
    ).json()
    client = controller.client(answer["secret"])
    assert (await client.get("/v1/whoami")).status_code == 200
    controller.clock.now += 61
    assert (
        "has expired"
        in problem_of(await client.get("/v1/whoami"), 401, "unauthenticated")["detail"]
    )
    controller.clock.now -= 61
    assert (await controller.http.delete(f"/v1/keys/{answer['id']}")).status_code == 204
    assert "revoked" in problem_of(await client.get("/v1/whoami"), 401, "unauthenticated")["detail"]


async def test_a_key_bound_to_an_environment_stays_in_it(controller: Controller) -> None:
    await controller.http.post("/v1/environments", json={"name": "staging"})
    key = await controller.new_key(scope="admin", environment="staging")
    assert (await controller.client(key).get("/v1/whoami")).json()["environment"] == "staging"
    problem_of(await controller.client(key, environment="main").get("/v1/apps"), 403, "forbidden")
    problem_of(
        await controller.client(key).post("/v1/keys", json={"scope": "admin"}), 403, "forbidden"
    )
    problem_of(await controller.client(key).get("/v1/audit"), 403, "forbidden")
    assert [
        k["environment"] for k in (await controller.client(key).get("/v1/keys")).json()["keys"]
    ] == ["staging"]


async def test_another_tenants_things_do_not_exist(controller: Controller) -> None:
    await deploy(controller, spec())
    controller.agent.instances = [instance(await controller.tenant())]
    key_id = (await controller.http.get("/v1/whoami")).json()["key"]
    await controller.internal(
        "/internal/usage",
        {"activator": "a", "records": [usage(tenant=await controller.tenant()).to_json()]},
    )
    stranger = controller.client(await controller.other_tenant())
    assert (await stranger.get("/v1/apps")).json() == {"apps": []}
    assert (await stranger.get("/v1/instances")).json() == {"instances": []}
    for method, path in [
        ("GET", "/v1/apps/search"),
        ("GET", "/v1/apps/search/history"),
        ("POST", "/v1/apps/search:stop"),
        ("DELETE", "/v1/apps/search"),
        ("POST", "/v1/instances/i-1:stop"),
        ("DELETE", f"/v1/keys/{key_id}"),
        ("GET", "/v1/calls/req-1"),
    ]:
        problem_of(await stranger.request(method, path), 404, "not-found")
    assert (await stranger.head(f"/v1/blobs/{BUNDLE_DIGEST}")).status_code == 404
    refused = await stranger.post("/v1/apps/mine/deploy", json={"functions": [spec()]})
    assert "was not uploaded" in problem_of(refused, 400, "invalid-input")["detail"]


# -- problems --------------------------------------------------------------------------------------


async def test_the_framework_speaks_problems_too(controller: Controller) -> None:
    problem_of(await controller.http.get("/v1/nothing"), 404, "not-found")
    problem_of(await controller.http.delete("/v1/whoami"), 405, "method-not-allowed")
    malformed = await controller.http.post(
        "/v1/keys", content=b"{", headers={"content-type": "application/json"}
    )
    problem_of(malformed, 400, "invalid-input")
    wrong = problem_of(
        await controller.http.post("/v1/keys", json={"scope": "king"}), 400, "invalid-input"
    )
    assert wrong["parameter"] == "body.scope"
    compressed = await controller.http.post(
        "/v1/keys", content=b"\x1f\x8b", headers={"content-encoding": "gzip"}
    )
    problem_of(compressed, 415, "unsupported-media-type")
    assert compressed.headers["accept-encoding"] == "identity"


async def test_a_request_keeps_the_id_that_its_caller_chose_unless_it_is_odd(
    controller: Controller,
) -> None:
    assert (await controller.http.get("/healthz", headers={"x-request-id": "mine-1"})).headers[
        "x-request-id"
    ] == "mine-1"
    assert (
        (await controller.http.get("/healthz", headers={"x-request-id": "a b"}))
        .headers["x-request-id"]
        .startswith("req-")
    )


async def test_a_defect_is_a_problem_without_internals(controller: Controller) -> None:
    with controller.context.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE secrets")
    body = problem_of(await controller.http.get("/v1/secrets"), 500, "internal")
    assert "secrets" not in json.dumps(body)


@pytest.mark.slow  # the whole OpenAPI document
async def test_the_openapi_document_names_every_public_route_and_no_422(
    controller: Controller,
) -> None:
    document = (await controller.http.get("/openapi.json")).json()
    assert {
        "/v1/apps/{app}/deploy",
        "/v1/blobs/{digest}",
        "/v1/billing/report",
        "/v1/snapshots/{snapshot}",
    } <= document["paths"].keys()
    assert "/internal/" not in json.dumps(document), "our own processes' paths are nobody's to call"
    functions = document["components"]["schemas"]["DeployRequest"]["properties"]["functions"][
        "items"
    ]
    assert {"name", "bundle", "methods", "scaling"} <= functions["properties"].keys()
    assert not [
        p
        for p in document["paths"].values()
        for operation in p.values()
        if "422" in operation["responses"]
    ]


@pytest.mark.slow  # the whole OpenAPI document, and every path of it
async def test_methods_that_are_not_described_are_405_and_name_those_that_are(
    controller: Controller,
) -> None:
    document = (await controller.http.get("/openapi.json")).json()
    data_plane: dict[str, Any] = {"paths": {}}
    dataplane_openapi.describe_dataplane(data_plane, {})
    patterns = {path: re.compile(re.sub(r"{\w+}", "[^/]+", path)) for path in document["paths"]}
    activators = {*data_plane["paths"], "/v1/calls/{call}:redrive"}  # they answer it by themselves
    for path in document["paths"].keys() - activators:
        place = re.sub(r"{\w+}", "1", path)
        declared = {  # of /v1/apps/1:stop also those of an app with that name
            method.upper()
            for other, operations in document["paths"].items()
            if patterns[other].fullmatch(place)
            for method in operations
        }
        methods = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}
        for method in methods - declared:
            answer = await controller.http.request(method, place)
            allowed = set(answer.headers.get("allow", "").split(", "))
            assert (answer.status_code, allowed) == (405, declared), f"{method} {path}"


async def test_the_openapi_document_describes_the_data_plane_too(controller: Controller) -> None:
    document = (await controller.http.get("/openapi.json")).json()
    function = "/v1/functions/{app}/{function}"
    served = {
        f"{function}:invoke",
        f"{function}:submit",
        f"{function}:warmup",
        "/v1/calls/{call}",
        "/fn/{app}/{function}/{path}",
    }
    assert served <= document["paths"].keys()
    ids = [
        o["operationId"] for operations in document["paths"].values() for o in operations.values()
    ]
    assert len(ids) == len(set(ids)), "generated clients name functions by them"
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"} == set(
                re.findall(r"{(\w+)}", path)
            )
    call = document["components"]["schemas"]["Call"]
    jsonschema_rs.validator_for(call).validate(
        CallRecord(
            id="req-1",
            tenant="t",
            environment="main",
            app="a",
            function="f",
            method="",
            state="SUCCEEDED",
            sequence=1,
            submitted_at=1.0,
        ).to_json()
    )


async def test_the_reference_lists_public_routes_only_and_loads_nothing(
    controller: Controller,
) -> None:
    page = await controller.client(None).get("/docs")
    assert "/v1/apps/{app}/deploy" in page.text
    assert "/internal/" not in page.text
    assert "src=" not in page.text


# -- deploying -------------------------------------------------------------------------------------


async def test_a_deploy_answers_with_revisions_and_reaches_the_feed(
    controller: Controller, registry: CollectorRegistry
) -> None:
    answer = await deploy(controller, spec("one"), spec("two"))
    body = answer.json()
    assert (answer.status_code, body["version"], [f["created"] for f in body["functions"]]) == (
        200,
        1,
        [True, True],
    )
    page = await controller.feed()
    kinds = [change["kind"] for change in page["changes"]]  # type: ignore[attr-defined]
    assert (page["reset"], sorted(kinds)) == (True, ["function", "function", "key", "tenant"])
    assert registry.get_sample_value("pilotlight_controller_deploys_total") == 1


async def test_a_deploy_may_add_functions_to_an_app_and_keep_its_others(
    controller: Controller,
) -> None:
    leased = {"functions": [spec("one"), spec("two")], "lease_s": 60}
    assert (await controller.http.post("/v1/apps/search/deploy", json=leased)).status_code == 200
    more = {"functions": [spec("three")], "keep_others": True}
    assert (await controller.http.post("/v1/apps/search/deploy", json=more)).status_code == 200
    app = (await controller.http.get("/v1/apps/search")).json()
    assert [f["name"] for f in app["functions"]] == ["one", "three", "two"]
    assert (app["version"], app["expires_at"] is not None) == (2, True)
    both = {**more, "lease_s": 60}
    assert "exclude" in refused(
        await controller.http.post("/v1/apps/search/deploy", json=both), 400
    )
    assert (await controller.http.post("/v1/apps/search:stop")).status_code == 200
    assert (await controller.http.post("/v1/apps/search/deploy", json=more)).status_code == 200
    assert not (await controller.http.get("/v1/apps/search")).json()["stopped"]
    await deploy(controller, spec("one"))
    app = (await controller.http.get("/v1/apps/search")).json()
    assert [f["name"] for f in app["functions"]] == ["one"]


async def test_the_first_call_of_a_new_revision_ends_the_time_of_the_one_before(
    controller: Controller,
) -> None:
    async def document() -> dict[str, Any]:
        changes: Any = (await controller.feed())["changes"]
        (route,) = (one["value"] for one in changes if one["kind"] == "function")
        return {**route["document"], "id": route["id"]}

    async def ran(revision: str, function: str) -> None:
        record = usage(f"req-{revision}/1", function_id=function, revision=revision)
        body = {"activator": "a", "records": [record.to_json()]}
        assert (await controller.internal("/internal/usage", body)).status_code == 200

    await deploy(controller, spec())
    first = await document()
    (old,) = first["weights"]
    await ran(old, first["id"])
    await deploy(controller, spec(description="another"))
    said = await document()
    assert (said["previous"], said["awaited"]) == ({old: 100}, list(said["weights"]))
    (new,) = said["weights"]
    await ran(new, said["id"])
    said = await document()
    assert (said["previous"], said["awaited"]) == ({}, [])


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"bundle": "ab" * 32}, f"bundle {'ab' * 32} was not uploaded"),
        ({"bundle": "nonsense"}, "expected a sha256"),
        ({"image": "cd" * 32}, f"image {'cd' * 32} was not built"),
        ({"secrets": ["HF"]}, "no secret 'HF' in environment 'main'"),
        ({"weights": [{"name": "w", "manifest": "ef" * 32}]}, "weights 'w'"),
        (
            {"weights": [{"name": "../w", "manifest": "ef" * 32}]},
            "weights name '../w' is not valid",
        ),
        ({"methods": []}, "no methods"),
        ({"name": "9"}, "function name '9' is not valid"),
        ({"cpu": 1}, "unknown key 'cpu'"),
        ({"resources": {"cpu": "much"}}, "expected a number"),
        ({"scaling": {"max_instances": 0}}, "max_instances = 0"),
        (
            {"methods": [{"schema": {"$ref": "https://elsewhere.example/schema"}}]},
            "points outside the schema",
        ),
        ({"methods": [{"schema": {"type": "thing"}}]}, "not a JSON Schema"),
        ({"methods": [{"schema": {"description": "x" * 70_000}}]}, "the maximum is 65536"),
    ],
)
async def test_a_deploy_that_cannot_run_is_refused_by_name_and_changes_nothing(
    controller: Controller, changes: dict[str, Any], said: str
) -> None:
    answer = await deploy(controller, spec("fine"), spec(**changes))
    assert said in problem_of(answer, 400, "invalid-input")["detail"]
    assert (await controller.http.get("/v1/apps")).json() == {"apps": []}


async def test_a_schema_as_deep_as_a_well_is_refused(controller: Controller) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"items": deep}
    answer = await deploy(controller, spec(methods=[{"schema": deep}]))
    assert "levels deep" in problem_of(answer, 400, "invalid-input")["detail"]


async def test_a_deploy_into_an_environment_that_is_not_there_says_how_to_make_it(
    controller: Controller,
) -> None:
    answer = await deploy(controller, spec(), **{"pilotlight-environment": "staging"})
    assert "pilotlight environment create staging" in problem_of(answer, 404, "not-found")["detail"]


async def test_apps_are_listed_shown_stopped_and_deleted(controller: Controller) -> None:
    await deploy(controller, spec("one"), spec("two"))
    (listed,) = (await controller.http.get("/v1/apps")).json()["apps"]
    assert (listed["name"], listed["functions"], listed["stopped"]) == ("search", 2, False)
    assert (await controller.http.post("/v1/apps/search:stop")).json() == {
        "app": "search",
        "version": 2,
    }
    detail = (await controller.http.get("/v1/apps/search")).json()
    assert (detail["stopped"], [f["name"] for f in detail["functions"]]) == (True, ["one", "two"])
    assert (await controller.http.delete("/v1/apps/search")).status_code == 204
    actions = [
        h["action"]
        for h in (await controller.http.get("/v1/apps/search/history")).json()["history"]
    ]
    assert actions == ["delete", "stop", "deploy"]


# -- blobs and images ------------------------------------------------------------------------------
def blob_file(controller: Controller, digest: str) -> Path:
    path = controller.context.files.objects.local_path(blob_key(digest))
    assert path is not None
    return path


async def test_a_blob_is_kept_under_its_hash_and_again_is_cheap(controller: Controller) -> None:
    data = b"y" * 300_000
    digest = hashlib.sha256(data).hexdigest()
    first = (await controller.http.put(f"/v1/blobs/{digest}", content=data)).json()
    written = blob_file(controller, digest).stat().st_mtime_ns
    again = (await controller.http.put(f"/v1/blobs/{digest}", content=data)).json()
    assert (first["created"], again["created"]) == (True, False)
    assert blob_file(controller, digest).stat().st_mtime_ns == written
    assert (await controller.http.head(f"/v1/blobs/{digest}")).headers["content-length"] == "300000"


async def test_bytes_that_do_not_match_their_name_are_not_kept(controller: Controller) -> None:
    answer = await controller.http.put(f"/v1/blobs/{'ab' * 32}", content=b"other")
    problem_of(answer, 400, "invalid-input")
    problem_of(await controller.http.put("/v1/blobs/x", content=b"other"), 400, "invalid-input")
    assert not list(controller.context.files.incoming.iterdir())
    assert not blob_file(controller, "ab" * 32).exists()


@pytest.mark.parametrize("announced", [True, False])
async def test_a_blob_over_the_limit_is_refused_and_leaves_nothing(
    controller: Controller, announced: bool
) -> None:
    data = b"z" * (controller.context.files.limit_bytes + 1)

    async def pieces() -> Any:
        for start in range(0, len(data), 65_536):
            yield data[start : start + 65_536]

    answer = await controller.http.put(
        f"/v1/blobs/{hashlib.sha256(data).hexdigest()}", content=data if announced else pieces()
    )
    assert (
        problem_of(answer, 413, "too-large")["limit_bytes"] == controller.context.files.limit_bytes
    )
    assert not list(controller.context.files.incoming.glob("*"))


async def test_knowing_a_digest_is_not_owning_it_but_sending_it_is(controller: Controller) -> None:
    stranger = controller.client(await controller.other_tenant())
    assert (await stranger.head(f"/v1/blobs/{BUNDLE_DIGEST}")).status_code == 404
    problem_of(
        await stranger.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=b"guess"), 400, "invalid-input"
    )
    sent = await stranger.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=b"the source archive of an app")
    assert sent.json()["created"]
    assert (
        await stranger.post("/v1/apps/mine/deploy", json={"functions": [spec()]})
    ).status_code == 200


async def test_an_image_is_built_with_its_progress_shown_and_may_then_be_deployed(
    controller: Controller,
) -> None:
    answer = await controller.http.post(
        "/v1/images", json={"python": "3.11", "steps": [{"op": "pip", "packages": ["numpy"]}]}
    )
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines == [
        {"step": "pip install", "text": "one moment"},
        {"image": "ab" * 32, "size_bytes": 0},
    ]
    assert controller.agent.asked[-1][1]["uid"] == 20_000
    assert (await deploy(controller, spec(image="ab" * 32))).status_code == 200


async def test_an_image_that_fails_ends_in_a_problem(controller: Controller) -> None:
    controller.agent.build_failure = ImageBuildFailed(
        "no such package: nmupy", {"step": "pip install"}
    )
    answer = await controller.http.post("/v1/images", json={"python": "3.11"})
    last = json.loads(answer.text.splitlines()[-1])
    assert (last["error"]["status"], last["error"]["detail"]) == (400, "no such package: nmupy")
    missing = await controller.http.post(
        "/v1/images",
        json={"python": "3.11", "steps": [{"op": "copy", "blob": "ab" * 32, "target": "/x"}]},
    )
    assert "was not uploaded" in problem_of(missing, 400, "invalid-input")["detail"]


async def test_what_is_no_plain_name_of_a_debian_package_is_refused_before_anything_is_built(
    controller: Controller,
) -> None:
    def image(*packages: str) -> dict[str, object]:
        return {"python": "3.11", "steps": [{"op": "apt", "packages": packages}]}

    asked = len(controller.agent.asked)
    assert (
        '"image":"' + "ab" * 32
        in (await controller.http.post("/v1/images", json=image("ffmpeg"))).text
    )
    for name in ("ffmpeg-", "ffmpeg=1.0"):
        refused = problem_of(
            await controller.http.post("/v1/images", json=image(name)), 400, "invalid-input"
        )
        assert "not the name of a Debian package" in refused["detail"]
    assert [operation for operation, _ in controller.agent.asked[asked:]].count("build_image") == 1


# -- the node --------------------------------------------------------------------------------------


async def test_instances_are_stopped_and_entered_by_their_owner(controller: Controller) -> None:
    controller.agent.instances = [instance(await controller.tenant())]
    assert [
        i["id"] for i in (await controller.http.get("/v1/instances?app=search")).json()["instances"]
    ] == ["i-1"]
    assert (await controller.http.get("/v1/instances?app=other")).json() == {"instances": []}
    shell = await controller.http.post("/v1/instances/i-1:exec", json={"argv": ["echo", "hi"]})
    assert [json.loads(line) for line in shell.text.splitlines()] == [
        {"stream": "stdout", "text": "echo hi"},
        {"exit_status": 0},
    ]
    assert (await controller.http.post("/v1/instances/i-1:stop")).status_code == 204
    problem_of(await controller.http.post("/v1/instances/i-1:stop"), 404, "not-found")
    actions = [
        e["action"] for e in (await controller.http.get("/v1/audit?limit=2")).json()["entries"]
    ]
    assert actions == ["instance.stop", "instance.exec"]


async def test_logs_are_asked_for_with_the_callers_own_tenant(controller: Controller) -> None:
    await deploy(controller, spec())
    controller.agent.lines = [
        {"time": 1.0, "instance": "i-1", "stream": "stdout", "call": None, "text": "hello"}
    ]
    answer = await controller.http.get(
        "/v1/logs", params={"app": "search", "tail": 5, "call": "req-1"}
    )
    assert [json.loads(line)["text"] for line in answer.text.splitlines()] == ["hello"]
    labels = {"tenant": await controller.tenant(), "environment": "main", "app": "search"}
    asked = {
        "labels": labels,
        "instance_id": None,
        "since": None,
        "tail": 5,
        "call_id": "req-1",
        "follow": False,
    }
    assert controller.agent.asked[-1] == ("logs", asked)


async def test_a_reader_of_logs_too_many_is_told_when_to_come_back(controller: Controller) -> None:
    controller.agent.logs_failure = LogsBusy(
        "4 requests read logs of this tenant", {"limit": 4, "retry_after_s": 5}
    )
    for follow in ("false", "true"):
        answer = await controller.http.get("/v1/logs", params={"follow": follow})
        assert problem_of(answer, 429, "too-many-requests")["limit"] == 4
        assert answer.headers["retry-after"] == "5"


async def test_logs_of_a_name_that_never_was_are_a_404_and_those_of_a_deleted_app_are_there(
    controller: Controller,
) -> None:
    problem_of(await controller.http.get("/v1/logs", params={"app": "serach"}), 404, "not-found")
    await deploy(controller, spec())
    wrong = await controller.http.get("/v1/logs", params={"app": "search", "function": "helo"})
    assert "never had a function 'helo'" in problem_of(wrong, 404, "not-found")["detail"]
    await controller.http.delete("/v1/apps/search")
    assert (
        await controller.http.get("/v1/logs", params={"app": "search", "function": "hello"})
    ).status_code == 200


async def test_the_node_says_what_it_can(controller: Controller) -> None:
    told = (await controller.http.get("/v1/node")).json()
    assert told["features"][0]["name"] == "fork"
    assert told["node"] == {"name": "here", "snapshots": {"on": True, "ready": 1}}, (
        "of another tenant's refusals nothing"
    )
    assert (await controller.http.get("/v1/templates")).json() == {"templates": []}


async def test_an_agent_that_is_away_is_a_503_that_says_when_to_come_back(
    controller: Controller, short_tmp: Any
) -> None:
    (short_tmp / "snapshotter.sock").unlink()
    for path in ("/v1/instances", "/v1/logs", "/v1/node"):
        answer = await controller.http.get(path)
        problem_of(answer, 503, "unavailable")
        assert answer.headers["retry-after"] == "1"


# -- secrets, environments, tenants ----------------------------------------------------------------


async def test_a_secret_is_sealed_in_rows_and_feed_and_never_shown(controller: Controller) -> None:
    put = await controller.http.put(
        "/v1/secrets/HF", json={"values": {"HF_TOKEN": "hunter2", "B": "c"}}
    )
    assert put.json()["variables"] == ["B", "HF_TOKEN"]
    listed = await controller.http.get("/v1/secrets")
    page = await controller.feed()
    (sealed,) = [change["value"] for change in page["changes"] if change["kind"] == "secret"]  # type: ignore[attr-defined]
    assert json.loads(controller.context.key.activator.secrets.open(sealed)) == {
        "HF_TOKEN": "hunter2",
        "B": "c",
    }
    assert (
        "hunter2"
        not in listed.text
        + put.text
        + json.dumps(page)
        + (await controller.http.get("/v1/audit")).text
    )
    await deploy(controller, spec(secrets=["HF"]))
    problem_of(await controller.http.delete("/v1/secrets/HF"), 409, "conflict")
    await deploy(controller, spec())
    assert (await controller.http.delete("/v1/secrets/HF")).status_code == 204
    problem_of(await controller.http.delete("/v1/secrets/HF"), 404, "not-found")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"value": "x", "values": {"A": "b"}},
        {"values": {}},
        {"values": {"A B": "c"}},
        {"value": "x" * 70_000},
    ],
)
async def test_a_secret_that_cannot_be_an_environment_is_refused(
    controller: Controller, body: dict[str, Any]
) -> None:
    problem_of(await controller.http.put("/v1/secrets/S", json=body), 400, "invalid-input")


async def test_environments_are_apart(controller: Controller) -> None:
    assert (
        await controller.http.post("/v1/environments", json={"name": "staging"})
    ).status_code == 201
    problem_of(
        await controller.http.post("/v1/environments", json={"name": "staging"}), 409, "conflict"
    )
    assert (
        await deploy(controller, spec(), **{"pilotlight-environment": "staging"})
    ).status_code == 200
    assert (await controller.http.get("/v1/apps")).json() == {"apps": []}
    problem_of(await controller.http.delete("/v1/environments/staging"), 409, "conflict")
    problem_of(await controller.http.delete("/v1/environments/main"), 409, "conflict")
    await controller.http.delete("/v1/apps/search", headers={"pilotlight-environment": "staging"})
    assert (await controller.http.delete("/v1/environments/staging")).status_code == 204
    assert [
        e["name"] for e in (await controller.http.get("/v1/environments")).json()["environments"]
    ] == ["main"]


async def test_only_the_platforms_administrators_make_tenants(controller: Controller) -> None:
    key = await controller.other_tenant()
    stranger = controller.client(key)
    assert (await stranger.get("/v1/whoami")).json()["tenant"] == {
        **(await stranger.get("/v1/whoami")).json()["tenant"],
        "uid": 20_001,
    }
    problem_of(await stranger.post("/v1/tenants", json={"name": "more"}), 403, "forbidden")
    problem_of(await controller.http.post("/v1/tenants", json={"name": "acme"}), 409, "conflict")
    assert [t["name"] for t in (await controller.http.get("/v1/tenants")).json()["tenants"]] == [
        "default",
        "acme",
    ]


# -- books -----------------------------------------------------------------------------------------


async def test_a_bill_is_the_sum_of_its_records_to_the_last_digit(controller: Controller) -> None:
    tenant = await controller.tenant()
    records = [
        usage(f"req-{n}/1", tenant=tenant, cost="0.000000000001").to_json() for n in range(3)
    ]
    records.append(usage("req-9/1", tenant=tenant, cost="2.5", kind="IDLE").to_json())
    for _ in range(2):
        assert (
            await controller.internal("/internal/usage", {"activator": "a", "records": records})
        ).json() == {
            "accepted": 4,
            "budgets": {},
        }
    bill = (await controller.http.get("/v1/billing/report")).json()
    assert [(r["name"], r["kind"], r["records"], r["cost"]) for r in bill["rows"]] == [
        ("search/embed", "CALL", 3, "0.000000000003"),
        ("search/embed", "IDLE", 1, "2.5"),
    ]
    assert bill["totals"] == {"USD": "2.500000000003"}
    table = await controller.http.get("/v1/billing/report?format=csv&by=app&since=2027-01-01")
    assert table.text.splitlines()[1].startswith("search,CALL,USD,3,")
    problem_of(
        await controller.http.get("/v1/billing/report?since=yesterday"), 400, "invalid-input"
    )


async def test_a_broken_usage_record_is_refused_by_name_and_none_of_its_batch_is_kept(
    controller: Controller,
) -> None:
    body = {
        "activator": "a",
        "records": [usage().to_json(), {**usage("req-2/1").to_json(), "queued_ms": "soon"}],
    }
    assert (
        "records[1].queued_ms"
        in problem_of(await controller.internal("/internal/usage", body), 400, "invalid-input")[
            "detail"
        ]
    )
    assert (await controller.http.get("/v1/billing/report")).json()["rows"] == []


async def test_submitted_calls_are_polled_where_they_were_reported(controller: Controller) -> None:
    tenant = await controller.tenant()
    call = {
        "id": "req-1",
        "tenant": tenant,
        "environment": "main",
        "app": "a",
        "function": "f",
        "method": "",
        "state": "QUEUED",
    }
    for sequence, state in [(2, "SUCCEEDED"), (1, "RUNNING")]:
        body = {
            "calls": [
                {
                    **call,
                    "state": state,
                    "sequence": sequence,
                    "submitted_at": 1.0,
                    "result": "aGk=",
                }
            ]
        }
        assert (await controller.internal("/internal/calls", body)).json() == {"accepted": 1}
    found = (await controller.http.get("/v1/calls/req-1")).json()
    assert (found["state"], found["result"]) == ("SUCCEEDED", "aGk=")
    token = {"pilotlight-platform-token": controller.context.key.token}
    for whose, status in [(tenant, 200), ("t-of-another", 404)]:  # as an activator asks
        asked = await controller.http.get(f"/internal/calls/req-1?tenant={whose}", headers=token)
        assert asked.status_code == status


@pytest.mark.parametrize(
    "path",
    ["/internal/feed", "/internal/usage", "/internal/calls", "/internal/calls/req-1?tenant=t-1"],
)
async def test_internal_paths_need_the_platforms_token_whatever_the_key(
    controller: Controller, path: str
) -> None:
    method = "GET" if path.endswith(("feed", "t-1")) else "POST"
    problem_of(
        await controller.http.request(method, path, headers={"pilotlight-platform-token": "x"}),
        403,
        "forbidden",
    )
