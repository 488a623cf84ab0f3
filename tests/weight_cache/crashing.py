"""A process whose children die (SIGKILL) one step later each time: `python -m
tests.weight_cache.crashing STORY FOLDER UID`.

A step is whatever changes names, modes or times below the store, or opens a file there
(sys.addaudithook tells of each before it happens). After every death the store is opened again,
checked, and the story told to its end. Prints how many steps there were."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.fakes.origins import MemoryOrigin
from tests.fakes.trees import remove_tree
from tests.weight_cache.models import chunked, digest_of, put_model
from weight_cache.errors import OriginUnavailable
from weight_cache.manifest import CHUNK_BYTES
from weight_cache.store.store import Store

_STEPS = frozenset(
    [
        "open",
        "os.rename",
        "os.link",
        "os.remove",
        "os.rmdir",
        "os.mkdir",
        "os.chmod",
        "os.utime",
        "os.truncate",
        "shutil.rmtree",
    ]
)
_LARGE = chunked(b"a")
_MODELS: list[dict[str, bytes]] = [
    {"w": b"1" * 4000, "shared": b"s" * 100, "sub/c": b"{}"},
    {"w": b"2" * 4000, "shared": b"s" * 100},
    {"w": b"3" * 4000},
    {"w": _LARGE},
]
_SMALL_BUDGET, _LARGE_BUDGET = 9_000, 60_000_000


class Library:
    """The models, and what each should look like."""

    def __init__(self) -> None:
        self.origin = MemoryOrigin()
        self.names = [put_model(self.origin, files) for files in _MODELS]
        self.contents = dict(zip(self.names, _MODELS, strict=True))


async def small(store: Store, library: Library) -> None:
    """Leases, an eviction, a pin, a drop."""
    one, two, three, _ = library.names
    for left_over in store.leases():
        await store.release(left_over.id)
    await store.unpin(two)
    lease, _ = await store.lease(one, holder="s", pid=1, pid_started=2)
    await store.pin(two)
    await store.release(lease.id)
    await store.lease(three, holder="t")
    await store.unpin(two)
    await store.drop(two)
    await store.release((await store.lease(one, holder="u"))[0].id)


async def large(store: Store, library: Library) -> None:
    """A fetch that fails at its end, and the next one."""
    name = library.names[3]
    library.origin.lost = {(digest_of(_LARGE), CHUNK_BYTES)}
    with contextlib.suppress(OriginUnavailable):
        await store.prefetch(name)
    library.origin.lost = set()
    await store.lease(name, holder="s")


STORIES: dict[str, tuple[Callable[[Store, Library], Awaitable[None]], int]] = {
    "small": (small, _SMALL_BUDGET),
    "large": (large, _LARGE_BUDGET),
}


def check(store: Store, root: Path, library: Library, budget: int) -> None:
    """Everything that is here is right, held and counted."""
    assert list((root / "tmp").iterdir()) == []
    here = [m.manifest for m in store.models()]
    for name in here:
        found = {
            p.relative_to(store.path(name)).as_posix(): p.read_bytes()
            for p in store.path(name).rglob("*")
            if p.is_file()
        }
        assert found == library.contents[name], name
        assert asyncio.run(store.verify(name)) == []
    assert all(lease.manifest in here for lease in store.leases())
    files = sum(p.stat().st_size for p in (root / "files").iterdir())
    assert store.statistics().used_bytes == files + store.statistics().partial_bytes <= budget
    assert store.statistics().quarantined_files == 0


def die_at(step: int, root: Path) -> None:
    """Arm the hook: the process dies before its `step`th step below `root`."""
    left = step

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in _STEPS and str(args[0]).startswith(str(root)):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def tell(story: str, root: Path, library: Library) -> None:
    """The whole story, on whatever is there."""
    told, budget = STORIES[story]

    async def run() -> None:
        store = Store.open(root, origin=library.origin, max_bytes=budget, clock=time.time)
        await told(store, library)
        store.close()

    asyncio.run(run())


def main(story: str, folder: Path) -> int:
    """Children until one survives; the number of steps."""
    library, budget = Library(), STORIES[story][1]
    step = 0
    while True:
        step += 1
        root = folder / f"w{step}"
        child = os.fork()
        if not child:
            die_at(step, root)
            tell(story, root, library)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return step
        if root.exists():
            store = Store.open(root, origin=library.origin, max_bytes=budget, clock=time.time)
            check(store, root, library, budget)
            store.close()
        tell(story, root, library)
        store = Store.open(root, origin=library.origin, max_bytes=budget, clock=time.time)
        check(store, root, library, budget)
        store.close()
        for model in (root / "models").glob("**"):
            model.chmod(0o700)
        remove_tree(root)


if __name__ == "__main__":
    if (uid := int(sys.argv[3])) != os.getuid():
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    print(main(sys.argv[1], Path(sys.argv[2])))
