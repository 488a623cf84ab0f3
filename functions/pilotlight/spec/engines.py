"""Specification of functions that are language models on a stock inference server, and limits of
their calls.

The records are part of a `FunctionSpec`, and so of its revision. Frozen, standard library only;
values out of range raise InvalidInput naming key, value and bound."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.errors import InvalidInput
from pilotlight.spec.identifiers import check_name
from pilotlight.spec.policies import require_in_range
from pilotlight.validation.schema_cost import pattern_weight

MAX_TOKENS = 100_000_000
MAX_ADAPTERS = 64
FINISH_REASONS = ("stop", "length", "content_filter", "tool_calls", "cancelled", "error")
"""Reasons for the end of a stream: those of the engine, `cancelled` if the caller disconnected,
`error` if it broke."""

GUARD_PATTERNS = ("api_key", "credit_card", "email", "iban", "private_key", "us_ssn")
"""Names of the built-in patterns of a guard."""
MAX_GUARD_WORDS = 200
MAX_GUARD_WORD_CHARS = 64
MAX_GUARD_WORDS_CHARS = 4000
MAX_GUARD_PARTS = 600
MAX_GUARD_EXPRESSIONS = 32
MAX_GUARD_EXPRESSION_CHARS = 256
MAX_GUARD_WEIGHT = 2000
"""Maximum states of the automata of a guard's expressions (`pattern_weight`): each character of a
text costs at most that many steps, measured 0.15 microseconds."""
MAX_WINDOW_CHARS = 4000


class Task(enum.StrEnum):
    """The task of a model: GENERATE text, or EMBED it."""

    GENERATE = "generate"
    EMBED = "embed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """A stock vLLM OpenAI server, run as a separate process tree behind the socket of the instance.

    Attributes:
        model: name of the weights that it serves, among those of the function.
        max_model_len: maximum tokens of prompt and answer together.
        max_num_seqs: concurrent sequences; further ones wait in the engine.
        lora: name of adapter → name of its weights.
        args: further arguments of the server, by name without dashes; true for a flag, false for
            `--no-…`.
        parallel: number of GPUs; an engine on more than one is never checkpointed (its processes
            share GPU memory, which the driver cannot checkpoint before 610).
        kv_bytes: size of the KV cache; None = the default of the engine on a GPU.
        gpu_bytes: memory that it needs of its GPUs together: weights, KV cache for `max_num_seqs`
            sequences of `max_model_len` tokens, and the engine, by the share that it uses of each
            GPU; a node grants it GPUs with that much. 0 = not known, and on a CPU.
        sleep_level: level of vLLM's sleep mode: 1 keeps the weights in DRAM, 2 discards them.
        environment: engine environment of the node to run in, if the function has no image."""

    model: str
    max_model_len: int
    max_num_seqs: int = 16
    task: Task = Task.GENERATE
    lora: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    parallel: int = 1
    kv_bytes: int | None = None
    gpu_bytes: int = 0
    sleep_level: int = 2
    environment: str = "vllm"

    def __post_init__(self) -> None:
        require_in_range("max_model_len", self.max_model_len, 1, MAX_TOKENS)
        require_in_range("max_num_seqs", self.max_num_seqs, 1, 10_000)
        require_in_range("parallel", self.parallel, 1, 64)
        require_in_range("sleep_level", self.sleep_level, 1, 2)
        if self.kv_bytes is not None:
            require_in_range("kv_bytes", self.kv_bytes, 1 << 20, 1 << 50)
        require_in_range("gpu_bytes", self.gpu_bytes, 0, 1 << 60)
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
class LanguageModel:
    """What OpenAI's API knows of a function, be it an engine or a web server of user code.

    Attributes:
        served: the name that its server knows its model by.
        others: names of the further models that it serves: of an engine, its adapters.
        max_model_len: maximum tokens of prompt and answer together.
        task: None: the server's to say.
        is_engine: whether it is the stock server, which reports its usage in each piece of a
            stream, and keeps prompts of tenants apart."""

    served: str
    others: tuple[str, ...]
    max_model_len: int
    task: Task | None
    is_engine: bool


def is_language_model(spec: Mapping[str, Any]) -> bool:
    """Whether the JSON of a `FunctionSpec` has a `LanguageModel`."""
    return bool(spec.get("engine") or (spec.get("web_server") or {}).get("openai"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Limits of the calls of a language model. None = only the limit of the model.

    Attributes:
        max_input_tokens, max_output_tokens: tokens of one call; calls beyond are rejected with
            status 400.
        default_output_tokens: output limit of calls without one; None = up to the maximum length of
            the model.
        max_streams: concurrent calls of the function over all tenants and instances; further calls
            are queued.
        max_streams_per_tenant: concurrent calls of one tenant; further calls are rejected with
            status 429.
        pressured_output_tokens: output limit under pressure (while calls wait); such answers are
            marked degraded. None = none.
        pressured_above: number of waiting calls from which there is pressure."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSpec:
    """What is asked about prompts before an engine gets them, and about answers before their
    callers do. What it refuses ends the call.

    Attributes:
        patterns: built-in patterns (`GUARD_PATTERNS`).
        words: words and phrases, in upper or lower case, and with any spaces between.
        expressions: regular expressions of linear time by the name of their rule.
        function: the function that is asked, `function` (of the same app), `app/function` or
            `app/class.method`; "" = none.
        input: whether prompts are checked.
        output: whether generated text is checked.
        window_chars: of a streamed answer, the characters that are held back for `expressions`, and
            that `function` gets at least."""

    patterns: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    expressions: Mapping[str, str] = field(default_factory=dict)
    function: str = ""
    input: bool = True
    output: bool = True
    window_chars: int = 200

    def __post_init__(self) -> None:
        if not (self.patterns or self.words or self.expressions or self.function):
            raise _guard("it checks nothing: add patterns, words, expressions or a function")
        if not (self.input or self.output):
            raise _guard("input and output are False: it checks nothing: leave guard out")
        if unknown := sorted(set(self.patterns) - set(GUARD_PATTERNS)):
            raise _guard(
                f"patterns: {unknown[0]!r} is unknown: must be of {', '.join(GUARD_PATTERNS)}"
            )
        require_in_range("window_chars", self.window_chars, 1, MAX_WINDOW_CHARS)
        self._check_words()
        self._check_expressions()
        if self.function and not _GUARD_FUNCTION.fullmatch(self.function):
            raise _guard(
                f"function = {self.function[:80]!r}: must be a function such as 'judge', "
                f"'safety/judge' or 'safety/Judge.ask'"
            )

    def _check_words(self) -> None:
        if len(self.words) > MAX_GUARD_WORDS:
            raise _guard(f"words: {len(self.words)} words, at most {MAX_GUARD_WORDS}")
        if (chars := sum(map(len, self.words))) > MAX_GUARD_WORDS_CHARS:
            raise _guard(f"words: {chars} characters, at most {MAX_GUARD_WORDS_CHARS}")
        if (parts := sum(len(word.split()) for word in self.words)) > MAX_GUARD_PARTS:
            raise _guard(f"words: {parts} words with spaces between, at most {MAX_GUARD_PARTS}")
        for word in self.words:
            if not word.strip() or len(word) > MAX_GUARD_WORD_CHARS or not word.isprintable():
                raise _guard(
                    f"words: {word[:80]!r}: must have 1 to {MAX_GUARD_WORD_CHARS} printable "
                    f"characters"
                )

    def _check_expressions(self) -> None:
        if len(self.expressions) > MAX_GUARD_EXPRESSIONS:
            raise _guard(
                f"expressions: {len(self.expressions)} expressions, at most {MAX_GUARD_EXPRESSIONS}"
            )
        for name, expression in self.expressions.items():
            if not _GUARD_RULE.fullmatch(name) or name in (*GUARD_PATTERNS, "words"):
                raise _guard(
                    f"expressions: rule {name[:80]!r}: must be letters, digits, '-' and '_', up to "
                    f"64, and no name of a pattern"
                )
            if not 0 < len(expression) <= MAX_GUARD_EXPRESSION_CHARS:
                raise _guard(
                    f"expressions: {name}: must have 1 to {MAX_GUARD_EXPRESSION_CHARS} characters"
                )
        weight = sum(map(pattern_weight, self.expressions.values()))
        if weight > MAX_GUARD_WEIGHT:
            raise _guard(
                f"expressions have about {weight} states with their repetitions expanded, at most "
                f"{MAX_GUARD_WEIGHT}: write shorter repetitions than {{1,1000}}"
            )


_GUARD_FUNCTION = re.compile(r"(?:[\w.-]{1,64}/)?[\w-]{1,64}(?:\.[A-Za-z_]\w{0,63})?")
_GUARD_RULE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def _guard(text: str) -> InvalidInput:
    return InvalidInput(f"guard: {text}", parameter="guard")
