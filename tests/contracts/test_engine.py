"""What the platform relies on of an inference server, held against the fake one and the real vLLM
with a small model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.tiny_llama import make
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec, Resources, WeightsSpec
from pilotlight.worker.engine import arguments, reference_answer
from pilotlight.worker.engine.client import ServerClient
from pilotlight.worker.engine.process_tree import EngineProcess
from tests.fakes.engine.environment import HERE

START_S = 300.0
"""The real one takes 20 to 30 s on a free machine, minutes on one that is full of tests."""
MODEL_LEN, SEQS = 256, 2
ENGINE = EngineSpec(model="m", max_model_len=MODEL_LEN, max_num_seqs=SEQS, kv_bytes=16 << 20)
SPEC = FunctionSpec(
    name="assistant",
    kind=FunctionKind.ENGINE,
    module="",
    qualname="",
    bundle="0" * 64,
    methods=(MethodSpec(),),
    weights=(WeightsSpec(name="m", manifest="0" * 64),),
    engine=ENGINE,
    resources=Resources(cpu=2.0),
)


class Served:
    """A running engine and a client of it."""

    def __init__(self, path: str) -> None:
        self.asker = ServerClient(path)
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=path), base_url="http://engine", timeout=60.0
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        """One question."""
        return self.client.post(path, json={"model": "assistant", **body})

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream; the last one is the word [DONE]."""
        asked = {"model": "assistant", "stream": True, **body}
        with self.client.stream("POST", path, json=asked) as answer:
            datas = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]

    def metric(self, name: str) -> float:
        """One figure."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{")
        )

    def wait_metric(self, name: str, value: float) -> None:
        """Until the figure is that; it is told only when asked."""
        deadline = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}"
            time.sleep(0.05)


@contextlib.contextmanager
def serving(python: str, environ: Mapping[str, str], site: list[str]) -> Iterator[Served]:
    """The server as a worker starts it."""
    directory = Path(tempfile.mkdtemp(prefix="pl"))
    model, path = make(directory / "model"), str(directory / "engine.sock")
    command = arguments.command(SPEC, python=python, weights={"m": str(model)}, socket=path)
    tree = EngineProcess(
        command,
        arguments.environment(SPEC, environ, site=site, chosen=()),
        directory=str(directory),
    )
    try:
        served = Served(path)
        served.asker.wait_healthy(within_s=START_S, require_alive=tree.require_alive)
        with served.client:
            yield served
    finally:
        tree.end(10.0)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(
    scope="module",
    params=["fake", pytest.param("real", marks=[pytest.mark.vllm, pytest.mark.timeout(600)])],
)
def engine(request: pytest.FixtureRequest) -> Iterator[Served]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if request.param == "fake":
        with serving(
            sys.executable,
            {**environ, "FAKE_ENGINE_TOKEN_S": "0.002"},
            [str(HERE / "site"), str(HERE.parents[2])],
        ) as served:
            yield served
        return
    directory: Path = request.getfixturevalue("vllm_env")
    with serving(str(directory / "bin/python"), environ, []) as served:
        yield served


def test_it_says_what_it_serves(engine: Served) -> None:
    (model,) = engine.client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == ("assistant", MODEL_LEN)


def test_greedy_answers_are_always_the_same(engine: Served) -> None:
    learned = reference_answer.learn(ENGINE, "assistant", engine.asker, within_s=60)
    assert len(learned.value) == reference_answer.TOKENS
    learned.require_same(
        reference_answer.ask(ENGINE, "assistant", engine.asker, within_s=60, tokens=2)
    )


def test_a_chat_tells_its_tokens_and_why_it_ended(engine: Served) -> None:
    body = engine.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        temperature=0,
    ).json()

    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "length"
    usage = body["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert "cached_tokens" in usage["prompt_tokens_details"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_counts_as_it_goes_and_ends_with_its_usage(engine: Served, path: str) -> None:
    asked: dict[str, Any] = (
        {"prompt": "hello"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last, done = engine.events(
        path, max_tokens=5, temperature=0, stream_options=options, **asked
    )

    assert done == "[DONE]"
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


def test_without_being_asked_a_stream_tells_no_usage(engine: Served) -> None:
    *events, _ = engine.events("/v1/completions", prompt="hello", max_tokens=2)
    assert all(not event.get("usage") for event in events)


def test_the_same_beginning_is_found_in_the_cache(engine: Served) -> None:
    prompt = list(range(200, 340))
    before = engine.metric("prefix_cache_hits_total")
    for _ in range(2):
        body = engine.post("/v1/completions", prompt=prompt, max_tokens=1).json()

    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert engine.metric("prefix_cache_hits_total") > before


@pytest.mark.parametrize(
    "body, status, parameter",
    [
        ({"prompt": [5] * (MODEL_LEN + 50), "max_tokens": 1}, 400, "input_tokens"),
        ({"prompt": [5], "max_tokens": 100_000}, 400, "max_tokens"),
        ({"prompt": [5], "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": [5], "max_tokens": 1, "model": "nobody"}, 404, "model"),
    ],
)
def test_what_it_cannot_do_it_refuses_in_openais_shape(
    engine: Served, body: dict[str, Any], status: int, parameter: str
) -> None:
    answer = engine.client.post("/v1/completions", json={"model": "assistant", **body})

    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (status, parameter)
    assert error["message"]


def test_a_body_that_is_no_json_is_refused(engine: Served) -> None:
    answer = engine.client.post(
        "/v1/chat/completions", content=b"{bad", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


def test_tokens_are_counted_without_generating(engine: Served) -> None:
    body = engine.post("/tokenize", prompt="hello there").json()
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == MODEL_LEN
    assert "prompt" in engine.post("/detokenize", tokens=body["tokens"]).json()


def test_the_id_of_a_request_is_the_callers(engine: Served) -> None:
    headers = {"x-request-id": "c-123"}
    answer = engine.client.post(
        "/v1/completions",
        json={"model": "assistant", "prompt": [5], "max_tokens": 1},
        headers=headers,
    )
    assert answer.json()["id"].startswith("cmpl-c-123")


def test_a_caller_that_leaves_frees_its_place(engine: Served) -> None:
    long = {"prompt": [5], "max_tokens": MODEL_LEN - 2, "stream": True, "ignore_eos": True}
    with engine.client.stream(
        "POST", "/v1/completions", json={"model": "assistant", **long}
    ) as answer:
        assert next(answer.iter_lines()).startswith("data: ")

    engine.wait_metric("num_requests_running", 0)
    assert engine.metric("kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    "name",
    [
        "num_requests_waiting",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
    ],
)
def test_its_figures_have_their_names(engine: Served, name: str) -> None:
    assert engine.metric(name) >= 0


def test_nothing_that_could_change_it_is_open(engine: Served) -> None:
    assert engine.client.get("/version").json()["version"].startswith("0.")
    assert engine.client.get("/health").status_code == 200
