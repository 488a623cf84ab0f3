"""Proofs of language models: their server's command line, sleep, and the limits of their calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from activator.llm.token_admission import TokenAdmission
from activator.worker_client import engine_sleep
from pilotlight import errors
from pilotlight.spec.engines import Task
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.record_json import from_json
from pilotlight.worker.engine import arguments
from snapshotter.errors import SnapshotterError
from snapshotter.gpus.grants import GpuGrants
from tests.activator.llm.asking import Crowd, Door, chat, model
from tests.activator.llm.test_engine_slots import _turns, engine_of
from tests.fakes.fake_nvml import L4, gpus, inventory_of
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.functions.worker.engine.test_arguments import function, value
from tests.options.contract import CLUSTER, LOCAL, proves
from tests.options.test_scaling import refused_by_name
from tests.options.world import VLLM, launched, pod

WEIGHTS = {"m": "/w/m", "poet": "/w/poet"}


def command(made: FunctionSpec, fleet: str) -> list[str]:
    """What a worker executes, from what its node is given."""
    told = from_json(FunctionSpec, launched(made, fleet).entry)
    return arguments.command(told, python="/py", weights=WEIGHTS, socket="/s")


@proves(
    "EngineSpec.model",
    "EngineSpec.max_model_len",
    "EngineSpec.max_num_seqs",
    "EngineSpec.lora",
    "EngineSpec.args",
    "EngineSpec.kv_bytes",
    "EngineSpec.parallel",
)
def test_the_server_is_started_with_what_is_declared(fleet: str) -> None:
    made = function(
        model="m",
        max_model_len=2048,
        max_num_seqs=9,
        lora={"poet": "poet"},
        args={"dtype": "bfloat16"},
        kv_bytes=1 << 26,
        parallel=2,
        gpu=("H100", "H100"),
    )
    words = command(made, fleet)
    assert value(words, "--model") == "/w/m"
    assert value(words, "--max-model-len") == "2048"
    assert value(words, "--max-num-seqs") == "9"
    assert value(words, "--lora-modules") == "poet=/w/poet"
    assert value(words, "--dtype") == "bfloat16"
    assert value(words, "--kv-cache-memory-bytes") == str(1 << 26)
    assert value(words, "--tensor-parallel-size") == "2"


@proves("EngineSpec.task")
def test_the_task_is_the_servers(fleet: str) -> None:
    assert "--runner" not in command(function(), fleet)
    assert value(command(function(task=Task.EMBED), fleet), "--runner") == "pooling"


@proves("EngineSpec.sleep_level", fleets=(LOCAL,))
@pytest.mark.parametrize("level", [1, 2])
async def test_a_suspended_engine_sleeps_at_its_level(
    fleet: str, short_tmp: Path, level: int
) -> None:
    asked: list[str] = []

    async def note(request: WorkerRequest) -> WorkerAnswer:
        asked.append(request.path)
        return WorkerAnswer()

    worker = await FakeWorker(short_tmp / "w.sock", note).start()
    made = function(gpu=("H100",), sleep_level=level)
    await engine_sleep.suspend(made, str(worker.path))
    await worker.aclose()
    assert asked == [f"/sleep?level={level}"]


@proves("EngineSpec.gpu_bytes", fleets=(LOCAL,))
def test_gpus_that_a_model_does_not_fit_on_are_refused(fleet: str) -> None:
    node = GpuGrants(inventory_of(*gpus(L4)), tuple)
    assert node.allocate(launched(function(gpu=("L4",), gpu_bytes=20 << 30), fleet)) is not None
    with pytest.raises(SnapshotterError, match=r"need 30\.0 GiB of GPU memory"):
        node.allocate(launched(function(gpu=("L4",), gpu_bytes=30 << 30), fleet))


@proves("EngineSpec.gpu_bytes", fleets=(CLUSTER,))
def test_gpus_that_a_model_fits_on_are_preferred(fleet: str) -> None:
    found = pod(function(gpu=("L4",), gpu_bytes=30 << 30))["affinity"]["nodeAffinity"]
    preferred = found["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred[0]["preference"]["matchExpressions"][0]["values"] == [str(30 * 1024 - 1)]


@proves("EngineSpec.sleep_level", fleets=(CLUSTER,))
def test_a_level_of_sleep_is_refused(fleet: str) -> None:
    refused_by_name(function(sleep_level=1), "sleep_level")


@proves("EngineSpec.environment")
def test_the_environment_is_the_nodes_or_an_image(fleet: str) -> None:
    assert launched(function(environment="vllm"), fleet).engine == "vllm"
    if fleet == CLUSTER:
        assert pod(function(environment="vllm"))["containers"][0]["image"] == VLLM
        with pytest.raises(errors.InvalidInput, match="environment 'other'"):
            pod(function(environment="other"))


@proves("TokenLimits.max_input_tokens", "TokenLimits.max_output_tokens")
async def test_calls_beyond_the_limits_are_refused(fleet: str) -> None:
    desk = TokenAdmission(waiting_of=Crowd().of)
    short = Door(model(max_model_len=10_000, max_input_tokens=5, max_output_tokens=100))
    for body, bound in (
        (chat("word " * 500), "max_input_tokens"),
        (chat(max_tokens=101), "max_output_tokens"),
    ):
        with pytest.raises(errors.InvalidInput) as caught:
            await desk.admit(short.entry(), "/v1/chat/completions", body, began_ns=0)
        assert caught.value.detail["bound"] == bound


@proves("TokenLimits.default_output_tokens")
async def test_calls_that_name_no_length_have_the_default(fleet: str) -> None:
    desk = TokenAdmission(waiting_of=Crowd().of)
    door = Door(model(default_output_tokens=77))
    use = await desk.admit(door.entry(), "/v1/chat/completions", chat(), began_ns=0)
    assert use.max_out == 77


@proves("TokenLimits.pressured_output_tokens", "TokenLimits.pressured_above")
async def test_answers_are_cut_while_calls_wait(fleet: str) -> None:
    crowd = Crowd()
    desk = TokenAdmission(waiting_of=crowd.of)
    door = Door(model(pressured_output_tokens=32, pressured_above=4))
    for waiting, cap in ((3, None), (4, 32)):
        crowd.waiting = waiting
        use = await desk.admit(
            door.entry(), "/v1/chat/completions", chat(max_tokens=500), began_ns=0
        )
        assert use.cap == cap


@proves("TokenLimits.max_streams")
async def test_streams_of_a_function_are_bounded(fleet: str) -> None:
    async with engine_of(max_streams=3) as engine:
        for _ in range(8):
            engine.call("a", 10)
        await _turns()
        assert (engine.throttler.in_flight, engine.throttler.waiting) == (3, 5)
        await engine.go_until(engine.clock() + 5)


@proves("TokenLimits.max_streams_per_tenant")
async def test_streams_of_a_tenant_are_bounded(fleet: str) -> None:
    desk = TokenAdmission(waiting_of=Crowd().of)
    door = Door(model(max_streams_per_tenant=1))
    await desk.admit(door.entry(), "/v1/chat/completions", chat(), began_ns=0)
    with pytest.raises(errors.OverQuota, match="max_streams_per_tenant"):
        await desk.admit(door.entry("k-2"), "/v1/chat/completions", chat(), began_ns=0)
