"""Sandboxes: what the SDK, the activator and the worker agree on.

A sandbox is one submitted call of a function whose spec says `sandbox`, which has its instance for
itself: its slot is used once. The call lasts as long as the
sandbox. Requests at `/v1/sandboxes/{id}/…` go to the worker of that instance, which executes
commands and reads and writes files as the tenant's uid."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

SANDBOXES_PATH: Final = "/v1/sandboxes/"
NAME_PREFIX: Final = "sandbox-"
ENTRY: Final = ("pilotlight.worker.sandbox.lifetime", "run")
"""Module and name of the function that a sandbox's call runs."""
LABEL: Final = "sandbox"
"""Label of a sandbox's call record."""

DEFAULT_TIMEOUT_S: Final = 300.0
MAX_TIMEOUT_S: Final = 86_400.0
QUEUE_S: Final = 60.0
"""How long a sandbox may wait for its instance. The deadline of its call has room for it, which the
activator takes away once the sandbox has its instance."""
SLACK_S: Final = 2.0
"""So long after its time the activator ends a sandbox that has not ended itself."""
MAX_SANDBOXES: Final = 100
"""Default for the most sandboxes of one set of options that run at once."""

WAIT_S: Final = 20.0
"""Longest wait of one request for output."""
EXEC_WAIT_S: Final = 0.02
"""How long the answer to `exec` waits for the end of its command, which it contains then: most
commands of agents take one request."""
PIECE_BYTES: Final = 64 * 1024
"""Most bytes of each stream in one answer."""
FILE_PIECE_BYTES: Final = 1024 * 1024
"""Most bytes of a file, or of standard input, in one request."""
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
UNREAD_BYTES: Final = 1024 * 1024
"""Output of a stream that waits for its reader: beyond it the command waits, as with a full
pipe."""
MAX_PROCESSES: Final = 64
"""Commands that run at once."""
MAX_ENTRIES: Final = 10_000
"""Most entries of a listed directory."""
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Most bytes of an answer: MAX_ENTRIES names of 255 bytes, each written as six."""
MAX_REQUESTS: Final = 128
"""Requests to one sandbox in progress."""

_TEXTS: Final = {"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 256}
ARGUMENTS: Final[Mapping[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "args": {"type": "array", "items": {"type": "string"}, "maxItems": 4096},
        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
        "idle_timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0},
        "workdir": {"type": "string", "maxLength": 4096},
        "env": _TEXTS,
    },
}
"""JSON Schema of the call's arguments."""


def sandbox_name(digest: str) -> str:
    """Return the name of the function with these options: `digest` of its spec under another
    name."""
    return NAME_PREFIX + hashlib.sha256(digest.encode()).hexdigest()[:12]
