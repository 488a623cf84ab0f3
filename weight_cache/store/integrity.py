"""Later checks of files that `fetch.partial_files` verified when they arrived: files that were
modified or became corrupt on the disk are quarantined and never served."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection
from pathlib import Path

from pilotlight.core.threads import LowPriorityThreads, finish_in_thread
from weight_cache.fetch.file_download import hash_file
from weight_cache.store.catalog import Catalog
from weight_cache.store.counters import StoreCounters
from weight_cache.store.layout import StoreDirectory

_log = logging.getLogger(__name__)


class IntegrityChecker:
    """Compares files with their digests. Owner: the store's event loop."""

    def __init__(
        self,
        *,
        directory: StoreDirectory,
        catalogue: Catalog,
        threads: LowPriorityThreads,
        tally: StoreCounters,
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._threads = threads
        self._tally = tally

    def changed_files(self, name: str) -> list[str]:
        """The files of a complete model whose size, time or mode changed since they were published.
        Does not read the contents."""
        files = self._catalogue.files_of(name)
        return [
            d
            for d, size in files.items()
            if not self._directory.is_sealed(self._directory.file(d), size)
        ]

    async def verify_files(self, digests: Collection[str]) -> list[str]:
        """Read files; quarantine and return the corrupt ones, seal the intact ones again."""
        corrupt = [d for d in digests if not await self._threads.run(self._is_intact, d)]
        await self.quarantine(corrupt)
        return corrupt

    async def quarantine(self, digests: Collection[str]) -> None:
        """Quarantine corrupt files. The models that contain them are fetched again when next
        requested."""
        # files not in the catalog were quarantined before
        corrupt = {digest for digest in digests if self._catalogue.has_file(digest)}
        if not corrupt:
            return
        _log.error("corrupt files quarantined count=%d first=%s", len(corrupt), min(corrupt))
        self._tally.quarantined_files += len(corrupt)
        broken = self._catalogue.quarantine(corrupt)
        graves = [self._directory.detach_model(name) for name in broken]
        for digest in corrupt:
            self._directory.quarantine(digest)
        await finish_in_thread(self._clear, [grave for grave in graves if grave is not None])

    def _clear(self, graves: list[Path]) -> None:
        self._directory.remove(*graves)
        self._directory.trim_quarantine()

    def _is_intact(self, digest: str) -> bool:
        path = self._directory.file(digest)
        try:
            if hash_file(path) != digest:
                return False
            self._directory.reseal(path)
        except OSError as e:
            if is_resource_exhaustion(e):
                raise
            _log.warning("file unreadable digest=%s error=%s", digest[:12], e)
            return False
        return True


def is_resource_exhaustion(error: OSError) -> bool:
    """Whether the process or the machine lacks resources, which says nothing about the file."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
