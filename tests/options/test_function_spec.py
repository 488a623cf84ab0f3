"""Proofs of a function's own fields, and of its methods, resources, weights and image."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import pytest

import pilotlight
from pilotlight.controller.deployments.fleet_checks import check_cluster
from pilotlight.controller.release.compatibility import breaking_changes
from pilotlight.errors import InvalidInput
from pilotlight.sdk.binding.parameters import parameters_schema, take_parameters
from pilotlight.spec.function import (
    GIB,
    FunctionKind,
    FunctionNetwork,
    FunctionSpec,
    ImageSpec,
    MethodSpec,
    Resources,
    WeightsSpec,
)
from pilotlight.spec.instances.volumes import VolumeSpec, check_mount_path
from pilotlight.spec.quotas import Plan
from pilotlight.spec.record_json import from_json
from pilotlight.spec.sandboxes import ENTRY
from pilotlight.worker.launch_file import Launch
from pilotlight.worker.user_code.loader import load, set_script
from pilotlight.worker.user_code.target import make_target
from snapshotter.images.spec import parse_image
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest, echo
from tests.fakes.fed_platform import spec
from tests.fakes.routes import TENANT, route_of, spec_of
from tests.functions.controller.conftest import Controller
from tests.functions.controller.parts import BUNDLE_DIGEST, refused
from tests.functions.controller.parts import spec as json_spec
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.world import RUNTIME, SETTINGS, launched, manifests, pod, template


async def deploy(controller: Controller, *functions: dict[str, Any]) -> httpx.Response:
    return await controller.http.post("/v1/apps/search/deploy", json={"functions": list(functions)})


@proves("FunctionSpec.name")
def test_the_name_is_the_functions_address(fleet: str) -> None:
    made = spec(name="rank")
    assert launched(made, fleet).labels["function"] == "rank"
    assert manifests(made)["Service"]["metadata"]["name"] == "search-rank"


@proves("FunctionSpec.kind")
def test_the_kind_decides_how_it_runs(fleet: str) -> None:
    weights = (WeightsSpec(name="model", manifest="3f" * 32),)
    engine = {"model": "model", "max_model_len": 512}
    llm = from_json(
        FunctionSpec,
        {
            **json_spec(),
            "kind": "engine",
            "engine": engine,
            "weights": [{"name": "model", "manifest": "3f" * 32}],
        },
    )
    assert llm.weights == weights
    assert launched(llm, fleet).offline, "an engine has no network"
    assert launched(llm, fleet).engine == "vllm"
    plain = replace(llm, kind=FunctionKind.FUNCTION, engine=None)
    assert not launched(plain, fleet).offline
    if fleet == CLUSTER:
        names = [[v["name"] for v in pod(one)["volumes"]] for one in (llm, plain)]
        assert ["shm" in each for each in names] == [True, False]


def launch_of(made: FunctionSpec, code: Path, fleet: str) -> Launch:
    """The launch file of a worker, from what the node is given."""
    entry = launched(made, fleet).entry
    return Launch.from_json(
        {"entry": entry, "revision": "f@v1", "code": str(code), "work": str(code), "control_fd": 3}
    )


@proves("FunctionSpec.module", "FunctionSpec.qualname", "FunctionSpec.pickled")
def test_a_worker_loads_the_object_that_is_named(
    fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    module = f"options_{fleet}"
    (tmp_path / f"{module}.py").write_text("class Space:\n    def f():\n        return 7\n")
    (tmp_path / "f.pkl").write_bytes(cloudpickle.dumps(lambda: 8))
    imported = spec(module=module, qualname="Space.f")
    set_script(launch_of(imported, tmp_path, fleet))
    assert load(launch_of(imported, tmp_path, fleet))() == 7
    assert load(launch_of(replace(imported, pickled="f.pkl"), tmp_path, fleet))() == 8


class Sized:
    size: int = pilotlight.parameter()

    @pilotlight.method()
    def run(self, n: int) -> int:
        return self.size * n


@proves("FunctionSpec.parameters", "FunctionSpec.arguments")
def test_a_class_runs_with_its_arguments(fleet: str) -> None:
    methods = (MethodSpec(name="run"),)
    schema = parameters_schema(take_parameters(Sized))
    declared = spec(kind=FunctionKind.CLASS, methods=methods, parameters=schema)
    bound = replace(declared, arguments={"size": 3})

    def called(made: FunctionSpec) -> Any:
        entry = launched(made, fleet).entry
        return make_target(Sized, from_json(FunctionSpec, entry)).methods["run"].call(2)

    assert called(bound) == 6
    with pytest.raises(InvalidInput, match="no value for its parameter size"):
        called(declared)
    with pytest.raises(InvalidInput, match=r"arguments: .* has no parameter 'colour'"):
        replace(declared, arguments={"colour": "red"})


@proves("FunctionSpec.bundle")
async def test_a_bundle_must_have_been_uploaded(fleet: str, controller: Controller) -> None:
    assert (await deploy(controller, json_spec(bundle=BUNDLE_DIGEST))).status_code == 200
    answer = await deploy(controller, json_spec(bundle="c" * 64))
    assert "bundle cccc" in refused(answer, 400)


@proves("FunctionSpec.image", "FunctionSpec.container_image")
async def test_an_image_must_have_been_built_and_its_container_image_is_the_platforms(
    fleet: str, controller: Controller
) -> None:
    answer = await deploy(controller, json_spec(image="c" * 64))
    assert "image cccc" in refused(answer, 400)
    answer = await deploy(controller, json_spec(container_image=RUNTIME))
    assert "container_image is set by the platform" in refused(answer, 400)
    made = spec(image="c" * 64, container_image="registry.example/a@sha256:" + "2" * 64)
    if fleet == LOCAL:
        assert launched(made, fleet).image == "c" * 64
    else:
        assert pod(made)["containers"][0]["image"] == made.container_image
        with pytest.raises(InvalidInput, match="not in a registry"):
            pod(replace(made, container_image=None))


@proves("FunctionSpec.secrets")
async def test_secrets_must_exist_and_reach_the_worker(fleet: str, controller: Controller) -> None:
    answer = await deploy(controller, json_spec(secrets=["api-key"]))
    assert "no secret 'api-key'" in refused(answer, 400)
    if fleet == CLUSTER:
        (source,) = pod(spec(secrets=("api-key",)))["containers"][0]["envFrom"]
        assert source["secretRef"]["name"] == "secret-api-key"
    else:
        stored = await controller.http.put("/v1/secrets/api-key", json={"values": {"TOKEN": "x"}})
        assert stored.status_code in (200, 201, 204), stored.text
        assert (await deploy(controller, json_spec(secrets=["api-key"]))).status_code == 200
        changes: Any = (await controller.feed())["changes"]
        (route,) = [one["value"] for one in changes if one["kind"] == "function"]
        (revision,) = route["revisions"].values()
        assert revision["launch"]["secret_variables"] == ["TOKEN"]


@proves("FunctionSpec.env")
def test_variables_are_in_the_launch(fleet: str) -> None:
    assert launched(spec(env={"MODE": "fast"}), fleet).env == {"MODE": "fast"}


@proves("FunctionSpec.snapshot")
def test_without_snapshots_none_is_made_nor_forked(fleet: str) -> None:
    kept, refused_ = launched(spec(), fleet), launched(spec(snapshot=False), fleet)
    assert (kept.snapshot, kept.forkable) == (True, True)
    assert (refused_.snapshot, refused_.forkable) == (False, False)
    if fleet == CLUSTER:
        restoring = replace(SETTINGS, restore_into_pods=True)
        assert "affinity" in pod(spec(), settings=restoring)
        assert "affinity" not in pod(spec(snapshot=False), settings=restoring)


@proves("FunctionSpec.idempotent")
@pytest.mark.parametrize("is_idempotent", [True, False])
async def test_a_call_of_a_dead_worker_is_tried_again_only_if_idempotent(
    fleet: str, edge: Edge, *, is_idempotent: bool
) -> None:
    edge.add(route_of(spec_of(idempotent=is_idempotent)))
    edge.fleet.behaviour = hang
    task = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
    edge.fleet.behaviour = echo
    await edge.fleet.kill(edge.fleet.started[0], "killed")
    assert (await task).status_code == (200 if is_idempotent else 502)


async def hang(_: WorkerRequest) -> WorkerAnswer:
    await asyncio.Event().wait()
    raise AssertionError("not reached")


@proves("FunctionSpec.description", "FunctionSpec.tags")
async def test_descriptions_and_tags_are_shown(fleet: str, controller: Controller) -> None:
    body = json_spec(description="Ranks results.", tags={"team": "search"})
    assert (await deploy(controller, body)).status_code == 200
    (shown,) = (await controller.http.get("/v1/apps/search")).json()["functions"]
    assert shown["spec"]["description"] == "Ranks results."
    assert shown["spec"]["tags"] == {"team": "search"}
    with pytest.raises(InvalidInput, match="tags"):
        spec(tags={"": "x"})


@proves("FunctionSpec.access")
async def test_other_tenants_may_call_it_if_it_says_so(fleet: str, edge: Edge) -> None:
    edge.add_tenant("acme")
    edge.add_tenant("beta", tenant="t-000000000002")
    edge.add_key("pl_beta", tenant="t-000000000002", scope="invoke")
    path = f"{edge.url}/t/acme/v1/functions/shop/hello:invoke"
    headers = {"authorization": "Bearer pl_beta"}
    for access, status in (((), 404), (("beta",), 200)):
        edge.add(route_of(spec_of(access=access)))
        answer = await edge.client.post(path, json={"x": 1}, headers=headers)
        assert answer.status_code == status


@proves("FunctionSpec.priority")
async def test_calls_have_the_functions_priority(fleet: str, edge: Edge) -> None:
    edge.add_tenant("acme", priority="realtime")
    key = edge.table.authenticate(b"Bearer pl_test", 0.0)
    for priority, rank in ((None, "standard"), ("batch", "batch"), ("realtime", "realtime")):
        edge.add(route_of(from_json(FunctionSpec, {**_json(spec_of()), "priority": priority})))
        target = edge.table.targets_of(f"{TENANT}/main/shop/hello")[0]
        assert edge.entrance.entry(key, target).caller_of({}).rank.priority == rank


def _json(made: FunctionSpec) -> dict[str, Any]:
    from pilotlight.spec.record_json import to_json

    return dict(to_json(made))


@proves("FunctionSpec.require")
async def test_a_required_evaluation_gates_the_deploy(fleet: str, controller: Controller) -> None:
    body = json_spec(require={"accuracy": ">= 0.9"})
    assert (await deploy(controller, body)).status_code == 409
    answer = await controller.http.post(
        "/v1/apps/search/deploy", json={"functions": [body], "evaluation": {"accuracy": 0.95}}
    )
    assert answer.status_code == 200, answer.text


@proves("FunctionSpec.network")
def test_a_function_without_a_network_is_cut_off(fleet: str) -> None:
    cut = spec(network=FunctionNetwork.NONE)
    assert (launched(spec(), fleet).offline, launched(cut, fleet).offline) == (False, True)
    if fleet == CLUSTER:
        labels = [template(one)["metadata"]["labels"] for one in (spec(), cut)]
        assert [each["pilotlight.dev/network"] for each in labels] == ["open", "none"]


@proves("FunctionSpec.egress", fleets=(LOCAL,))
def test_networks_on_request_reach_the_node(fleet: str) -> None:
    assert launched(spec(egress=("10.1.0.0/16",)), fleet).egress == ("10.1.0.0/16",)


@proves("FunctionSpec.egress", fleets=(CLUSTER,))
async def test_networks_on_request_are_refused(fleet: str, controller: Controller) -> None:
    answer = await deploy(controller, json_spec(egress=["10.1.0.0/16"]))
    assert "egress: functions on this platform have no network of their own" in refused(answer, 400)
    assert answer.json()["parameter"] == "egress"


@proves("FunctionSpec.cors")
async def test_pages_of_named_origins_may_call_it(fleet: str, edge: Edge) -> None:
    edge.add_tenant("acme")
    edge.add(route_of(spec_of(access=("*",), cors=("https://app.example",))))
    url = f"{edge.url}/t/acme/v1/functions/shop/hello:invoke"
    for origin, status in (("https://app.example", 204), ("https://evil.example", 403)):
        headers = {"origin": origin, "access-control-request-method": "POST"}
        assert (await edge.client.options(url, headers=headers)).status_code == status


# -- methods ---------------------------------------------------------------------------------------
@proves("MethodSpec.name", "MethodSpec.schema", "MethodSpec.parameters")
async def test_methods_are_called_by_name_and_arguments_are_checked(fleet: str, edge: Edge) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    methods = (MethodSpec(name="rank", schema=schema, parameters=("x",)),)
    edge.add(route_of(spec_of(methods=methods)))
    assert (await edge.call("shop/hello.rank:invoke", json={"x": 1})).status_code == 200
    assert (await edge.call("shop/hello.rank:invoke", json=[2])).status_code == 200
    assert (await edge.call("shop/hello.rank:invoke", json=[2, 3])).status_code == 400
    assert (await edge.call("shop/hello.rank:invoke", json={"x": "one"})).status_code == 400
    assert (await edge.call("shop/hello.other:invoke", json={"x": 1})).status_code == 404


@proves("MethodSpec.is_generator", "MethodSpec.returns")
def test_results_are_part_of_what_a_new_revision_must_keep(fleet: str) -> None:
    old = spec(methods=(MethodSpec(returns={"type": "integer"}),))
    for new, said in (
        (spec(methods=(MethodSpec(is_generator=True),)), "stream"),
        (spec(methods=(MethodSpec(returns={"type": "string"}),)), "string"),
    ):
        assert any(said in str(gap) for gap in breaking_changes(old, new)), said
        assert launched(new, fleet).entry != launched(old, fleet).entry


@proves("Resources.cpu", "Resources.memory_bytes", "Resources.gpu", "Resources.gpu_count")
def test_resources_are_requested(fleet: str) -> None:
    resources = Resources(cpu=2.5, memory_bytes=3 * GIB, gpu=("H100", "L4"), gpu_count=2)
    made = spec(resources=resources)
    if fleet == LOCAL:
        launch = launched(made, fleet)
        assert (launch.cpu, launch.memory_bytes) == (2.5, 3 * GIB)
        assert "H100" in str(launch.gpu)
        assert launch.gpu_count == 2
        return
    found = pod(made)
    assert found["containers"][0]["resources"] == {
        "requests": {"cpu": "2500m", "memory": "3Gi"},
        "limits": {"memory": "3Gi", "nvidia.com/gpu": "2"},
    }
    required = found["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["H100", "L4"]
    of_any = pod(spec(resources=Resources(gpu=("any",), gpu_count=1)))
    assert not {"affinity", "nodeSelector"} & of_any.keys()


@proves("WeightsSpec.name", "WeightsSpec.manifest")
async def test_weights_must_have_been_uploaded_and_are_mounted(
    fleet: str, controller: Controller
) -> None:
    weights = [{"name": "model", "manifest": "3f" * 32}]
    answer = await deploy(controller, json_spec(weights=weights))
    assert "weights 'model' 3f3f" in refused(answer, 400)
    made = spec(weights=(WeightsSpec(name="model", manifest="3f" * 32),))
    (mount,) = launched(made, fleet).weights
    assert (mount.name, mount.manifest) == ("model", "3f" * 32)
    if fleet == CLUSTER:
        assert "w-3f3f3f3f3f3f" in str(pod(made)["affinity"])


@proves("VolumeSpec.name", "VolumeSpec.path")
def test_volumes_are_mounted_on_one_machine_and_refused_on_a_cluster(fleet: str) -> None:
    made = spec(volumes=(VolumeSpec(name="data", path="/mnt/data/"),))
    if fleet == CLUSTER:
        with pytest.raises(InvalidInput, match=r"volumes = 'data': on a cluster .* pods mount no"):
            check_cluster([made], Plan(), SETTINGS)
        return
    (mount,) = launched(made, fleet).volumes
    assert (mount.name, mount.path) == ("data", "/mnt/data/")
    assert check_mount_path(mount.path) == "/mnt/data"


@proves("FunctionSpec.sandbox")
def test_a_sandbox_is_not_forked_on_one_machine_and_refused_on_a_cluster(fleet: str) -> None:
    module, qualname = ENTRY
    made = spec(module=module, qualname=qualname, sandbox=True)
    if fleet == CLUSTER:
        with pytest.raises(InvalidInput, match=r"sandbox = True: on a cluster .* no sandboxes"):
            check_cluster([made], Plan(), SETTINGS)
        return
    assert launched(replace(made, sandbox=False), fleet).forkable
    assert not launched(made, fleet).forkable


@proves("ImageSpec.python", "ImageSpec.steps")
def test_an_image_is_built_with_its_python_and_its_steps(fleet: str) -> None:
    image = ImageSpec(python="3.11", steps=({"op": "env", "values": {"MODE": "fast"}},))
    plan = parse_image({"python": image.python, "steps": list(image.steps)})
    assert plan.python == "3.11"
    assert [dict(step.values or {}) for step in plan.steps] == [{"MODE": "fast"}]
