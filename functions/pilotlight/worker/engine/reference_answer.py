"""The known answer: what the engine says to a prompt of ours before the snapshot, and must say
again after every restore.

The prompt is token ids, so that nothing depends on a template; the answer is greedy (temperature
0), as far as the engine gave it twice. A model that embeds is compared by its numbers, up to what
the order of additions may move."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.spec.engines import EngineSpec, Task
from pilotlight.worker.engine.client import EngineClient
from pilotlight.worker.engine.errors import WrongAnswer

PROMPT = (1, 2, 3, 5, 8, 13, 21, 34)
"""Token ids that every vocabulary has."""
TOKENS = 8
TOLERANCE = 0.01
"""Of the largest number of an embedding: half precision has three digits, and what was lost is
farther away."""
_WARM = 2
"""Answers before the one that is remembered: the first pays for what is made lazily, and the second
may read the first one's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """What was said. `value`: token ids, or numbers (`is_close`: those are the same within
    TOLERANCE)."""

    value: tuple[Any, ...]
    is_close: bool = False

    def demand_same(self, other: KnownAnswer) -> None:
        """One of both may be longer: then the other is how it begins. Raises WrongAnswer."""
        if not self._is_same(other):
            raise WrongAnswer(
                f"the engine answers the known prompt with {_shown(other.value)}, before the "
                f"snapshot it was {_shown(self.value)}"
            )

    def also(self, earlier: KnownAnswer) -> KnownAnswer:
        """What both begin with, where they begin alike; else this one."""
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


def learn(engine: EngineSpec, name: str, asker: EngineClient, *, within_s: float) -> KnownAnswer:
    """Warm the engine up, which serves the model as `name`, and remember what it says. Raises
    EngineHung, EngineRefused, OSError."""
    for _ in range(_WARM):
        warm = ask(engine, name, asker, within_s=within_s)
    if engine.task is Task.GENERATE:
        stream = {"model": name, "prompt": list(PROMPT[:1]), "max_tokens": 1, "stream": True}
        # its own way through the server, made lazily, too
        asker.read("POST", "/v1/completions", stream, within_s=within_s)
    return ask(engine, name, asker, within_s=within_s).also(warm)


def ask(
    engine: EngineSpec, name: str, asker: EngineClient, *, within_s: float, tokens: int = TOKENS
) -> KnownAnswer:
    """What it says now, as many tokens at most. Raises EngineHung, EngineRefused, OSError."""
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


def _shown(value: tuple[Any, ...]) -> str:
    return f"{list(value[:TOKENS])}{' …' if len(value) > TOKENS else ''}"
