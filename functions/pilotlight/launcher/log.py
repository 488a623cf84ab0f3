"""The launcher's log on stderr, among the worker's lines: one event per line, `launcher.<event>
key=value …`."""

from __future__ import annotations

import json
import os


def log_event(event: str, **fields: object) -> None:
    """Write one line immediately; ignore errors, because the reader may have ended."""
    words = [event, *(f"{name}={_word(value)}" for name, value in fields.items())]
    try:
        os.write(2, (" ".join(words) + "\n").encode(errors="backslashreplace"))
    except OSError:
        return


def _word(value: object) -> str:
    """Format a value; quote it like JSON unless it is a single word."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return (
        text
        if text and text.isprintable() and not any(mark in text for mark in ' "=')
        else json.dumps(text, ensure_ascii=False)
    )
