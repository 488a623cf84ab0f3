"""Tensors whose data follow the JSON, and bodies that are one argument: the worker's own code reads
and writes them behind the whole gateway."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any

import httpx
import numpy as np
import pytest

from activator.http.payloads import TENSORS
from activator.settings import ActivatorSettings
from pilotlight.core.binary_tensors import encode
from pilotlight.errors import InvalidInput
from pilotlight.sdk.schema import arguments_schema, returns_schema
from pilotlight.spec.function import MethodSpec
from pilotlight.worker.user_code import serialization, tensors
from pilotlight.worker.user_code.arguments import Binder
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

HEAD = "inference-header-content-length"
OTHER_KEY = "pl_other"


def array(image: np.ndarray, scale: float = 1.0) -> Any:
    """Scale an array."""
    return {"image": image * image.dtype.type(scale), "shape": list(image.shape)}


def lists(rows: list[list[float]], names: list[str] | None = None, n: int = 0) -> Any:
    """Answer with the arguments."""
    return {"rows": rows, "names": names, "n": n}


def raw(data: bytes) -> bytes:
    """Reverse bytes."""
    return data[::-1]


FUNCTIONS = {f.__name__: f for f in (array, lists, raw)}


@pytest.fixture(name="behaviour")
def _behaviour() -> Behaviour:
    return working


async def working(request: WorkerRequest) -> WorkerAnswer:
    """Run the function that takes such arguments, as a worker does."""
    is_packed = request.headers["content-type"] == TENSORS.decode()
    for function in FUNCTIONS.values():
        binder = Binder(function)
        try:
            args, kwargs = (
                binder.from_tensors(bytearray(request.body))
                if is_packed
                else binder.from_json(request.body)
            )
        except InvalidInput:
            continue
        value = function(*args, **kwargs)
        found = tensors.answer(request.headers.get("accept", "").encode(), value)
        if found is None:
            return WorkerAnswer(body=serialization.as_json(value))
        return WorkerAnswer(body=found[1], content_type=found[0].decode())
    return WorkerAnswer(status=500, outcome="raised")


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(argument_check_s=30.0)  # a machine that runs tests may be slow


@pytest.fixture(name="models")
def _models(edge: Edge) -> Edge:
    for name, function in FUNCTIONS.items():
        schema, parameters = arguments_schema(function)
        method = MethodSpec(schema=schema, parameters=parameters, returns=returns_schema(function))
        edge.add(route_of(spec_of(name, methods=(method,))))
    edge.add_key(OTHER_KEY, tenant="t-000000000002")
    return edge


def given(name: str, datatype: str, shape: list[int], data: bytes, **more: Any) -> Any:
    parameters = {"binary_data_size": len(data), **more}
    return (
        {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters},
        data,
    )


def body_of(*inputs: Any, **more: Any) -> tuple[bytes, int]:
    head = json.dumps({"inputs": [entry for entry, _ in inputs], **more}).encode()
    return head + b"".join(data for _, data in inputs), len(head)


async def infer(
    edge: Edge, model: str, body: bytes, head: int | str, *, key: str = KEY, **headers: str
) -> httpx.Response:
    return await edge.client.post(
        f"{edge.url}/v2/models/shop/{model}/infer",
        content=body,
        headers={"authorization": f"Bearer {key}", HEAD: str(head), **headers},
    )


def outputs_of(answer: httpx.Response) -> dict[str, Any]:
    """Outputs by name: values, or bytes where they follow the JSON."""
    assert answer.status_code == 200, answer.text
    size = int(answer.headers.get(HEAD, len(answer.content)))
    assert (answer.headers["content-type"] == "application/octet-stream") == (
        HEAD in answer.headers
    )
    found, at = {}, size
    for output in json.loads(answer.content[:size])["outputs"]:
        length = output.get("parameters", {}).get("binary_data_size")
        if length is not None:
            found[output["name"]] = (
                output["datatype"],
                output["shape"],
                answer.content[at : at + length],
            )
            at += length
        else:
            found[output["name"]] = output["data"]
    assert at == len(answer.content)
    return found


BINARY = {"parameters": {"binary_data_output": True}}


@pytest.mark.parametrize("rows", [4, 200_000])
async def test_an_array_reaches_the_function_as_it_was_sent(models: Edge, rows: int) -> None:
    image = np.arange(rows * 3, dtype="f4").reshape(rows, 3)
    body, head = body_of(given("image", "FP32", [rows, 3], image.tobytes()), **BINARY)
    found = outputs_of(await infer(models, "array", body, head))
    assert found["image"] == ("FP32", [rows, 3], image.tobytes())
    assert found["shape"] == ("INT64", [2], np.array([rows, 3]).tobytes())
    (record,) = (await models.settle()).values()
    assert (record.function, record.status) == ("array", 200)


async def test_a_caller_chooses_what_is_binary(models: Edge) -> None:
    entry = given("image", "INT16", [2], np.array([1, 2], "i2").tobytes())
    asked = [{"name": "shape", "parameters": {"binary_data": True}}, {"name": "image"}]
    body, head = body_of(entry, outputs=asked)
    assert outputs_of(await infer(models, "array", body, head)) == {
        "shape": ("INT64", [1], np.array([2]).tobytes()),
        "image": [1, 2],
    }
    body, head = body_of(entry)
    assert outputs_of(await infer(models, "array", body, head)) == {"shape": [2], "image": [1, 2]}


async def test_json_and_binary_data_may_be_mixed(models: Edge) -> None:
    rows = np.array([[1, 2]], "f8")
    names = ({"name": "names", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}, b"")
    body, head = body_of(
        names,
        given("rows", "FP64", [1, 2], rows.tobytes()),
        given("n", "INT8", [1], b"\x07"),
    )
    assert outputs_of(await infer(models, "lists", body, head)) == {
        "rows": [1.0, 2.0],
        "names": ["a", "b"],
        "n": [7],
    }
    body, head = body_of(
        given("rows", "BF16", [1, 1], b"\x80\x3f"),
        given("names", "BYTES", [2], encode("BYTES", ["ä", "b"])),
        **BINARY,
    )
    found = outputs_of(await infer(models, "lists", body, head))
    assert found["names"] == ("BYTES", [2], encode("BYTES", ["ä", "b"]))
    assert found["rows"] == ("FP64", [1, 1], np.array([1.0]).tobytes())


async def test_an_array_in_json_has_the_type_of_its_tensor(models: Edge) -> None:
    tensor = {"name": "image", "datatype": "FP16", "shape": [2], "data": [1, 0.5]}
    answer = await models.client.post(
        f"{models.url}/v2/models/shop/array/infer",
        json={"inputs": [tensor], **BINARY},
        headers={"authorization": f"Bearer {KEY}"},
    )
    assert outputs_of(answer)["image"] == ("FP16", [2], np.array([1, 0.5], "f2").tobytes())


async def test_bodies_may_be_compressed(models: Edge) -> None:
    body, head = body_of(given("image", "UINT8", [50_000], bytes(50_000)), **BINARY)
    answer = await infer(models, "array", gzip.compress(body), head, **{"content-encoding": "gzip"})
    assert outputs_of(answer)["image"] == ("UINT8", [50_000], bytes(50_000))


@pytest.mark.parametrize(
    "inputs,more,told",
    [
        ([given("image", "FP32", [2], bytes(7))], {}, "'image': shape [2] of FP32 takes 8 bytes"),
        ([given("image", "FP32", [2**62, 2**62], b"")], {}, "more than 10^12 bytes"),
        ([given("image", "FP32", [2**64], b"")], {}, "whole numbers"),
        ([given("image", "FP99", [1], bytes(4))], {}, "must be one of BOOL"),
        ([given("image", "FP32", [1], bytes(4), binary_data_size=5)], {}, "only 4 bytes follow"),
        ([given("image", "FP32", [1], bytes(4), binary_data_size=-1)], {}, "a number of bytes"),
        ([given("image", "FP32", [1], bytes(4), binary_data_size=2**80)], {}, "a number of bytes"),
        (
            [given("image", "FP32", [0], bytes(4), binary_data_size=0)],
            {},
            "4 bytes follow the data",
        ),
        ([given("image", "FP32", [1], bytes(4), shared_memory_region="x")], {}, "shared_memory"),
        ([given("image", "FP32", [1], bytes(4))] * 2, {}, "duplicate input name 'image'"),
        ([given("image", "FP32", [1], bytes(4))] * 257, {}, "257 tensors, at most 256"),
        ([given("other", "FP32", [1], bytes(4))], {}, "argument 'other'"),
        ([given("image", "FP32", [1], bytes(4))], {"outputs": [{"name": "x"}]}, "no output 'x'"),
        (
            [given("image", "FP32", [1], bytes(4))],
            {"outputs": [{"name": "x", "parameters": {"classification": 3}}]},
            "classification is not supported",
        ),
    ],
)
async def test_what_is_wrong_is_said_with_the_tensor_and_the_bound(
    models: Edge, inputs: list[Any], more: dict[str, Any], told: str
) -> None:
    body, head = body_of(*inputs, **more)
    answer = await infer(models, "array", body, head)
    assert (answer.status_code, told in answer.json()["error"]) == (400, True), answer.text


@pytest.mark.parametrize(
    "entry,told",
    [
        (given("rows", "FP32", [1, 250_001], bytes(4 * 250_001)), "at most 250000"),
        (given("rows", "FP32", [1] * 32, bytes(4)), "argument 'rows'"),
        (given("rows", "BYTES", [1, 1], b"\x01\0\0\0\xff"), "is not UTF-8"),
        (given("rows", "BYTES", [1, 1], b"\x09\0\0\0\xff"), "ends at byte 13"),
        (given("rows", "BYTES", [1, 1], encode("BYTES", ["a"])), "argument 'rows'"),
    ],
)
async def test_what_becomes_json_is_checked_like_json(models: Edge, entry: Any, told: str) -> None:
    body, head = body_of(entry)
    answer = await infer(models, "lists", body, head)
    assert (answer.status_code, told in answer.json()["error"]) == (400, True), answer.text
    assert not await models.settle(), "nothing was started"


@pytest.mark.parametrize("head", ["0", "-1", "x", "99999", "9" * 40, "1"])
async def test_a_size_of_the_json_that_is_none_is_refused(models: Edge, head: str) -> None:
    body, _ = body_of(given("image", "FP32", [1], bytes(4)))
    answer = await infer(models, "array", body, head)
    assert (answer.status_code, "error" in answer.json()) == (400, True)


async def test_another_tenants_model_does_not_exist(models: Edge) -> None:
    body, head = body_of(given("image", "FP32", [1], bytes(4)))
    answer = await infer(models, "array", body, head, key=OTHER_KEY)
    assert (answer.status_code, "no function" in answer.json()["error"]) == (404, True)


async def test_a_large_list_does_not_hold_up_the_event_loop(models: Edge) -> None:
    body, head = body_of(given("rows", "FP32", [1, 200_000], bytes(800_000)))
    longest = 0.0
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        nonlocal longest
        while True:
            before = loop.time()
            await asyncio.sleep(0)
            longest = max(longest, loop.time() - before)

    await infer(models, "lists", body, head)  # starts the process for such checks
    watching = asyncio.create_task(watch())
    checks = models.arguments
    made = await checks.translate(
        {
            "verb": "infer",
            "model": "shop/lists",
            "parameters": ("rows",),
            "schema": {"properties": {"rows": {"type": "array"}}},
            "revision": "v1",
            "memo": None,
            "head_bytes": head,
            "is_packed": False,
        },
        body,
        tenant="t-000000000001",
        is_answer=False,
    )
    watching.cancel()
    assert len(json.loads(made.body)["rows"][0]) == 200_000
    assert longest < 0.1, "200,000 elements take longer than that to become JSON here"


# -- a body that is the argument -------------------------------------------------------------------
async def invoke(edge: Edge, name: str, body: bytes, verb: str = "invoke", **headers: str) -> Any:
    return await edge.client.post(
        f"{edge.url}/v1/functions/shop/{name}:{verb}",
        content=body,
        headers={"authorization": f"Bearer {KEY}", **headers},
    )


@pytest.mark.parametrize("size", [0, 3, 1_000_000])
async def test_a_body_of_bytes_is_the_argument(models: Edge, size: int) -> None:
    data = b"ab\xff"[:size] + bytes(max(0, size - 3))
    octets = {"content-type": "application/octet-stream"}
    for _ in range(2):  # the second one could take the fast path
        answer = await invoke(models, "raw", data, **octets)
        assert (answer.status_code, answer.content) == (200, data[::-1])
        assert answer.headers["content-type"] == "application/octet-stream"
    refused = await invoke(models, "lists", b'{"rows": [[1]]}', **octets)
    assert refused.status_code == 200, "JSON, where no parameter takes bytes"


async def test_a_body_of_an_array_is_the_argument(models: Edge) -> None:
    file = io.BytesIO()
    np.save(file, np.array([[1, 2]], "i8"))
    npy = {"content-type": "application/x-npy"}
    answer = await invoke(models, "array", file.getvalue(), **npy)
    assert answer.json() == {"image": [[1, 2]], "shape": [1, 2]}
    refused = await invoke(models, "lists", file.getvalue(), **npy)
    assert (refused.status_code, "numpy.ndarray" in refused.json()["detail"]) == (415, True)
    refused = await invoke(models, "array", b"junk", **npy)
    assert (refused.status_code, "numpy.save" in refused.json()["detail"]) == (400, True)


async def test_bytes_are_submitted_too(models: Edge) -> None:
    octets = {"content-type": "application/octet-stream"}
    submitted = await invoke(models, "raw", b"ab\xff", "submit", **octets)
    assert submitted.status_code == 202
    place = f"{models.url}/v1/calls/{submitted.json()['id']}?wait_s=20"
    done = await models.client.get(place, headers={"authorization": f"Bearer {KEY}"})
    record = done.json()
    assert (record["state"], record["result_encoding"]) == ("SUCCEEDED", "base64")


async def test_callers_cannot_send_what_workers_get(models: Edge) -> None:
    refused = await invoke(models, "array", b"x", **{"content-type": TENSORS.decode()})
    assert (refused.status_code, "not valid JSON" in refused.json()["detail"]) == (400, True)
