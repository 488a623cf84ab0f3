"""What ELF files say of themselves; anything may be called an ELF file."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.packaging.oci.elf import read_elf
from pilotlight.packaging.oci.libraries import LibrariesMissing, find_library_closure

PYTHON = Path(sys.executable).resolve()


def test_an_executable_names_its_loader_and_its_libraries() -> None:
    elf = read_elf(PYTHON)
    assert elf is not None
    assert elf.interpreter is not None
    assert Path(elf.interpreter).exists()
    assert any(name.startswith("libc.so") for name in elf.needed)


def test_a_library_has_no_loader_of_its_own() -> None:
    needed = find_library_closure(PYTHON)
    libm = read_elf(needed.files["libm.so.6"])
    assert libm is not None
    assert libm.interpreter is None


def test_what_is_no_elf_file_needs_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("#!/bin/sh\n" * 20)
    (tmp_path / "short").write_bytes(b"\x7fELF\x02\x01")
    assert read_elf(tmp_path / "text") is None
    assert read_elf(tmp_path / "short") is None


@given(st.binary(max_size=400), st.integers(0, 63), st.binary(min_size=1, max_size=8))
def test_a_broken_file_is_none_or_has_little_to_say(tail: bytes, at: int, noise: bytes) -> None:
    head = bytearray(PYTHON.read_bytes()[:64])
    head[at : at + len(noise)] = noise
    path = Path(f"/dev/shm/elf-{ctypes.c_uint(id(tail)).value}")
    path.write_bytes(bytes(head[:64]) + tail)
    try:
        read_elf(path)
    finally:
        path.unlink()


def test_the_closure_holds_the_c_library_and_not_the_loader() -> None:
    needed = find_library_closure(PYTHON)
    assert "libc.so.6" in needed.files
    assert Path(needed.loader).name not in needed.files
    assert all(path.is_file() for path in needed.files.values())
    assert str(needed.files["libc.so.6"].parent) == needed.folder


def test_what_is_not_executable_cannot_be_exported(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\n")
    with pytest.raises(LibrariesMissing, match="not a dynamic executable"):
        find_library_closure(tmp_path / "python")
