"""Which log is whose: the read side of logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snapshotter.logs import LogQuery, Logs

LINE = "2026-11-01T00:00:00+00:00 stdout - text\n"
MINE = {"tenant": "t-1"}


def write(directory: Path, name: str, labels: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps({"labels": labels}))
    (directory / f"{name}.log").write_text(LINE)


async def texts(logs: Logs, name: str | None) -> list[str]:
    return [line["text"] async for line in logs.read(LogQuery(labels=MINE, instance_id=name))]


async def test_only_logs_with_the_labels_asked_for_are_read(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "logs", "i-mine", MINE)
    write(tmp_path / "logs", "i-theirs", {"tenant": "t-2"})

    assert await texts(logs, None) == ["text"]
    assert await texts(logs, "i-mine") == ["text"]
    assert await texts(logs, "i-theirs") == []


@pytest.mark.parametrize("name", ["../elsewhere/forged", "{root}/elsewhere/forged", "./i-mine", "i-mine\n", ""])
async def test_what_is_no_name_of_an_instance_leads_nowhere(tmp_path: Path, name: str) -> None:
    logs = Logs(tmp_path / "logs")
    write(tmp_path / "elsewhere", "forged", MINE)

    assert await texts(logs, name.format(root=tmp_path)) == []


async def test_the_tail_of_a_log_has_no_line_before_one_was_printed(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs")
    assert await logs.tail("i-new") == []
    write(tmp_path / "logs", "i-new", MINE)
    assert await logs.tail("i-new") == ["text"]
    (tmp_path / "logs/i-new.log").write_text("")
    assert await logs.tail("i-new") == []


async def test_a_line_of_several_calls_is_each_ones(tmp_path: Path) -> None:
    write(tmp_path / "logs", "i-mine", MINE)
    (tmp_path / "logs/i-mine.log").write_text(LINE.replace(" - ", " req-1,req-2 ") + LINE.replace(" - text", " req-12 other"))

    found = {
        call: [line["text"] async for line in Logs(tmp_path / "logs").read(LogQuery(labels=MINE, call_id=call))]
        for call in ("req-1", "req-2", "req-12", "req-3", "req-1,req-2")
    }

    assert found == {"req-1": ["text"], "req-2": ["text"], "req-12": ["other"], "req-3": [], "req-1,req-2": []}
