"""`app.vllm(…)`: what is declared, what a build makes of it, and what is refused before anything is
sent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import pilotlight
from examples import tiny_llama
from pilotlight.controller.registry.launch_spec import launch_spec
from pilotlight.errors import InvalidInput
from pilotlight.packaging.archive import pack_files
from pilotlight.packaging.build import build
from pilotlight.spec.engines import Task
from pilotlight.spec.function import GIB, MIB, FunctionKind, FunctionSpec
from pilotlight.spec.record_json import from_json, to_json


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(
        tmp_path_factory.mktemp("models") / "tiny", hidden=64, layers=1, max_len=1024
    )


def built(model: Path, **options: Any) -> FunctionSpec:
    app = pilotlight.App("llm")
    app.vllm("assistant", weights=pilotlight.Weights(str(model)), **options)
    with build(app) as everything:
        return everything.functions[0]


def test_one_line_becomes_a_function_of_a_model(model: Path) -> None:
    spec = built(
        model,
        max_model_len=512,
        max_num_seqs=4,
        limits=pilotlight.TokenLimits(max_output_tokens=64),
    )

    assert spec.kind is FunctionKind.ENGINE
    assert spec.engine is not None
    assert (spec.engine.model, spec.engine.max_model_len, spec.engine.max_num_seqs) == (
        model.name,
        512,
        4,
    )
    assert spec.scaling.max_inputs == 4
    assert spec.limits is not None
    assert spec.limits.max_output_tokens == 64
    assert from_json(FunctionSpec, json.loads(json.dumps(to_json(spec)))) == spec


def test_its_length_is_the_models_own_unless_said(model: Path) -> None:
    spec = built(model)

    assert spec.engine is not None
    assert spec.engine.max_model_len == 1024


def test_on_a_cpu_the_cache_has_the_size_that_is_promised_and_memory_follows(model: Path) -> None:
    """One layer, one KV head of 64: a token takes 2 * 64 * 2 bytes."""
    spec = built(model, max_model_len=1024, max_num_seqs=256)

    assert spec.engine is not None
    assert spec.engine.kv_bytes == 256 * 1024 * 256
    assert spec.resources.memory_bytes == 4 * GIB


def test_a_small_cache_keeps_a_floor(model: Path) -> None:
    spec = built(model, max_model_len=128, max_num_seqs=1)

    assert spec.engine is not None
    assert spec.engine.kv_bytes == 16 * MIB


def test_the_file_that_declares_it_is_not_part_of_its_revision(model: Path) -> None:
    """Its bundle is empty: an engine is not booted again because a comment changed."""
    spec = built(model)

    assert (spec.module, spec.qualname, spec.pickled) == ("", "", None)
    assert spec.bundle == pack_files({}).digest
    assert spec.digest() == built(model).digest()


def adapter(directory: Path, *, rank: int) -> Path:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (directory / "adapter_model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    return directory


def test_adapters_have_room_at_once_for_the_largest_of_their_ranks(
    model: Path, tmp_path: Path
) -> None:
    lora = {
        name: pilotlight.Weights(str(adapter(tmp_path / name, rank=rank)))
        for name, rank in (("one", 8), ("two", 40))
    }

    spec, own = built(model, lora=lora), built(model, lora=lora, engine_args={"max_loras": 1})

    assert spec.engine is not None
    assert own.engine is not None
    assert dict(spec.engine.args) == {"max-loras": 2, "max-lora-rank": 64}
    assert dict(own.engine.args) == {"max-loras": 1, "max-lora-rank": 64}


def test_an_adapter_that_is_none_is_refused(model: Path) -> None:
    with pytest.raises(InvalidInput, match=r"'poet' have no adapter_config\.json"):
        built(model, lora={"poet": pilotlight.Weights(str(model), name="poet")})


def test_adapters_are_weights_of_their_own(model: Path, tmp_path: Path) -> None:
    poet = adapter(tmp_path / "poet-weights", rank=8)
    spec = built(model, lora={"poet": pilotlight.Weights(str(poet))})

    assert spec.engine is not None
    assert dict(spec.engine.lora) == {"poet": "poet-weights"}
    assert dict(spec.engine.args) == {"max-loras": 1}
    assert {w.name for w in spec.weights} == {model.name, "poet-weights"}


def test_several_gpus_are_one_engine_that_is_not_checkpointed(model: Path) -> None:
    spec = built(model, gpu="H100:8")

    assert spec.engine is not None
    assert (spec.engine.parallel, spec.resources.gpu_count, spec.snapshot) == (8, 8, False)
    assert built(model, gpu="H100").snapshot


def test_a_gpu_that_nobody_knows_is_not_checked_and_that_is_said(model: Path) -> None:
    with pytest.warns(pilotlight.PilotlightWarning, match="not checked"):
        built(model, gpu="X9000")


def test_what_it_needs_of_its_gpus_travels_to_the_node(model: Path) -> None:
    """A cache of 40 GiB, 2 GiB of engine on each GPU and the weights, by 0.9 of each GPU."""
    options = {"engine_args": {"kv_cache_memory_bytes": "40GiB"}}
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    one, two = built(model, gpu="H100", **options), built(model, gpu="H100:2", **options)
    assert one.engine is not None
    assert two.engine is not None
    assert one.engine.gpu_bytes == math.ceil((weights + 42 * GIB) / 0.9)
    assert two.engine.gpu_bytes == math.ceil((weights + 44 * GIB) / 0.9)
    launch = launch_spec(
        one,
        revision="v1",
        tenant="t-1",
        uid=None,
        environment="main",
        app="llm",
        snapshots=True,
        variables={},
    )
    assert launch.gpu_memory_bytes == one.engine.gpu_bytes
    on_a_cpu = built(model).engine
    assert on_a_cpu is not None
    assert on_a_cpu.gpu_bytes == 0
    with pytest.warns(pilotlight.PilotlightWarning, match="nodes check it"):
        unknown = built(model, gpu="X9000", **options).engine
    assert unknown is not None
    assert unknown.gpu_bytes == one.engine.gpu_bytes, "the node knows its GPUs"


def test_what_does_not_fit_is_refused_before_anything_is_sent(model: Path) -> None:
    with pytest.raises(InvalidInput, match="does not fit on a CPU"):
        built(model, memory="1GiB")
    with pytest.raises(InvalidInput, match="does not fit on one T4 GPU"):
        built(model, gpu="T4", engine_args={"kv_cache_memory_bytes": "40GiB"})


def test_embeddings_are_a_task(model: Path) -> None:
    spec = built(model, task="embed")

    assert spec.engine is not None
    assert spec.engine.task is Task.EMBED
    with pytest.raises(InvalidInput, match="task = 'dream'"):
        built(model, task="dream")


@pytest.mark.parametrize(
    "options, told",
    [
        ({"max_model_len": 4096}, "supports at most 1024 tokens"),
        ({"max_model_len": 0}, "must be a number of tokens"),
        ({"max_model_len": 12.5}, "must be a number of tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"engine_args": {"--uds": "/x"}}, "uds= is reserved"),
        ({"engine_args": {"served_model_name": "x"}}, "served-model-name= is reserved"),
        ({"engine_args": {"disable_log_stats": True}}, "disable-log-stats= is reserved"),
        ({"engine_args": {"dtype": object()}}, "must be a string, number"),
        ({"engine_args": {"seed": 1, "--seed": 2}}, "given twice"),
        ({"gpu": "H100:4", "engine_args": {"tensor-parallel-size": 2}}, "must be equal"),
        (
            {"engine_args": {"tensor-parallel-size": "x"}},
            "tensor-parallel-size = 'x': must be an integer",
        ),
        ({"engine_args": {"kv-cache-memory-bytes": -5}}, "kv-cache-memory-bytes = -5"),
        ({"engine_args": {"kv-cache-memory-bytes": [1]}}, "kv-cache-memory-bytes"),
        ({"engine_args": {"block-size": "large"}}, "block-size = 'large'"),
        (
            {"gpu": "H100", "engine_args": {"gpu-memory-utilization": "all"}},
            "gpu-memory-utilization = 'all'",
        ),
        (
            {"gpu": "H100", "engine_args": {"gpu-memory-utilization": 3}},
            "gpu-memory-utilization = 3",
        ),
        ({"gpu": "H100", "engine_args": {"cpu-offload-gb": float("inf")}}, "cpu-offload-gb"),
        ({"lora": {"poet": "somewhere"}}, "lora"),
        (
            {"lora": {"assistant": pilotlight.Weights("/poet")}},
            "the adapter 'assistant' has the name of the function",
        ),
        ({"limits": {"max_output_tokens": 1}}, "TokenLimits"),
        ({"example": ["hello"]}, "example= is not supported"),
        ({"secrets": [pilotlight.Secret.from_name("hf")]}, "secrets= is not supported"),
        ({"schedule": pilotlight.Period(hours=1)}, "schedule= is not supported"),
        ({"sleep_level": 3}, "sleep_level"),
        ({"keep_asleep": -1}, "keep_asleep"),
        ({"speed": "fast"}, "unknown option speed="),
    ],
)
def test_broken_options_are_named(model: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        built(model, **options)


def test_something_that_is_no_model_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidInput, match=r"no config\.json"):
        built(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(InvalidInput, match="not valid JSON"):
        built(tmp_path)
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(InvalidInput, match="contain no model"):
        built(tmp_path)


def test_its_handle_says_what_applications_write_as_model(model: Path) -> None:
    app = pilotlight.App("llm")
    engine = app.vllm("assistant", weights=pilotlight.Weights(str(model)))

    assert engine.model == "llm/assistant"
    assert pilotlight.Engine.from_name("llm", "assistant").model == "llm/assistant"


def test_two_of_one_name_are_refused(model: Path) -> None:
    app = pilotlight.App("llm")
    app.vllm("assistant", weights=pilotlight.Weights(str(model)))
    with pytest.raises(InvalidInput, match="two functions named"):
        app.vllm("assistant", weights=pilotlight.Weights(str(model)))
