"""The response cache of a function: how long its answers are kept for equal calls, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pilotlight.errors import InvalidInput

MIN_TTL_S: Final = 1
MAX_TTL_S: Final = 30 * 86_400
MIN_BYTES: Final = 2**20
MAX_BYTES: Final = 2**30
DEFAULT_BYTES: Final = 16 * 2**20
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([1-9][0-9]{0,7})([smhd])")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCacheSpec:
    """Terms of a response cache.

    Attributes:
        ttl_s: how long an answer is served, in seconds.
        max_bytes: memory that the answers of the function may take in one activator.
        shared: activators that share a Redis also share answers in it."""

    ttl_s: int
    max_bytes: int = DEFAULT_BYTES
    shared: bool = False

    def __post_init__(self) -> None:
        if not MIN_TTL_S <= self.ttl_s <= MAX_TTL_S:
            raise InvalidInput(
                f"cache: ttl = {self.ttl_s} s: must be {MIN_TTL_S} s to {MAX_TTL_S // 86_400} days",
                parameter="cache",
            )
        if not MIN_BYTES <= self.max_bytes <= MAX_BYTES:
            raise InvalidInput(
                f"cache: max_bytes = {self.max_bytes}: must be {MIN_BYTES} to {MAX_BYTES} bytes",
                parameter="cache",
            )


def parse_ttl(ttl: str | float) -> int:
    """Parse "30s", "5m", "1h" or "7d", or a whole number of seconds. Raises InvalidInput."""
    if isinstance(ttl, str) and (found := _DURATION.fullmatch(ttl)):
        return int(found[1]) * _UNITS[found[2]]
    is_whole = isinstance(ttl, int) or (isinstance(ttl, float) and ttl.is_integer())
    if is_whole and not isinstance(ttl, bool):
        return int(ttl)
    raise InvalidInput(
        f'cache: ttl = {ttl!r}: must be such as "30s", "5m", "1h" or "7d", or whole seconds',
        parameter="cache",
    )
