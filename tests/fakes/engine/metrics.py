"""The fake engine's `/metrics`: the series of vLLM that this project reads, and the words around
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.fakes.engine.engine import EngineFake

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
ITL_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)


def exposition(engine: EngineFake) -> str:
    """Prometheus text."""
    return "\n".join(_lines(engine)) + "\n"


def _lines(engine: EngineFake) -> Iterator[str]:
    counts, labels = engine.counts, f'engine="0",model_name="{engine.model}"'
    for name, help_text, value in (
        ("num_requests_running", "Number of requests in model execution batches.", engine.running),
        ("num_requests_waiting", "Number of requests waiting to be processed.", engine.waiting),
        (
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            engine.held_tokens / engine.kv_tokens,
        ),
    ):
        yield from _head(name, help_text, "gauge")
        yield f"vllm:{name}{{{labels}}} {float(value)}"
    for name, number in (
        ("prefix_cache_queries", counts.prefix_queries),
        ("prefix_cache_hits", counts.prefix_hits),
        ("num_preemptions", counts.preemptions),
        ("prompt_tokens", counts.prompt_tokens),
        ("generation_tokens", counts.generation_tokens),
    ):
        yield from _head(f"{name}_total", f"Cumulative {name.replace('_', ' ')}.", "counter")
        yield f"vllm:{name}_total{{{labels}}} {float(number)}"
    yield from _head(
        "request_success_total", "Count of successfully processed requests.", "counter"
    )
    for reason, number in counts.finished.items():
        yield f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="{engine.model}"}} {float(number)}'
    yield from _histogram("time_to_first_token_seconds", labels, TTFT_BUCKETS, counts.first_token_s)
    yield from _histogram("inter_token_latency_seconds", labels, ITL_BUCKETS, counts.between_s)
    yield from _histogram("request_queue_time_seconds", labels, TTFT_BUCKETS, counts.queue_s)
    yield from _head("engine_sleep_state", "Engine sleep state.", "gauge")
    for state, level in (("awake", 0), ("weights_offloaded", 1), ("discard_all", 2)):
        yield (
            f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} '
            f"{float(engine.asleep == level)}"
        )
    yield from _head("cache_config_info", "Information of the LLMEngine CacheConfig", "gauge")
    blocks = f'block_size="16",kv_cache_size_tokens="{engine.kv_tokens}",num_gpu_blocks="{engine.kv_tokens // 16}"'
    yield f'vllm:cache_config_info{{{blocks},engine="0"}} 1.0'


def _head(name: str, help_text: str, kind: str) -> Iterator[str]:
    yield f"# HELP vllm:{name} {help_text}"
    yield f"# TYPE vllm:{name} {kind}"


def _histogram(
    name: str, labels: str, buckets: Sequence[float], values: Sequence[float]
) -> Iterator[str]:
    yield from _head(name, f"Histogram of {name.replace('_', ' ')}.", "histogram")
    for bound in buckets:
        yield (
            f'vllm:{name}_bucket{{{labels},le="{bound}"}} {float(sum(v <= bound for v in values))}'
        )
    yield f'vllm:{name}_bucket{{{labels},le="+Inf"}} {float(len(values))}'
    yield f"vllm:{name}_count{{{labels}}} {float(len(values))}"
    yield f"vllm:{name}_sum{{{labels}}} {float(sum(values))}"
