"""The archive of a slot's files: kept exactly, read by any tar, and never a way out of the slot."""

from __future__ import annotations

import functools
import io
import os
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.shim.sandbox import workdir_archive
from snapshotter.shim.sandbox.workdir_archive import ArchiveTooLarge, InvalidArchive, SymlinkEscapes
from tests.hypothesis_profiles import examples

KIB = 1024


@pytest.fixture
def there(tmp_path: Path) -> dict[str, str]:
    return roots(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    return roots(tmp_path / "here")


def roots(base: Path) -> dict[str, str]:
    for name in ("work", "tmp", "shm"):
        (base / name).mkdir(parents=True)
    return {name: str(base / name) for name in ("work", "tmp", "shm")}


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "files.tar", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def empty_file() -> int:
    """For an archive, which closes it."""
    return os.memfd_create("files", os.MFD_CLOEXEC)


def travel(source: dict[str, str], target: dict[str, str], fd: int) -> None:
    archive = workdir_archive.pack(empty_file(), source)
    workdir_archive.copy(archive, fd)
    assert workdir_archive.finish(fd) == os.fstat(fd).st_size
    assert workdir_archive.unpack(fd, target) == archive.end
    archive.close()


def looks(base: dict[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, root in base.items():
        for directory, _, files in os.walk(root):
            for path in [directory, *(f"{directory}/{f}" for f in files)]:
                status = os.lstat(path)
                content = (
                    os.readlink(path)
                    if os.path.islink(path)
                    else Path(path).read_bytes()
                    if os.path.isfile(path)
                    else b""
                )
                found[name + path.removeprefix(root)] = (
                    status.st_mode,
                    status.st_uid,
                    status.st_gid,
                    status.st_mtime_ns,
                    content,
                )
    return found


def test_everything_is_as_it_was(
    there: dict[str, str], here: dict[str, str], destination: int
) -> None:
    work = Path(there["work"])
    (work / "a/b").mkdir(parents=True)
    (work / "a/b/data").write_bytes(b"\0\1\2" * 1000)
    os.utime(work / "a/b/data", ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    (work / "a/b").chmod(0o2750)
    (work / "link").symlink_to("a/b/data")
    (work / "a/up").symlink_to("../link")
    (work / os.fsdecode(b"caf\xe9")).write_text("name that is no UTF-8")
    (work / ("n" * 200)).write_text("long")
    (Path(there["shm"]) / "sem").write_bytes(b"x" * 32)
    os.utime(work / "a", ns=(5, 999_999_999_999))
    travel(there, here, destination)
    assert looks(here) == looks(there)


@pytest.mark.root
def test_owners_are_kept(there: dict[str, str], here: dict[str, str], destination: int) -> None:
    (Path(there["work"]) / "mine").write_text("x")
    os.chown(Path(there["work"]) / "mine", 20001, 20002)
    travel(there, here, destination)
    status = (Path(here["work"]) / "mine").stat()
    assert (status.st_uid, status.st_gid) == (20001, 20002)


def test_names_of_one_file_stay_names_of_one_file(
    there: dict[str, str], here: dict[str, str], destination: int
) -> None:
    (Path(there["work"]) / "a").write_text("x")
    os.link(Path(there["work"]) / "a", Path(there["work"]) / "b")
    travel(there, here, destination)
    assert (Path(here["work"]) / "a").stat().st_ino == (Path(here["work"]) / "b").stat().st_ino


@pytest.mark.parametrize("ends_with_data", [True, False])
def test_holes_stay_holes(
    there: dict[str, str], here: dict[str, str], destination: int, ends_with_data: bool
) -> None:
    with (Path(there["work"]) / "sparse").open("wb") as f:
        f.write(b"begin")
        f.seek(1024**3)
        f.write(b"end" if ends_with_data else b"")
        f.truncate(1024**3 + (3 if ends_with_data else 0))
    travel(there, here, destination)
    copy = Path(here["work"]) / "sparse"
    assert copy.stat().st_size == 1024**3 + (3 if ends_with_data else 0)
    assert copy.stat().st_blocks * 512 < 64 * KIB
    assert os.fstat(destination).st_size < 64 * KIB
    with copy.open("rb") as f:
        assert f.read(6) == b"begin\0"
        f.seek(1024**3)
        assert f.read() == (b"end" if ends_with_data else b"")


def test_sockets_and_pipes_are_left_out(
    there: dict[str, str], here: dict[str, str], destination: int
) -> None:
    os.mkfifo(Path(there["work"]) / "fifo")
    where = os.open(there["work"], os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{where}/sock")  # a path of 107 bytes at most
    os.close(where)
    (Path(there["work"]) / "file").write_text("x")
    travel(there, here, destination)
    assert os.listdir(here["work"]) == ["file"]


def test_any_tar_reads_it(there: dict[str, str], destination: int) -> None:
    (Path(there["work"]) / "file").write_text("x")
    archive = workdir_archive.pack(empty_file(), there)
    workdir_archive.copy(archive, destination)
    workdir_archive.finish(destination)
    archive.close()
    os.lseek(destination, 0, os.SEEK_SET)
    out = subprocess.run(
        ["tar", "-t"], stdin=destination, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == ["work/", "work/file", "tmp/", "shm/"]


def test_too_much_names_the_biggest_file(there: dict[str, str]) -> None:
    (Path(there["work"]) / "small").write_bytes(b"x" * 40 * KIB)
    (Path(there["tmp"]) / "big").write_bytes(b"x" * 80 * KIB)
    for attempt in (workdir_archive.measure, functools.partial(workdir_archive.pack, empty_file())):
        with pytest.raises(ArchiveTooLarge, match=r"slot/tmp/big \(80 KiB\)"):
            attempt(there, max_bytes=100 * KIB)


def test_a_tree_deeper_than_any_is_no_endless_work(there: dict[str, str]) -> None:
    path = there["work"]
    for _ in range(70):
        path += "/d"
        os.mkdir(path)
    with pytest.raises(ArchiveTooLarge, match="deeper than 64"):
        workdir_archive.pack(empty_file(), there)


@pytest.mark.parametrize("hold_back", [0, 1])
def test_a_name_that_is_another_files_when_it_is_opened_takes_no_more_than_the_bound(
    there: dict[str, str], tmp_path: Path, destination: int, hold_back: int
) -> None:
    for n in range(8):
        Path(there["work"], f"f{n}").write_bytes(b"")
        (tmp_path / f"large{n}").write_bytes(b"x" * 64 * KIB)

    def exchange(name: str) -> bool:
        last = name.rpartition("/")[2]
        if last.startswith("f"):
            os.rename(tmp_path / f"large{last[1:]}", f"{there['work']}/{last}")
        return True

    with pytest.raises(ArchiveTooLarge, match="biggest"):
        workdir_archive.write(
            destination, there, max_bytes=(128 + 64 * hold_back) * KIB, wanted=exchange
        )
    assert os.fstat(destination).st_size < (160 + 64 * hold_back) * KIB


def test_a_file_that_took_anothers_name_is_packed_as_it_is(
    there: dict[str, str], here: dict[str, str], tmp_path: Path, destination: int
) -> None:
    path = Path(there["work"], "f")
    path.write_bytes(b"earlier")
    (tmp_path / "later").write_bytes(b"later")
    (tmp_path / "later").chmod(0o640)

    def exchange(name: str) -> bool:
        if name == "work/f":
            (tmp_path / "later").rename(path)
        return True

    workdir_archive.write(destination, there, wanted=exchange)
    workdir_archive.finish(destination)
    workdir_archive.unpack(destination, here)
    assert looks(here)["work/f"] == looks(there)["work/f"]


def test_long_names_have_a_bound_of_their_own(there: dict[str, str], destination: int) -> None:
    for n in range(100):
        Path(there["work"], f"{n:0200}").write_bytes(b"")
    with pytest.raises(ArchiveTooLarge, match="names"):
        workdir_archive.write(destination, there, max_header_bytes=64 * KIB)
    assert os.fstat(destination).st_size <= 64 * KIB


def test_a_directory_of_very_many_names_is_not_listed_whole(
    there: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workdir_archive, "_MAX_WALKED", 50)
    for n in range(60):
        Path(there["shm"], f"f{n}").write_bytes(b"")
    with pytest.raises(ArchiveTooLarge, match="more than 50 files"):
        workdir_archive.measure(there)


def test_an_empty_archive_is_nothing(here: dict[str, str]) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    assert workdir_archive.unpack(null, here) == 0
    os.close(null)


def forged(fd: int, *entries: tarfile.TarInfo) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            archive.addfile(entry, io.BytesIO(b"x" * entry.size))
    os.write(fd, raw.getvalue())


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", size: int = 1
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o600
    info.size = size if kind == tarfile.REGTYPE else 0
    info.uid, info.gid = os.getuid(), os.getgid()
    return info


@pytest.mark.parametrize(
    "name", ["../out", "/etc/out", "work/../../out", "work//x", "etc/x", "work/./x", "."]
)
def test_a_name_that_leads_out_is_refused(
    here: dict[str, str], destination: int, name: str
) -> None:
    forged(destination, entry(name))
    with pytest.raises(InvalidArchive, match="leads out"):
        workdir_archive.unpack(destination, here)


def test_a_link_is_not_followed(here: dict[str, str], destination: int, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    forged(
        destination, entry("work/way", tarfile.SYMTYPE, link=str(outside)), entry("work/way/out")
    )
    with pytest.raises(OSError):
        workdir_archive.unpack(destination, here)
    assert os.listdir(outside) == []


def test_a_file_in_the_place_of_a_link_replaces_the_link(
    here: dict[str, str], destination: int, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("safe")
    # nothing of the link is left
    forged(destination, entry("work/way", tarfile.SYMTYPE, link=str(outside)), entry("work/way"))
    workdir_archive.unpack(destination, here)
    assert outside.read_text() == "safe"
    assert (Path(here["work"]) / "way").read_text() == "x"


@pytest.mark.parametrize(
    "target",
    [
        "/etc",
        "/etc/passwd",
        "../../../../../../../../etc",
        "/",
        "/proc/self/root",
        "/proc/self/cwd",
        "loop",
    ],
)
def test_a_link_that_leads_out_never_reaches_criu(
    there: dict[str, str], here: dict[str, str], destination: int, target: str
) -> None:
    """It opens by name as root, and follows links."""
    (Path(there["work"]) / "loop").symlink_to(target)
    with pytest.raises(
        SymlinkEscapes, match=r"work/loop is a symbolic link .* enter\(snap=False\)"
    ):
        workdir_archive.pack(empty_file(), there)
    with pytest.raises(SymlinkEscapes):
        workdir_archive.measure(there)
    forged(destination, entry("work/loop", tarfile.SYMTYPE, link=target))
    with pytest.raises(InvalidArchive, match="leads out"):
        workdir_archive.unpack(destination, here)


def test_links_that_lead_out_together_are_refused(here: dict[str, str], destination: int) -> None:
    up = entry("work/a/b/up", tarfile.SYMTYPE, link=here["tmp"])
    out = entry("work/a/b/out", tarfile.SYMTYPE, link="up/../../../x")
    forged(
        destination, entry("work/a", tarfile.DIRTYPE), entry("work/a/b", tarfile.DIRTYPE), up, out
    )
    with pytest.raises(InvalidArchive, match="a/b/out"):
        workdir_archive.unpack(destination, here)


def test_a_second_name_for_a_file_outside_is_refused(
    here: dict[str, str], destination: int
) -> None:
    forged(destination, entry("work/shadow", tarfile.LNKTYPE, link="../../etc/shadow"))
    with pytest.raises(InvalidArchive):
        workdir_archive.unpack(destination, here)


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_refused(here: dict[str, str], destination: int, kind: bytes) -> None:
    forged(destination, entry("work/mem", kind))
    with pytest.raises(InvalidArchive, match="neither file"):
        workdir_archive.unpack(destination, here)


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(where=st.integers(0, 4095), value=st.integers(0, 255), cut=st.none() | st.integers(1, 4095))
def test_a_damaged_archive_is_refused_or_stays_inside(
    tmp_path: Path, where: int, value: int, cut: int | None
) -> None:
    base = tmp_path / os.urandom(8).hex()
    source, target = roots(base / "a"), roots(base / "b")
    (Path(source["work"]) / "x").write_bytes(b"data" * 10)
    archive = workdir_archive.pack(empty_file(), source)
    raw = bytearray(os.pread(archive.fd, archive.end, 0) + bytes(1024))
    archive.close()
    raw[where % len(raw)] = value
    outside = sorted(os.listdir(base))
    fd = os.memfd_create("damaged")
    os.write(fd, raw[: cut % len(raw)] if cut else raw)
    try:
        workdir_archive.unpack(fd, target)
    except (InvalidArchive, OSError):
        pass
    finally:
        os.close(fd)
    assert sorted(os.listdir(base)) == outside
    assert sorted(os.listdir(base / "b")) == ["shm", "tmp", "work"]
