"""The contents of a layer: names in the image and their entries."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Leave = Callable[[str], bool]
"""Predicate on a relative name with slashes: True excludes it and everything below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEntry:
    """One entry. At most one of `source` (a local file), `content` and `link` (target of a link) is
    set; with none it is a directory."""

    mode: int = 0o644
    source: Path | None = None
    content: bytes | None = None
    link: str | None = None

    @property
    def is_directory(self) -> bool:
        """Whether the entry is a directory."""
        return self.source is None and self.content is None and self.link is None


@dataclass(slots=True)
class LayerContents:
    """Entries by their absolute names in the image, without the leading slash. Later ones replace
    earlier ones."""

    entries: dict[str, LayerEntry] = field(default_factory=dict)

    def file(self, name: str, source: Path, *, executable: bool = False) -> None:
        """Add a local file."""
        self.entries[_plain(name)] = LayerEntry(source=source, mode=0o755 if executable else 0o644)

    def text(self, name: str, content: bytes | str) -> None:
        """Add a file with this content."""
        self.entries[_plain(name)] = LayerEntry(
            content=content.encode() if isinstance(content, str) else content
        )

    def link(self, name: str, target: str) -> None:
        """Add a symbolic link."""
        self.entries[_plain(name)] = LayerEntry(link=target, mode=0o777)

    def directory(self, name: str, *, mode: int = 0o755) -> None:
        """Add a directory, empty unless entries below it are added."""
        self.entries[_plain(name)] = LayerEntry(mode=mode)

    def opaque(self, name: str) -> None:
        """Add a directory that hides its contents in lower layers (layer.md, "Opaque
        Whiteout")."""
        self.directory(name)
        self.text(f"{name}/.wh..wh..opq", b"")

    def tree(
        self, name: str, root: Path, *, leave: Leave = lambda _: False, follow: bool = True
    ) -> None:
        """Add everything below `root`. Links are kept if they point inside it, otherwise followed.
        Raises OSError.

        With `follow` False no link is followed: for files of a tenant, whose links may point to any
        file of this machine."""
        bound = root.resolve()

        def walk(below: str, above: tuple[Path, ...]) -> None:
            here = (root / below).resolve()
            if here in above:
                return  # a link to a parent directory
            for item in sorted(os.scandir(root / below), key=lambda i: i.name):
                relative, path = posixpath.join(below, item.name), Path(item.path)
                if leave(relative):
                    continue
                if item.is_symlink() and (target := _inside(path, bound)) is not None:
                    self.link(posixpath.join(name, relative), target)
                elif item.is_symlink() and not follow:
                    self.link(posixpath.join(name, relative), os.readlink(path))
                elif item.is_dir():
                    walk(relative, (*above, here))
                elif item.is_file():
                    self.file(
                        posixpath.join(name, relative),
                        path,
                        executable=bool(item.stat().st_mode & stat.S_IXUSR),
                    )

        walk("", ())

    def ordered(self) -> Iterator[tuple[str, LayerEntry]]:
        """Yield all entries and their parent directories, in byte order of names."""
        found = dict(self.entries)
        for name in self.entries:
            for parent in _parents(name):
                found.setdefault(parent, LayerEntry(mode=0o755))
        yield from sorted(found.items(), key=lambda pair: pair[0].encode())


def _parents(name: str) -> Iterator[str]:
    while name := posixpath.dirname(name):
        yield name


def _plain(name: str) -> str:
    plain = posixpath.normpath(name.lstrip("/"))
    if plain in (".", "..") or plain.startswith("../"):
        raise ValueError(f"{name!r} is outside the image")
    return plain


def _inside(path: Path, bound: Path) -> str | None:
    target = Path(os.readlink(path))
    if target.is_absolute() or not path.exists() or not path.resolve().is_relative_to(bound):
        return None
    return target.as_posix()
