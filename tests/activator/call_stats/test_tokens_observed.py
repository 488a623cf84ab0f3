"""What a language model's calls took is counted however they end, and its clocks are apart from
starts."""

from __future__ import annotations

from activator.call_stats.observer import CallStats
from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.llm.openai.call import EngineCall
from activator.llm.openai.request import OpenAIRequest
from activator.quotas.token_reservation import TokenReservation
from pilotlight.spec.observations import Observation, latency_bucket
from snapshotter.types import StartKind
from tests.activator.llm.asking import model
from tests.fakes.calls import call_of as admitted_call
from tests.fakes.routes import target_of

MS = 1_000_000
TARGET = target_of(model())


def call_of(
    *,
    pieces_ms: tuple[float, ...] = (),
    prompt: int = 10,
    completion: int = 0,
    cached: int = 0,
    start_ms: float = 0.0,
) -> Call:
    use = TokenReservation(estimated_in=prompt, max_out=100, began_ns=0)
    asked = OpenAIRequest("/v1/completions", {"prompt": "hello"})
    call = EngineCall(
        asked, tokens=use, id="req-1", target=TARGET, method="", caller=Caller(key_id="k-1")
    )
    call.began_ns = call.routed_ns = call.received_ns = 0
    for at_ms in pieces_ms:
        use.on_piece(int(at_ms * MS))
    use.on_usage(prompt, completion or len(pieces_ms), cached)
    if start_ms:
        call.start_ms, call.start_kind = start_ms, StartKind.RESTORE
    return call


def observed(call: Call, *, status: int = 200, completed: bool = True) -> Observation:
    observer = CallStats()
    observer.answered(
        call,
        status=status,
        dispatched_ns=0,
        ended_ns=100 * MS,
        streamed=True,
        completed=completed,
        first_byte_ms=5.0,
        outcome="ok",
    )
    (one,) = observer.drain(7)
    return one


def test_tokens_and_the_times_between_them_are_counted() -> None:
    one = observed(call_of(pieces_ms=(40, 60, 80, 180), cached=4))

    assert (one.tokens_in, one.tokens_out, one.tokens_cached) == (10, 4, 4)
    assert one.latency["ttft"] == {latency_bucket(40): 1}
    assert one.latency["itl"] == {latency_bucket(20): 2, latency_bucket(100): 1}


def test_the_first_token_after_a_start_is_not_in_the_clock_of_the_warm() -> None:
    one = observed(call_of(pieces_ms=(900, 920), start_ms=800))

    assert "ttft" not in one.latency
    assert one.latency["itl"] == {latency_bucket(20): 1}


def test_what_was_delivered_counts_although_the_caller_left_or_the_engine_died() -> None:
    for status, completed in ((499, False), (502, False)):
        one = observed(call_of(pieces_ms=(40, 60)), status=status, completed=completed)

        assert (one.tokens_in, one.tokens_out) == (10, 2)


def test_calls_without_tokens_have_none() -> None:
    call = admitted_call(TARGET, b"", key_id="k-1")
    call.began_ns = 0

    one = observed(call)

    assert (one.tokens_in, one.tokens_out) == (0, 0)
    assert not {"ttft", "itl"} & one.latency.keys()


def test_an_instance_without_memory_is_counted_and_other_ends_are_not() -> None:
    observer = CallStats()

    observer.lost(TARGET, "out_of_memory")
    observer.lost(TARGET, "exited")

    (one,) = observer.drain(7)
    assert one.out_of_memory == 1


def test_the_use_of_an_engines_cache_is_kept_in_percent() -> None:
    observer = CallStats()

    for share in (0.0, 0.874, 0.874, 1.3):
        observer.cache_used(TARGET, share)

    (one,) = observer.drain(7)
    assert one.latency["kv"] == {0: 1, 87: 2, 100: 1}
