"""The reference answer: the engine's answer to a known prompt before the snapshot, which every
restored copy must reproduce.

The prompt is token ids, so that it does not depend on a template; the answer is greedy (temperature
0), truncated to the part that the engine gave twice. Embeddings are compared by their numbers,
within a tolerance for the order of additions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.spec.engines import EngineSpec, Task
from pilotlight.worker.engine.client import ServerClient
from pilotlight.worker.engine.errors import WrongAnswer

PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
"""Token ids that exist in every vocabulary."""
TOKENS = 8
TOLERANCE = 0.01
"""Relative to the largest number of an embedding: half precision has three digits, and a corrupted
answer differs by more."""
_WARM = 2
"""Answers before the recorded one: the first includes lazy initialization, and the second may read
the first one's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """The recorded answer. `value`: token ids, or numbers (`is_close`), which are compared within
    TOLERANCE."""

    value: tuple[Any, ...]
    is_close: bool = False

    def require_same(self, other: KnownAnswer) -> None:
        """Raise WrongAnswer unless the answers are equal, or one is a prefix of the other."""
        if not self._is_same(other):
            raise WrongAnswer(
                f"the engine answers the known prompt with {_format(other.value)}; before the "
                f"snapshot it answered {_format(self.value)}"
            )

    def also(self, earlier: KnownAnswer) -> KnownAnswer:
        """The common prefix of both answers, or this one if they have none."""
        if self.is_close:
            return self
        both = zip(self.value, earlier.value, strict=False)
        common = tuple(
            mine for mine, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)
        )
        return replace(self, value=common) if common else self

    def _is_same(self, other: KnownAnswer) -> bool:
        if self.is_close:
            bound = TOLERANCE * max(map(abs, self.value), default=0.0)
            return len(self.value) == len(other.value) and all(
                abs(mine - theirs) <= bound
                for mine, theirs in zip(self.value, other.value, strict=True)
            )
        length = min(len(self.value), len(other.value))
        return length > 0 and self.value[:length] == other.value[:length]


def learn(engine: EngineSpec, name: str, asker: ServerClient, *, within_s: float) -> KnownAnswer:
    """Warm up the engine, which serves the model as `name`, and record its answer. Raises
    ServerHung, ServerRefused, OSError."""
    for _ in range(_WARM):
        warm = ask(engine, name, asker, within_s=within_s)
    if engine.task is Task.GENERATE:
        stream = {"model": name, "prompt": list(PROMPT[:1]), "max_tokens": 1, "stream": True}
        # streaming has its own code path in the server, initialized lazily, too
        asker.read("POST", "/v1/completions", stream, within_s=within_s)
    return ask(engine, name, asker, within_s=within_s).also(warm)


def ask(
    engine: EngineSpec, name: str, asker: ServerClient, *, within_s: float, tokens: int = TOKENS
) -> KnownAnswer:
    """The engine's current answer, of at most `tokens`. Raises ServerHung, ServerRefused,
    OSError."""
    if engine.task is Task.EMBED:
        body = asker.ask(
            "POST",
            "/v1/embeddings",
            {"model": name, "input": list(PROMPT[: engine.max_model_len])},
            within_s=within_s,
        )
        return KnownAnswer(
            value=tuple(float(v) for v in body["data"][0]["embedding"]), is_close=True
        )
    prompt = list(PROMPT[: max(1, engine.max_model_len - TOKENS)])
    length = max(1, min(tokens, engine.max_model_len - len(prompt)))
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = asker.ask(
        "POST",
        "/v1/completions",
        {"model": name, "prompt": prompt, "max_tokens": length, **greedy},
        within_s=within_s,
    )
    return KnownAnswer(value=tuple(answer["choices"][0]["token_ids"]))


def _format(value: tuple[Any, ...]) -> str:
    return f"{list(value[:TOKENS])}{' …' if len(value) > TOKENS else ''}"
