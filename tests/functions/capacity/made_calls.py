"""Calls as an instance of known behaviour would have been measured."""

from __future__ import annotations

import math
import random

from pilotlight.capacity.measurements import MeasuredCall


def made_calls(
    n: int,
    *,
    work_ms: float = 20.0,
    sigma: float = 0.3,
    slowdown: float = 0.0,
    at_once: int = 1,
    seed: int = 3,
) -> list[MeasuredCall]:
    """`n` calls with lognormal work of this median, at 1 to `at_once` at once."""
    source = random.Random(seed)
    found = []
    for number in range(n):
        calls = source.uniform(1, at_once) if at_once > 1 else 1.0
        work = work_ms * math.exp(source.gauss(0.0, sigma))
        exec_ms = work * (1 + slowdown * (calls - 1))
        found.append(
            MeasuredCall(
                at=float(number),
                exec_ms=exec_ms,
                first_ms=None,
                calls_at_once=calls,
                found=round(calls) - 1,
            )
        )
    return found


def shared_calls(
    n: int, *, rate_per_s: float, slowdown: float, work_ms: float = 10.0, seed: int = 5
) -> list[MeasuredCall]:
    """`n` Poisson calls of one instance that slow each other down, with exponential work."""
    source = random.Random(seed)
    running: dict[int, list[float]] = {}  # call: work left, share of the instance's time
    begun: dict[int, tuple[float, int]] = {}
    found: list[MeasuredCall] = []
    now, arrives, number = 0.0, 0.0, 0
    while len(found) < n:
        at_once = len(running)
        factor = 1 + slowdown * (at_once - 1)
        ends, first = min(
            ((now + left * factor, call) for call, (left, _) in running.items()),
            default=(math.inf, -1),
        )
        until = min(arrives, ends)
        for state in running.values():
            state[0] -= (until - now) / factor
            state[1] += (until - now) / at_once
        now = until
        if ends <= arrives:
            share = running.pop(first)[1]
            at, others = begun.pop(first)
            whole = now - at
            found.append(
                MeasuredCall(
                    at=at / 1000,
                    exec_ms=whole,
                    first_ms=None,
                    calls_at_once=whole / share,
                    found=others,
                )
            )
            continue
        running[number] = [source.expovariate(1 / work_ms), 0.0]
        begun[number] = (now, at_once)
        number += 1
        arrives = now + source.expovariate(rate_per_s) * 1000
    return sorted(found, key=lambda call: call.at)


def made_streams(
    n: int,
    *,
    prompt_ms: float = 5.0,
    prompt_token_ms: float = 0.1,
    token_ms: float = 2.0,
    seed: int = 4,
) -> list[MeasuredCall]:
    """Streamed calls of a language model, alone, with some noise."""
    source = random.Random(seed)
    found = []
    for number in range(n):
        tokens_in, tokens_out = source.randint(10, 400), source.randint(1, 80)
        first = (prompt_ms + prompt_token_ms * tokens_in) * source.uniform(0.9, 1.1)
        rest = token_ms * (tokens_out - 1) * source.uniform(0.9, 1.1)
        found.append(
            MeasuredCall(
                at=float(number),
                exec_ms=first + rest,
                first_ms=first,
                calls_at_once=1.0,
                tokens_in=tokens_in,
                tokens_out=tokens_out,
            )
        )
    return found
