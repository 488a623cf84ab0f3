"""Layers and layouts: the same contents are the same bytes, and a layout is one that others can
read."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.packaging.oci import layers
from pilotlight.packaging.oci.bytecode import with_bytecode
from pilotlight.packaging.oci.contents import LayerContents
from pilotlight.packaging.oci.layers import GZIP, Layer, unpack_names, write_layer
from pilotlight.packaging.oci.layout import create_layout, read_base, write_image

CONFIG = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "x.py").write_text("x = {'a', 'b', 'c'}\n")
    (folder / "a.txt").write_text("a")
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o700)
    (folder / "inner").symlink_to("b/x.py")
    (folder / "outer").symlink_to("/etc/hostname")
    (folder / "around").symlink_to(".")
    return folder


def layer_of(folder: Path, blobs: Path, *, epoch_s: int = 0) -> Layer:
    contents = LayerContents()
    contents.tree("opt/here", folder)
    blobs.mkdir(parents=True, exist_ok=True)
    return write_layer(contents, blobs, title="test", epoch_s=epoch_s)


def members(layer: Layer, blobs: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(blobs / layer.digest.removeprefix("sha256:")) as tar:
        return {member.name: member for member in tar}


def test_times_owners_and_modes_of_the_source_leave_no_trace(tree: Path, tmp_path: Path) -> None:
    one = layer_of(tree, tmp_path / "1")
    os.utime(tree / "a.txt", (5, 5))
    (tree / "a.txt").chmod(0o600)
    two = layer_of(tree, tmp_path / "2")
    assert (one.digest, one.diff_id, one.size_bytes) == (two.digest, two.diff_id, two.size_bytes)
    assert layer_of(tree, tmp_path / "3", epoch_s=1_700_000_000).digest != one.digest


def test_a_layer_has_its_names_in_order_its_directories_first_and_no_owner(
    tree: Path, tmp_path: Path
) -> None:
    found = members(layer_of(tree, tmp_path / "1", epoch_s=7), tmp_path / "1")
    assert list(found) == sorted(found)
    assert found["opt"].isdir()
    assert {(m.uid, m.gid, m.mtime) for m in found.values()} == {(0, 0, 7)}
    assert (found["opt/here/run"].mode, found["opt/here/a.txt"].mode) == (0o755, 0o644)
    assert found["opt/here/inner"].linkname == "b/x.py"
    assert not any(name.startswith("opt/here/around/around/") for name in found)


def test_both_digests_are_those_of_the_bytes(tree: Path, tmp_path: Path) -> None:
    layer = layer_of(tree, tmp_path / "1")
    packed = (tmp_path / "1" / layer.digest.removeprefix("sha256:")).read_bytes()
    assert (f"sha256:{hashlib.sha256(packed).hexdigest()}", len(packed)) == (
        layer.digest,
        layer.size_bytes,
    )
    assert f"sha256:{hashlib.sha256(gzip.decompress(packed)).hexdigest()}" == layer.diff_id
    assert packed[4:8] == bytes(4)  # gzip's own time (RFC 1952, 2.3.1)


def test_names_cannot_leave_the_image() -> None:
    with pytest.raises(ValueError, match="outside the image"):
        LayerContents().text("../etc/passwd", "x")


def test_modules_are_compiled_alike_every_time_and_what_is_no_python_is_left(
    tmp_path: Path,
) -> None:
    contents = LayerContents()
    contents.text("opt/a.py", "def f(x):\n    return x in {'one', 'two', 'three'}\n")
    contents.text("opt/broken.py", "def (:\n")
    made = []
    for number in range(2):
        with with_bytecode(contents, python=Path(sys.executable)) as whole:
            tag = sys.implementation.cache_tag
            assert set(whole.entries) == {
                "opt/a.py",
                "opt/broken.py",
                f"opt/__pycache__/a.{tag}.pyc",
            }
            (tmp_path / str(number)).mkdir()
            made.append(write_layer(whole, tmp_path / str(number), title="code", epoch_s=0).digest)
    assert made[0] == made[1]


def test_a_layout_can_be_built_on(tree: Path, tmp_path: Path) -> None:
    blobs = create_layout(tmp_path / "layout")
    layer = layer_of(tree, blobs)
    config = {**CONFIG, "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]}}
    digest = write_image(tmp_path / "layout", [layer], config=config, tag="v1")
    index = json.loads((tmp_path / "layout" / "index.json").read_bytes())
    assert index["manifests"][0]["digest"] == digest
    assert index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] == "v1"
    assert json.loads((tmp_path / "layout" / "oci-layout").read_bytes()) == {
        "imageLayoutVersion": "1.0.0"
    }
    base = read_base(tmp_path / "layout", architecture="amd64")
    assert [found.diff_id for found in base.layers] == [layer.diff_id]
    with pytest.raises(InvalidInput, match="0 images for arm64"):
        read_base(tmp_path / "layout", architecture="arm64")


def test_writing_again_leaves_nothing_of_the_image_before(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "layout"
    write_image(folder, [layer_of(tree, create_layout(folder))], config=CONFIG, tag="v1")
    (tree / "a.txt").write_text("changed")
    write_image(folder, [layer_of(tree, create_layout(folder))], config=CONFIG, tag="v1")
    assert len(list((folder / "blobs" / "sha256").iterdir())) == 3


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(InvalidInput, match="not an OCI layout"):
        create_layout(tmp_path)


@pytest.mark.parametrize("broken", ["index.json", "manifest", "config"])
def test_a_broken_base_is_named(tree: Path, tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "layout"
    digest = write_image(folder, [layer_of(tree, create_layout(folder))], config=CONFIG, tag="v1")
    blobs = folder / "blobs" / "sha256"
    manifest = blobs / digest.removeprefix("sha256:")
    config = blobs / json.loads(manifest.read_bytes())["config"]["digest"].removeprefix("sha256:")
    {"index.json": folder / "index.json", "manifest": manifest, "config": config}[
        broken
    ].write_text('{"a": 1}')
    with pytest.raises(InvalidInput, match=r"--base .* not an OCI layout with a usable image"):
        read_base(folder, architecture="amd64")


def packed(names: Sequence[str], file: Path, *, size: int = 0) -> Path:
    """A layer of files of `size` zeros."""
    with tarfile.open(file, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
    return file


def test_names_of_a_layer_are_found_packed_and_plain(tree: Path, tmp_path: Path) -> None:
    layer = layer_of(tree, tmp_path / "1")
    blob = tmp_path / "1" / layer.digest.removeprefix("sha256:")
    (tmp_path / "plain").write_bytes(gzip.decompress(blob.read_bytes()))
    for file in (blob, tmp_path / "plain"):
        assert unpack_names(file, GZIP, re.compile("opt/here/(a|b/)")) == {
            "opt/here/a.txt",
            "opt/here/around",
            "opt/here/b/x.py",
        }


def test_a_layer_of_a_base_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MAX_ENTRIES", 3)
    monkeypatch.setattr(layers, "MAX_UNPACKED_BYTES", 100_000)
    every = re.compile("")
    assert unpack_names(packed(["a", "./b", "/c"], tmp_path / "1"), GZIP, every) == {"a", "b", "c"}
    with pytest.raises(ValueError, match="more than 3 entries"):
        unpack_names(packed("abcd", tmp_path / "2"), GZIP, every)
    with pytest.raises(ValueError, match="more than 100000 unpacked bytes"):
        unpack_names(packed("a", tmp_path / "3", size=200_000), GZIP, every)


@pytest.mark.parametrize(
    "content",
    [
        b"text",
        b"\x1f\x8btext",
        gzip.compress(b"text" * 1000),
        gzip.compress(tarfile.TarInfo("a").tobuf()),
    ],
    ids=["text", "what gzip cannot read", "packed text", "cut off"],
)
def test_what_is_no_layer_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "blob").write_bytes(content)
    with pytest.raises(ValueError, match="is not a valid layer"):
        unpack_names(tmp_path / "blob", GZIP, re.compile(""))
