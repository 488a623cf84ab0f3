"""No order of opening, leasing, pinning, evicting, rotting, failing and restarting frees what is
held or serves what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.fakes.origins import MemoryOrigin
from tests.fakes.trees import remove_tree
from tests.hypothesis_profiles import examples
from tests.weight_cache.models import digest_of, put_model
from weight_cache.errors import ChunkCorrupt, OriginUnavailable, StoreFull
from weight_cache.store.store import Store

T = TypeVar("T")
_BLOBS = [bytes([65 + i]) * (400 + 10 * i) for i in range(6)]
_MODELS = [
    {"w": _BLOBS[0], "c": _BLOBS[1]},
    {"w": _BLOBS[2], "c": _BLOBS[1]},
    {"only": _BLOBS[3]},
    {"w": _BLOBS[4], "sub/x": _BLOBS[3], "c": _BLOBS[5]},
    {"twin": _BLOBS[3]},
]
_BUDGET = 1_700
MODELS = st.integers(0, len(_MODELS) - 1)
HOLDERS = st.sampled_from(["s", "t"])


class AnyOrder(RuleBasedStateMachine):
    """What should be true, beside the store: who holds what, and which files were tampered with."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pl"))
        self.loop = asyncio.new_event_loop()
        self.origin = MemoryOrigin()
        self.names = [put_model(self.origin, files) for files in _MODELS]
        self.held: dict[str, int] = {}
        self.pinned: set[int] = set()
        self.rotten: set[str] = set()
        self.store = self._open()

    def teardown(self) -> None:
        self.store.close()
        self.loop.close()
        remove_tree(self.root)

    def _open(self) -> Store:
        return Store.open(self.root / "w", origin=self.origin, max_bytes=_BUDGET, clock=time.time)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def _lease(self, index: int, holder: str) -> None:
        with contextlib.suppress(StoreFull, OriginUnavailable):
            lease, path = await self.store.lease(self.names[index], holder=holder)
            self.held[lease.id] = index
            assert read(path) == _MODELS[index]
            self._is_right(index)

    def _is_right(self, index: int) -> None:
        self.rotten -= {digest_of(content) for content in _MODELS[index].values()}

    @rule(index=MODELS, holder=HOLDERS)
    def lease(self, index: int, holder: str) -> None:
        self.do(self._lease(index, holder))

    @rule(asks=st.lists(st.tuples(MODELS, HOLDERS, st.booleans()), min_size=2, max_size=6))
    def many_at_once(self, asks: list[tuple[int, str, bool]]) -> None:
        async def all_of_them() -> None:
            tasks = [asyncio.create_task(self._lease(index, holder)) for index, holder, _ in asks]
            await asyncio.sleep(0.001)
            for task, (_, _, is_cancelled) in zip(tasks, asks, strict=True):
                if is_cancelled:
                    task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            failed = [
                e for e in ended if isinstance(e, Exception) and not isinstance(e, ChunkCorrupt)
            ]
            assert not failed, failed

        self.do(all_of_them())
        self.held = {lease.id: self.names.index(lease.manifest) for lease in self.store.leases()}

    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        """Picked by number: what is held depends on who was faster, and what is drawn must not."""
        held = sorted(self.held)
        lease_id = held[pick % len(held)] if held else "l-none"
        assert self.do(self.store.release(lease_id)) is (self.held.pop(lease_id, None) is not None)

    @rule(index=MODELS)
    def prefetch(self, index: int) -> None:
        with contextlib.suppress(StoreFull, OriginUnavailable):
            self.do(self.store.prefetch(self.names[index]))
            self._is_right(index)

    @rule(index=MODELS)
    def pin(self, index: int) -> None:
        with contextlib.suppress(StoreFull, OriginUnavailable):
            self.do(self.store.pin(self.names[index]))
            self.pinned.add(index)
            self._is_right(index)

    @rule(index=MODELS)
    def unpin(self, index: int) -> None:
        assert self.do(self.store.unpin(self.names[index])) is (index in self.pinned)
        self.pinned.discard(index)

    @rule(index=MODELS)
    def drop(self, index: int) -> None:
        was_here = self.store.is_here(self.names[index])
        dropped = self.do(self.store.drop(self.names[index]))
        if index in self.pinned or (was_here and index in self.held.values()):
            assert dropped is False
        assert not (dropped and self.store.is_here(self.names[index]))

    @rule(blob=st.integers(0, len(_BLOBS) - 1), is_seen=st.booleans())
    def rot(self, blob: int, is_seen: bool) -> None:
        """A file changes on the disk: visibly, or so that only reading it tells; then somebody
        reads."""
        path = self.root / "w" / "files" / digest_of(_BLOBS[blob])
        if not path.exists():
            return
        before = path.stat()
        path.chmod(0o644)
        path.write_bytes(b"!" + _BLOBS[blob][1:])
        path.chmod(0o444)
        self.rotten.add(path.name)
        if is_seen:
            return
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        for name in self.names:
            self.do(self.store.verify(name))
        if path.exists():  # of no model: whoever needs it next reads it again
            os.utime(path)
        else:
            self.rotten.discard(path.name)

    @rule(index=MODELS, blob=st.integers(0, len(_BLOBS) - 1))
    def origin_loses_a_blob_for_a_while(self, index: int, blob: int) -> None:
        self.origin.lost = {(digest_of(_BLOBS[blob]), 0)}
        with contextlib.suppress(StoreFull, OriginUnavailable):
            self.do(self.store.prefetch(self.names[index]))
            self._is_right(index)
        self.origin.lost = set()

    @rule(
        junk=st.sampled_from(
            [
                "tmp/half",
                "partial/half",
                "partial/x.done",
                "leases/junk",
                "models/junk",
                "scrubbed",
                "none",
            ]
        )
    )
    def restart(self, junk: str) -> None:
        """As after a kill: what was half done lies about."""
        self.store.close()
        path = self.root / "w" / junk
        if junk == "models/junk":
            path.mkdir()
        elif junk != "none":
            path.write_bytes(b"\xff" * 10)
        self.store = self._open()
        here = [self.store.is_here(name) for name in self.names]
        self.held = {lease_id: index for lease_id, index in self.held.items() if here[index]}

    @invariant()
    def what_is_held_is_on_the_disk_and_whole(self) -> None:
        assert {lease.id for lease in self.store.leases()} == set(self.held)
        for index, name in enumerate(self.names):
            if self.store.is_here(name):
                tampered = {digest_of(content) for content in _MODELS[index].values()} & self.rotten
                assert tampered or read(self.store.path(name)) == _MODELS[index]
            else:
                assert not self.store.path(name).exists()

    @invariant()
    def what_is_counted_is_on_the_disk_and_within_the_budget(self) -> None:
        on_disk = {p.name: p.stat().st_size for p in (self.root / "w" / "files").iterdir()}
        assert sum(on_disk.values()) == self.store.statistics().used_bytes <= _BUDGET
        assert list((self.root / "w" / "tmp").iterdir()) == []
        assert {
            self.names.index(m.manifest) for m in self.store.models() if m.is_pinned
        } <= self.pinned


def read(directory: Path) -> dict[str, bytes]:
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file()
    }


AnyOrder.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None
)
TestAnyOrder = AnyOrder.TestCase
