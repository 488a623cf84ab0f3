"""Builds the server's command line and environment from an EngineSpec. Pure.

Names are those of vLLM's OpenAI server (`vllm serve --help=all`, 0.32). The user's arguments come
last, so that they win where the server allows a flag twice; flags that would change the server's
address or name are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.engines import EngineSpec, Task
from pilotlight.spec.function import FunctionSpec

MODULE = "vllm.entrypoints.openai.api_server"
KEEP_ALIVE_S = 3600
"""The activator pools its connections and closes them itself: if the server closed them, a request
could meet a closing connection."""
OURS = frozenset(
    {
        "api-key",
        "host",
        "model",
        "port",
        "root-path",
        "served-model-name",
        "ssl-certfile",
        "ssl-keyfile",
        "uds",
    }
)
"""Flags for the server's address and name, which users may not set."""
_SPREAD = frozenset(
    {"distributed-executor-backend", "pipeline-parallel-size", "tensor-parallel-size"}
)
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Disable telemetry and downloads, bytecode in read-only packages, and imports from the home
directory."""


def command(
    spec: FunctionSpec, *, python: str, weights: Mapping[str, str], socket: str
) -> list[str]:
    """The server's command. `weights`: name → directory; `socket`: the path to listen at.

    Raises InvalidInput for reserved arguments and for missing weights.
    """
    engine = _engine(spec)
    return [
        python,
        "-P",
        "-m",
        MODULE,
        *_fixed(spec, engine, weights, socket),
        *_adapters(engine, weights),
        *_given(engine.args),
    ]


_GRANTED = "CUDA_VISIBLE_DEVICES"
"""The GPUs that the slot was granted, from the worker's environment; a revision of an earlier
release may declare others."""


def environment(
    spec: FunctionSpec, base: Mapping[str, str], *, site: Sequence[str], chosen: Sequence[str]
) -> dict[str, str]:
    """The server's environment. `site`: directories of packages; `chosen`: one-thread variables,
    which apply to the worker only."""
    threads = str(max(1, int(spec.resources.cpu)))
    kept = {
        name: value
        for name, value in base.items()
        if name not in chosen and not name.startswith("PILOTLIGHT_")
    }
    cpu = (
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        if not spec.resources.gpu
        else {}
    )
    if cpu and _in_one_process(_engine(spec)):
        # otherwise vLLM on a CPU refuses to run the model in one process
        cpu["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    sleep = {"VLLM_SERVER_DEV_MODE": "1"} if sleeps(spec) else {}
    ours = {
        **QUIET,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "PYTHONPATH": ":".join(site),
        **sleep,
    }
    declared = {name: value for name, value in spec.env.items() if name != _GRANTED}
    return {**cpu, **kept, **ours, **declared}


def sleeps(spec: FunctionSpec) -> bool:
    """Whether the running server can release its memory (vLLM's sleep mode): on a GPU only."""
    return bool(spec.resources.gpu)


def _engine(spec: FunctionSpec) -> EngineSpec:
    if spec.engine is None:
        raise InvalidInput(
            f"function {spec.name!r} is of kind engine but has no engine specification",
            parameter="engine",
        )
    return spec.engine


def _fixed(
    spec: FunctionSpec, engine: EngineSpec, weights: Mapping[str, str], socket: str
) -> Iterator[str]:
    yield from (
        "--model",
        _path(engine.model, weights),
        "--served-model-name",
        spec.name,
        "--uds",
        socket,
    )
    yield from (
        "--max-model-len",
        str(engine.max_model_len),
        "--max-num-seqs",
        str(engine.max_num_seqs),
    )
    if engine.kv_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(engine.kv_bytes))
    yield from (
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--disable-uvicorn-access-log",
    )
    if engine.task is Task.EMBED:
        yield from ("--runner", "pooling", "--convert", "embed")
    if (
        engine.parallel > 1
        and not {"tensor-parallel-size", "pipeline-parallel-size"} & engine.args.keys()
    ):
        yield from ("--tensor-parallel-size", str(engine.parallel))
    if sleeps(spec):
        yield "--enable-sleep-mode"
        return
    if "enforce-eager" not in engine.args:
        yield "--enforce-eager"  # compiling takes minutes on a CPU
    if _in_one_process(engine):
        yield from ("--distributed-executor-backend", "uni")


def _in_one_process(engine: EngineSpec) -> bool:
    """Whether the model runs in the scheduler's process, which saves one process and a third of the
    image."""
    return engine.parallel == 1 and not _SPREAD & engine.args.keys()


def _adapters(engine: EngineSpec, weights: Mapping[str, str]) -> Iterator[str]:
    if engine.lora:
        yield "--enable-lora"
        yield "--lora-modules"
        yield from (f"{name}={_path(place, weights)}" for name, place in engine.lora.items())


def _path(name: str, weights: Mapping[str, str]) -> str:
    if name not in weights:
        there = ", ".join(sorted(weights)) or "none"
        raise InvalidInput(
            f"the engine uses weights {name!r}, but the function has only {there}",
            parameter="weights",
        )
    return weights[name]


def _given(args: Mapping[str, Any]) -> Iterator[str]:
    for name, value in args.items():
        if name in OURS:
            raise InvalidInput(
                f"engine argument {name!r} is set by the platform: remove it", parameter="args"
            )
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
            continue
        yield f"--{name}"
        if isinstance(value, list):
            yield from (_text(item) for item in value)
        else:
            yield _text(value)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
