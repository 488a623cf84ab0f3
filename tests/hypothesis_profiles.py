"""How many inputs Hypothesis tries: `fast` in `make test`, `deep` in `make test-all`
(`--hypothesis-profile=deep`).

Deadlines are off in both: how long one input takes says nothing on a busy machine. A failure is
shrunk and not explained: the phase `explain` traces every line (`sys.settrace`), in which CPython
3.11 never returns when the alarm of pytest-timeout comes.
"""

from __future__ import annotations

from hypothesis import Phase, settings

FAST, DEEP = "fast", "deep"
FEWEST = 10

_PHASES = tuple(phase for phase in Phase if phase is not Phase.explain)

settings.register_profile(FAST, settings.default, max_examples=30, deadline=None, phases=_PHASES)
settings.register_profile(DEEP, settings.default, max_examples=100, deadline=None, phases=_PHASES)


def examples(deep: int) -> int:
    """For `max_examples` of a test that needs another number than its profile has: a quarter of
    `deep` in `fast`."""
    return deep if settings.get_current_profile_name() == DEEP else max(FEWEST, deep // 4)
