"""Source archives: the same files give the same bytes, and what does not belong stays out."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from pilotlight.errors import InvalidInput, TooLarge
from pilotlight.packaging.archive import Archive, pack_files, pack_tree
from pilotlight.packaging.ignore import is_in_platform_home
from snapshotter.images.code_bundles import Bundles


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"content of {name}")


def members(archive: Archive) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive.data)) as tar:
        return {info.name: info for info in tar}


def test_the_same_files_give_the_same_bytes_whenever_and_wherever(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write(first, "app.py", "pkg/mod.py")
    write(second, "pkg/mod.py", "app.py")
    os.utime(second / "app.py", (1, 1))
    (second / "app.py").chmod(0o600)

    assert pack_tree(first).data == pack_tree(second).data


def test_a_changed_byte_or_name_changes_the_digest(tmp_path: Path) -> None:
    write(tmp_path, "app.py")
    before = pack_tree(tmp_path).digest
    (tmp_path / "app.py").write_text("other")
    changed = pack_tree(tmp_path).digest
    (tmp_path / "app.py").rename(tmp_path / "app2.py")

    assert len({before, changed, pack_tree(tmp_path).digest}) == 3


def test_entries_carry_no_time_and_no_owner_and_only_the_executable_bit(tmp_path: Path) -> None:
    write(tmp_path, "app.py", "run.sh")
    (tmp_path / "run.sh").chmod(0o750)

    found = members(pack_tree(tmp_path))

    assert {(i.mtime, i.uid, i.gid, i.uname) for i in found.values()} == {(0, 0, 0, "")}
    assert (found["app.py"].mode, found["run.sh"].mode) == (0o644, 0o755)


def test_what_is_never_source_stays_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        "app.py",
        ".git/config",
        ".venv/x.py",
        "__pycache__/a.pyc",
        "node_modules/m.js",
        "a.pyc",
        ".env",
        "own/pyvenv.cfg",
        "own/b.py",
    )

    assert pack_tree(tmp_path).names == ("app.py",)


@pytest.mark.parametrize("files", [("platform.lock",), ("platform.key", "node/agent.json")])
@pytest.mark.parametrize("respect_ignore", [True, False])
def test_the_home_of_a_platform_is_left_out_and_named(
    tmp_path: Path, files: tuple[str, ...], respect_ignore: bool
) -> None:
    write(tmp_path, "app.py", "keys/platform.key", *(f"data/home/{name}" for name in files))

    archive = pack_tree(tmp_path, respect_ignore=respect_ignore)

    assert archive.names == ("app.py", "keys/platform.key")
    assert archive.homes == (tmp_path / "data/home",)
    assert is_in_platform_home(tmp_path / "data/home/node/x", tmp_path)
    assert not is_in_platform_home(tmp_path / "app.py", tmp_path)
    with pytest.raises(InvalidInput, match="is the home of a platform"):
        pack_tree(tmp_path / "data/home")


def test_ignore_files_are_followed_at_every_level_and_the_deeper_one_wins(tmp_path: Path) -> None:
    write(
        tmp_path,
        "app.py",
        "data.bin",
        "keep/data.bin",
        "build/x.py",
        "sub/build/y.py",
        "notes/a.md",
    )
    (tmp_path / ".gitignore").write_text("*.bin\n/build/\nnotes/*.md\n")
    (tmp_path / "keep" / ".gitignore").write_text("!data.bin\n")
    (tmp_path / ".pilotlightignore").write_text("!notes/a.md\n")

    names = set(pack_tree(tmp_path).names)

    assert names == {
        ".gitignore",
        ".pilotlightignore",
        "app.py",
        "keep/.gitignore",
        "keep/data.bin",
        "sub/build/y.py",
        "notes/a.md",
    }


def test_ignore_files_above_the_root_count_up_to_the_top_of_the_work_tree(tmp_path: Path) -> None:
    write(
        tmp_path,
        "repo/.git/config",
        "repo/apps/shop/app.py",
        "repo/apps/shop/big.bin",
        "repo/apps/shop/x.log",
    )
    (tmp_path / "repo" / ".gitignore").write_text("/apps/shop/*.bin\n")
    (tmp_path / ".gitignore").write_text("*.log\n")

    assert pack_tree(tmp_path / "repo/apps/shop").names == ("app.py", "x.log")


def test_links_inside_stay_links_and_others_become_what_they_point_to(tmp_path: Path) -> None:
    write(tmp_path, "root/app.py", "outside/shared.py")
    (tmp_path / "root/same.py").symlink_to("app.py")
    (tmp_path / "root/shared").symlink_to(tmp_path / "outside")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/dangling").symlink_to("nowhere")

    found = members(pack_tree(tmp_path / "root"))

    assert set(found) == {"app.py", "same.py", "shared/shared.py"}
    assert (found["same.py"].issym(), found["same.py"].linkname) == (True, "app.py")


def test_too_much_source_names_the_largest_files(tmp_path: Path) -> None:
    write(tmp_path, "app.py")
    (tmp_path / "model.bin").write_bytes(b"x" * 3_000_000)

    with pytest.raises(
        TooLarge, match=r"2\.9 MiB  model\.bin\n(?s:.*)\.pilotlightignore"
    ) as caught:
        pack_tree(tmp_path, limit_bytes=1_000_000)
    assert caught.value.detail["limit_bytes"] == 1_000_000


def test_excluded_directories_and_extra_files_are_respected(tmp_path: Path) -> None:
    write(tmp_path, "app.py", "model/weights.bin")

    archive = pack_tree(
        tmp_path, exclude={tmp_path / "model"}, extra={".pilotlight/f.pkl": b"pickle"}
    )

    assert archive.names == (".pilotlight/f.pkl", "app.py")
    assert pack_files({"b.txt": tmp_path / "app.py"}).names == ("b.txt",)


async def test_the_node_agent_unpacks_what_was_packed(tmp_path: Path) -> None:
    write(tmp_path / "src", "app.py", "pkg/mod.py", "run.sh", "pkg/ü.txt")
    (tmp_path / "src/run.sh").chmod(0o755)
    (tmp_path / "src/link.py").symlink_to("pkg/mod.py")
    archive = pack_tree(tmp_path / "src")
    blob = tmp_path / "home/blobs" / archive.digest[:2] / archive.digest
    blob.parent.mkdir(parents=True)
    blob.write_bytes(archive.data)

    unpacked = await Bundles(tmp_path / "home").ensure(archive.digest)

    assert (unpacked / "pkg/ü.txt").read_text() == "content of pkg/ü.txt"
    assert (unpacked / "link.py").read_text() == "content of pkg/mod.py"
    assert os.access(unpacked / "run.sh", os.X_OK)
