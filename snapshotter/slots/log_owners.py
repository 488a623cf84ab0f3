"""Index of log owners: a node has thousands of logs, and each reader requests those of one tenant.

`<logs>/<name>.json` is written once, before its log, by this process. So the directory is listed
again only when its modification time has changed, and only new files are read.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\Z")
_SETTLED_NS = 100_000_000
"""Modification times have the resolution of the kernel's clock, some milliseconds: a younger
listing may miss a file."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Metadata of a log."""

    labels: Mapping[str, str]
    started_at: float


class LogOwners:
    """The owners of the logs in one directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._owners: dict[str, Owner] = {}
        self._names: dict[str, set[str]] = {}
        self._listed_ns = -1

    def __repr__(self) -> str:
        return f"<LogOwners {len(self._owners)} logs of {len(self._names)} tenants>"

    def invalidate(self, name: str) -> None:
        """Evict the owner of a log that is rewritten."""
        with self._lock:
            self._remove(name)
            self._listed_ns = -1

    def cached(self, name: str) -> Owner | None:
        """The cached owner of a log; None if it is not cached. Reads no file."""
        return self._owners.get(name)

    def owner(self, name: str) -> Owner | None:
        """The owner of a log; None if there is none. Blocking."""
        with self._lock:
            self._refresh()
            return self._owners.get(name)

    def names(self, labels: Mapping[str, str]) -> list[str]:
        """Names of the logs whose owners have these labels. Blocking."""
        with self._lock:
            self._refresh()
            among = self._names.get(labels["tenant"], ()) if "tenant" in labels else self._owners
            return [name for name in among if labels.items() <= self._owners[name].labels.items()]

    def _refresh(self) -> None:
        changed_ns = self._directory.stat().st_mtime_ns
        if changed_ns == self._listed_ns:
            return
        is_settled = time.time_ns() - changed_ns > _SETTLED_NS
        with os.scandir(self._directory) as found:
            present = {
                entry.name.removesuffix(".json") for entry in found if entry.name.endswith(".json")
            }
        for name in self._owners.keys() - present:
            self._remove(name)
        for name in present - self._owners.keys():
            if (owner := self._read(name)) is not None:
                self._owners[name] = owner
                self._names.setdefault(owner.labels.get("tenant", ""), set()).add(name)
        self._listed_ns = changed_ns if is_settled else -1

    def _read(self, name: str) -> Owner | None:
        if not _NAME.match(name):
            return None  # the name is untrusted and becomes part of a path
        try:
            about = json.loads((self._directory / f"{name}.json").read_text())
            return Owner(
                labels={str(key): str(value) for key, value in about["labels"].items()},
                started_at=float(about.get("started_at", 0)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def _remove(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is None:
            return
        tenant = owner.labels.get("tenant", "")
        self._names[tenant].discard(name)
        if not self._names[tenant]:
            del self._names[tenant]
