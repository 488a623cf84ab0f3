"""The load of the engines of a language model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engines of a language model report; only ready instances whose engine answered.

    Attributes:
        slots: average concurrent calls of one instance, by its KV memory.
        queued_tokens: prompt tokens of the calls that wait, for a slot or inside an engine.
        tokens_per_s: prompt tokens that one instance processes, including generation: the recent
            peak; None = unknown.
        first_tokens: number of recent first tokens since the newest instance started.
        late: the share of them that exceeded the objective; None = there is no objective."""

    slots: float
    queued_tokens: int = 0
    tokens_per_s: float | None = None
    first_tokens: int = 0
    late: float | None = None
