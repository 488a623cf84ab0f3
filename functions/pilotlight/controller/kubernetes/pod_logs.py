"""Logs of pods as lines, oldest first: merged from many pods, then followed, including later pods.

The kubelet keeps a pod's output while the pod exists, and that of a restarted container's previous
run. A log collector must store what should outlive pods."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.controller.kubernetes import pods
from pilotlight.core.threads import cancel_and_wait
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError, Invalid, NotFound
from pilotlight.kubernetes.kinds import POD
from pilotlight.kubernetes.watch_events import Object

LogLine = Mapping[str, Any]
_MARK, _MARK_END = "\x1e", "\x1f"
"""Delimiters of the call id before a line (`snapshotter.shim.log_pipe`), which `@` and the instance
may follow (`pilotlight.worker.user_code.output`)."""
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_MOST_PODS = 100
"""Number of pods, the newest, read at once; each needs a connection."""
_QUEUED = 1000
_AGAIN_S = 1.0
_MOST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """A selection of log lines.

    Attributes:
        since: seconds since the epoch.
        tail: only this many of the last lines.
        call_id: only lines of this call.
    """

    since: float | None = None
    tail: int | None = None
    call_id: str | None = None

    def takes(self, line: LogLine) -> bool:
        """Whether the query selects the line."""
        if self.since is not None and line["time"] < self.since:
            return False
        return self.call_id is None or line["call"] == self.call_id


def parse_line(pod: str, raw: bytes) -> LogLine | None:
    """Parse a line with the kubelet's timestamp (`2026-11-21T22:00:00.123456789Z text`); None if it
    has none."""
    stamp, _, text = raw.decode("utf-8", "replace").partition(" ")
    try:
        moment = dt.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
    call, instance = None, pod
    if text.startswith(_MARK) and _MARK_END in text:
        mark, _, text = text[1:].partition(_MARK_END)
        call, _, named = mark.partition("@")
        instance = named if _INSTANCE.match(named) else pod
    # The kubelet merges both streams and does not distinguish them.
    return {
        "time": moment,
        "instance": instance,
        "stream": "stdout",
        "call": call or None,
        "text": text,
    }


async def history(
    cluster: Cluster, found: Sequence[Object], query: LogQuery
) -> AsyncGenerator[LogLine, None]:
    """Yield what these pods have printed until now."""
    newest = sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))[
        -_MOST_PODS:
    ]
    started = [pod for pod in newest if pods.has_started(pod)]
    spare = 0
    if query.tail is not None:  # count, then read again: the lines may not fit into memory
        spare = -query.tail
        async with contextlib.aclosing(_all(cluster, started, query)) as lines:
            async for _ in lines:
                spare += 1
    async with contextlib.aclosing(_all(cluster, started, query)) as lines:
        async for line in lines:
            if spare <= 0:
                yield line
            spare -= 1


async def _all(
    cluster: Cluster, found: Sequence[Object], query: LogQuery
) -> AsyncGenerator[LogLine, None]:
    sources = [_past(cluster, pod, query) for pod in found]
    try:
        async for line in _merged(sources):
            yield line
    finally:
        for source in sources:
            await source.aclose()


async def follow_logs(
    cluster: Cluster,
    selector: str,
    belongs: Callable[[Object], bool],
    query: LogQuery,
    *,
    seen: Mapping[str, float],
) -> AsyncGenerator[LogLine, None]:
    """Yield what pods print from now on, without end, including later pods.

    Args:
        belongs: whether to follow a pod.
        seen: pod's name → time of its last line already returned.
    """
    queue: asyncio.Queue[LogLine | BaseException] = asyncio.Queue(_QUEUED)
    reader = asyncio.create_task(
        _follow_all(cluster, selector, belongs, queue, dict(seen)), name="pod logs"
    )
    try:
        while True:
            line = await queue.get()
            if isinstance(line, BaseException):
                raise line
            if query.takes(line):
                yield line
    finally:
        await cancel_and_wait(reader)


async def _follow_all(
    cluster: Cluster,
    selector: str,
    belongs: Callable[[Object], bool],
    queue: asyncio.Queue[LogLine | BaseException],
    seen: dict[str, float],
) -> None:
    followed: dict[str, asyncio.Task[None]] = {}
    try:
        async with contextlib.aclosing(cluster.watch(POD, None, selector)) as changes:
            async for change in changes:
                if (
                    change.type == "SYNCED"
                    or not belongs(change.object)
                    or not pods.has_started(change.object)
                ):
                    continue
                uid = str(change.object["metadata"]["uid"])
                if change.type != "DELETED" and uid not in followed and len(followed) < _MOST_PODS:
                    followed[uid] = asyncio.create_task(
                        _follow_one(cluster, change.object, queue, seen),
                        name=f"log of {change.key[1]}",
                    )
                followed = {uid: task for uid, task in followed.items() if not task.done()}
    except ClusterError as error:
        await queue.put(error)
    finally:
        for task in followed.values():
            task.cancel()
        await asyncio.gather(*followed.values(), return_exceptions=True)


async def _follow_one(
    cluster: Cluster,
    pod: Object,
    queue: asyncio.Queue[LogLine | BaseException],
    seen: dict[str, float],
) -> None:
    """Follow a pod until it is deleted. An interrupted stream resumes after the last line."""
    name, namespace = str(pod["metadata"]["name"]), str(pod["metadata"]["namespace"])
    while True:
        since = stamp(seen[name]) if name in seen else None
        try:
            async with contextlib.aclosing(
                _lines(cluster, name, namespace, follow=True, since_time=since)
            ) as lines:
                async for line in lines:
                    if line["time"] > seen.get(name, 0.0):  # the server truncates to whole seconds
                        seen[name] = line["time"]
                        await queue.put(line)
        except NotFound:
            return
        except ClusterError:
            pass  # retried while the pod exists
        await cluster.pause(_AGAIN_S)
        if await _is_over(cluster, name, namespace):
            return


async def _is_over(cluster: Cluster, name: str, namespace: str) -> bool:
    try:
        now = await cluster.get(POD, name, namespace)
    except ClusterError:
        return False
    return now is None or (now.get("status") or {}).get("phase") in ("Succeeded", "Failed")


async def _past(cluster: Cluster, pod: Object, query: LogQuery) -> AsyncGenerator[LogLine, None]:
    name, namespace = str(pod["metadata"]["name"]), str(pod["metadata"]["namespace"])
    since = stamp(query.since) if query.since is not None else None
    # the last lines of a call need not be the pod's last lines
    tail = query.tail if query.call_id is None else None
    for previous in (True, False) if pods.restarts(pod) else (False,):
        try:
            async with contextlib.aclosing(
                _lines(
                    cluster, name, namespace, previous=previous, since_time=since, tail_lines=tail
                )
            ) as lines:
                async for line in lines:
                    if query.takes(line):
                        yield line
        except (NotFound, Invalid):
            continue  # the pod was deleted meanwhile, or the log of that run


async def _lines(
    cluster: Cluster, name: str, namespace: str, **how: Any
) -> AsyncGenerator[LogLine, None]:
    rest = b""
    async with contextlib.aclosing(
        cluster.logs(name, namespace, container=pods.CONTAINER, timestamps=True, **how)
    ) as pieces:
        async for piece in pieces:
            *whole, rest = (rest + piece).split(b"\n")
            rest = rest[:_MOST_LINE_BYTES]
            for raw in whole:
                if (line := parse_line(name, raw)) is not None:
                    yield line
    if (line := parse_line(name, rest)) is not None:
        yield line


async def _merged(
    sources: Sequence[AsyncGenerator[LogLine, None]],
) -> AsyncGenerator[LogLine, None]:
    """Merge sources by time, holding one line of each."""
    heads: dict[int, LogLine] = {}

    async def advance(index: int) -> None:
        try:
            heads[index] = await anext(sources[index])
        except StopAsyncIteration:
            heads.pop(index, None)

    await asyncio.gather(*(advance(index) for index in range(len(sources))))
    while heads:
        first = min(heads, key=lambda index: (heads[index]["time"], index))
        yield heads[first]
        await advance(first)


def stamp(moment: float) -> str:
    """Format as RFC 3339 in whole seconds, rounded down."""
    return dt.datetime.fromtimestamp(int(moment), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
