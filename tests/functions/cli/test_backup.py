"""State as one file, and back: complete, checked, never half loaded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sqlite3
import tarfile
from pathlib import Path

import pytest

from pilotlight.cli.commands.operations import state, state_drill
from pilotlight.cli.commands.operations.backup import (
    external_blob_location,
    load_backup,
    save_backup,
)
from pilotlight.cli.core.session import CommonOptions, Session
from pilotlight.controller.billing import invoices, ledger
from pilotlight.controller.database.store import Store
from pilotlight.controller.identity import tenants
from pilotlight.core.settings import PlatformSettings
from pilotlight.errors import Conflict, InvalidInput, NotFound
from tests.functions.controller.parts import ManualClock, usage


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    for directory in ("blobs/aa", "activator/a-0", "logs", "node", "weights"):
        (home / directory).mkdir(parents=True)
    for name, text in {
        "blobs/aa/aabb": "blob",
        "activator/a-0/journal-1.ndjson": "{}\n",
        "platform.key": "k",
        "logs/x.log": "l",
    }.items():
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
    # open and ahead of its main file, as while running
    with contextlib.closing(sqlite3.connect(home / "controller.db")) as db:
        db.execute("INSERT INTO keys VALUES ('k-2')")
        db.commit()
        done = save_backup(home, tmp_path / "b.tar", now=5.0)
    assert (tmp_path / "b.tar").stat().st_mode & 0o777 == 0o600
    loaded = load_backup(tmp_path / "b.tar", tmp_path / "other", replace=False, now=9.0)
    assert loaded.created_at == 5.0
    assert loaded.files == done.files == 4
    assert keys(tmp_path / "other") == ["k-1", "k-2"]
    restored = {
        p.relative_to(tmp_path / "other").as_posix()
        for p in (tmp_path / "other").rglob("*")
        if p.is_file()
    }
    assert restored == {
        "blobs/aa/aabb",
        "activator/a-0/journal-1.ndjson",
        "platform.key",
        "controller.db",
    }


def test_a_home_with_state_is_kept_unless_told_otherwise_and_then_set_aside(
    home: Path, tmp_path: Path
) -> None:
    save_backup(home, tmp_path / "b.tar", now=5.0)
    (home / "platform.yaml").write_text("# mine")
    with pytest.raises(Conflict, match="already contains"):
        load_backup(tmp_path / "b.tar", home, replace=False, now=9.0)
    (home / "blobs/aa/later").write_text("newer")
    load_backup(tmp_path / "b.tar", home, replace=True, now=9.0)
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
    save_backup(home, tmp_path / "b.tar", now=5.0)
    altered(tmp_path / "b.tar", tmp_path / "bad.tar", "blobs/aa/aabb", b"evil")
    with pytest.raises(InvalidInput, match="blobs/aa/aabb was altered"):
        load_backup(tmp_path / "bad.tar", home, replace=True, now=9.0)
    assert (home / "blobs/aa/aabb").read_text() == "blob"
    assert keys(home) == ["k-1"]


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "controller.db/../../x", "node/code"]
)
def test_names_that_no_backup_has_are_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        for member, data in {
            "manifest.json": json.dumps(
                {"format": 1, "created_at": 0, "sha256": {name: "0"}}
            ).encode(),
            name: b"x",
        }.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(InvalidInput, match="no backup contains"):
        load_backup(tmp_path / "b.tar", tmp_path / "h", replace=False, now=9.0)
    assert not (tmp_path / "h").exists()


def test_what_is_no_backup_or_cut_short_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(InvalidInput, match="not a complete backup"):
        load_backup(tmp_path / "text", tmp_path / "h", replace=False, now=9.0)
    save_backup(home, tmp_path / "b.tar", now=5.0)
    (tmp_path / "cut.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:6000])
    with pytest.raises(InvalidInput):
        load_backup(tmp_path / "cut.tar", tmp_path / "h", replace=False, now=9.0)
    with pytest.raises(NotFound):
        load_backup(tmp_path / "none", tmp_path / "h", replace=False, now=9.0)
    with pytest.raises(NotFound, match="no platform state"):
        save_backup(tmp_path / "empty", tmp_path / "c.tar", now=5.0)


def sparse(name: str, size: int) -> bytes:
    """A header of GNU tar's that says that a file of `size` zeros follows, in no bytes (`tar.h`,
    oldgnu_header)."""
    header = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[483:495] = b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_a_backup_becomes_no_more_than_it_has_bytes(tmp_path: Path) -> None:
    size = 1 << 20
    body = {
        "format": 1,
        "created_at": 0,
        "sha256": {"blobs/aa/aabb": hashlib.sha256(bytes(size)).hexdigest()},
    }
    manifest = json.dumps(body).encode()
    info = tarfile.TarInfo("manifest.json")
    info.size = len(manifest)
    padded = manifest + bytes(-len(manifest) % 512)
    (tmp_path / "b.tar").write_bytes(
        info.tobuf() + padded + sparse("blobs/aa/aabb", size) + bytes(1024)
    )
    with pytest.raises(InvalidInput, match="sparse"):
        load_backup(tmp_path / "b.tar", tmp_path / "h", replace=False, now=9.0)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_a_backup_is_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        manifest = json.dumps({"format": 1, "created_at": 0, "sha256": {"blobs/a": "0"}}).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
        link = tarfile.TarInfo("blobs/a")
        link.type, link.linkname = kind, "/etc"
        tar.addfile(link)
    with pytest.raises(InvalidInput, match="no backup contains"):
        load_backup(tmp_path / "b.tar", tmp_path / "h", replace=False, now=9.0)


@pytest.mark.parametrize(
    "manifest",
    [
        b"[" * 100_000,
        b'{"format": 1, "sha256": {}}',
        b'{"format": 1, "created_at": 0, "sha256": []}',
    ],
)
def test_a_manifest_that_no_backup_has_is_refused(tmp_path: Path, manifest: bytes) -> None:
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(manifest)
        tar.addfile(info, io.BytesIO(manifest))
    with pytest.raises(InvalidInput, match="not a backup of format 1"):
        load_backup(tmp_path / "b.tar", tmp_path / "h", replace=False, now=9.0)


def test_blobs_that_lie_elsewhere_are_left_out_and_named(home: Path, tmp_path: Path) -> None:
    done = save_backup(home, tmp_path / "b.tar", now=5.0, blobs_at="s3://bucket/blobs")
    assert (done.files, done.blobs_at) == (3, "s3://bucket/blobs")
    loaded = load_backup(tmp_path / "b.tar", tmp_path / "other", replace=False, now=9.0)
    assert loaded.blobs_at == "s3://bucket/blobs"
    assert not (tmp_path / "other" / "blobs").exists()


def test_uploads_under_way_are_no_part_of_a_backup(home: Path, tmp_path: Path) -> None:
    (home / "blobs/incoming").mkdir()
    (home / "blobs/incoming/half").write_text("ha")
    assert save_backup(home, tmp_path / "b.tar", now=5.0).files == 4


def test_only_another_place_than_the_homes_own_is_elsewhere(home: Path) -> None:
    assert external_blob_location(PlatformSettings(), home) is None
    assert external_blob_location(PlatformSettings(blobs=str(home / "x/../blobs")), home) is None
    assert external_blob_location(PlatformSettings(blobs="/srv/blobs"), home) == "/srv/blobs"
    assert external_blob_location(PlatformSettings(blobs="s3://b"), home) == "s3://b"


def test_the_commands_say_where_blobs_are_that_a_backup_lacks(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def session(name: str, where: str) -> Session:
        config = tmp_path / f"{name}.yaml"
        config.write_text(f"platform: {{home: {tmp_path / name}, blobs: {where}}}")
        return Session(
            options=CommonOptions(config=config),
            environ={"HOME": str(tmp_path), "NO_COLOR": "1"},
            cwd=tmp_path,
        )

    state.backup(session("home", "s3://bucket/blobs"), tmp_path / "b.tar")
    assert (
        "does not include blobs, which are stored at s3://bucket/blobs" in capsys.readouterr().out
    )
    state.load(session("same", "s3://bucket/blobs"), tmp_path / "b.tar")
    assert "blobs" not in capsys.readouterr().out
    state.load(session("other", "null"), tmp_path / "b.tar")
    assert (
        f"this platform stores blobs at {tmp_path}/other/blobs"
        in capsys.readouterr().out.replace("\n", " ")
    )


# -- the drill -------------------------------------------------------------------------------------
@pytest.fixture
def books(home: Path) -> Path:
    """A home whose ledger has three records and an issued invoice."""
    (home / "controller.db").unlink()
    for leftover in home.glob("controller.db-*"):
        leftover.unlink()
    store = Store(f"sqlite:///{home / 'controller.db'}", clock=ManualClock())
    store.migrate()
    with store.write() as write:
        tenant = tenants.create(write, name="default", uid_base=None, actor="platform").id
        ledger.add(
            write,
            [
                usage(f"req-{n}/1", tenant=tenant, started_at=1_790_812_800.0, cost="0.5")
                for n in range(3)
            ],
        )
        invoices.issue(write, tenant=tenant, month="2026-10", currency="USD", actor="platform")
    store.close()
    return home


def drilled(home: Path, tmp_path: Path, now: float = 1_800_000_100.0) -> state_drill.DrillResult:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return state_drill.run_drill(home, scratch, clock=ManualClock(now))


def test_a_drill_tells_what_would_be_lost_and_how_long_it_takes(
    books: Path, tmp_path: Path
) -> None:
    done = drilled(books, tmp_path)
    assert (done.records, done.later, done.invoices, done.totals) == (
        3,
        0,
        1,
        {"USD": "1.500000000000"},
    )
    assert done.rpo_s == done.backup_s > 0
    assert done.rto_s >= done.load_s > 0


def test_a_drill_finds_an_invoice_that_its_records_do_not_add_up_to(
    books: Path, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(books / "controller.db")) as db:
        db.execute("UPDATE invoices SET total = '1.4'")
        db.commit()
    with pytest.raises(
        state_drill.DrillFailed, match=r"inv-000001 has total 1\.4, but its records add up to 1\.5"
    ):
        drilled(books, tmp_path)


def test_a_drill_finds_a_sum_that_is_off(books: Path, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(books / "controller.db")) as db:
        db.execute("UPDATE usage_days SET records = 4")
        db.commit()
    with pytest.raises(state_drill.DrillFailed, match="usage_days"):
        drilled(books, tmp_path)


def test_the_drill_is_a_command_and_leaves_nothing_behind(
    books: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (books / "platform.yaml").write_text(f"platform: {{home: {books}}}\n")
    state.drill(
        Session(
            options=CommonOptions(home=books, config=books / "platform.yaml", json=True), environ={}
        )
    )
    body = json.loads(capsys.readouterr().out)
    assert body["records"] == 3
    assert body["rpo_s"] >= 0
    assert body["rto_s"] >= 0
    assert [path.name for path in books.parent.iterdir()] == [books.name]


def test_a_link_that_a_process_left_in_its_directory_leads_a_backup_nowhere(
    home: Path, tmp_path: Path
) -> None:
    """The controller's and activators' users write there, and who makes a backup is root."""
    (tmp_path / "shadow").write_text("root's own")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwords").write_text("root's own")
    for link, target in (
        ("blobs/aa/link", "shadow"),
        ("activator/a-0/journal-2.ndjson", "shadow"),
        ("blobs/bb", "etc"),
    ):
        (home / link).symlink_to(tmp_path / target)
    os.mkfifo(home / "blobs/aa/pipe")
    (home / "blobs/aa/x.db").symlink_to(home / "controller.db")
    save_backup(home, tmp_path / "out.tar", now=1.0)
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert {*tar.getnames()} == {
            "manifest.json",
            "blobs/aa/aabb",
            "activator/a-0/journal-1.ndjson",
            "platform.key",
            "controller.db",
        }
