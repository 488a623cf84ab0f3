"""A manifest names exactly the bytes that were there, the same way everywhere, and a foreign one is
not believed."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_cache import manifest as manifests
from weight_cache.errors import ManifestInvalid, TensorsInvalid
from weight_cache.manifest import (
    CHUNK_BYTES,
    MAX_TENSORS_OF_FILE,
    FileHash,
    ManifestFile,
    check_paths,
    check_tensors,
    file_digest,
    parse,
)
from weight_cache.sources.manifest_builder import build_manifest
from weight_cache.types import Chunk, Tensor


def test_same_directory_gives_the_same_manifest(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
    for order, name in ((["b", "sub/a", "sub.x"], "one"), (["sub.x", "sub/a", "b"], "two")):
        for path in order:
            (tmp_path / name / path).write_text(path)
    one, two = build_manifest(tmp_path / "one"), build_manifest(tmp_path / "two", workers=1)
    assert [f.path for f in one.files] == ["b", "sub.x", "sub/a"]
    assert one == two
    assert one.digest == hashlib.sha256(one.to_bytes()).hexdigest()
    assert parse(one.to_bytes()) == one


def test_large_file_is_cut_into_chunks(tmp_path: Path) -> None:
    content = os.urandom(CHUNK_BYTES) + b"tail"
    (tmp_path / "model.bin").write_bytes(content)
    (tmp_path / "empty").touch()
    seen: list[tuple[int, int]] = []
    manifest = build_manifest(tmp_path, progress=lambda done, total: seen.append((done, total)))
    empty, model = manifest.files
    assert list(empty.chunks()) == []
    assert list(model.chunks()) == [
        Chunk(
            offset_bytes=0,
            length_bytes=CHUNK_BYTES,
            sha256=hashlib.sha256(content[:CHUNK_BYTES]).hexdigest(),
        ),
        Chunk(offset_bytes=CHUNK_BYTES, length_bytes=4, sha256=hashlib.sha256(b"tail").hexdigest()),
    ]
    assert (
        model.digest
        == digest_of(content, piece_bytes=1_000_003)
        == digest_of(content, piece_bytes=CHUNK_BYTES)
    )
    assert model.digest != file_digest(len(content) + 1, model.chunk_sha256s)
    assert seen == [(CHUNK_BYTES, CHUNK_BYTES + 4), (CHUNK_BYTES + 4, CHUNK_BYTES + 4)]
    assert manifest.size_bytes == CHUNK_BYTES + 4


def digest_of(content: bytes, *, piece_bytes: int) -> str:
    whole = FileHash()
    for begin in range(0, len(content), piece_bytes):
        whole.update(content[begin : begin + piece_bytes])
    return whole.hexdigest()


def test_link_inside_is_followed_and_outside_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "real").write_text("x")
    (model / "same").symlink_to("real")
    assert len(build_manifest(model).blobs()) == 1
    (tmp_path / "secret").write_text("x")
    (model / "out").symlink_to("../secret")
    with pytest.raises(ManifestInvalid, match="links out of"):
        build_manifest(model)
    (model / "out").unlink()
    (model / "loop").symlink_to(".")
    with pytest.raises(ManifestInvalid, match="not a file"):
        build_manifest(model)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(ManifestInvalid, match="no files"):
        build_manifest(tmp_path / "empty")
    with pytest.raises(ManifestInvalid, match="not a directory"):
        build_manifest(tmp_path / "nothing")
    os.mkfifo(tmp_path / "empty" / "pipe")
    with pytest.raises(ManifestInvalid, match="neither a file"):
        build_manifest(tmp_path / "empty")


def one_file(**changes: Any) -> bytes:
    file = {"path": "a", "size_bytes": 1, "chunks": ["1" * 64], **changes}
    return canonical({"version": 2, "chunk_bytes": CHUNK_BYTES, "files": [file]})


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def test_well_formed_manifest_is_read() -> None:
    assert parse(one_file()).files[0].path == "a"


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"{", "not a manifest"),
        (b"[" * 100_000, "not a manifest"),
        (one_file().replace(b'"a"', b'"a'), "not JSON"),
        (one_file().replace(b'"a"', b"[" * 100_000), "not JSON"),
        (canonical({"version": 3, "chunk_bytes": CHUNK_BYTES, "files": []}), "files and version 2"),
        (canonical({"version": 2, "chunk_bytes": 1, "files": []}), "files and version 2"),
        (canonical({"version": 1, "chunk_bytes": CHUNK_BYTES, "files": []}), "deploy again"),
        (canonical({"version": 2, "chunk_bytes": CHUNK_BYTES, "files": []}), "0 files"),
        (one_file(path="/etc/passwd"), "plain relative path"),
        (one_file(path="a/../../b"), "plain relative path"),
        (one_file(path="a//b"), "plain relative path"),
        (one_file(path=".."), "plain relative path"),
        (one_file(path="./a"), "plain relative path"),
        (one_file(path="a/."), "plain relative path"),
        (one_file(path="a/"), "plain relative path"),
        (one_file(path=""), "plain relative path"),
        (one_file(path="a/" * 600), "plain relative path"),
        (one_file(path="a\0b"), "plain relative path"),
        (one_file(path="x" * 256), "plain relative path"),
        (one_file(size_bytes=-1), "whole number"),
        (one_file(size_bytes=True), "whole number"),
        (one_file(size_bytes=CHUNK_BYTES + 1), "have 2 chunks, not 1"),
        (one_file(chunks=["../../x"]), "64 hex digits"),
        (one_file(chunks=["z" * 64]), "64 hex digits"),
        (one_file() + b"\n", "canonical JSON"),
        (one_file().replace(b'"path"', b' "path"'), "not canonical"),
        (one_file(extra=1), "expected path"),
        (one_file(tensors=[]), "non-empty"),
        (one_file(tensors=[["w", "F32", [1], 0]]), "a row must be"),
        (one_file(tensors=[["w", "U8", [2], 0, 2]]), "is at 0 to 2, but must be within 1 bytes"),
        (one_file(tensors=[["w", "U8", [-1], 0, 1]]), "whole number"),
        (
            one_file(tensors=[["v", "U8", [1], 0, 1], ["w", "U8", [1], 0, 1]]),
            "is at 0 to 1, but must be within 1 bytes and after byte 1",
        ),
        (one_file(tensors=[["v", "U8", [0], 0, 0], ["v", "U8", [1], 0, 1]]), "have the same name"),
        (
            one_file().replace(b"}]", b',"tensors":[["\\ud800","U8",[1],0,1]]}]'),
            "is not valid Unicode",
        ),
    ],
)
def test_broken_manifest_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(ManifestInvalid, match=said):
        parse(raw)


@pytest.mark.parametrize(
    "paths, said",
    [
        (["b", "a"], "sorted"),
        (["a", "a"], "sorted"),
        (["a", "a-b", "a/b"], "'a' is both a file and a directory"),
    ],
)
def test_paths_that_collide_are_refused(paths: list[str], said: str) -> None:
    files = [{"path": p, "size_bytes": 0, "chunks": []} for p in paths]
    with pytest.raises(ManifestInvalid, match=said):
        parse(canonical({"version": 2, "chunk_bytes": CHUNK_BYTES, "files": files}))


def test_directories_of_a_model_have_bounds() -> None:
    check_paths(["a/" * 32 + "f"])
    with pytest.raises(ManifestInvalid, match="is 33 directories deep: at most 32"):
        check_paths(["a/" * 33 + "f"])
    check_paths([f"{i:05d}/f" for i in range(10_000)])
    with pytest.raises(ManifestInvalid, match="more than 10000 directories"):
        check_paths([f"{i:05d}/f" for i in range(10_001)])


def rows(count: int, *, name: str = "w") -> list[Any]:
    return [[f"{name}{i}", "U8", [], 0, 0] for i in range(count)]


def files_with(*tensors: list[Any]) -> bytes:
    files = [
        {"path": f"{i:06d}", "size_bytes": 0, "chunks": [], **({"tensors": held} if held else {})}
        for i, held in enumerate(tensors)
    ]
    return canonical({"version": 2, "chunk_bytes": CHUNK_BYTES, "files": files})


@pytest.mark.parametrize(
    "raw, said",
    [
        (
            files_with(rows(MAX_TENSORS_OF_FILE * 3 // 2)),
            r"files\[0\] has more values than 100000 tensors",
        ),
        (
            files_with(rows(1)).replace(b"[]", b"[" + b"1," * 2_000_000 + b"1]", 1),
            r"files\[0\] has more values than",
        ),
        (
            files_with(*[rows(MAX_TENSORS_OF_FILE)] * 3),
            "the manifest has more values than 250000 tensors",
        ),
        (files_with(*[[]] * 100_001), "100001 files: a model has 1 to 100000"),
        (b"," * (32 * 1024**2 + 1), "is longer than 33554432"),
    ],
    ids=["tensors of a file", "numbers", "tensors of all files", "files", "bytes"],
)
def test_a_manifest_of_many_values_is_refused_before_any_is_decoded(raw: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ManifestInvalid, match=said):
            parse(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw), "copies of the text, no values"


def test_tensors_of_a_model_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Tensor(name="w", dtype="U8", shape=(), offset_bytes=0, length_bytes=0)
    file = ManifestFile(
        path="a", size_bytes=0, chunk_sha256s=(), tensors=(tensor,) * MAX_TENSORS_OF_FILE
    )
    check_tensors([file, file])
    with pytest.raises(ManifestInvalid, match="300000 tensors: a model has at most 250000"):
        check_tensors([file, file, file])
    with pytest.raises(ManifestInvalid, match="has 100001 tensors: a file has at most 100000"):
        check_tensors([replace(file, tensors=(*file.tensors, tensor))])

    raw = files_with(rows(11), *[[]] * 10)
    monkeypatch.setattr(manifests, "MAX_TENSORS", 10)
    with pytest.raises(ManifestInvalid, match="11 tensors: a model has at most 10"):
        parse(raw)  # files without tensors leave room for them in what is counted before


def test_names_with_brackets_and_separators_are_read() -> None:
    raw = files_with([['},{"chunks":[[[,,,', "U8", [], 0, 0]], [["\\", "U8", [], 0, 0]])
    assert parse(raw).files[0].tensors[0].name == '},{"chunks":[[[,,,'
    assert parse(raw).to_bytes() == raw


def test_many_deep_paths_take_no_more_memory_than_they_are_long() -> None:
    paths = [f"{i:04d}" + f"/{'a' * 100}" * 9 for i in range(1000)]
    tracemalloc.start()
    try:
        check_paths(paths)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    ).map(canonical)
)
def test_anything_else_is_refused_and_nothing_worse(raw: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        parse(raw)


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def test_safetensors_file_has_an_index_in_its_manifest(tmp_path: Path) -> None:
    rows = {
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
    }
    content = safetensors(json.dumps(rows).encode(), b"abcdef")
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")

    manifest = build_manifest(tmp_path)

    config, model = manifest.files
    begin = len(content) - 6
    assert config.tensors == ()
    assert [(t.name, t.dtype, t.shape, t.offset_bytes, t.length_bytes) for t in model.tensors] == [
        ("a", "F32", (), begin, 4),
        ("b", "U8", (2,), begin + 4, 2),
    ]
    assert parse(manifest.to_bytes()) == manifest


def test_safetensors_header_beyond_the_first_chunk_is_indexed(tmp_path: Path) -> None:
    row = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    (tmp_path / "m.safetensors").write_bytes(safetensors(row + b" " * CHUNK_BYTES + b"}", b"x"))

    (file,) = build_manifest(tmp_path).files

    assert (file.tensors[0].name, file.tensors[0].offset_bytes) == ("a", file.size_bytes - 1)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 64, "claims"),
        (safetensors(b"{" * 1000), "not JSON"),
        (
            safetensors(b'{"a":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}'),
            "a.safetensors.*cut off",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
)
def test_safetensors_file_that_lies_is_refused_by_name(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(TensorsInvalid, match=said):
        build_manifest(tmp_path)
