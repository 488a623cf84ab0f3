"""Paths below a directory: what leads through a link, or out of it, is not opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pilotlight.core.openat2 import check_directory_beneath, open_beneath, open_beneath_by_parts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (root / "inner").symlink_to("a")
    (root / "outer").symlink_to(tmp_path)
    (root / "a" / "last").symlink_to("b/file")
    return root


@pytest.fixture
def folder(root: Path) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY)
    yield fd
    os.close(fd)


both = pytest.mark.parametrize("opens", [open_beneath, open_beneath_by_parts])


@both
def test_what_lies_below_is_opened(folder: int, opens: Callable[..., int]) -> None:
    with open(opens(folder, "a/b/file"), "rb") as file:
        assert file.read() == b"inside"
    os.close(opens(folder, "a/b", os.O_PATH | os.O_DIRECTORY))


@both
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
@pytest.mark.parametrize(
    "name, code",
    [
        ("inner/b/file", errno.ELOOP),
        ("outer/secret", errno.ELOOP),
        ("a/last", errno.ELOOP),
        ("outer", errno.ELOOP),
        ("../secret", errno.EXDEV),
        ("a/../../secret", errno.EXDEV),
        ("/etc/passwd", errno.EXDEV),
        ("a/none", errno.ENOENT),
    ],
)
def test_links_and_ways_out_are_refused(
    folder: int, opens: Callable[..., int], name: str, code: int, flags: int
) -> None:
    with pytest.raises(OSError) as refused:
        opens(folder, name, flags)
    assert refused.value.errno == code


def test_a_checked_directory_says_what_is_wrong_with_it(root: Path) -> None:
    assert check_directory_beneath(root, "a/b") == root / "a" / "b"
    for name, said in (
        ("inner/b", "leads through a symbolic link"),
        ("../x", "leads out of it"),
        ("a/b/file", "Not a directory"),
    ):
        with pytest.raises(OSError, match=said):
            check_directory_beneath(root, name)
