"""Pulling weights: every chunk verified, what is there not fetched again, the directory whole or
not there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pilotlight.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    PilotlightError,
    StorageFull,
    Unavailable,
)
from pilotlight.packaging.weights_pull import is_pull_target_empty, pull_weights
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.sources.manifest_builder import build_manifest


@dataclass
class Shelf:
    """Blobs in memory. `asked`: (digest, offset) of each read; `spoil` may change or refuse what is
    read."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, int]] = field(default_factory=list)
    spoil: Callable[[str, int, bytes], bytes] = lambda _digest, _offset, data: data

    def read_blob(
        self, digest: str, *, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> bytes:
        self.asked.append((digest, offset_bytes))
        if digest not in self.blobs:
            raise NotFound(f"there is no blob {digest}")
        end = None if length_bytes is None else offset_bytes + length_bytes
        return self.spoil(digest, offset_bytes, self.blobs[digest][offset_bytes:end])

    def take(self, directory: Path) -> str:
        """Keep a model; the digest of its manifest."""
        manifest = build_manifest(directory)
        self.blobs |= {f.digest: (directory / f.path).read_bytes() for f in manifest.files}
        self.blobs[manifest.digest] = manifest.to_bytes()
        return manifest.digest


@dataclass
class Model:
    directory: Path
    digest: str
    shelf: Shelf

    def digest_of(self, path: str) -> str:
        return next(f.digest for f in build_manifest(self.directory).files if f.path == path)


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Model:
    directory = tmp_path / "model"
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "empty").touch()
    (directory / "config.json").write_text("{}")
    (directory / "deep" / "er" / "vocab.txt").write_text("a\nb\n")
    (directory / "big.bin").write_bytes(os.urandom(1 << 20) * 40)
    shelf = Shelf()
    return Model(directory, shelf.take(directory), shelf)


