"""Log lines in the terminal."""

from __future__ import annotations

import pytest

from pilotlight.cli.core.logs import format_log_line


@pytest.mark.parametrize(
    "instance, shown",
    [
        ("i-3f2a1c0011223344", "i-3f2a1c00"),
        ("search-embed-v7-3f2a1c-deployment-7998bd060-mchx4", "…060-mchx4"),
        ("search-embed-v7-3f2a1c-deployment-7998bd060-zq2wd", "…060-zq2wd"),
        ("short", "short     "),
    ],
)
def test_instances_are_told_apart_in_ten_characters(instance: str, shown: str) -> None:
    line = format_log_line(
        {"time": 0.0, "instance": instance, "stream": "stdout", "call": None, "text": "hello"}
    )
    assert line.plain.split(" ", 1)[1] == f"{shown} hello"
