"""The server's command line and environment, from what a function says of its engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.spec.engines import EngineSpec, Task
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec, Resources, WeightsSpec
from pilotlight.worker.engine import arguments

WEIGHTS = {"m": "/w/m", "poet": "/w/poet"}


def function(
    *, gpu: tuple[str, ...] = (), cpu: float = 2.0, env: dict[str, str] | None = None, **engine: Any
) -> FunctionSpec:
    """A function of kind ENGINE."""
    spec = EngineSpec(**{"model": "m", "max_model_len": 512, **engine})
    return FunctionSpec(
        name="assistant",
        kind=FunctionKind.ENGINE,
        module="",
        qualname="",
        bundle="0" * 64,
        methods=(MethodSpec(),),
        weights=tuple(WeightsSpec(name=name, manifest="0" * 64) for name in WEIGHTS),
        engine=spec,
        resources=Resources(cpu=cpu, gpu=gpu, gpu_count=max(len(gpu), spec.parallel if gpu else 0)),
        env=env or {},
    )


def command(spec: FunctionSpec) -> list[str]:
    """What is executed, without the interpreter."""
    return arguments.command(spec, python="/py", weights=WEIGHTS, socket="/s")[1:]


def value(words: list[str], flag: str) -> str:
    """What follows a flag."""
    return words[words.index(flag) + 1]


def test_the_stock_server_is_executed_with_what_the_function_says() -> None:
    words = command(function(max_num_seqs=8, kv_bytes=64 << 20))

    assert words[:3] == ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(words, "--model") == "/w/m"
    assert value(words, "--served-model-name") == "assistant"
    assert value(words, "--uds") == "/s"
    assert value(words, "--max-model-len") == "512"
    assert value(words, "--max-num-seqs") == "8"
    assert value(words, "--kv-cache-memory-bytes") == str(64 << 20)


def test_without_a_size_the_cache_is_the_engines_own_choice() -> None:
    assert "--kv-cache-memory-bytes" not in command(function())


def test_on_a_processor_nothing_is_compiled_and_the_model_runs_in_the_process_that_schedules_it() -> (
    None
):
    words = command(function())

    assert "--enforce-eager" in words
    assert value(words, "--distributed-executor-backend") == "uni"
    assert "--enable-sleep-mode" not in words


def test_on_a_gpu_it_can_sleep() -> None:
    words = command(function(gpu=("H100",)))

    assert "--enable-sleep-mode" in words
    assert "--enforce-eager" not in words


def test_several_gpus_are_one_tensor_parallel_group_unless_the_user_splits_them_otherwise() -> None:
    assert value(command(function(gpu=("H100",), parallel=8)), "--tensor-parallel-size") == "8"
    split = command(
        function(
            gpu=("H100",), parallel=8, args={"tensor-parallel-size": 4, "pipeline-parallel-size": 2}
        )
    )
    assert split.count("--tensor-parallel-size") == 1
    assert value(split, "--pipeline-parallel-size") == "2"


def test_a_model_that_embeds_is_run_as_one() -> None:
    words = command(function(task=Task.EMBED))
    assert value(words, "--runner") == "pooling"
    assert value(words, "--convert") == "embed"


def test_adapters_are_served_under_their_own_names() -> None:
    words = command(function(lora={"poet": "poet"}))
    assert "--enable-lora" in words
    assert value(words, "--lora-modules") == "poet=/w/poet"


def test_further_arguments_come_last_in_the_servers_own_notation() -> None:
    more = {
        "enforce-eager": False,
        "tool-call-parser": "hermes",
        "rope": {"f": 2},
        "many": ["a", 1],
        "quiet": True,
        "none": None,
    }
    words = command(function(args=more))

    assert words[-9:] == [
        "--no-enforce-eager",
        "--tool-call-parser",
        "hermes",
        "--rope",
        '{"f": 2}',
        "--many",
        "a",
        "1",
        "--quiet",
    ]
    assert "--enforce-eager" not in words
    assert "--none" not in words


@pytest.mark.parametrize("name", ["uds", "port", "model", "served-model-name", "api-key"])
def test_where_the_server_is_and_what_it_is_called_is_not_the_users(name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        command(function(args={name: "x"}))


def test_weights_that_were_not_brought_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"'m'.*other"):
        arguments.command(function(), python="/py", weights={"other": "/w"}, socket="/s")


def environment(spec: FunctionSpec, base: dict[str, str] | None = None) -> dict[str, str]:
    """What the server sees."""
    return arguments.environment(
        spec,
        base or {"PATH": "/bin", "OMP_NUM_THREADS": "1"},
        site=["/a", "/b"],
        chosen=["OMP_NUM_THREADS"],
    )


def test_nothing_is_reported_and_nothing_is_fetched() -> None:
    env = environment(function())
    assert (env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"], env["HF_HUB_OFFLINE"]) == (
        "1",
        "1",
        "1",
    )
    assert env["PYTHONPATH"] == "/a:/b"


def test_it_has_the_cores_of_the_function_and_not_the_one_thread_of_other_workers() -> None:
    assert environment(function(cpu=3.5))["OMP_NUM_THREADS"] == "3"
    assert environment(function(cpu=0.5))["OMP_NUM_THREADS"] == "1"


def test_what_is_the_workers_own_is_not_the_engines() -> None:
    assert "PILOTLIGHT_INSTANCE" not in environment(function(), {"PILOTLIGHT_INSTANCE": "i-1"})


def test_an_engine_sees_the_gpus_that_the_slot_was_granted() -> None:
    """A revision of an earlier release may declare others."""
    declared = function(env={"CUDA_VISIBLE_DEVICES": "0"})
    granted = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert environment(declared, granted)["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert "CUDA_VISIBLE_DEVICES" not in environment(declared)


def test_what_the_user_sets_wins() -> None:
    assert environment(function(env={"OMP_NUM_THREADS": "7"}))["OMP_NUM_THREADS"] == "7"


def test_sleeping_needs_the_servers_own_switch() -> None:
    assert environment(function(gpu=("H100",)))["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in environment(function())


def test_a_function_without_an_engine_is_refused() -> None:
    plain = replace(function(), kind=FunctionKind.FUNCTION, engine=None)
    with pytest.raises(InvalidInput, match="has no engine specification"):
        command(plain)
