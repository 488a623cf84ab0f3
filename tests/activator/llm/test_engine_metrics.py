"""Engines' own metrics are read by name; what is missing is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from activator.llm.engine_metrics import MAX_BUCKETS, parse
from activator.llm.engine_state import EngineTracker
from tests.activator.llm.samples import histogram
from tests.fakes.engine.engine import EngineFake
from tests.fakes.engine.metrics import exposition

REAL = (Path(__file__).parent / "vllm_0_32.txt").read_bytes()
TWO_SCHEDULERS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b"} 3.0
vllm:num_requests_running{engine="1",model_name="a} b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a} b"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a} b"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a} b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a} b"} 0.75
vllm:prompt_tokens_total{engine="0"} 1.25e+03
vllm:prompt_tokens_total{engine="1"} 50.0
vllm:prompt_tokens_created{engine="0"} 1.7e+09
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:time_to_first_token_seconds_bucket{le="0.1",engine="1"} 0.0
vllm:time_to_first_token_seconds_bucket{le="0.5",engine="1"} 0.0
vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="1"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0"} 2.5
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
"""


def test_an_engine_of_two_schedulers_is_added_up_and_its_fuller_memory_counts() -> None:
    found = parse(TWO_SCHEDULERS)

    assert found is not None
    assert (found.running, found.waiting, found.kv_use, found.prompt_tokens) == (7, 1, 0.75, 1300.0)
    assert found.first_token_s is not None
    assert found.first_token_s.counts == (1.0, 3.0, 6.0)
    assert found.first_token_s.sum_s == 2.5


def test_what_an_engine_does_not_say_is_not_known() -> None:
    found = parse(
        b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc NaN\n"
    )

    assert found is not None
    assert found.kv_use is None
    assert (found.prompt_tokens, found.prefix_hits, found.first_token_s) == (None, None, None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"process_cpu_seconds_total 3\n",
        b"vllm:num_requests_running{} x\n",
        b"\xff\x00" * 50,
    ],
)
def test_what_is_no_engines_says_nothing(text: bytes) -> None:
    assert parse(text) is None


def test_what_vllm_0_32_really_says_is_understood() -> None:
    """`vllm_0_32.txt`: what the real engine said on a CPU, one call running, of the names that are
    read here."""
    found = parse(REAL)

    assert found is not None
    assert None not in (
        found.kv_use,
        found.prefix_queries,
        found.prefix_hits,
        found.generation_tokens,
    )
    assert (found.running, found.waiting, found.prompt_tokens) == (1, 0, 416.0)
    assert found.first_token_s is not None
    assert (found.first_token_s.count, found.first_token_s.longer_than(0.3)) == (4, 0)


def test_the_fake_engine_says_by_the_same_names_what_the_real_one_does() -> None:
    def names(text: bytes) -> set[bytes]:
        return {line.partition(b"{")[0] for line in text.splitlines()}

    assert names(REAL) <= names(exposition(EngineFake()).encode())


def test_the_fake_engine_is_understood() -> None:
    engine = EngineFake(kv_tokens=100)

    idle = parse(exposition(engine).encode())

    assert idle is not None
    assert (idle.running, idle.waiting, idle.kv_use) == (0, 0, 0.0)
    assert idle.first_token_s is not None
    assert idle.first_token_s.count == 0


def test_what_took_longer_is_counted_evenly_inside_a_bucket() -> None:
    times = histogram(0.05, 0.2, 0.3, 0.4, 2.0, 3.0)

    assert times.longer_than(0.5) == 2
    assert times.longer_than(0.25) == 4
    assert times.longer_than(0.375) == 3, "two in the bucket from 0.25 to 0.5 s, half of it beyond"
    assert times.longer_than(5.0) == 2, "nobody knows how much longer than the last bound they took"


def test_a_histogram_since_another_is_what_came_between() -> None:
    before, now = histogram(0.05, 0.3), histogram(0.05, 0.3, 0.3, 2.0)

    assert now.since(before) == histogram(0.3, 2.0).__class__(
        bounds_s=now.bounds_s, counts=(0.0, 0.0, 1.0, 1.0, 2.0), sum_s=2.3
    )
    assert now.since(None) == now
    assert before.since(now) == before, "one that counted further was another engine's"


@pytest.mark.parametrize("number", ["inf", "-inf", "NaN", "1e308", "-5", "x", "", "0x1p3"])
@pytest.mark.parametrize(
    "line",
    [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "time_to_first_token_seconds_sum",
        'time_to_first_token_seconds_bucket{le="0.5"}',
        'time_to_first_token_seconds_bucket{le="+Inf"}',
    ],
)
def test_an_engine_that_says_nonsense_harms_nobody(line: str, number: str) -> None:
    """A tenant chooses what its engine is: what it says of itself must not stop those who
    listen."""
    text = (
        b"vllm:num_requests_running 2\nvllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc "
        b"0.5\nvllm:prompt_tokens_total 100\n"
    )
    buckets = (
        b'vllm:time_to_first_token_seconds_bucket{le="0.5"} '
        b'1\nvllm:time_to_first_token_seconds_bucket{le="+Inf"} 1\n'
    )
    watched = EngineTracker(4)
    for nonsense in (f"vllm:{line} {number}\n", f"vllm:{line} 1\n".replace("0.5", number or "y")):
        for now in (1.0, 3.0):
            reading = parse(text + buckets + nonsense.encode())
            if reading is not None:
                view = watched.record(reading, now)
                assert 1 <= view.slots <= 4
                assert 0 <= int(view.waiting * view.mean_prompt_tokens) < 10**40
                if reading.first_token_s is not None:
                    assert reading.first_token_s.longer_than(0.3) >= 0


@pytest.mark.parametrize("count", [MAX_BUCKETS, MAX_BUCKETS + 1])
def test_a_histogram_of_more_buckets_than_any_engine_has_is_left_out(count: int) -> None:
    lines = [b'vllm:time_to_first_token_seconds_bucket{le="%d.5"} 1' % n for n in range(count)]
    reading = parse(
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n" + b"\n".join(lines) + b"\n"
    )

    assert reading is not None
    assert (reading.first_token_s is None) == (count > MAX_BUCKETS)
