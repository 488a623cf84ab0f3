"""What a user names in `Weights(...)`: files that are read in ranges, on the user's machine, with
the user's credentials.

A file has a *version* (an entity tag, or a file's times and inode). Every read compares it, so that
what was hashed, what is uploaded and what was listed are the same bytes, or the read fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from weight_cache.errors import SourceInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: its path below the model's directory, with `/`. version: what must not change while it
        is read. is_lasting: other bytes will have another version, however long from now: a
        manifest of this version may be kept. is_ranged: ranges may be asked for at once, in any
        order; otherwise it is read from the begin to the end by one reader.
    """

    path: str
    size_bytes: int
    version: str
    is_lasting: bool = True
    is_ranged: bool = True


class Source(Protocol):
    """The files of one model, where the user has them. Threads call it at once, except `close`."""

    @property
    def name(self) -> str:
        """What it is, to be shown and remembered: an address without credentials, or a
        directory."""
        ...

    @property
    def reads_at_once(self) -> int:
        """How many reads side by side are worth their while."""
        ...

    def files(self) -> list[SourceFile]:
        """Every file, sorted by the bytes of its path; at least one. Raises SourceInvalid."""
        ...

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Exactly these bytes of that version of the file. Raises SourceInvalid; then nothing was
        read that counts."""
        ...

    def close(self) -> None:
        """Let go of connections and files."""
        ...


def sort_source_files(files: Iterable[SourceFile], *, where: str) -> list[SourceFile]:
    """The files sorted by the bytes of their paths. Raises SourceInvalid when there are none."""
    found = sorted(files, key=lambda f: f.path.encode(errors="surrogateescape"))
    if not found:
        raise SourceInvalid(
            f"{where} holds no files: name the directory that holds the model itself"
        )
    return found


def source_changed_error(what: object) -> SourceInvalid:
    """The error for a file that is not the one that was listed."""
    return SourceInvalid(
        f"{what} changed while it was read: wait until whoever writes it is done, then deploy or "
        f"push again"
    )
