"""How many inputs Hypothesis tries: `fast` in `make test`, `deep` in `make test-all`
(`--hypothesis-profile=deep`).

Deadlines are off in both: how long one input takes says nothing on a busy machine.
"""

from __future__ import annotations

from hypothesis import settings

FAST, DEEP = "fast", "deep"
FEWEST = 10

settings.register_profile(FAST, settings.default, max_examples=30, deadline=None)
settings.register_profile(DEEP, settings.default, max_examples=100, deadline=None)


def examples(deep: int) -> int:
    """For `max_examples` of a test that needs another number than its profile has: a quarter of
    `deep` in `fast`."""
    return deep if settings.get_current_profile_name() == DEEP else max(FEWEST, deep // 4)
