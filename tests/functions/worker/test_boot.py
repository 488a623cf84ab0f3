"""What a worker does before it imports user code."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotlight.worker import boot


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> Path:
    """Copied files of an image, and an empty working directory beside them."""
    (tmp_path / "files/data").mkdir(parents=True)
    (tmp_path / "files/.absolute/models").mkdir(parents=True)
    (tmp_path / "files/data/words.txt").write_text("one two")
    (tmp_path / "files/settings.json").write_text("{}")
    (tmp_path / "work").mkdir()
    return tmp_path / "files"


def test_files_of_the_image_are_in_the_working_directory(files: Path) -> None:
    work = files.parent / "work"
    (work / "settings.json").write_text("mine")
    files.chmod(0o555)

    boot.copy_files(str(files), str(work))

    assert sorted(path.name for path in work.iterdir()) == ["data", "settings.json"]
    assert (work / "data/words.txt").read_text() == "one two"
    assert (work / "settings.json").read_text() == "mine", "what is there stays"
    (work / "data/new.txt").write_text("functions may write")


def test_many_bytes_stay_in_the_image_and_a_line_says_where(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boot, "MAX_FILES_BYTES", 8)

    boot.copy_files(str(files), str(files.parent / "work"))

    assert list((files.parent / "work").iterdir()) == []
    assert "has 9 bytes of files" in capsys.readouterr().err


def test_an_image_without_files_has_none(files: Path) -> None:
    boot.copy_files("", str(files.parent / "work"))
    boot.copy_files("/nonexistent", str(files.parent / "work"))
    assert list((files.parent / "work").iterdir()) == []
