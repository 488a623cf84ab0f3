"""Model servers' protocols: the same calls under other names, with the same checks, choice and
bills."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from activator.open_inference.api import InferenceRequest, is_model_path, parse
from pilotlight.spec.function import MethodSpec
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of, split_route

NUMBERS = {"type": "array", "items": {"type": "number"}}


@pytest.fixture(name="behaviour")
def _behaviour() -> Behaviour:
    return answering


async def answering(request: WorkerRequest) -> WorkerAnswer:
    """Answer with the arguments, as an object; or as `boom` says."""
    arguments = json.loads(request.body)
    if arguments.get("text") == "boom":
        body = {
            "type": "x",
            "title": "x",
            "status": 500,
            "detail": "ValueError: no",
            "error": {"type": "ValueError", "message": "no"},
        }
        return WorkerAnswer(
            status=500,
            body=json.dumps(body).encode(),
            outcome="raised",
            content_type="application/problem+json",
        )
    lists = [value for value in arguments.values() if isinstance(value, list)]
    return WorkerAnswer(
        body=json.dumps(
            [sum(map(sum, lists[0]))] if lists and isinstance(lists[0][0], list) else arguments
        ).encode()
    )


def takes(returns: Any = None, **properties: Any) -> MethodSpec:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return MethodSpec(schema=schema, parameters=tuple(properties), returns=returns)


@pytest.fixture(name="models")
def _models(edge: Edge) -> Edge:
    edge.add_key(KEY)
    edge.add(route_of(spec_of("sum", methods=(takes(rows={"type": "array", "items": NUMBERS}),))))
    edge.add(route_of(spec_of("say", methods=(takes(text={"type": "string"}),))))
    edge.add(
        route_of(spec_of("two", methods=(takes(text={"type": "string"}, n={"type": "integer"}),)))
    )
    edge.add(route_of(spec_of("batch", methods=(takes(instances={}),))))
    return edge


async def post(
    edge: Edge, path: str, body: Any, *, key: str | None = KEY, **headers: str
) -> httpx.Response:
    given = {"authorization": f"Bearer {key}"} if key else {}
    return await edge.client.post(edge.url + path, json=body, headers={**given, **headers})


async def get(edge: Edge, path: str) -> httpx.Response:
    return await edge.client.get(edge.url + path, headers={"authorization": f"Bearer {KEY}"})


@pytest.mark.parametrize(
    "path,asked",
    [
        (
            "/v1/models/shop/sum:predict",
            InferenceRequest(model="shop/sum", version="", verb="predict"),
        ),
        (
            "/v1/models/shop/sum/versions/v2:predict",
            InferenceRequest(model="shop/sum", version="v2", verb="predict"),
        ),
        ("/v2/models/shop/sum", InferenceRequest(model="shop/sum", version="", verb="")),
        ("/v2/models/shop/sum/infer", InferenceRequest(model="shop/sum", version="", verb="infer")),
        (
            "/v2/models/shop/sum/versions/v2/ready",
            InferenceRequest(model="shop/sum", version="v2", verb="ready"),
        ),
        ("/v2/models/shop", None),
        ("/v2/models/shop/sum/delete", None),
        ("/v2/models/shop//infer", None),
        ("/v2/nothing", None),
    ],
)
def test_a_path_says_which_model_in_which_version(
    path: str, asked: InferenceRequest | None
) -> None:
    assert (is_model_path(path), parse(path)) == (True, asked)
    assert not is_model_path("/v1/functions/shop/sum:invoke")
    assert not is_model_path("/v20/models")


# -- predict ---------------------------------------------------------------------------------------


async def test_instances_become_predictions(models: Edge) -> None:
    answer = await post(models, "/v1/models/shop/sum:predict", {"instances": [[1, 2], [3, 4]]})
    assert (answer.status_code, answer.json()) == (200, {"predictions": [10]})
    assert (await post(models, "/v1/models/shop/batch:predict", {"instances": [7]})).json() == {
        "predictions": [{"instances": [7]}]
    }
    for instance in ("hi", {"text": "hi"}):
        answer = await post(models, "/v1/models/shop/say:predict", {"instances": [instance]})
        assert answer.json() == {"predictions": [{"text": "hi"}]}
    named = await post(
        models, "/v1/models/shop/two:predict", {"instances": [{"text": "a", "n": 1}]}
    )
    assert named.json() == {"predictions": [{"text": "a", "n": 1}]}


@pytest.mark.parametrize(
    "model,body,told",
    [
        ("say", {"instances": ["a", "b"]}, "one instance at a time"),
        ("say", {"instances": []}, "at least one instance"),
        ("say", {"instances": ["a"], "more": 1}, "at least one instance"),
        ("say", [], "at least one instance"),
        ("say", {"instances": [7]}, "argument 'text'"),
        ("two", {"instances": [{"text": "a", "n": "b"}]}, "argument 'n'"),
        ("missing", {"instances": ["a"]}, "no function shop/missing"),
    ],
)
async def test_what_cannot_be_predicted_is_refused_before_anything_starts(
    models: Edge, model: str, body: Any, told: str
) -> None:
    answer = await post(models, f"/v1/models/shop/{model}:predict", body)
    assert answer.status_code in (400, 404)
    assert told in answer.json()["detail"]
    assert not await models.settle()


async def test_it_is_a_call_like_any_other(models: Edge) -> None:
    answer = await post(models, "/v1/models/shop/sum:predict", {"instances": [[1]]})
    (record,) = (await models.settle()).values()
    assert (record.call, record.function, record.status) == (
        answer.headers["x-request-id"],
        "sum",
        200,
    )
    assert answer.headers["pilotlight-revision"] == "v1-abcdef"
    assert float(answer.headers["pilotlight-cost"]) > 0
    assert (
        await post(models, "/v1/models/shop/sum:predict", {"instances": [[1]]}, key=None)
    ).status_code == 401
    assert (
        await post(models, "/v1/models/shop/sum:predict", {"instances": [[1]]}, key="pl_other")
    ).status_code == 401
    large = await post(models, "/v1/models/shop/sum:predict", {"instances": [[1] * 2000]})
    assert large.status_code == 413


async def test_a_version_is_a_revision_or_a_tag(models: Edge) -> None:
    models.add(
        split_route(
            spec_of("sum", methods=(takes(rows=NUMBERS),)),
            {"v1": 100},
            named=["v2"],
            tags={"next": "v2"},
        )
    )
    for version, revision in (("next", "v2"), ("v2", "v2"), ("v1", "v1")):
        answer = await post(
            models, f"/v1/models/shop/sum/versions/{version}:predict", {"instances": [1]}
        )
        assert answer.headers["pilotlight-revision"] == revision
    assert (
        await post(models, "/v1/models/shop/sum/versions/v9:predict", {"instances": [1]})
    ).status_code == 404


# -- infer -----------------------------------------------------------------------------------------


def tensor(
    name: str, data: list[Any], *, shape: list[int] | None = None, datatype: str = "FP32"
) -> dict[str, Any]:
    return {"name": name, "shape": shape or [len(data)], "datatype": datatype, "data": data}


async def test_tensors_become_arguments_and_answers_tensors(models: Edge) -> None:
    body = {"id": "42", "inputs": [tensor("rows", [1, 2, 3, 4], shape=[2, 2])]}
    answer = await post(models, "/v2/models/shop/sum/infer", body)
    output = {"name": "output", "shape": [1], "datatype": "FP64", "data": [10.0]}
    assert answer.json() == {
        "model_name": "shop/sum",
        "model_version": "v1-abcdef",
        "id": "42",
        "outputs": [{**output, "datatype": "INT64"}],
    }
    two = {
        "inputs": [
            tensor("text", ["a"], datatype="BYTES"),
            tensor("n", [3], shape=[1, 1], datatype="INT32"),
        ],
        "outputs": [{"name": "n"}],
    }
    answer = await post(models, "/v2/models/shop/two/infer", two)
    assert answer.json()["outputs"] == [
        {"name": "n", "shape": [1], "datatype": "INT64", "data": [3]}
    ]
    assert "id" not in answer.json()


@pytest.mark.parametrize(
    "body,told",
    [
        ({"inputs": []}, "inference request"),
        ({"inputs": [tensor("rows", [1], shape=[2])]}, "shape [2] has 2 elements"),
        ({"inputs": [tensor("rows", [1]), tensor("rows", [1])]}, "duplicate input name 'rows'"),
        ({"inputs": [tensor("other", [1])]}, "argument 'other'"),
        ({"inputs": [tensor("rows", [1], shape=[1, 1])], "outputs": ["x"]}, 'write [{"name": …}]'),
        (
            {"inputs": [tensor("rows", [1], shape=[1, 1])], "outputs": [{"name": "x"}]},
            "no output 'x': available are output",
        ),
    ],
)
async def test_what_is_wrong_is_said_in_the_member_error(
    models: Edge, body: Any, told: str
) -> None:
    answer = await post(models, "/v2/models/shop/sum/infer", body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]
    assert answer.json()["error"] == answer.json()["detail"]


async def test_what_the_function_raised_is_said_in_the_member_error(models: Edge) -> None:
    answer = await post(
        models,
        "/v2/models/shop/say/infer",
        {"inputs": [tensor("text", ["boom"], datatype="BYTES")]},
    )
    assert (answer.status_code, answer.json()["error"]) == (500, "ValueError: no")


# -- health and metadata ---------------------------------------------------------------------------


async def test_health_needs_no_key(models: Edge) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2"):
        assert (await models.client.get(models.url + path)).status_code == 200
    assert (await models.client.get(f"{models.url}/v2")).json()["name"] == "pilotlight"
    assert (await models.client.get(f"{models.url}/v2/models/shop/sum")).status_code == 401


async def test_a_model_is_described_and_is_ready_at_zero(models: Edge) -> None:
    returns = {"type": "object", "properties": {"score": {"type": "number"}}}
    models.add(
        split_route(
            spec_of("rate", methods=(takes(returns, text={"type": "string"}),)),
            {"v1": 100},
            named=["v2"],
            tags={"n": "v2"},
        )
    )
    told = (await get(models, "/v2/models/shop/rate")).json()
    assert (told["name"], told["versions"]) == ("shop/rate", ["v1", "v2"])
    assert told["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [1]}]
    assert told["outputs"] == [{"name": "score", "datatype": "FP64", "shape": [1]}]
    for path in (
        "/v2/models/shop/rate/ready",
        "/v2/models/shop/rate/versions/n/ready",
        "/v1/models/shop/rate",
    ):
        assert (await get(models, path)).json() == {"name": "shop/rate", "ready": True}
    assert (await get(models, "/v2/models/shop/nothing/ready")).status_code == 404
    assert not await models.settle()


async def test_a_path_that_is_no_models_says_what_one_is(models: Edge) -> None:
    answer = await get(models, "/v2/x")
    assert answer.status_code == 404
    assert "a model is a function's address" in answer.json()["detail"]
