"""Text of others in logs: one record stays one line, and nothing speaks to a terminal."""

from __future__ import annotations

import logging
from pathlib import Path

from pilotlight.core.logging_config import SingleLineFormatter, escape_control_characters

FORGED = "x\n2026-11-24 00:00:00 INFO activator all is well\x1b]0;owned\x07\x9b2J\r\u2028\u202e"


def formatted(*args: object, error: Exception | None = None) -> list[str]:
    info = (type(error), error, error.__traceback__) if error is not None else None
    record = logging.LogRecord(
        "activator", logging.WARNING, __file__, 1, "start failed error=%s", args, info
    )
    return SingleLineFormatter("%(levelname)s %(name)s %(message)s").format(record).split("\n")


def test_a_record_is_one_line_without_control_characters() -> None:
    (line,) = formatted(FORGED)

    assert line.startswith(r"WARNING activator start failed error=x\n2026-11-24")
    assert line.isprintable()
    assert r"\x1b]0;owned\x07\x9b2J\r\u2028\u202e" in line


def test_no_line_of_a_traceback_can_be_taken_for_a_record() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as e:
        first, *rest = formatted("y", error=e)

    assert first == "WARNING activator start failed error=y"
    assert rest
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_other_text_is_left_alone() -> None:
    assert escape_control_characters("Grüße, 東京 \\n 'quoted' 🙂") == "Grüße, 東京 \\n 'quoted' 🙂"


def test_every_process_logs_so() -> None:
    root = Path(__file__).parents[3]
    sources = [
        file
        for place in ("activator", "functions/pilotlight", "snapshotter", "weight_cache")
        for file in (root / place).rglob("*.py")
    ]

    assert [
        str(file.relative_to(root)) for file in sources if "basicConfig" in file.read_text()
    ] == ["functions/pilotlight/core/logging_config.py"]
    assert (
        len([file for file in sources if "logging_config.configure_logging(" in file.read_text()])
        == 5
    )
