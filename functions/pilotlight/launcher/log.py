"""What the launcher says on stderr, beside the worker's own lines: one event per line,
`launcher.<what> key=value …`."""

from __future__ import annotations

import json
import os


def log_event(event: str, **fields: object) -> None:
    """Write one line at once; whoever reads may be gone, which stops nothing."""
    words = [event, *(f"{name}={_word(value)}" for name, value in fields.items())]
    try:
        os.write(2, (" ".join(words) + "\n").encode(errors="backslashreplace"))
    except OSError:
        return


def _word(value: object) -> str:
    """As it is, or quoted like JSON where it would not be one word."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return (
        text
        if text and text.isprintable() and not any(mark in text for mark in ' "=')
        else json.dumps(text, ensure_ascii=False)
    )
