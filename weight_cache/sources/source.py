"""Interface of a source, named by a user in `Weights(...)`: files read in ranges, on the user's
machine, with the user's credentials.

A file has a *version* (an entity tag, or its timestamps and inode). Every read checks it, so that
the listed, the hashed and the uploaded bytes are the same, or the read fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weight_cache.errors import SourceInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: its path below the model's directory, with `/`.
        version: identifies the contents while the file is read.
        is_lasting: other contents always have another version, so a manifest of this version may be
            cached.
        is_ranged: ranges may be read concurrently in any order; otherwise one reader reads it
            sequentially.
    """

    path: str
    size_bytes: int
    version: str
    is_lasting: bool = True
    is_ranged: bool = True


class Source(Protocol):
    """The files of one model. Called from several threads, except `close`."""

    @property
    def name(self) -> str:
        """A display name that may be stored: a URL without credentials, or a directory."""

    @property
    def reads_at_once(self) -> int:
        """The useful number of concurrent reads."""

    def files(self) -> list[SourceFile]:
        """All files, at least one, sorted by the bytes of their paths. Raises SourceInvalid."""

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Read exactly these bytes of this version of the file. Raises SourceInvalid."""

    def close(self) -> None:
        """Close connections and files."""


def sort_source_files(files: Iterable[SourceFile], *, where: str) -> list[SourceFile]:
    """Sort files by the bytes of their paths. Raises SourceInvalid if there are none."""
    found = sorted(files, key=lambda f: f.path.encode(errors="surrogateescape"))
    if not found:
        raise SourceInvalid(
            f"{where} contains no files: name the directory that contains the model itself"
        )
    return found


def source_changed_error(what: object) -> SourceInvalid:
    """The error for a file that changed since it was listed."""
    return SourceInvalid(
        f"{what} changed while it was read: wait until it is complete, then deploy or push again"
    )
