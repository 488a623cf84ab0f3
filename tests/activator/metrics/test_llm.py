"""What Prometheus is told of language models, read back from its own text."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, generate_latest

from activator.llm.engine_metrics import EngineMetrics
from activator.llm.engine_state import EngineState
from activator.metrics.call_counters import LabelLimiter
from activator.metrics.llm import LlmMetrics
from activator.quotas.token_reservation import TokenReservation
from activator.routing.call_target import CallTarget
from snapshotter.types import StartKind
from tests.fakes.routes import spec_of, target_of

MS = 1_000_000
TARGET = target_of(spec_of())


class Told:
    """Metrics and what they say."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = LlmMetrics(self._registry, LabelLimiter(10))

    def value(self, name: str, **labels: str) -> float | None:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in generate_latest(self._registry).decode().splitlines():
            found = re.match(rf"^{name}(?:{{(.*)}})? (\S+)$", line)
            if found is not None and all(one in (found[1] or "") for one in wanted):
                return float(found[2])
        return None


def use_of(
    *pieces_ms: float, prompt: int = 5, cached: int = 0, finish: str = "stop"
) -> TokenReservation:
    use = TokenReservation(estimated_in=prompt, max_out=10, began_ns=0)
    for at_ms in pieces_ms:
        use.on_piece(int(at_ms * MS))
    use.on_usage(prompt, len(pieces_ms), cached)
    use.on_finish(finish)
    return use


def view_of(
    *, running: int = 2, kv_use: float | None = 0.5, hits: float | None = 0.25
) -> EngineState:
    reading = EngineMetrics(running=running, waiting=1, kv_use=kv_use)
    return EngineState(
        at=0.0,
        slots=8,
        running=running,
        waiting=1,
        kv_use=kv_use,
        prefix_hit_rate=hits,
        prompt_tokens_per_s=100.0,
        generation_tokens_per_s=20.0,
        peak_prompt_tokens_per_s=None,
        reading=reading,
    )


def test_a_call_adds_its_tokens_its_first_one_and_why_it_ended() -> None:
    told = Told()

    told.metrics.ended(
        TARGET, use_of(400, 420, 450, prompt=5, cached=3, finish="length"), StartKind.RESTORE
    )

    assert told.value("pilotlight_tokens_total", direction="in") == 5
    assert told.value("pilotlight_tokens_total", direction="out") == 3
    assert told.value("pilotlight_tokens_total", direction="cached") == 3
    assert told.value("pilotlight_first_token_seconds_count", start_kind="RESTORE") == 1
    assert told.value("pilotlight_first_token_seconds_bucket", le="0.3") == 0
    assert told.value("pilotlight_first_token_seconds_bucket", le="0.5") == 1
    assert told.value("pilotlight_finishes_total", reason="length") == 1


def test_times_between_tokens_add_up_over_calls() -> None:
    told = Told()

    for _ in range(2):
        told.metrics.ended(TARGET, use_of(10, 30, 50, 250), StartKind.WARM)

    assert told.value("pilotlight_token_gap_seconds_count") == 6
    assert told.value("pilotlight_token_gap_seconds_bucket", le="0.03") == 4
    assert told.value("pilotlight_token_gap_seconds_bucket", le="0.3") == 6


def test_engines_of_a_function_are_added_up_and_the_fullest_cache_is_shown() -> None:
    told = Told()
    views: dict[str, tuple[CallTarget, EngineState]] = {
        "i-1": (TARGET, view_of(kv_use=0.5)),
        "i-2": (TARGET, view_of(kv_use=0.75, hits=0.75)),
    }
    told.metrics.collect_engines(lambda: views)

    assert told.value("pilotlight_engines") == 2
    assert told.value("pilotlight_engine_running") == 4
    assert told.value("pilotlight_engine_cache_use") == 0.75
    assert told.value("pilotlight_engine_prefix_hit_ratio") == 0.5
    assert told.value("pilotlight_engine_generated_tokens_per_second") == 40


def test_what_an_engine_did_not_say_is_not_zero() -> None:
    told = Told()
    told.metrics.collect_engines(lambda: {"i-1": (TARGET, view_of(kv_use=None, hits=None))})

    assert told.value("pilotlight_engine_cache_use") is None
    assert told.value("pilotlight_engine_running") == 2


def test_instances_without_memory_are_counted() -> None:
    told = Told()

    told.metrics.lost(TARGET, "out_of_memory")
    told.metrics.lost(TARGET, "killed")

    assert told.value("pilotlight_out_of_memory_total") == 1
