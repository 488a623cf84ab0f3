"""Filters a source's files: repositories often contain the same weights in several formats."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from weight_cache.errors import SourceInvalid
from weight_cache.sources.source import Source, SourceFile


class FilteredSource:
    """The files of `source` that match one of `patterns`: `*` matches any characters, `/` included,
    as in the hub's tools."""

    def __init__(self, source: Source, patterns: Sequence[str]) -> None:
        self._source = source
        self._patterns = tuple(patterns)

    def __repr__(self) -> str:
        return f"<FilteredSource {', '.join(self._patterns)} of {self._source!r}>"

    @property
    def name(self) -> str:
        """The name of the filtered source."""
        return self._source.name

    @property
    def reads_at_once(self) -> int:
        """The limit of the filtered source."""
        return self._source.reads_at_once

    def files(self) -> list[SourceFile]:
        """The matching files. Raises SourceInvalid for a pattern without matches, probably a typing
        error."""
        found = self._source.files()
        for pattern in self._patterns:
            if not any(fnmatch.fnmatchcase(file.path, pattern) for file in found):
                raise SourceInvalid(
                    f"{self.name} has no file {pattern!r}; it has "
                    f"{_abbreviate([file.path for file in found])}"
                )
        return [
            file
            for file in found
            if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in self._patterns)
        ]

    def read(self, file: SourceFile, offset_bytes: int, length_bytes: int) -> bytes:
        """Read a range of a file."""
        return self._source.read(file, offset_bytes, length_bytes)

    def close(self) -> None:
        """Close the filtered source."""
        self._source.close()


def _abbreviate(paths: Sequence[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
