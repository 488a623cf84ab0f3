"""The console that commands print to. It escapes control characters, so that untrusted text such as
names and errors cannot control the terminal."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from pilotlight.core.logging_config import escape_control_characters


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
