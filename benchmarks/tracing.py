"""What tracing costs a warm call that is not kept, in the process: beside the empty loop, and
beside a call that is kept.

python -m benchmarks.tracing
"""

from __future__ import annotations

import time
from collections.abc import Callable

from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.http.payloads import Payload
from activator.routing.call_target import CallTarget
from activator.tracing.trace_builder import Json
from activator.tracing.tracer import Tracer
from pilotlight.protocol import FunctionRoute, new_call_id
from pilotlight.spec.function import FunctionSpec, MethodSpec
from pilotlight.spec.pricing import Rates
from pilotlight.spec.record_json import to_json
from snapshotter.types import LaunchSpec, RevisionKey

ROUNDS = 200_000
REPEATS = 7
_PLAIN = {
    b"host": b"x",
    b"content-length": b"9",
    b"authorization": b"Bearer x",
    b"content-type": b"application/json",
}
_TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7"


def best_us(step: Callable[[], object], *, rounds: int = ROUNDS) -> float:
    """Microseconds of one step, the best of several runs: what else the machine does only adds."""
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        for _ in range(rounds):
            step()
        times.append((time.thread_time() - began) / rounds * 1e6)
    return min(times)


def main() -> None:
    """Print a table."""
    target = _target()
    call = Call(
        id=new_call_id(),
        target=target,
        method="",
        payload=Payload(b"{}"),
        caller=Caller(key_id="k"),
    )
    kept: list[Json] = []
    tracer = Tracer(share=0.01, keep=kept.append)
    never = Tracer(share=0.0)

    def nothing() -> None: ...

    def end() -> bool:
        status, exec_ms = 200, 0.4
        return (
            status >= 500
            or exec_ms > call.target.slow_ms
            or (call.trace is not None and bool(call.trace.kept_for))
        )

    def tell() -> bytes:
        return call.trace_lines() if call.trace is not None else b""

    def begin(headers: dict[bytes, bytes], by: Tracer) -> Callable[[], None]:
        def step() -> None:
            by.begin(call, headers)
            call.trace = None

        return step

    empty = best_us(nothing)
    unsampled = {**_PLAIN, b"traceparent": b"00-" + _TRACE + b"-00"}
    rows = {
        "begin, caller says nothing, none drawn": best_us(begin(_PLAIN, never)) - empty,
        "begin, caller says nothing, 1 % drawn (within the rate)": best_us(begin(_PLAIN, tracer))
        - empty,
        "end, a comparison": best_us(end) - empty,
        "what the worker is told: nothing": best_us(tell) - empty,
        "begin, caller's trace is not sampled": best_us(
            begin(unsampled, never), rounds=ROUNDS // 10
        )
        - empty,
        "a trace that is kept, made whole": best_us(lambda: _whole(never, call, kept), rounds=2000)
        - empty,
    }
    for name, microseconds in rows.items():
        print(f"{name:<60} {microseconds:8.2f} µs")


def _target() -> CallTarget:
    spec = FunctionSpec(
        name="echo", module="app", qualname="echo", bundle="b" * 64, methods=(MethodSpec(),)
    )
    launch = LaunchSpec(
        revision=RevisionKey("f-echo@v1"),
        trust_domain="t",
        uid=None,
        bundle=spec.bundle,
        image=None,
        entry={},
        memory_bytes=1,
        cpu=1.0,
        startup_timeout_s=1.0,
    )
    document = {"spec": to_json(spec), "launch": launch.to_json()}
    route = FunctionRoute(
        id="f-echo",
        tenant="t",
        environment="main",
        app="bench",
        function="echo",
        traffic=(("v1", 100),),
        revisions={"v1": document},
    )
    return CallTarget(route, "v1", Rates(version="bench"))


def _whole(tracer: Tracer, call: Call, kept: list[Json]) -> None:
    tracer._sampling._buckets.clear()
    tracer.ended(
        call,
        None,
        None,
        status=500,
        dispatched_ns=call.received_ns,
        ended_ns=call.received_ns + 1_000_000,
    )
    kept.clear()


if __name__ == "__main__":
    main()
