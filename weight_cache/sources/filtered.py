"""Some of a source's files: repositories often hold the same weights in several formats."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from weight_cache.errors import SourceInvalid
from weight_cache.sources.source import Source, SourceFile


class FilteredSource:
    """The files of `source` that one of `patterns` matches: `*` stands for anything, `/` included,
    as in the hub's own tools."""

    def __init__(self, source: Source, patterns: Sequence[str]) -> None:
        self._source = source
        self._patterns = tuple(patterns)

    def __repr__(self) -> str:
        return f"<FilteredSource {', '.join(self._patterns)} of {self._source!r}>"

    @property
    def name(self) -> str:
        """See Source."""
        return self._source.name

    @property
    def reads_at_once(self) -> int:
        """See Source."""
        return self._source.reads_at_once

    def files(self) -> list[SourceFile]:
        """See Source. Raises SourceInvalid for a pattern that matches nothing: it is likely
        misspelt."""
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
        """See Source."""
        return self._source.read(file, offset_bytes, length_bytes)

    def close(self) -> None:
        """See Source."""
        self._source.close()


def _abbreviate(paths: Sequence[str]) -> str:
    return ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
