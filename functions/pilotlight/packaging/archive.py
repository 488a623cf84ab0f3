"""Deterministic archives: the same files result in the same bytes, so the hash of an archive
identifies its content.

A `.tar.gz` with entries sorted by name, without times and owners, and with one of two modes; the
gzip header has no time and no name. Links that point inside are kept, others are replaced by their
target."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pilotlight.errors import InvalidInput, TooLarge
from pilotlight.packaging.ignore import IgnoreRules, is_platform_home

DEFAULT_LIMIT_BYTES = 100 * 1024**2
"""Limit of the total size of files, equal to bundle_max_bytes of the controller, which limits the
packed size."""
_COMPRESSION = 6
_LARGEST_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Packed bytes, their sha256 (hex), the names in them, and homes of platforms that were left
    out."""

    data: bytes
    digest: str
    names: tuple[str, ...]
    homes: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    path: Path
    size_bytes: int
    is_executable: bool = False
    link: str | None = None


def pack_tree(
    root: Path,
    *,
    extra: Mapping[str, bytes] | None = None,
    exclude: Collection[Path] = (),
    respect_ignore: bool = True,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Archive:
    """Pack the directory `root`, and `extra` (name → content).

    Directories in `exclude` are skipped, homes of platforms, and what the ignore files exclude,
    unless `respect_ignore` is False. Raises TooLarge, naming the largest files, or InvalidInput if
    a file cannot be read, or `root` is a home."""
    if is_platform_home(root):
        raise InvalidInput(
            f"{root} is the home of a platform, with its keys and database, and is not uploaded",
            hint="Move the app's files to a directory of their own.",
        )
    ignore = IgnoreRules.at_root(root) if respect_ignore else None
    walk = _TreeWalk(root.resolve(), frozenset(exclude))
    try:
        entries = dict(walk.files(root, "", ignore, frozenset()))
        archive = _pack(entries, extra or {}, limit_bytes, root)
    except OSError as e:
        raise InvalidInput(f"{root} cannot be packed: {e}") from e
    return replace(archive, homes=tuple(walk.homes))


def pack_files(
    files: Mapping[str, Path],
    *,
    extra: Mapping[str, bytes] | None = None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Archive:
    """Pack the given files (name in the archive → local path). Raises like `pack_tree`."""
    try:
        entries = {name: _file_entry(path) for name, path in files.items()}
        return _pack(entries, extra or {}, limit_bytes, None)
    except OSError as e:
        raise InvalidInput(f"a file cannot be packed: {e}") from e


@dataclass(frozen=True, slots=True)
class _TreeWalk:
    """A walk over a tree: links outside `root` are followed, directories in `exclude` skipped, and
    homes of platforms, which are recorded in `homes`."""

    root: Path
    exclude: frozenset[Path]
    homes: list[Path] = field(default_factory=list)

    def files(
        self, directory: Path, prefix: str, ignore: IgnoreRules | None, above: frozenset[Path]
    ) -> Iterator[tuple[str, _Entry]]:
        """Yield (name, entry) of everything to pack, sorted. `above`: the parent directories."""
        here = directory.resolve()
        if here in above:
            return  # a link to a parent directory
        for item in sorted(os.scandir(directory), key=lambda i: i.name):
            path, name, is_directory = Path(item.path), prefix + item.name, item.is_dir()
            if ignore is not None and ignore.excludes(path, is_directory=is_directory):
                continue
            if item.is_symlink() and (link := _link_inside(path, self.root)) is not None:
                yield name, _Entry(path=path, size_bytes=0, link=link)
            elif is_directory and is_platform_home(path):
                self.homes.append(path)
            elif is_directory and path.resolve() not in self.exclude:
                inner = ignore.within(path) if ignore is not None else None
                yield from self.files(path, name + "/", inner, above | {here})
            elif item.is_file():
                yield name, _file_entry(path)


def _link_inside(path: Path, root: Path) -> str | None:
    """Return the relative target of a link if it is inside the root and exists."""
    target = Path(os.readlink(path))
    if target.is_absolute() or not path.exists() or not path.resolve().is_relative_to(root):
        return None
    return target.as_posix()


def _file_entry(path: Path) -> _Entry:
    info = path.stat()
    return _Entry(
        path=path, size_bytes=info.st_size, is_executable=bool(info.st_mode & stat.S_IXUSR)
    )


def _pack(
    entries: Mapping[str, _Entry], extra: Mapping[str, bytes], limit_bytes: int, root: Path | None
) -> Archive:
    sizes = {
        **{name: e.size_bytes for name, e in entries.items()},
        **{name: len(data) for name, data in extra.items()},
    }
    if (total := sum(sizes.values())) > limit_bytes:
        raise TooLarge(_too_large(total, limit_bytes, sizes, root), limit_bytes=limit_bytes)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(sizes):
            if name in extra:
                _add(tar, name, extra[name], is_executable=False)
            elif (link := entries[name].link) is not None:
                info = tarfile.TarInfo(name)
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, link, 0o777
                tar.addfile(info)
            else:
                _add(
                    tar,
                    name,
                    entries[name].path.read_bytes(),
                    is_executable=entries[name].is_executable,
                )
    packed = io.BytesIO()
    with gzip.GzipFile(
        filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=_COMPRESSION
    ) as zipped:
        zipped.write(plain.getbuffer())
    data = packed.getvalue()
    return Archive(data=data, digest=hashlib.sha256(data).hexdigest(), names=tuple(sorted(sizes)))


def _add(tar: tarfile.TarFile, name: str, content: bytes, *, is_executable: bool) -> None:
    info = tarfile.TarInfo(name)  # time, owner and group default to 0
    info.size, info.mode = len(content), 0o755 if is_executable else 0o644
    tar.addfile(info, io.BytesIO(content))


def _too_large(total: int, limit: int, sizes: Mapping[str, int], root: Path | None) -> str:
    largest = sorted(sizes.items(), key=lambda kv: -kv[1])[:_LARGEST_SHOWN]
    listing = "\n".join(f"  {size / 1024**2:8.1f} MiB  {name}" for name, size in largest)
    where = f" under {root}" if root else ""
    return (
        f"the source{where} has {total / 1024**2:.1f} MiB, the limit is {limit / 1024**2:.1f} "
        f"MiB. The largest files:\n{listing}\n"
        "List files that are not source in .pilotlightignore; declare model files as Weights."
    )
