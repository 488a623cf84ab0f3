"""The tutorial and the how-to pages do what they say: a reader runs their blocks one after the
other, against one platform. Further tests are of the reader itself."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.documentation import ROOT
from tests.e2e.documentation import Reader, commands, missing_line, settings_error
from tests.fakes.ports import free_port

PAGES = re.findall(r"((?:tutorial|how-to)/[\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
"""In the order of the site's navigation."""


@pytest.fixture
def reader() -> Iterator[Reader]:
    """A reader in an empty directory, with an empty home, who has no platform yet."""
    root = Path(tempfile.mkdtemp(prefix="pl"))
    root.chmod(0o755)
    places = {name: root / name for name in ("home", "platform", "work")}
    for place in places.values():
        place.mkdir()
    address = f"127.0.0.1:{free_port()}"
    (places["platform"] / "platform.yaml").write_text(f"activator: {{listen: '{address}'}}\n")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(places["home"]),
        "PILOTLIGHT_HOME": str(places["platform"]),
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "LC_ALL": "C.UTF-8",
    }
    hook = free_port()
    replaced = {
        "127.0.0.1:8700": address,
        "127.0.0.1:9000": f"127.0.0.1:{hook}",
        '"127.0.0.1", 9000': f'"127.0.0.1", {hook}',
    }
    with Reader(places["work"], environment, replaced) as reader:
        try:
            yield reader
        finally:
            reader.shell("pilotlight down")
    shutil.rmtree(root)


@pytest.mark.e2e
@pytest.mark.root  # the pages show snapshots and tenants
@pytest.mark.timeout(900)
@pytest.mark.soak  # two minutes: functions go to zero, and steps of a canary last for seconds
def test_the_blocks_of_the_tutorial_and_the_how_to_pages_do_what_they_show(reader: Reader) -> None:
    assert PAGES[0].startswith("tutorial/")
    faults = [fault for page in PAGES for fault in reader.read(ROOT / "docs" / page)]
    faults += reader.finish()
    assert not faults, "\n".join(map(str, faults))


def test_every_page_of_the_tutorial_and_of_the_how_to_part_is_read() -> None:
    docs = ROOT / "docs"
    pages = [*(docs / "tutorial").glob("*.md"), *(docs / "how-to").glob("*.md")]
    assert sorted(PAGES) == sorted(str(page.relative_to(docs)) for page in pages)


def test_a_command_shows_the_lines_below_it_and_goes_on_after_a_backslash() -> None:
    text = "$ one \\\n    --two\nfirst\n\nsecond\n$ three\n"
    assert commands(text) == [(0, "one \\\n    --two", ["first", "second"]), (5, "three", [])]


def test_lines_are_found_in_their_order_with_other_numbers_and_left_out_text() -> None:
    printed = "weight_cache ready (0.59 s)\nlive at v7-3f2a1c in 3 ms\nPOST http://here/x\n"
    assert missing_line(["live at v1-aaaaa1 in 2.5 s", "…", "POST …/x"], printed) is None
    assert missing_line(["POST …/x", "live at v1-aaaaa1 in 2.5 s"], printed) is not None
    assert missing_line(["dead at v1-aaaaa1 in 2.5 s"], printed) == "dead at v1-aaaaa1 in 2.5 s"


def test_a_setting_that_does_not_exist_is_named() -> None:
    assert settings_error("activator: {listen: x}") == ""
    assert "lisen" in settings_error("activator: {lisen: x}")
    assert "activtor" in settings_error("activtor: {listen: x}")
    assert settings_error("issuers: {own: {issuer: 'https://a'}}") == ""
    assert "isuer" in settings_error("issuers: {own: {isuer: 'https://a'}}")
