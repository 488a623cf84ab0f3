"""Class `pilotlight.dev`: how long from an activator's wish to the Deployment's new scale, and what it costs the API server.

    python -m benchmarks.poke [--quick] [--json FILE]

The autoscaler is the activators' own (one leads, another asks; Redis between them, or a board in the process where none is installed); the
API server is that of the tests over real HTTP, in a thread of this process. All revisions are at zero; each is asked for once. Goals: at
most 300 ms from the poke to the PATCH, and two calls of the API on the way from zero; none where nothing changes.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from activator.knative.autoscaler.wiring import Around, Autoscaler
from benchmarks.harness import Options, Report, Row, options, phase
from pilotlight.cluster.api import Cluster
from pilotlight.cluster.kinds import LEASE
from pilotlight.cluster.settings import ClusterSettings
from tests.fakes.kubernetes.thread import ThreadedApiServer, running_api_server
from tests.fakes.scaled_revision import ScaledRevision

REVISIONS, QUICK_REVISIONS = 300, 60
QUIET_S = 10.0
GOAL_MS = 300.0
LONGEST_S = 60.0


class Connection:
    """A cluster that is reached already."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def connected(self) -> Cluster:
        """See activator.knative.autoscaler.wiring.Connected."""
        return self._cluster


@contextmanager
def redis_url(directory: Path) -> Iterator[str | None]:
    """A Redis of its own; None where there is none."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    socket = directory / "r.sock"
    argv = [program, "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(directory)]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + LONGEST_S
        while not socket.exists() and time.monotonic() < until:
            time.sleep(0.02)
        yield f"unix://{socket}?db=0"
    finally:
        server.terminate()
        server.wait(LONGEST_S)


def autoscaler(member: str, cluster: Cluster, url: str | None) -> Autoscaler:
    """Of one activator, which has nothing to do."""
    known = asyncio.Event()
    known.set()
    around = Around(
        member=member, redis_url=url, platform="benchmark", loads=dict, is_known=lambda: known, pods_of=lambda _: (),
        spec_of=lambda *_: None,
    )  # fmt: skip
    return Autoscaler(cluster.settings, Connection(cluster), around)


async def measure(threaded: ThreadedApiServer, settings: ClusterSettings, url: str | None, count: int, report: Report) -> None:
    """Ask for one pod of each revision, one after the other."""
    names = [(f"fn-v1-{n:06x}", f"f-{n}@v1-{n:06x}") for n in range(count)]
    revisions = threaded.call(lambda: [ScaledRevision(threaded.server, name, key=key).made() for name, key in names])
    async with await Cluster.connect(settings) as cluster:
        leader = autoscaler("a-0", cluster, url)
        asking = leader if url is None else autoscaler("a-1", cluster, url)
        tasks = [asyncio.create_task(leader.run())]
        try:
            with phase(f"{count} revisions are taken over"):
                await until(lambda: leader.leader is not None and all(threaded.call(lambda: [r.sks for r in revisions])))
            tasks += [asyncio.create_task(asking.run())] if asking is not leader else []
            await asyncio.sleep(QUIET_S / 2)
            with phase("asking"):
                took_ms, calls = [], []
                for revision in revisions:
                    ms, before = await one(threaded, asking, revision)
                    took_ms.append(ms)
                    calls.append(float(before))
            report.rows.append(Row.of("poke to PATCH of the scale", "ms", took_ms, f"goal {GOAL_MS:g} ms; {count} revisions"))
            report.rows.append(Row.of("API calls from zero until then", "", calls, "goal 2"))
            await quiet(threaded, report)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in {id(one): one for one in (leader, asking)}.values():
                await each.aclose()


async def one(threaded: ThreadedApiServer, asking: Autoscaler, revision: ScaledRevision) -> tuple[float, int]:
    """Milliseconds until the API server had the new scale, and requests about this revision up to it."""
    threaded.call(threaded.server.requests.clear)
    began = time.time()
    await asking.speaker.ask(revision.key, 1)

    def seen() -> list[tuple[float, bool]]:
        asked = [r for r in threaded.server.requests if r.resource != LEASE.resource and r.verb != "watch" and revision.name in r.name]
        return [(r.at, r.subresource == "scale") for r in asked]

    await until(lambda: any(is_scale for _, is_scale in threaded.call(seen)))
    found = threaded.call(seen)
    first = next(n for n, (_, is_scale) in enumerate(found) if is_scale)
    return (found[first][0] - began) * 1000, first + 1


async def quiet(threaded: ThreadedApiServer, report: Report) -> None:
    """Nothing changes for a while."""
    await asyncio.sleep(QUIET_S / 2)
    threaded.call(threaded.server.requests.clear)
    await asyncio.sleep(QUIET_S)
    written = threaded.call(lambda: sum(r.resource != LEASE.resource and r.wrote for r in threaded.server.requests))
    report.rows.append(Row.of(f"writes in {QUIET_S:g} s where nothing changed", "", [float(written)], "goal 0"))


async def until(what: Callable[[], bool]) -> None:
    """It is true. Raises TimeoutError."""
    async with asyncio.timeout(LONGEST_S):
        while not what():  # noqa: ASYNC110  # the server is in another thread
            await asyncio.sleep(0.002)


def main(given: Options) -> None:
    """Run it."""
    report = Report("autoscaler: from a poke to the scale")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plpk")))
        threaded = stack.enter_context(running_api_server())
        threaded.call(lambda: threaded.server.add_namespace("pilotlight"))
        settings = ClusterSettings(kubeconfig=str(threaded.server.write_kubeconfig(directory / "kubeconfig")))
        url = stack.enter_context(redis_url(directory))
        if url is None:
            report.missing("through Redis", "redis-server is not installed; the board is in the process")
        asyncio.run(measure(threaded, settings, url, QUICK_REVISIONS if given.quick else REVISIONS, report))
    report.finish(given)


if __name__ == "__main__":
    main(options(__doc__ or ""))
