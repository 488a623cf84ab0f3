"""The second half of `fleet.py`: how soon a decision reaches the Deployment, and what a start from
zero asks of the API server.

With class `pilotlight.dev` the leader of the activators' autoscaler follows all revisions, on its
own clock, while one after the other is poked. With Knative's own autoscaler a start asks the API
server for nothing: a request wakes the revision, and pods come by watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from activator.knative.autoscaler.leader import FunctionLister, Leader
from activator.knative.autoscaler.load_report import Load
from activator.knative.autoscaler.load_report_store import ProcessBoard
from benchmarks.harness import Report, Row
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.names import function_selector
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.requests import Asked
from tests.fakes.kubernetes.server import ApiServer
from tests.fakes.kubernetes.store import Event
from tests.fakes.scaled_revision import ScaledRevision
from tests.fakes.small_cluster import small_cluster

POKE_GOAL_MS, CALLS_GOAL = 300.0, 2
_LONGEST_S = 120.0
_WATCHING = ("watch", "list")


class _Always:
    """A Lease that nobody takes away."""

    is_leader = True

    async def wait_follower(self) -> None:
        """Never."""
        await asyncio.Event().wait()


async def measure(directory: Path, *, revisions: int, pokes: int, report: Report) -> None:
    """Both autoscalers."""
    took_ms, calls = await poked(directory, revisions=revisions, pokes=pokes)
    report.rows.append(
        Row.of(
            "poke to Deployment",
            "ms",
            took_ms,
            f"{revisions} revisions led; goal {POKE_GOAL_MS:g} ms",
        )
    )
    report.rows.append(
        Row.of("API calls until then, pilotlight.dev", "", calls, f"goal at most {CALLS_GOAL}")
    )
    report.rows.append(
        Row.of(
            "API calls of a start from zero, kpa",
            "",
            await woken(directory, starts=5),
            f"goal at most {CALLS_GOAL}",
        )
    )


async def poked(directory: Path, *, revisions: int, pokes: int) -> tuple[list[float], list[float]]:
    """Milliseconds from a poke to the Deployment's new scale, and the API calls until then, of each
    poke."""
    async with ApiServer() as server:
        those = [
            ScaledRevision(server, f"f{number}-v1-aaaaaa", key=f"f-{number:016x}@v1-aaaaaa")
            for number in range(revisions)
        ]
        for one in those:
            one.made()
        settings = ClusterSettings(
            kubeconfig=str(server.write_kubeconfig(directory / "kubeconfig"))
        )
        async with await Cluster.connect(settings) as cluster:
            board = ProcessBoard(member="a-0")
            leader = Leader(
                cluster,
                board,
                _Always(),
                selector=function_selector(settings),
                functions=FunctionLister(
                    members=lambda: (),
                    pods_of=lambda _: (),
                    has_function=lambda *_: True,
                    spec_of=lambda *_: None,
                ),
            )
            running = asyncio.create_task(leader.run())
            try:
                await settled(server, those)
                return await _poke_each(server, board, those[:pokes])
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


async def settled(server: ApiServer, those: Sequence[ScaledRevision]) -> None:
    """Every revision has its ServerlessService and its status, and Knative has answered. Raises
    TimeoutError."""
    async with asyncio.timeout(_LONGEST_S):
        for one in those:
            await until(partial(_has_service, one))
            one.served()
        for one in those:
            await until(partial(_is_initialised, one))
        asked = -1
        while asked != len(server.requests):
            asked = len(server.requests)
            await asyncio.sleep(0.5)


async def _poke_each(
    server: ApiServer, board: ProcessBoard, those: Sequence[ScaledRevision]
) -> tuple[list[float], list[float]]:
    took_ms, calls = [], []
    statement: dict[str, Load] = {}
    for one in those:
        scaled = asyncio.Event()
        name = f"{one.name}-deployment"

        def seen(event: Event, name: str = name, scaled: asyncio.Event = scaled) -> None:
            if event.place[1] == name and event.now.body["spec"]["replicas"]:
                scaled.set()

        stop = server.store.listen(("apps", "deployments"), seen)
        server.requests.clear()
        statement[one.key] = Load(waiting=1, asked=1, concurrency=1.0)
        began = time.perf_counter()
        await board.post(statement, (one.key,))
        async with asyncio.timeout(_LONGEST_S):
            await scaled.wait()
        took_ms.append((time.perf_counter() - began) * 1000)
        stop()
        async with asyncio.timeout(_LONGEST_S):
            await until(partial(_is_noted, server, one))
        made = of_object(server.requests, one.name)
        calls.append(
            1.0 + next(index for index, asked in enumerate(made) if asked.subresource == "scale")
        )
        await asyncio.sleep(0.05)
    return took_ms, calls


async def woken(directory: Path, *, starts: int) -> list[float]:
    """API calls, watches left out, of starts from zero that a wake brings up."""
    counts = []
    async with small_cluster(directory) as world:
        fleet = await world.fleet()
        for number in range(starts):
            target = world.target(f"hello{number}")
            world.woken.clear()
            world.server.requests.clear()
            starting = asyncio.create_task(world.start(fleet, target, number))
            await world.woken.wait()
            await world.maker.up(target)
            await starting
            counts.append(
                float(
                    len([asked for asked in world.server.requests if asked.verb not in _WATCHING])
                )
            )
    return counts


def of_object(requests: Iterable[Asked], name: str) -> list[Asked]:
    """Calls that concern one revision, in their order, watches left out."""
    return [
        asked for asked in requests if asked.verb not in _WATCHING and asked.name.startswith(name)
    ]


def _has_service(one: ScaledRevision) -> bool:
    return one.sks is not None


def _is_initialised(one: ScaledRevision) -> bool:
    return bool(one.condition("ScaleTargetInitialized").get("status") == "True")


def _is_noted(server: ApiServer, one: ScaledRevision) -> bool:
    """A request is noted when it has been answered."""
    return any(asked.subresource == "scale" for asked in of_object(server.requests, one.name))


async def until(is_so: Callable[[], bool], *, poll_s: float = 0.005) -> None:
    """Wait for what somebody else does, and does not tell."""
    while not is_so():  # noqa: ASYNC110 - the API server's objects are looked at, which sets no event
        await asyncio.sleep(poll_s)
