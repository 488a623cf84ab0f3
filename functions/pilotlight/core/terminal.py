"""The console that commands and the SDK print to. It escapes control characters, so that untrusted
text such as names and errors cannot control the terminal."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import IO, Any, TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from pilotlight.core.logging_config import escape_control_characters

PIPE_WIDTH = 1000
"""Columns when the output is not a terminal: wide enough that a table row stays one line for
grep."""


def terminal_of(file: IO[str]) -> Terminal:
    """A console on `file`, as wide as its terminal, or PIPE_WIDTH."""
    return Terminal(file, width=None if file.isatty() else PIPE_WIDTH)


def program_output(line: Mapping[str, Any]) -> Text:
    """The text of a log line with its colours; standard error is yellow."""
    # from_ansi keeps colours and drops all other control sequences
    return Text.from_ansi(
        str(line.get("text", "")), style="yellow" if line.get("stream") == "stderr" else ""
    )


class ForeignOutput:
    """Writes bytes that user code chose: to a terminal as text with control characters as escapes,
    elsewhere as they are."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Write a piece."""
        if self._is_terminal:
            text = self._decoder.decode(data)
            self._stream.write(escape_control_characters(text, keep="\n\t"))
        else:
            self._stream.buffer.write(data)
        self._stream.flush()


class Terminal(Console):
    """Console that honours NO_COLOR and shows control characters, except newlines and tabs, as
    escapes (`\\x1b`)."""

    def __init__(self, file: IO[str], *, width: int | None) -> None:
        super().__init__(file=file, highlight=False, emoji=False, width=width)
        self.push_render_hook(_Harmless())


class _Harmless(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Wrap each renderable so that its text is escaped."""
        return [_Escaped(each) for each in renderables]


class _Escaped:
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inner, options):
            yield (
                segment
                if segment.control
                else Segment(escape_control_characters(segment.text, keep="\n\t"), segment.style)
            )
