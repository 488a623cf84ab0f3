"""The process that reads a volume's tree, uploads its chunks, and brings a manifest into the tree.

One for each operation, started by the node agent as root: `python -m snapshotter.volumes.mover`. It
reads one order (a line of JSON) when the agent has put it into its control group, and answers with
lines of JSON, the last of which has `done` or `error`.

- `scan` gives up root, and is the tenant, before it opens a tenant's file. `upload` acts as the
  tenant while it opens files, and reads what it opened as the owner of the blob store, if that is a
  directory.
- `sync` stays root, as files of the store are not the tenant's to read. It opens what it created
  itself, and directories below the descriptor of the tree.

Files of a volume's directory, besides `data/` (the tree), are root's: `state.json` (the manifest of
the last commit or sync and the stamps of its files), `scan.json` (what the last scan found),
`incoming/` (files that are being fetched).

A scan imports neither asyncio nor a client of the store: most commits are small."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pilotlight.core.openat2 import open_beneath
from pilotlight.core.pid_file import boot_id
from pilotlight.core.volumes.entries import CHUNK_BYTES, Entry, EntryInvalid, by_path
from snapshotter.volumes import tree
from snapshotter.volumes.tree import Stamp, StoreFailed, TreeRefused

BATCH = 500
"""Entries for each line of an answer: at most some 100 KiB, unless files are very large."""
_BATCH_CHUNKS = 20_000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SPACE = (errno.ENOSPC, errno.EDQUOT)

Answer = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the tree was when it was last committed or synchronised.

    Attributes:
        entries: the manifest.
        stamps: of files whose content is that of their entry as long as the stamp is the same.
    """

    entries: Mapping[str, Entry]
    stamps: Mapping[str, Stamp]

    @classmethod
    def read(cls, path: Path) -> State:
        """Read a state; without a usable file nothing is known. Stamps hold for one boot of the
        machine: after a power failure a file may have lost what its status promises."""
        try:
            body = json.loads(path.read_bytes())
            entries = by_path(map(Entry.from_json, body["entries"]))
            stamps = body["stamps"] if body["boot"] == boot_id() else {}
            return cls(entries=entries, stamps={p: tuple(s) for p, s in stamps.items()})
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(entries={}, stamps={})

    def write(self, target: IO[bytes]) -> None:
        """Write it to an open file."""
        body = {
            "boot": boot_id(),
            "entries": [entry.to_json() for entry in self.entries.values()],
            "stamps": self.stamps,
        }
        target.write(json.dumps(body, separators=(",", ":")).encode())
        target.flush()


