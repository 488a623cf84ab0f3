"""Quantities in Kubernetes' canonical form, so that an applied manifest compares equal to the
object in the cluster."""

from __future__ import annotations

_BINARY = (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


def cores(cpu: float) -> str:
    """CPU cores, such as `500m` or `2`; at least one thousandth."""
    milli = max(1, round(cpu * 1000))
    return str(milli // 1000) if milli % 1000 == 0 else f"{milli}m"


def size(count: int) -> str:
    """A number of bytes, such as `2Gi`, `1536Mi`, or plain bytes."""
    return next(
        (f"{count // unit}{suffix}" for suffix, unit in _BINARY if count and count % unit == 0),
        str(count),
    )
