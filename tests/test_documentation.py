"""What holds the documentation together: its checks find what they are for, pictures and generated
reference are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from scripts import architecture_pictures, documentation
from scripts.documentation import ROOT
from scripts.documentation_site import metrics_of

RULES = ROOT / "deploy" / "monitoring" / "rules.yml"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page of the how-to part, in a repository of its own."""
    monkeypatch.setattr(documentation, "ROOT", tmp_path)
    page = tmp_path / "docs" / "how-to" / "page.md"
    page.parent.mkdir(parents=True)
    return page


def test_links_to_files_and_headings_that_are_not_there_are_found(page: Path) -> None:
    page.write_text("# A page\n[a](other.md) [b](#a-page) [c](#nothing) [d](https://x)\n")
    assert [fault.split(": ", 1)[1] for fault in documentation.link_faults(page)] == [
        "the link other.md leads to no file",
        "page.md has no heading for #nothing",
    ]


def test_links_in_blocks_and_code_are_no_links(page: Path) -> None:
    page.write_text("`[a](b)`\n```text\n[a](b)\n```\n")
    assert list(documentation.link_faults(page)) == []


def test_python_that_does_not_parse_is_found_with_its_line(page: Path) -> None:
    page.write_text("# A page\n\n```python\nawait x\ndef broken(:\n```\n")
    (fault,) = documentation.python_faults(page)
    assert "page.md:5: does not parse" in fault


def test_retired_words_are_found_outside_of_code(page: Path) -> None:
    page.write_text("It is told.\nThe user `nobody`.\n")
    (fault,) = documentation.word_faults(page)
    assert "page.md:1: 'told'" in fault


def test_a_page_is_short_and_begins_with_an_example(page: Path) -> None:
    page.write_text("word " * 99 + "\n```text\n```\n")
    assert list(documentation.shape_faults(page)) == []
    page.write_text("word " * 101 + "\n```text\n```\n")
    (late,) = documentation.shape_faults(page)
    assert "begin with an example" in late
    page.write_text("```text\n```\n" + "word " * 1500)
    (long,) = documentation.shape_faults(page)
    assert "1502 words: at most 1500" in long


@pytest.mark.parametrize("name", ["page.md", "reference/deep/page.md"])
def test_a_page_of_no_part_is_bounded_as_well(page: Path, name: str) -> None:
    other = page.parents[1] / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("word " * 1501)
    (long,) = documentation.shape_faults(other)
    assert "1501 words: at most 1500" in long


def test_anchors_are_those_of_github() -> None:
    assert documentation.anchor_of("Cold start (`a/b.py --peers`)") == "cold-start-abpy---peers"
    assert documentation.anchor_of("[Links](x.md), and A/B") == "links-and-ab"


def test_the_pictures_of_the_architecture_are_drawn_from_names_in_the_code() -> None:
    assert architecture_pictures.missing_names() == []
    for picture in (architecture_pictures.PROCESSES, architecture_pictures.REQUEST):
        drawn = (ROOT / "docs" / "img" / picture.file).read_text()
        assert drawn == architecture_pictures.draw(picture), (
            "python -m scripts.architecture_pictures"
        )


def test_metrics_that_alert_rules_read_are_in_the_reference() -> None:
    listed = {
        name
        for folder in (
            "activator",
            "functions/pilotlight/controller",
            "snapshotter",
            "weight_cache",
        )
        for name in metrics_of(folder)
    }
    rules = yaml.safe_load(RULES.read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    read = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"(?<![:\w])pilotlight_\w+\b(?!:)", "\n".join(expressions))
    }
    assert len(read) > 10
    assert read - listed == set()
