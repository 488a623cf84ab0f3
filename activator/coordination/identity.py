"""The number of this activator, given or read from the host name that a StatefulSet gives each of
its pods."""

from __future__ import annotations

import re
from dataclasses import dataclass

FROM_HOSTNAME = "from-hostname"
ANY = 10_000
"""Upper bound for the index of an activator that may already have been scaled away."""
_ORDINAL = re.compile(r"-(\d{1,4})\Z")


class IdentityInvalid(Exception):
    """Raised when `--index` yields no valid number; the message says what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """`index`: from 0. `is_alone_here`: no other activator runs on this machine (this pod), so its
    ports are those of the settings."""

    index: int
    is_alone_here: bool


def identity_of(text: str, *, hostname: str, activators: int) -> Identity:
    """Parse `--index`: a number, or `from-hostname`. Raises IdentityInvalid."""
    if text == FROM_HOSTNAME:
        found = _ORDINAL.search(hostname.partition(".")[0])
        if found is None:
            raise IdentityInvalid(
                f"--index {FROM_HOSTNAME}: host name {hostname!r} does not end in -<number>, as a "
                f"StatefulSet's pods do"
            )
        index = int(found[1])
    elif text.isdigit():
        index = int(text)
    else:
        raise IdentityInvalid(f"--index {text!r}: write a number from 0, or {FROM_HOSTNAME}")
    if index >= activators:
        raise IdentityInvalid(
            f"--index {index}: must be from 0 to {activators - 1} (activator.activators: as many "
            f"as there are replicas)"
        )
    return Identity(index=index, is_alone_here=text == FROM_HOSTNAME)
