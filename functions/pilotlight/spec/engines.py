"""What a function that is a language model's stock inference server is made of, and the bounds of
those who call it.

Records of a `FunctionSpec`, so of its revision. Frozen, standard library only; broken bounds raise
InvalidInput naming key, value and bound."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import check_name
from pilotlight.spec.policies import require_in_range

MAX_TOKENS = 100_000_000
MAX_ADAPTERS = 64
FINISH_REASONS = ("stop", "length", "content_filter", "tool_calls", "cancelled", "error")
"""How a stream ends: the engine's own words, `cancelled` when its caller left, `error` when it
broke."""


class Task(enum.StrEnum):
    """What the model does: GENERATE text, or EMBED it."""

    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A stock vLLM OpenAI server, run as a process tree of its own behind the instance's socket.

    Attributes:
        model: name of the weights that it serves, one of the function's. max_model_len: tokens of
        prompt and answer together. max_num_seqs: sequences that run at once; what is beyond waits
        in the engine. lora: adapter's name → name of the weights that hold it. args: further
        arguments of the server, by name without the dashes; true for a flag, false for `--no-…`.
        parallel: GPUs that it is spread over; more than one is never checkpointed (CUDA's
        checkpoint is single-GPU). kv_bytes: memory of its KV cache; None = what the engine takes of
        a GPU by itself. sleep_level: of vLLM's sleep mode: 1 keeps the weights in DRAM, 2 drops
        them. environment: engine environment of the node that it runs in, where the function has no
        image of its own.
    """

    model: str
    max_model_len: int
    max_num_seqs: int = 16
    task: Task = Task.GENERATE
    lora: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    parallel: int = 1
    kv_bytes: int | None = None
    sleep_level: int = 2
    environment: str = "vllm"

    def __post_init__(self) -> None:
        require_in_range("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        require_in_range("max_num_seqs", self.max_num_seqs, 1, 10_000)
        require_in_range("parallel", self.parallel, 1, 64)
        require_in_range("sleep_level", self.sleep_level, 1, 2)
        if self.kv_bytes is not None:
            require_in_range("kv_bytes", self.kv_bytes, 1 << 20, 1 << 50)
        if len(self.lora) > MAX_ADAPTERS:
            raise InvalidInput(
                f"lora: {len(self.lora)} adapters, at most {MAX_ADAPTERS}", parameter="lora"
            )
        for name in self.lora:
            try:
                check_name("adapter", name)
            except ValueError as e:
                raise InvalidInput(f"lora: {e}", parameter="lora") from e


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """What a call of a language model, and all calls of one tenant together, may take. None = no
    bound but the model's own.

    Attributes:
        max_input_tokens, max_output_tokens: of one call; more is refused with 400.
        default_output_tokens: of a call that does not say; None = what the model's length leaves.
        max_streams: calls at once, of the function, all tenants and instances together; more wait
        in the queue. max_streams_per_tenant: calls of one tenant at once; more are refused with
        429. pressured_output_tokens: under pressure (calls are waiting) answers are cut to this
        many tokens, and marked degraded;
            None = never.
        pressured_above: how many calls must wait for that.
    """

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    default_output_tokens: int | None = None
    max_streams: int | None = None
    max_streams_per_tenant: int | None = None
    pressured_output_tokens: int | None = None
    pressured_above: int = 1

    def __post_init__(self) -> None:
        for name in (
            "max_input_tokens",
            "max_output_tokens",
            "default_output_tokens",
            "pressured_output_tokens",
        ):
            if (value := getattr(self, name)) is not None:
                require_in_range(name, value, 1, MAX_TOKENS)
        for name in ("max_streams", "max_streams_per_tenant"):
            if (value := getattr(self, name)) is not None:
                require_in_range(name, value, 1, 1_000_000)
        require_in_range("pressured_above", self.pressured_above, 1, 1_000_000)
