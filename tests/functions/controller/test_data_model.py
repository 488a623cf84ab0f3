"""The pages of the data model say of every table how long its rows live."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pilotlight.controller.database import tables

PAGES = Path(__file__).parents[3] / "docs" / "reference" / "data-model"


def lives() -> Iterator[tuple[str, str]]:
    """Names of tables, and what their row of a page says in its column `lives`."""
    for page in PAGES.glob("*.md"):
        column = None
        for line in page.read_text().splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if cells[:1] == ["table"]:
                column = cells.index("lives") if "lives" in cells else None
            elif column is not None and len(cells) > column:
                for name in re.findall(r"`(\w+)`", cells[0]):
                    yield name, cells[column]


def test_every_table_is_described_with_its_retention() -> None:
    known = dict(lives())
    missing = tables.metadata.tables.keys() - {name for name, text in known.items() if text}
    assert missing == set()
