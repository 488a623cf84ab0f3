"""Half files keep what is right of them, over failures and restarts, and never more than that."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.weight_cache.models import chunked, manifest_of
from weight_cache.fetch.partial_files import PartialFile, PartialFiles
from weight_cache.manifest import CHUNK_BYTES, ManifestFile

CONTENT = chunked(b"a", b"b")
FILE = manifest_of({"w": CONTENT}).files[0]


@pytest.fixture
def partials(tmp_path: Path) -> PartialFiles:
    return PartialFiles(tmp_path)


def write(
    partial: PartialFile, *indices: int, file: ManifestFile = FILE, content: bytes = CONTENT
) -> list[bool]:
    chunks = list(file.chunks())
    return [
        partial.write(
            i,
            chunks[i],
            content[chunks[i].offset_bytes : chunks[i].offset_bytes + chunks[i].length_bytes],
        )
        for i in indices
    ]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_wrong_or_short_chunks_are_not_written(tmp_path: Path, partials: PartialFiles) -> None:
    partial = partials.open(FILE)
    chunk = next(iter(FILE.chunks()))
    assert partial.write(0, chunk, b"b" * CHUNK_BYTES) is False
    assert partial.write(0, chunk, b"a" * (CHUNK_BYTES - 1)) is False
    assert partial.missing_bytes == len(CONTENT)
    assert (tmp_path / FILE.digest).stat().st_blocks == 0
    partials.leave(partial)
    assert names(tmp_path) == []


def test_what_this_process_wrote_is_known_and_what_another_wrote_is_read_again(
    tmp_path: Path, partials: PartialFiles
) -> None:
    partial = partials.open(FILE)
    assert write(partial, 1, 2) == [True, True]
    partials.leave(partial)
    assert partials.kept_bytes(FILE.digest) == CHUNK_BYTES + 4
    ours = partials.open(FILE)
    assert (ours.verified, ours.claimed) == ({1, 2}, set())
    partials.leave(ours)
    theirs = PartialFiles(tmp_path).open(FILE)
    assert (theirs.verified, theirs.claimed, theirs.missing_bytes) == (set(), {1, 2}, CHUNK_BYTES)
    assert theirs.check(1, list(FILE.chunks())[1]) is True
    assert (theirs.verified, theirs.claimed) == ({1}, {2})
    assert repr(theirs) == f"<PartialFile {FILE.digest[:12]} 1/3 chunks>"
    theirs.close()


def test_a_claim_that_is_wrong_is_dropped(tmp_path: Path, partials: PartialFiles) -> None:
    partial = partials.open(FILE)
    write(partial, 0, 1)
    partials.leave(partial)
    with (tmp_path / FILE.digest).open("r+b") as stream:
        stream.write(b"x")
    again = partials.open(FILE)  # the same process: but somebody wrote to the file
    chunks = list(FILE.chunks())
    assert [again.check(0, chunks[0]), again.check(1, chunks[1])] == [False, True]
    assert again.missing_bytes == CHUNK_BYTES + 4
    partials.leave(again)
    assert PartialFiles(tmp_path).stock(set()) == {FILE.digest: CHUNK_BYTES}


def test_claims_not_looked_at_yet_are_still_claimed_after_the_next_failure(
    tmp_path: Path, partials: PartialFiles
) -> None:
    partial = partials.open(FILE)
    write(partial, 0, 1)
    partials.leave(partial)
    others = PartialFiles(tmp_path)
    second = others.open(FILE)
    write(second, 2)
    others.leave(second)
    third = PartialFiles(tmp_path).open(FILE)
    assert third.claimed == {0, 1, 2}
    third.close()


def test_bits_are_on_the_disk_after_every_few_chunks(tmp_path: Path) -> None:
    partial = PartialFiles(tmp_path, flushed_every=2).open(FILE)
    write(partial, 0)
    assert names(tmp_path) == [FILE.digest]
    write(partial, 1, 2)
    partial.close()  # as a kill would: nothing more is written
    assert PartialFiles(tmp_path).stock(set()) == {FILE.digest: 2 * CHUNK_BYTES}


def test_files_of_one_chunk_have_no_bits_and_no_half(
    tmp_path: Path, partials: PartialFiles
) -> None:
    file = manifest_of({"w": b"abc"}).files[0]
    partial = partials.open(file)
    assert write(partial, 0, file=file, content=b"abc") == [True]
    partial.flush()
    partials.leave(partial)
    assert names(tmp_path) == []


def test_stock_removes_what_is_of_no_use(tmp_path: Path) -> None:
    (tmp_path / "no bits").write_bytes(b"x" * 100)
    (tmp_path / "no file.done").write_bytes(b"\xff")
    (tmp_path / "complete").write_bytes(b"x" * 100)
    (tmp_path / "complete.done").write_bytes(b"\1")
    (tmp_path / "empty bits").write_bytes(b"x" * 100)
    (tmp_path / "empty bits.done").write_bytes(b"")
    (tmp_path / "good").write_bytes(b"x" * 100)
    (tmp_path / "good.done").write_bytes(b"\1")
    assert PartialFiles(tmp_path).stock({"complete"}) == {"good": 100}
    assert names(tmp_path) == ["good", "good.done"]


def test_bits_beyond_the_file_and_bits_without_a_file_mean_nothing(
    tmp_path: Path, partials: PartialFiles
) -> None:
    (tmp_path / f"{FILE.digest}.done").write_bytes(b"\xff\xff")
    partial = partials.open(FILE)
    assert partial.claimed == set()
    partial.close()
    (tmp_path / f"{FILE.digest}.done").write_bytes(b"\xff\xff")
    partial = partials.open(FILE)
    assert partial.claimed == {0, 1, 2}
    partial.close()


def test_sealed_file_is_read_only_and_its_bits_go_when_it_has_its_name(
    tmp_path: Path, partials: PartialFiles
) -> None:
    partial = partials.open(FILE)
    write(partial, 0, 1, 2)
    partial.flush()
    partial.seal()
    assert (tmp_path / FILE.digest).stat().st_mode & 0o777 == 0o444
    (tmp_path / FILE.digest).rename(tmp_path / "named")
    partials.finish(FILE.digest)
    partials.leave(partial)
    assert names(tmp_path) == ["named"]
    assert (tmp_path / "named").read_bytes() == CONTENT


def test_a_disk_that_refuses_the_flush_loses_no_older_bits(
    partials: PartialFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_descriptor: int, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    partial = partials.open(FILE)
    write(partial, 0)
    partial.flush()
    monkeypatch.setattr(os, "pwrite", refuses)
    monkeypatch.setattr(os, "fdatasync", refuses)
    with pytest.raises(OSError, match="No space"):
        write(partial, 1)
    partials.leave(partial)
    assert "not flushed" in caplog.text
    assert partials.kept_bytes(FILE.digest) == CHUNK_BYTES
