"""Logs of the platform's processes: one record is one line, whatever stands in it.

Messages carry text of others: names, paths, what a function raised. A control character in it is
written as an escape (`\\n`, `\\x1b`), so that nobody forges a line or speaks to the terminal of who
reads it. Tracebacks keep their lines, indented."""

from __future__ import annotations

import logging
import re
import sys

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""C0, DEL, C1; separators of lines; characters that change the direction of what follows."""


def escape_control_characters(text: str, *, keep: str = "") -> str:
    """The same on one line, without a control character but those in `keep`."""
    return _UNPRINTABLE.sub(
        lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text
    )


def configure_logging(form: str) -> None:
    """Log to standard error from INFO on. `form`: as `logging.Formatter` takes it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SingleLineFormatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class SingleLineFormatter(logging.Formatter):
    """See the module. Immutable."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """The record's line."""
        record.message = escape_control_characters(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:  # noqa: N802  # logging's name
        """A traceback, which no line of can be taken for a record's."""
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  # logging's name
        """The same of a stack."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"  {escape_control_characters(line)}" for line in text.split("\n"))
