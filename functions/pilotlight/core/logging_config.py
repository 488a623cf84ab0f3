"""Log configuration of the platform's processes: each record is one line.

Messages contain foreign text: names, paths, exceptions of functions. Control characters in it are
escaped (`\\n`, `\\x1b`), to prevent forged lines and terminal escape sequences. Tracebacks keep
their lines, indented."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""C0, DEL, C1; line separators; characters that change the text direction."""


def escape_control_characters(text: str, *, keep: str = "") -> str:
    """Escape control characters, except those in `keep`."""
    return _UNPRINTABLE.sub(
        lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text
    )


def dump_json(value: Any, *, default: Callable[[Any], str] = str) -> str:
    """Format JSON on one line as readable text: characters beyond ASCII as they are, except
    control characters and those that change the text direction (`\\u009b`)."""
    text = json.dumps(value, ensure_ascii=False, default=default)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def configure_logging(form: str) -> None:
    """Log to standard error from level INFO. `form`: a format of `logging.Formatter`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SingleLineFormatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class SingleLineFormatter(logging.Formatter):
    """Formats each record as one line, with control characters escaped. Immutable."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the record's line."""
        record.message = escape_control_characters(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Format a traceback, indented, so that no line looks like a record."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        """Format a stack, indented."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escape_control_characters(line)}" for line in text.split("\n"))