def main() -> int:
    """Execute one order."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.umask(0o077)
    os.nice(5)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))

    def answer(body: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(body, separators=(",", ":")) + "\n")
        sys.stdout.flush()

    line = sys.stdin.readline()
    if not line:
        return 1  # the agent ended
    order = json.loads(line)
    try:
        done = OPERATIONS[order["op"]](order, answer)
    except TreeRefused as e:
        answer({"error": "refused", "message": str(e)})
    except EntryInvalid as e:
        answer({"error": "refused", "message": f"the manifest is damaged: {e}"})
    except PermissionError as e:
        what = e.filename or "its directory"
        answer({"error": "refused", "message": f"{what} cannot be read by its owner: chmod u+rwx"})
    except OSError as e:
        code = "disk_full" if e.errno in _SPACE else "failed"
        answer({"error": code, "message": f"{e.filename or 'the volume'}: {e.strerror or e}"})
    except StoreFailed as e:
        answer({"error": "store", "message": str(e)})
    else:
        answer({"done": done})
    return 0


def _scan(order: Mapping[str, Any], answer: Answer) -> Mapping[str, Any]:
    """Find what differs from the last commit: `put` (entries) and `remove` (paths)."""
    home = Path(order["home"])
    state = State.read(home / "state.json")
    last = State.read(home / "scan.json")  # of a commit that did not end
    known = {path: (stamp, last.entries[path]) for path, stamp in last.stamps.items()}
    known |= {path: (stamp, state.entries[path]) for path, stamp in state.stamps.items()}
    with (home / "scan.json.new").open("wb") as target:
        root = os.open(home / "data", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        become(order["uid"])
        walk = tree.Walk(root=root, max_entries=int(order["max_entries"]))
        entries: dict[str, Entry] = {}
        stamps: dict[str, Stamp] = {}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for entry, stamp in tree.scan(walk, known, pool, now_ns=time.time_ns()):
                entries[entry.path] = entry
                if stamp is not None:
                    stamps[entry.path] = stamp
        State(entries=entries, stamps=stamps).write(target)
    changed = [e for e in entries.values() if state.entries.get(e.path) != e]
    for part in _batches(changed):
        answer({"put": [entry.to_json() for entry in part]})
    removed = [path for path in state.entries if path not in entries]
    for begin in range(0, len(removed), BATCH):
        answer({"remove": removed[begin : begin + BATCH]})
    return {"entries": len(entries), "changed": len(changed), "removed": len(removed)}


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    chunks = 0
    for entry in entries:
        part.append(entry)
        chunks += len(entry.chunks)
        if len(part) >= BATCH or chunks >= _BATCH_CHUNKS:
            yield part
            part, chunks = [], 0
    if part:
        yield part


def _upload(order: Mapping[str, Any], _: Answer) -> Mapping[str, Any]:
    """Upload the chunks `digests` of the last scan."""
    import asyncio

    from snapshotter.volumes import sync, upload  # before root is given up

    home, wanted = Path(order["home"]), set(order["digests"])
    places = _places(State.read(home / "scan.json"), wanted)
    root = os.open(home / "data", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    opened: dict[str, int] = {}
    with _acting_as(order["uid"]):
        for path in sorted({path for path, _ in places.values()}):
            try:
                opened[path] = tree.open_file(root, path)
            except OSError as e:
                raise TreeRefused(
                    f"{path} changed while it was committed ({e.strerror}): commit again"
                ) from e
    store = sync.open_order_store(order)
    directory = store.local_path("volumes")
    if directory is not None and order["store_uid"] is not None and os.geteuid() == 0:
        # its owner, who writes there, and can enter nothing above it
        os.chdir(directory.parent)
        store = sync.open_order_store({"store": {**order["store"], "where": "."}})
        become(order["store_uid"])
    asyncio.run(upload.put_all(store, str(order["tenant"]), places, opened))
    return {"chunks": len(places)}


def _places(scanned: State, wanted: set[str]) -> dict[str, tuple[str, int]]:
    """Digest → path and offset of a chunk with that content, as scanned."""
    places: dict[str, tuple[str, int]] = {}
    for entry in scanned.entries.values():
        for index, digest in enumerate(entry.chunks):
            if digest in wanted:
                places.setdefault(digest, (entry.path, index * CHUNK_BYTES))
    if missing := wanted - places.keys():
        raise TreeRefused(f"the last scan has no chunk {min(missing)[:12]}: commit again")
    return places


def _sync(order: Mapping[str, Any], _: Answer) -> Mapping[str, Any]:
    """Bring the manifest of `head.json` into the tree, except where the tree has changes that are
    not committed."""
    import asyncio

    from pilotlight.core.object_store.errors import ObjectStoreError
    from snapshotter.volumes import sync

    home = Path(order["home"])
    body = json.loads((home / "head.json").read_bytes())
    head = by_path(map(Entry.from_json, body["entries"]))
    before = State.read(home / "state.json")
    root = os.open(home / "data", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    incoming = open_beneath(_open(home), "incoming", os.O_RDONLY | os.O_DIRECTORY)
    for leftover in os.listdir(incoming):
        os.unlink(leftover, dir_fd=incoming)
    merge = sync.Merge(
        root=root,
        incoming=incoming,
        uid=order["uid"],
        base=before.entries,
        stamps=dict(before.stamps),
        head=head,
    )
    try:
        found = asyncio.run(merge.run(order))
    except ObjectStoreError as e:
        raise StoreFailed(str(e)) from e
    with (home / "state.json.new").open("wb") as target:
        State(entries=head, stamps=merge.stamps).write(target)
    (home / "state.json.new").rename(home / "state.json")
    (home / "scan.json").unlink(missing_ok=True)
    return found


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def become(uid: int | None) -> None:
    """Give up root for good. None: this process has no user of its own to become."""
    if uid is not None and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


@contextlib.contextmanager
def _acting_as(uid: int | None) -> Iterator[None]:
    """Open files with the rights of `uid` inside the block."""
    if uid is None or os.geteuid() != 0:
        yield
        return
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


OPERATIONS: Mapping[str, Callable[[Mapping[str, Any], Answer], Mapping[str, Any]]] = {
    "scan": _scan,
    "upload": _upload,
    "sync": _sync,
}

if __name__ == "__main__":
    raise SystemExit(main())
