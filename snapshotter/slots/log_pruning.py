"""How much the logs of a node may take: `LogPruner` deletes what exceeds it. The file of one
instance has limits of its own (`snapshotter/shim/log_file.py`)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


class LogPruner:
    """Deletes logs in a directory. Blocking; used by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prune(
        self,
        *,
        alive: Collection[str],
        keep_s: float,
        total_bytes: int,
        now: float,
        missing: tuple[int, int] = (0, 0),
    ) -> int:
        """Delete logs of exited instances: expired ones, then the oldest until the rest fits in
        `total_bytes`; then what exceeds each tenant's limit. `missing`: bytes and files to free
        because the disk is below its floor. Returns how many were deleted."""
        dead = sorted(
            (self._age(about), about.stem)
            for about in self._directory.glob("*.json")
            if about.stem not in alive
        )
        held = sum(self._size(name) for _, name in dead)
        missing_bytes, missing_files = missing
        total_bytes = min(total_bytes, max(0, held - missing_bytes))
        deleted = 0
        for written_at, name in dead:
            if now - written_at <= keep_s and held <= total_bytes and missing_files <= 0:
                break
            held -= self._size(name)
            deleted += 1
            missing_files -= self._delete(name)
        return deleted + self._prune_tenants(alive)

    def _prune_tenants(self, alive: Collection[str]) -> int:
        """Enforce each tenant's limit: delete logs of exited instances, oldest first, then the
        older file of logs in use."""
        owned: dict[str, list[tuple[float, str]]] = {}
        bounds: dict[str, tuple[float, int]] = {}
        for path in self._directory.glob("*.json"):
            about = _about(path)
            tenant = "" if about is None else str(about["labels"].get("tenant", ""))
            if about is None or not tenant:
                continue
            owned.setdefault(tenant, []).append((self._age(path), path.stem))
            if about.get("log_bytes") is not None:
                bounds[tenant] = max(
                    bounds.get(tenant, (0.0, 0)),
                    (float(about["started_at"]), int(about["log_bytes"])),
                )
        deleted = 0
        for tenant, (_, bound) in bounds.items():
            deleted += self._prune_tenant(sorted(owned[tenant]), alive, bound)
        return deleted

    def _prune_tenant(
        self, logs: list[tuple[float, str]], alive: Collection[str], bound: int
    ) -> int:
        held, deleted = sum(self._size(name) for _, name in logs), 0
        for _, name in logs:
            if held <= bound:
                return deleted
            if name not in alive:
                held -= self._size(name)
                deleted += 1
                self._delete(name)
        for _, name in logs:
            older = self._directory / f"{name}.log.1"
            if held > bound and name in alive and older.exists():
                held -= older.stat().st_size
                older.unlink(missing_ok=True)
        return deleted

    def _delete(self, name: str) -> int:
        """Delete a log; returns the number of its files."""
        files = [
            f
            for suffix in (".log.1", ".log", ".json")
            if (f := self._directory / f"{name}{suffix}").exists()
        ]
        for file in files:
            file.unlink(missing_ok=True)
        return len(files)

    def _age(self, about: Path) -> float:
        log = about.with_suffix(".log")
        return (log if log.exists() else about).stat().st_mtime

    def _size(self, name: str) -> int:
        return sum(
            f.stat().st_size
            for s in (".log", ".log.1")
            if (f := self._directory / f"{name}{s}").exists()
        )


def _about(path: Path) -> Mapping[str, Any] | None:
    """Metadata of a log; None if the file cannot be read."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None
