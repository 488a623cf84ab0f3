"""API servers that accept connections and answer nothing, and ones that only have nothing to say."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from pilotlight.kubernetes.client import VERSION_PATH
from pilotlight.kubernetes.cluster import CallDeadlines, Cluster
from pilotlight.kubernetes.errors import ClusterUnreachable
from pilotlight.kubernetes.retry_policy import RetryDelays
from pilotlight.kubernetes.settings import ClusterSettings
from tests.fakes.kubernetes.faults import Fault
from tests.fakes.kubernetes.server import ApiServer
from tests.functions.cluster.conftest import IMPATIENT
from tests.functions.cluster.test_watch import config_map, open_watch, watched


@asynccontextmanager
async def server_process(kubeconfig: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The API server as a process, which a signal can stop and continue."""
    arguments = ("-m", "tests.fakes.kubernetes", "--kubeconfig", str(kubeconfig))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            await process.stdout.readline()
        yield process
    finally:
        process.kill()
        await process.wait()


async def connected(api_server: ApiServer, directory: Path, patience: CallDeadlines) -> Cluster:
    kubeconfig = api_server.write_kubeconfig(directory / "kubeconfig")
    return await Cluster.connect(ClusterSettings(kubeconfig=str(kubeconfig)), patience=patience)


def test_it_is_noticed_within_half_a_minute() -> None:
    usual = CallDeadlines()
    # one pause may pass half of which something was heard
    assert 2 * usual.quiet_s + usual.attempt_s <= 30


async def test_a_server_that_accepts_and_never_answers_is_noticed(tmp_path: Path) -> None:
    """Its kernel acknowledges what it is sent, and its watches were silent before."""
    settings = ClusterSettings(kubeconfig=str(tmp_path / "kubeconfig"))
    hasty = dataclasses.replace(IMPATIENT, quiet_s=0.1, attempt_s=1.0)
    async with (
        server_process(tmp_path / "kubeconfig") as process,
        await Cluster.connect(settings, patience=hasty) as cluster,
        watched(cluster) as (seen, told),
    ):
        await cluster.create(config_map("a"))
        await told.until(lambda: told.count("ADDED") == 1)
        await asyncio.sleep(5 * hasty.quiet_s)
        assert cluster.away_s == 0.0  # it answers, though nothing happens
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(10):
            while not cluster.away_s:
                await asyncio.sleep(0.01)
        assert cluster.away_s >= hasty.attempt_s
        assert len(seen.store) == 1
        process.send_signal(signal.SIGCONT)
        await cluster.create(config_map("b"))
        await told.until(lambda: told.count("ADDED") == 2)
        assert (told.count("SYNCED"), cluster.away_s) == (1, 0.0)


async def test_a_watch_stays_open_while_the_server_answers_though_nothing_happens(
    api_server: ApiServer, tmp_path: Path
) -> None:
    def probes() -> int:
        return sum(one.path == VERSION_PATH for one in api_server.requests)

    hasty = dataclasses.replace(IMPATIENT, quiet_s=0.01)
    async with await connected(api_server, tmp_path, hasty) as cluster:
        async with watched(cluster) as (_, told):
            await open_watch(api_server)
            while probes() < 10:
                await asyncio.sleep(0.005)
            # an error is an answer, too
            api_server.faults.add(Fault(status=503, path=VERSION_PATH, times=3))
            while probes() < 20:
                await asyncio.sleep(0.005)
            assert api_server.requests.count(verb="watch") == 1
            assert (told.count("SYNCED"), cluster.away_s) == (1, 0.0)
        before = len(api_server.requests)
        await asyncio.sleep(10 * hasty.quiet_s)
        assert len(api_server.requests) == before  # no stream is open: nothing is asked


async def test_a_server_that_answered_meanwhile_is_not_away(
    api_server: ApiServer, tmp_path: Path
) -> None:
    def probes() -> int:
        return sum(one.path == VERSION_PATH for one in api_server.requests)

    hasty = dataclasses.replace(IMPATIENT, quiet_s=0.1, attempt_s=0.5)
    async with await connected(api_server, tmp_path, hasty) as cluster, watched(cluster):
        await open_watch(api_server)
        api_server.faults.add(Fault(hang=True, path=VERSION_PATH, times=1))
        async with asyncio.timeout(10):
            while not probes():
                await asyncio.sleep(0.005)
            await cluster.create(config_map("a"))
            while probes() < 2:  # the first one has been given up before
                assert cluster.away_s == 0.0
                await asyncio.sleep(0.002)
        assert api_server.requests.count(verb="watch") == 1


async def test_one_call_without_an_answer_leaves_no_trace_once_the_server_answers(
    api_server: ApiServer, tmp_path: Path
) -> None:
    hasty = dataclasses.replace(
        IMPATIENT, quiet_s=0.2, attempt_s=1.0, pauses=RetryDelays(attempts=1)
    )
    async with await connected(api_server, tmp_path, hasty) as cluster, watched(cluster):
        await open_watch(api_server)
        api_server.faults.add(Fault(hang=True, resource="configmaps", verb="create"))
        with pytest.raises(ClusterUnreachable):
            await cluster.create(config_map("a"))
        assert cluster.away_s
        async with asyncio.timeout(10):
            while cluster.away_s:
                await asyncio.sleep(0.01)
        assert api_server.requests.count(verb="watch") == 1


async def test_a_followed_log_ends_when_the_server_does_not_answer(
    api_server: ApiServer, tmp_path: Path
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A kubelet, whose container prints one line and no more."""
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\none\n")
        await reader.read()
        writer.close()

    hasty = dataclasses.replace(IMPATIENT, quiet_s=0.05, attempt_s=0.2)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as kubelet:
        endpoint = {"kubeletEndpoint": {"Port": kubelet.sockets[0].getsockname()[1]}}
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}
        api_server.put({**node, "status": {"addresses": addresses, "daemonEndpoints": endpoint}})
        spec = {"containers": [{"name": "user", "image": "registry.example/a:1"}], "nodeName": "n"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
        api_server.put(pod)
        async with (
            await connected(api_server, tmp_path, hasty) as cluster,
            aclosing(cluster.logs("a", "default", follow=True)) as pieces,
        ):
            assert await anext(pieces) == b"one\n"
            api_server.faults.add(Fault(hang=True, path=VERSION_PATH))
            with pytest.raises(ClusterUnreachable, match=r"no answer .* within 0\.2 s"):
                await anext(pieces)
            assert cluster.away_s >= hasty.attempt_s
