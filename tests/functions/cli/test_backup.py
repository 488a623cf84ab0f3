"""State as one file, and back: complete, checked, never half loaded."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import tarfile
from pathlib import Path

import pytest

from pilotlight.cli import state
from pilotlight.cli.backup import blobs_elsewhere, load, save
from pilotlight.cli.session import Options, Session
from pilotlight.errors import Conflict, InvalidInput, NotFound
from weight_cache.settings import PlatformSettings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    for directory in ("blobs/aa", "activator/a-0", "logs", "node", "weights"):
        (home / directory).mkdir(parents=True)
    for name, text in {"blobs/aa/aabb": "blob", "activator/a-0/journal-1.ndjson": "{}\n", "platform.key": "k", "logs/x.log": "l"}.items():
        (home / name).write_text(text)
    with contextlib.closing(sqlite3.connect(home / "controller.db")) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE keys (id TEXT)")
        db.execute("INSERT INTO keys VALUES ('k-1')")
        db.commit()
    return home


def keys(home: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(home / "controller.db")) as db:
        return [row[0] for row in db.execute("SELECT id FROM keys")]


def test_a_backup_brings_back_what_matters_and_nothing_else(home: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(home / "controller.db")) as db:  # open and ahead of its main file, as while running
        db.execute("INSERT INTO keys VALUES ('k-2')")
        db.commit()
        done = save(home, tmp_path / "b.tar", now=5.0)
    assert (tmp_path / "b.tar").stat().st_mode & 0o777 == 0o600
    loaded = load(tmp_path / "b.tar", tmp_path / "other", replace=False, now=9.0)
    assert loaded.created_at == 5.0
    assert loaded.files == done.files == 4
    assert keys(tmp_path / "other") == ["k-1", "k-2"]
    restored = {p.relative_to(tmp_path / "other").as_posix() for p in (tmp_path / "other").rglob("*") if p.is_file()}
    assert restored == {"blobs/aa/aabb", "activator/a-0/journal-1.ndjson", "platform.key", "controller.db"}


def test_a_home_with_state_is_kept_unless_told_otherwise_and_then_set_aside(home: Path, tmp_path: Path) -> None:
    save(home, tmp_path / "b.tar", now=5.0)
    (home / "platform.yaml").write_text("# mine")
    with pytest.raises(Conflict, match="already holds"):
        load(tmp_path / "b.tar", home, replace=False, now=9.0)
    (home / "blobs/aa/later").write_text("newer")
    load(tmp_path / "b.tar", home, replace=True, now=9.0)
    assert not (home / "blobs/aa/later").exists()
    assert (tmp_path / "home.before-9/blobs/aa/later").read_text() == "newer"
    assert (home / "platform.yaml").read_text() == "# mine"


def altered(source: Path, target: Path, change: str, content: bytes) -> None:
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        for member in old:
            file = old.extractfile(member)
            data = content if member.name == change else file.read() if file else b""
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))


def test_an_altered_file_is_refused_and_nothing_is_touched(home: Path, tmp_path: Path) -> None:
    save(home, tmp_path / "b.tar", now=5.0)
    altered(tmp_path / "b.tar", tmp_path / "bad.tar", "blobs/aa/aabb", b"evil")
    with pytest.raises(InvalidInput, match="blobs/aa/aabb was altered"):
        load(tmp_path / "bad.tar", home, replace=True, now=9.0)
    assert (home / "blobs/aa/aabb").read_text() == "blob"
    assert keys(home) == ["k-1"]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "controller.db/../../x", "node/code"])
def test_names_that_no_backup_has_are_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        for member, data in {
            "manifest.json": json.dumps({"format": 1, "created_at": 0, "sha256": {name: "0"}}).encode(),
            name: b"x",
        }.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(InvalidInput, match="no backup does"):
        load(tmp_path / "b.tar", tmp_path / "h", replace=False, now=9.0)
    assert not (tmp_path / "h").exists()


def test_what_is_no_backup_or_cut_short_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InvalidInput, match="not a whole backup"):
        load(tmp_path / "text", tmp_path / "h", replace=False, now=9.0)
    save(home, tmp_path / "b.tar", now=5.0)
    (tmp_path / "cut.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:6000])
    with pytest.raises(InvalidInput):
        load(tmp_path / "cut.tar", tmp_path / "h", replace=False, now=9.0)
    with pytest.raises(NotFound):
        load(tmp_path / "none", tmp_path / "h", replace=False, now=9.0)
    with pytest.raises(NotFound, match="no platform's state"):
        save(tmp_path / "empty", tmp_path / "c.tar", now=5.0)


def test_blobs_that_lie_elsewhere_are_left_out_and_named(home: Path, tmp_path: Path) -> None:
    done = save(home, tmp_path / "b.tar", now=5.0, blobs_at="s3://bucket/blobs")
    assert (done.files, done.blobs_at) == (3, "s3://bucket/blobs")
    loaded = load(tmp_path / "b.tar", tmp_path / "other", replace=False, now=9.0)
    assert loaded.blobs_at == "s3://bucket/blobs"
    assert not (tmp_path / "other" / "blobs").exists()


def test_uploads_under_way_are_no_part_of_a_backup(home: Path, tmp_path: Path) -> None:
    (home / "blobs/incoming").mkdir()
    (home / "blobs/incoming/half").write_text("ha")
    assert save(home, tmp_path / "b.tar", now=5.0).files == 4


def test_only_another_place_than_the_homes_own_is_elsewhere(home: Path) -> None:
    assert blobs_elsewhere(PlatformSettings(), home) is None
    assert blobs_elsewhere(PlatformSettings(blobs=str(home / "x/../blobs")), home) is None
    assert blobs_elsewhere(PlatformSettings(blobs="/srv/blobs"), home) == "/srv/blobs"
    assert blobs_elsewhere(PlatformSettings(blobs="s3://b"), home) == "s3://b"


def test_the_commands_say_where_blobs_are_that_a_backup_lacks(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def session(name: str, where: str) -> Session:
        config = tmp_path / f"{name}.yaml"
        config.write_text(f"platform: {{home: {tmp_path / name}, blobs: {where}}}")
        return Session(options=Options(config=config), environ={"HOME": str(tmp_path), "NO_COLOR": "1"}, cwd=tmp_path)

    state.backup(session("home", "s3://bucket/blobs"), tmp_path / "b.tar")
    assert "Without blobs: they lie at s3://bucket/blobs" in capsys.readouterr().out
    state.load(session("same", "s3://bucket/blobs"), tmp_path / "b.tar")
    assert "blobs" not in capsys.readouterr().out
    state.load(session("other", "null"), tmp_path / "b.tar")
    assert f"this platform looks for them at {tmp_path}/other/blobs" in capsys.readouterr().out.replace("\n", " ")
