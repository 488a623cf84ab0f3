"""What translating the protocols of model servers and of OpenAI may take of the event loop: more is
refused before it is read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from activator.arguments import tensors
from activator.arguments.translations import MAX_VALUES
from activator.settings import ActivatorSettings
from pilotlight import errors
from pilotlight.validation.json_size import require_few_values
from tests.activator.conftest import KEY, Edge
from tests.activator.open_inference.test_api import post, takes
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of


async def _numbers(_request: WorkerRequest) -> WorkerAnswer:
    return WorkerAnswer(body=b"[" + b"0," * MAX_VALUES + b"0]")


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(argument_check_s=30.0)  # a machine that runs tests may be slow


@pytest.fixture(name="models")
def _models(edge: Edge) -> Edge:
    for name in ("tensors", "numbers"):
        edge.add(route_of(spec_of(name, methods=(takes(x={}),))))
    edge.fleet.behaviours["numbers"] = _numbers
    return edge


@pytest.mark.parametrize(
    "inputs",
    [
        [{"name": "x", "shape": [10_000] + [1] * 31, "datatype": "INT8", "data": [0] * 10_000}],
        [
            {"name": f"x{n}", "shape": [100] + [1] * 31, "datatype": "INT8", "data": [0] * 100}
            for n in range(100)
        ],
        [{"name": "x", "shape": [10**18, 10**18, 0], "datatype": "INT8", "data": []}],
    ],
    ids=["one", "many", "none"],
)
async def test_shapes_that_ask_for_many_lists_are_refused_before_any_is_made(
    models: Edge, inputs: list[Any]
) -> None:
    began_s = time.process_time()
    answer = await post(models, "/v2/models/shop/tensors/infer", {"inputs": inputs})

    assert answer.status_code == 400
    assert f"at most {tensors.MAX_LISTS}" in answer.json()["error"]
    assert time.process_time() - began_s < 1
    assert models.fleet.started == []


@pytest.mark.parametrize(
    "path", ["/v1/models/shop/numbers:predict", "/v2/models/shop/numbers/infer"]
)
@pytest.mark.parametrize(
    "row",
    [
        b"[" + b",".join([b"[]"] * 2000) + b"]",
        b"{" + b",".join([b'"a":0'] * 2000) + b"}",
        b"0," * 2000 + b"0",
    ],
)
async def test_json_of_many_values_is_refused_before_it_is_read(
    models: Edge, path: str, row: bytes
) -> None:
    body = b'{"instances":[' + b",".join([row] * 400) + b'], "inputs":[]}'
    answer = await models.client.post(
        models.url + path, content=body, headers={"authorization": f"Bearer {KEY}"}
    )

    assert answer.status_code == 413
    assert f"more than {MAX_VALUES} values" in answer.json()["detail"]
    assert answer.json()["limit_values"] == MAX_VALUES
    assert models.fleet.started == []


async def test_an_answer_of_many_values_is_not_translated(models: Edge) -> None:
    answer = await post(models, "/v1/models/shop/numbers:predict", {"instances": [{"x": 1}]})

    assert answer.status_code == 413
    assert "by its own name" in answer.json()["detail"]


class TestAnswersThatWait:
    """An answer is in memory until it is translated, and counts so long."""

    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings(argument_check_s=30.0, tenant_waiting_bytes=2**20)

    @pytest.fixture(name="size")
    def _size(self, models: Edge) -> list[int]:
        size = [0]

        async def answer(_request: WorkerRequest) -> WorkerAnswer:
            return WorkerAnswer(body=b'"' + b"x" * size[0] + b'"')

        models.fleet.behaviours["tensors"] = answer
        return size

    async def test_an_answer_takes_of_the_room_that_its_tenants_bodies_have(
        self, models: Edge, size: list[int]
    ) -> None:
        size[0] = 2**20
        answer = await post(models, "/v1/models/shop/tensors:predict", {"instances": [{"x": 1}]})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), answer.text
        assert "tenant_waiting_bytes" in answer.json()["detail"]

    async def test_its_room_is_given_back(self, models: Edge, size: list[int]) -> None:
        size[0] = 10_000
        answers = [
            await post(models, "/v1/models/shop/tensors:predict", {"instances": [{"x": 1}]})
            for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert models.gateway.bodies.bytes_of == {}


class TestAnswersAboveTheBound:
    @pytest.fixture(name="settings")
    def _settings(self) -> ActivatorSettings:
        return ActivatorSettings(argument_check_s=30.0, tenant_waiting_bytes=2**26)

    @pytest.mark.parametrize(
        "path", ["/v1/models/shop/tensors:predict", "/v2/models/shop/tensors/infer"]
    )
    async def test_an_answer_above_the_bound_is_refused(self, models: Edge, path: str) -> None:
        async def answer(_request: WorkerRequest) -> WorkerAnswer:
            return WorkerAnswer(body=b'"' + b"x" * 16 * 1024**2 + b'"')

        models.fleet.behaviours["tensors"] = answer
        given = {"name": "x", "shape": [1], "datatype": "INT8", "data": [1]}
        answered = await post(
            models, path, {"inputs": [given]} if "infer" in path else {"instances": [{"x": 1}]}
        )
        assert (answered.status_code, answered.json()["limit_bytes"]) == (413, 16 * 1024**2)
        assert models.gateway.bodies.bytes_of == {}


async def longest_hold_s(work: Coroutine[Any, Any, httpx.Response]) -> float:
    """The longest time that anything else had to wait meanwhile, as CPU time of the loop's thread:
    other processes do not count."""
    task, longest_s, last_s = asyncio.ensure_future(work), 0.0, time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        now_s = time.thread_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert (await task).status_code == 200, task.result().text[:300]
    return longest_s


@pytest.mark.slow
@pytest.mark.parametrize("what", ["arguments", "answer"])
@pytest.mark.parametrize(
    "path",
    ["/v1/models/shop/large:predict", "/v2/models/shop/large/infer"],
    ids=["predict", "infer"],
)
async def test_translating_what_is_just_within_the_bounds_holds_nobody_up(
    models: Edge, path: str, what: str
) -> None:
    """Slow: megabytes of JSON are made, sent and read."""
    floats = [0.1234567890123456 + n / 1e7 for n in range(tensors.MAX_ELEMENTS - 100)]
    models.add(route_of(spec_of("large", methods=(takes(x={}, y={}),))))
    answer = WorkerAnswer(body=json.dumps([floats, floats] if what == "answer" else 1).encode())

    async def told(_request: WorkerRequest) -> WorkerAnswer:
        return answer

    models.fleet.behaviours["large"] = told
    values = floats if what == "arguments" else [1.5]
    given = [
        {"name": name, "shape": [len(values)], "datatype": "FP64", "data": values} for name in "xy"
    ]
    body = json.dumps(
        {"inputs": given} if "infer" in path else {"instances": [{"x": values, "y": values}]}
    ).encode()

    longest_s = await longest_hold_s(
        models.client.post(
            models.url + path,
            content=body,
            headers={"authorization": f"Bearer {KEY}"},
            timeout=50,
        )
    )

    assert longest_s < 0.2, "translated in the loop: 0.4 s and more"


async def test_an_image_is_within_the_bound(models: Edge) -> None:
    image = [[[0.5] * 3] * 224] * 224
    flat = {
        "name": "x",
        "shape": [1, 224, 224, 3],
        "datatype": "FP32",
        "data": [0.5] * (224 * 224 * 3),
    }

    assert (
        await post(models, "/v1/models/shop/tensors:predict", {"instances": [{"x": image}]})
    ).status_code == 200
    assert (
        await post(models, "/v2/models/shop/tensors/infer", {"inputs": [flat]})
    ).status_code == 200


@pytest.mark.parametrize("text", [b"a,[{", b"\\\\", b'\\"[', b'\\\\\\",{'])
def test_what_stands_in_strings_does_not_count(text: bytes) -> None:
    require_few_values(b'{"a":"' + text * 50_000 + b'"}', 10, "")

    with pytest.raises(errors.TooLarge, match="more than 10 values"):
        require_few_values(b'{"a":"' + text * 50_000 + b'","b":[[],[]]}', 10, "")
