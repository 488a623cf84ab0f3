"""The rows of a volume's manifest, one for each path, and how a commit changes them.

A commit holds the database's only writer, so its cost may not grow with the number of directories
that it changes times that of the volume's entries."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

import sqlalchemy as sa

from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.core.volumes.entries import Entry, EntryKind

_FEW = 4
"""Directories below which entries are looked for by a query each, which reads all of the volume's
entries. For more of them the paths are read once."""
_DIRECTORY_MODE = 0o755
_ENTRIES = tables.volume_entries


def apply(
    write: Write,
    volume: str,
    *,
    put: Sequence[Entry],
    remove: Collection[str],
    remove_trees: Collection[str],
) -> None:
    """Change the manifest of the volume with this id."""
    sql = write.sql
    _remove_below(sql, volume, remove_trees)
    _remove_paths(sql, volume, [*remove, *remove_trees])
    _make_way(sql, volume, put)
    _put(write, volume, [*_absent_directories(sql, volume, put), *put])


def _put(write: Write, volume: str, put: Sequence[Entry]) -> None:
    rows = [
        {
            "volume": volume,
            "path": one.path,
            "size_bytes": one.size_bytes,
            "entry": json.dumps(one.to_json(), separators=(",", ":")),
        }
        for one in put
    ]
    insert = write.insert(_ENTRIES)
    insert = insert.on_conflict_do_update(
        index_elements=["volume", "path"],
        set_={"size_bytes": insert.excluded.size_bytes, "entry": insert.excluded.entry},
    )
    for part in bulk.parts(rows):
        write.sql.execute(insert, part)


def _make_way(sql: sa.Connection, volume: str, put: Sequence[Entry]) -> None:
    """Remove what cannot be beside the entries: what is below a file, and files that are above."""
    above = {p for one in put for p in _parents(one.path)} - {one.path for one in put}
    _remove(sql, volume, [p for p, is_directory in _kinds(sql, volume, above) if not is_directory])
    replaced = [one.path for one in put if one.kind is not EntryKind.DIRECTORY]
    kinds = _kinds(sql, volume, replaced)
    _remove_below(sql, volume, [path for path, is_directory in kinds if is_directory])


def _absent_directories(sql: sa.Connection, volume: str, put: Sequence[Entry]) -> list[Entry]:
    """The directories above the entries that have no entry: each one has, so that it is listed,
    and found when a file takes its place."""
    above = {p for one in put for p in _parents(one.path)} - {one.path for one in put}
    there = {path for path, _ in _kinds(sql, volume, above)}
    return [
        Entry(path=path, kind=EntryKind.DIRECTORY, mode=_DIRECTORY_MODE)
        for path in sorted(above - there)
    ]


def _remove_paths(sql: sa.Connection, volume: str, paths: Collection[str]) -> None:
    """Remove paths, and of directories those that are empty then: another writer may have put
    files there."""
    kinds = dict(_kinds(sql, volume, paths))
    _remove(sql, volume, [path for path, is_directory in kinds.items() if not is_directory])
    directories = [path for path, is_directory in kinds.items() if is_directory]
    if len(directories) > _FEW:
        occupied = _occupied(_all_paths(sql, volume), frozenset(directories))
        _remove(sql, volume, [path for path in directories if path not in occupied])
        return
    for path in sorted(directories, reverse=True):
        query = sa.select(_ENTRIES.c.path).where(*entries_below(volume, path)).limit(1)
        if sql.execute(query).first() is None:
            _remove(sql, volume, [path])


def _occupied(paths: Iterable[str], directories: AbstractSet[str]) -> set[str]:
    """The directories that contain a path which is none of `directories`, at any depth."""
    found: set[str] = set()
    for path in paths:
        above = "" if path in directories else path.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


def _paths_below(paths: Iterable[str], directories: AbstractSet[str]) -> list[str]:
    """Those of the paths that are below one of `directories`, at any depth."""

    @functools.cache  # by directory: a path has up to MAX_DEPTH of them
    def is_inside(directory: str) -> bool:
        return bool(directory) and (
            directory in directories or is_inside(directory.rpartition("/")[0])
        )

    return [path for path in paths if is_inside(path.rpartition("/")[0])]


def _all_paths(sql: sa.Connection, volume: str) -> list[str]:
    query = sa.select(_ENTRIES.c.path).where(_ENTRIES.c.volume == volume)
    return list(sql.execute(query).scalars())


def _kinds(sql: sa.Connection, volume: str, paths: Collection[str]) -> Iterable[tuple[str, bool]]:
    """Those of the paths that have an entry, and whether each is a directory."""
    found: list[tuple[str, bool]] = []
    for part in bulk.parts(sorted(paths)):
        query = sa.select(_ENTRIES.c.path, _ENTRIES.c.entry).where(
            _ENTRIES.c.volume == volume, _ENTRIES.c.path.in_(part)
        )
        found += [
            (row.path, json.loads(row.entry)["kind"] == EntryKind.DIRECTORY)
            for row in sql.execute(query)
        ]
    return found


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _remove(sql: sa.Connection, volume: str, paths: Collection[str]) -> None:
    for part in bulk.parts(sorted(paths)):
        sql.execute(
            sa.delete(_ENTRIES).where(_ENTRIES.c.volume == volume, _ENTRIES.c.path.in_(part))
        )


def _remove_below(sql: sa.Connection, volume: str, directories: Collection[str]) -> None:
    """Remove what is below these directories."""
    if len(directories) > _FEW:
        paths = _paths_below(_all_paths(sql, volume), frozenset(directories))
        _remove(sql, volume, paths)
        return
    for path in directories:
        sql.execute(sa.delete(_ENTRIES).where(*entries_below(volume, path)))


def entries_below(volume: str, path: str) -> tuple[sa.ColumnElement[bool], ...]:
    """Which entries are below a directory. Not LIKE, which ignores case on SQLite."""
    prefix = f"{path}/"
    begins = sa.func.substr(_ENTRIES.c.path, 1, len(prefix)) == prefix
    return _ENTRIES.c.volume == volume, begins