def tree(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def leftovers(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.endswith(".part"))


@pytest.mark.parametrize("there", [False, True])
def test_a_model_comes_whole_and_leaves_nothing_beside_it(
    model: Model, tmp_path: Path, there: bool
) -> None:
    target = tmp_path / "new" / "copy"
    if there:
        target.mkdir(parents=True)
    told: list[tuple[int, int]] = []
    done = pull_weights(
        model.shelf, model.digest, target, progress=lambda a, b: told.append((a, b))
    )

    assert tree(target) == tree(model.directory)
    assert (done.files, done.size_bytes, done.fetched_bytes) == (
        4,
        done.size_bytes,
        done.size_bytes,
    )
    assert told == sorted(told)
    assert told[-1] == (done.size_bytes, done.size_bytes)
    assert leftovers(target.parent) == []


def test_what_was_cut_off_goes_on_without_fetching_a_chunk_twice(
    model: Model, tmp_path: Path
) -> None:
    big = model.digest_of("big.bin")

    def cut(digest: str, offset: int, data: bytes) -> bytes:
        if digest == big and offset == 2 * CHUNK_BYTES:
            raise Unavailable("the connection is gone")
        return data

    model.shelf.spoil = cut
    with pytest.raises(Unavailable):
        pull_weights(model.shelf, model.digest, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    assert len(leftovers(tmp_path)) == 1
    before = {
        asked
        for asked in model.shelf.asked
        if asked[0] != model.digest and asked != (big, 2 * CHUNK_BYTES)
    }

    model.shelf.spoil, model.shelf.asked = Shelf().spoil, []
    done = pull_weights(model.shelf, model.digest, tmp_path / "copy")

    again = set(model.shelf.asked) - {(model.digest, 0)}
    assert again.isdisjoint(before)
    assert (big, 2 * CHUNK_BYTES) in again
    assert done.fetched_bytes < done.size_bytes
    assert tree(tmp_path / "copy") == tree(model.directory)


def test_what_a_crash_left_half_written_is_fetched_again(model: Model, tmp_path: Path) -> None:
    staging = tmp_path / f".copy.{model.digest[:12]}.part"
    staging.mkdir()
    content = bytearray((model.directory / "big.bin").read_bytes())
    content[CHUNK_BYTES + 5] ^= 1
    (staging / "big.bin").write_bytes(content)
    pull_weights(model.shelf, model.digest, tmp_path / "copy")

    big = model.digest_of("big.bin")
    assert [asked for asked in model.shelf.asked if asked[0] == big] == [(big, CHUNK_BYTES)]
    assert tree(tmp_path / "copy") == tree(model.directory)


def test_a_wrong_answer_is_asked_for_again_and_a_damaged_blob_is_refused_by_path(
    model: Model, tmp_path: Path
) -> None:
    big, wrong = model.digest_of("big.bin"), iter([b"?"])
    model.shelf.spoil = lambda digest, _offset, data: next(wrong, data) if digest == big else data
    pull_weights(model.shelf, model.digest, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(model.directory)

    model.shelf.spoil = lambda digest, _offset, data: data[:-1] if digest == big else data
    with pytest.raises(PilotlightError, match=r"big\.bin: bytes .* wrong hash"):
        pull_weights(model.shelf, model.digest, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_manifest_with_other_bytes_is_refused(model: Model, tmp_path: Path) -> None:
    model.shelf.spoil = lambda _digest, _offset, data: data + b" "
    with pytest.raises(PilotlightError, match="does not match its digest"):
        pull_weights(model.shelf, model.digest, tmp_path / "copy")


def test_a_blob_that_is_no_manifest_is_refused_before_anything_is_made(
    model: Model, tmp_path: Path
) -> None:
    digest = hashlib.sha256(b"[]").hexdigest()
    model.shelf.blobs[digest] = b"[]"
    with pytest.raises(InvalidInput, match="is not a valid manifest"):
        pull_weights(model.shelf, digest, tmp_path / "copy")
    assert leftovers(tmp_path) == []


def test_into_a_full_directory_only_what_differs_comes_and_the_rest_stays(
    model: Model, tmp_path: Path
) -> None:
    target = tmp_path / "copy"
    pull_weights(model.shelf, model.digest, target)
    (target / "notes.txt").write_text("mine")
    (target / "config.json").write_text("[]")
    model.shelf.asked = []
    done = pull_weights(model.shelf, model.digest, target)

    assert done.fetched_bytes == 2
    assert (target / "config.json").read_text() == "{}"
    assert (target / "notes.txt").read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_a_link_in_the_way_is_replaced_not_written_through(model: Model, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
    target.mkdir()
    elsewhere.write_text("keep me")
    (target / "config.json").symlink_to(elsewhere)
    pull_weights(model.shelf, model.digest, target)

    assert elsewhere.read_text() == "keep me"
    assert not (target / "config.json").is_symlink()


def test_a_directory_in_the_place_of_a_file_is_named(model: Model, tmp_path: Path) -> None:
    (tmp_path / "copy" / "config.json").mkdir(parents=True)
    with pytest.raises(Conflict, match="is a directory"):
        pull_weights(model.shelf, model.digest, tmp_path / "copy")


def test_a_second_pull_into_the_same_place_is_refused_by_name(model: Model, tmp_path: Path) -> None:
    staging = tmp_path / f".copy.{model.digest[:12]}.part"
    staging.mkdir()
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="another pull is writing"):
            pull_weights(model.shelf, model.digest, tmp_path / "copy")
    finally:
        os.close(descriptor)


def test_a_disk_without_room_is_refused_with_both_numbers_before_anything_comes(
    model: Model, tmp_path: Path
) -> None:
    with pytest.raises(StorageFull, match=r"bytes must be downloaded, but .* has only 1000 bytes"):
        pull_weights(model.shelf, model.digest, tmp_path / "copy", free_bytes=lambda _: 1000)
    assert [asked for asked in model.shelf.asked if asked[0] != model.digest] == []


def test_ctrl_c_ends_it_with_nothing_still_writing_and_the_next_pull_goes_on(
    model: Model, tmp_path: Path
) -> None:
    pressed = False

    def interrupt(done: int, _total: int) -> None:
        nonlocal pressed
        if done > CHUNK_BYTES and not pressed:
            pressed = True
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pull_weights(model.shelf, model.digest, tmp_path / "copy", progress=interrupt)
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith("pull weights")
    ] == []
    done = pull_weights(model.shelf, model.digest, tmp_path / "copy")
    assert done.fetched_bytes < done.size_bytes
    assert tree(tmp_path / "copy") == tree(model.directory)


def test_a_link_to_a_directory_is_a_place_to_pull_to(model: Model, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "copy").symlink_to("disk")
    pull_weights(model.shelf, model.digest, tmp_path / "copy")

    assert tree(tmp_path / "disk") == tree(model.directory)
    assert leftovers(tmp_path) == leftovers(tmp_path / "disk") == []


def test_a_directory_that_is_there_may_be_a_disk_of_its_own_so_all_work_is_in_it(
    model: Model, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    places: list[Path] = []

    def room(staging: Path) -> int:
        places.append(staging.parent)
        return 10**12

    pull_weights(model.shelf, model.digest, tmp_path / "disk", free_bytes=room)
    assert places == [tmp_path / "disk"]


def test_what_a_cut_off_pull_left_does_not_replace_a_file_that_is_whole_by_now(
    model: Model, tmp_path: Path
) -> None:
    target = tmp_path / "copy"
    target.mkdir()
    model.shelf.spoil = lambda digest, _offset, data: (
        data[:-1] if digest == model.digest_of("big.bin") else data
    )
    with pytest.raises(PilotlightError):
        pull_weights(model.shelf, model.digest, target)
    (left,) = leftovers(target)
    assert is_pull_target_empty(target)
    (target / "big.bin").write_bytes((model.directory / "big.bin").read_bytes())
    with (target / left / "big.bin").open("r+b") as half:
        half.write(b"half of it")
    pull_weights(model.shelf, model.digest, target)

    assert tree(target) == tree(model.directory)
