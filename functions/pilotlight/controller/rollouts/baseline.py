"""Subtract what was observed before a step began in its first minute: observations are stored per
minute, and steps begin within one."""

from __future__ import annotations

from pilotlight.spec.observations import COUNTS, Observation


def subtract(seen: Observation, before: Observation | None) -> Observation:
    """Counts of `seen` minus those of `before`, never below zero: an activator may report a
    revision again from zero."""
    if before is None:
        return seen
    counts = {name: max(0, getattr(seen, name) - getattr(before, name)) for name in COUNTS}
    latency = {
        clock: _left(buckets, before.latency.get(clock, {}))
        for clock, buckets in seen.latency.items()
    }
    return Observation(
        tenant=seen.tenant,
        function_id=seen.function_id,
        revision=seen.revision,
        minute=seen.minute,
        arm=seen.arm,
        **counts,
        overruns={
            stage: max(0, calls - before.overruns.get(stage, 0))
            for stage, calls in seen.overruns.items()
        },
        latency=latency,
    )


def _left(buckets: dict[int, int], before: dict[int, int]) -> dict[int, int]:
    return {
        bucket: calls - before.get(bucket, 0)
        for bucket, calls in buckets.items()
        if calls > before.get(bucket, 0)
    }
