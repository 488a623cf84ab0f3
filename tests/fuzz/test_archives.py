"""Archives of functions' code, as the node agent unpacks them. An input is a tar stream, or what
has gzip's first bytes."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import stat
import tarfile
import tempfile
import time
from pathlib import Path

from hypothesis import strategies as st

from snapshotter.errors import BundleUnavailable
from snapshotter.images.code_bundles import Bundles
from tests.fakes.trees import remove_tree
from tests.fuzz.fuzzing import Fuzzer, mutated, seeds

MAX_BYTES = 1_000_000
BOUND_S = 10.0
"""For an input of a few KB, on a busy machine."""
_KINDS = (
    tarfile.REGTYPE,
    tarfile.AREGTYPE,
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
    tarfile.CONTTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.GNUTYPE_SPARSE,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    b"V",
    b"M",
    b"\xff",
)
_PARTS = st.sampled_from(
    (
        "a",
        "b",
        "..",
        ".",
        "",
        "/",
        "l",
        "x" * 300,
        "é",
        "\udcff",
        "\0",
        "\n",
        "a/b",
        "/etc",
        "../../x",
    )
)
_NAMES = st.lists(_PARTS, max_size=5).map("/".join) | st.just("a/" * 3000)
_KEYS = st.sampled_from(
    (
        "path",
        "linkpath",
        "size",
        "mtime",
        "uid",
        "hdrcharset",
        "GNU.sparse.map",
        "GNU.sparse.size",
        "GNU.sparse.major",
        "GNU.sparse.minor",
        "GNU.sparse.realsize",
        "GNU.sparse.name",
        "comment",
        "SCHILY.xattr.user.x",
        "",
    )
)
_VALUES = (
    _NAMES
    | st.sampled_from(("0", "1", "-1", "1e9", "9" * 30, "nan", "BINARY", "0,1,2", "4294967296"))
    | st.text(max_size=10)
)
WORDS = (
    b"../",
    b"/",
    b"\0",
    b"ustar\x0000",
    b"ustar  \0",
    b"x",
    b"g",
    b"L",
    b"K",
    b"S",
    b"7",
    b"\x80\0\0\0",
    b"\xff" * 12,
    b"12 path=../x\n",
    b"30 GNU.sparse.major=1\n",
    b"99999999999 path=x\n",
    b"\0" * 512,
)


@st.composite
def _header(draw: st.DrawFn) -> bytes:
    info = tarfile.TarInfo(draw(_NAMES)[:100])
    info.type, info.linkname = draw(st.sampled_from(_KINDS)), draw(_NAMES)[:100]
    body = draw(st.binary(max_size=700))
    if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
        body = b"".join(_record(draw(_KEYS), draw(_VALUES)) for _ in range(draw(st.integers(0, 4))))
    elif info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
        body = draw(_NAMES).encode("utf-8", "surrogateescape") + b"\0"
    info.size = draw(
        st.sampled_from((len(body), len(body), len(body), 0, 1, 2**33, 2**60, -1, -512))
    )
    info.mode = draw(st.sampled_from((0o644, 0o755, 0o7777, 0)))
    head = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")[-512:]
    return head + body + b"\0" * (-len(body) % 512)


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode("utf-8", "surrogateescape")
    size = len(rest) + 1
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


ARCHIVES = st.lists(_header(), max_size=6).map(lambda parts: b"".join(parts) + b"\0" * 1024)


def check_archive(data: bytes) -> None:
    """It is unpacked below its directory, or refused by name; nothing else changes."""
    packed = data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 1, mtime=0)
    home = Path(tempfile.mkdtemp(prefix="plfuzz"))
    try:
        digest = hashlib.sha256(packed).hexdigest()
        blob = home / "blobs" / digest[:2] / digest
        blob.parent.mkdir(parents=True)
        blob.write_bytes(packed)
        began = time.monotonic()
        try:
            code = asyncio.run(Bundles(home, max_bytes=MAX_BYTES).ensure(digest))
        except BundleUnavailable:
            assert not [*(home / "node" / "code").iterdir()], "what was refused leaves nothing"
        else:
            _check_tree(code)
        assert time.monotonic() - began < BOUND_S
        assert sorted(os.listdir(home)) == ["blobs", "node"]
        assert os.listdir(home / "node") == ["code"]
        assert blob.read_bytes() == packed
    finally:
        remove_tree(home)


def _check_tree(root: Path) -> None:
    size = 0
    for path in (root, *root.rglob("*")):
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            end = os.path.realpath(path)
            assert os.path.commonpath([os.path.realpath(root), end]) == os.path.realpath(root), (
                f"{path} leads to {end}"
            )
            continue
        assert stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode), path
        assert not about.st_mode & 0o7222, f"{path} has mode {about.st_mode:o}"
        size += about.st_size if stat.S_ISREG(about.st_mode) else 0
    assert size <= MAX_BYTES * 64, "hard links count once"


def test_corpus(seed_of_archive: bytes) -> None:
    check_archive(seed_of_archive)


def test_archives_of_code(fuzzer: Fuzzer) -> None:
    fuzzer.run("archive", ARCHIVES | mutated(seeds("archive"), WORDS), check_archive)
