"""Warm pods and their promotion: the real launcher in namespaces of its own, and the node agent's
real side of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pilotlight.spec.record_json import to_json
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.pods.entry.processes import EntryProcesses
from snapshotter.pods.tenant_listeners import Tenants
from snapshotter.types import LaunchSpec, RevisionKey
from tests.fakes.bundle import pack
from tests.fakes.fake_shim import function_spec
from tests.fakes.launched_pod import ROOT
from tests.fakes.pods_agent import serving
from tests.fakes.warm_pod import TARGET, UID, WarmPod, warm_pod

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

KEY = "the key of nodes"
SIGNER = LaunchSigner(KEY.encode())
CODE = b"""
import os
def f(x=1): return [x + 1, os.environ.get("TOKEN"), sorted(os.listdir("/proc/1/root" + os.environ["SEEN"]))]
"""


class Node:
    """A node's directories, and its agent's side of pods."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warm = root / "node" / "warm"
        self.warm.mkdir(parents=True)
        self.bundle = pack(root / "home", {"app.py": CODE})
        self.target = TARGET

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[Tenants]:
        """Serving, in this process."""
        async with (
            contextlib.aclosing(EntryProcesses()) as processes,
            serving(self.root, self.target, SIGNER, processes=processes) as found,
        ):
            yield found

    @contextlib.contextmanager
    def agent_process(self, step: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """Serving in a process of its own, which kills itself at a step of a promotion."""
        command = [sys.executable, "-m", "tests.fakes.pods_agent", str(self.root)]
        command += [str(self.target), KEY, step]
        path = ":".join(map(str, (ROOT, ROOT / "functions")))
        environ = {**os.environ, "PYTHONPATH": path}
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
            process.kill()

    def launch(self, pod: str, **changes: object) -> LaunchSpec:
        """As the controller signs it when it claims the pod."""
        spec = LaunchSpec(
            revision=RevisionKey("f-1@v1"),
            trust_domain="t-1",
            uid=UID,
            bundle=self.bundle,
            image=None,
            entry=to_json(function_spec()),
            env={"SEEN": str(self.target)},
            memory_bytes=512 * 1024**2,
            cpu=1.0,
            startup_timeout_s=60.0,
            secret_variables=("TOKEN",),
            labels={"tenant": "t-1", "pod": pod},
        )
        return SIGNER.signed(replace(spec, **changes))  # type: ignore[arg-type]


@pytest.fixture
def node(short_tmp: Path) -> Node:
    return Node(short_tmp)


@pytest.fixture
def warm(node: Node) -> Iterator[WarmPod]:
    with warm_pod(node.warm) as made:
        if made is None:
            pytest.skip("no control groups can be made on this machine")
        yield made


async def begin(warm: WarmPod) -> None:
    warm.pod.begin()
    await asyncio.to_thread(warm.wait_warm)


async def said(warm: WarmPod, pattern: str) -> str:
    return await asyncio.to_thread(warm.pod.wait_said, pattern)


async def test_a_promoted_pod_sees_its_tenants_directory_and_serves(
    node: Node, warm: WarmPod
) -> None:
    (node.root / "node" / "t-2").mkdir()
    async with node.agent() as agent:
        await begin(warm)
        assert [path.name for path in warm.seen.iterdir()] == ["agent.sock"]
        launch = node.launch(warm.uid)

        status, _ = await asyncio.to_thread(warm.promote, launch, {"TOKEN": "s3cret"})
        ready = await said(warm, "launcher.(ready|timeout|refused|exit)")

        assert status == 202
        assert "start=COLD" in ready
        print(ready)
        assert await asyncio.to_thread(warm.call, x=41) == [
            42,
            "s3cret",
            ["agent.sock", "bundles"],
        ]
        (session,) = agent.sessions()
        assert (session.uid, session.is_ready) == (warm.uid, True)
        assert (await asyncio.to_thread(warm.promote, launch, {"TOKEN": ""}))[0] == 202
        other = node.launch(warm.uid, revision=RevisionKey("f-2@v1"))
        assert (await asyncio.to_thread(warm.promote, other, {"TOKEN": ""}))[0] == 409
        assert (await asyncio.to_thread(warm.request, "GET", "/pilotlight/health"))[1] == {
            "state": "serving"
        }
        os.kill(warm.first_pid, 15)
        assert await asyncio.to_thread(warm.pod.wait_exit) == 0


STEAL = b"""
import json, os, socket

def f(path, launch):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(path)
    announcement = {"op": "announce", "pod": "pod-1", "launch": launch}
    if launch is None:
        del announcement["launch"]
    connection.sendall(json.dumps(announcement).encode() + b"\\n")
    return json.loads(connection.makefile("rb").readline())
"""


async def test_code_in_a_promoted_pod_announces_no_other_document(
    node: Node, warm: WarmPod
) -> None:
    node.bundle = pack(node.root / "home", {"app.py": STEAL})
    other_pod = "00000000-0000-4000-8000-000000000000"
    async with node.agent():
        await begin(warm)
        launch = node.launch(warm.uid)
        await asyncio.to_thread(warm.promote, launch, {"TOKEN": ""})
        assert "start=COLD" in await said(warm, "launcher.(ready|timeout|refused|exit)")
        path = str(warm.target / "agent.sock")

        def answered(document: object) -> str:
            answer = warm.call(path=path, launch=document)
            return f"{answer['op']} {answer.get('message', '')}"

        for document, words in (
            (node.launch(warm.uid, revision=RevisionKey("f-2@v1")), "to another launch document"),
            (node.launch(other_pod), f"is of pod {other_pod}"),
            (node.launch(warm.uid, labels={"tenant": "t-1"}), "to another launch document"),
            (node.launch(warm.uid, labels={"tenant": "t-2", "pod": warm.uid}), "tenant 't-2'"),
            (replace(launch, bundle="c" * 64), "signature"),
            (None, "does not match"),
        ):
            found = await asyncio.to_thread(answered, document and document.to_json())
            assert found.startswith("refused"), found
            assert words in found
        # its own it may repeat
        again = await asyncio.to_thread(answered, launch.to_json())
        assert again.split()[0] in ("wait", "cold")


@pytest.mark.slow  # two containers one after the other
async def test_a_container_that_starts_again_never_gets_another_document(node: Node) -> None:
    uid = ""
    async with node.agent() as agent:
        for number in range(2):
            with warm_pod(node.warm, uid=uid or None) as warm:
                if warm is None:
                    pytest.skip("no control groups can be made on this machine")
                uid = warm.uid
                warm.pod.begin()
                if number:
                    refused = await said(warm, "launcher.(refused|exit|ready)")
                    assert "was promoted before" in refused
                    assert await asyncio.to_thread(warm.pod.wait_exit) == 69
                else:
                    await asyncio.to_thread(warm.wait_warm)
                    launch = node.launch(uid)
                    await asyncio.to_thread(warm.promote, launch, {"TOKEN": ""})
                    await said(warm, "launcher.ready")
                    os.kill(warm.first_pid, signal.SIGKILL)
                    await asyncio.to_thread(warm.pod.wait_exit)
        assert agent.sessions() == []


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"labels": {"tenant": "t-1"}}, "is not one for pod"),
        (
            {"labels": {"tenant": "t-1", "pod": "00000000-0000-4000-8000-000000000000"}},
            "not one for",
        ),
        ({"labels": {"tenant": "../t-1", "pod": ""}}, "names no tenant"),
        ({"labels": {"tenant": "warm", "pod": ""}}, "names no tenant"),
        ({"uid": 4711}, "set runAsUser"),
    ],
)
async def test_a_document_that_is_not_of_this_pod_promotes_nothing(
    node: Node, warm: WarmPod, changes: dict[str, object], words: str
) -> None:
    async with node.agent():
        await begin(warm)
        await asyncio.to_thread(warm.promote, node.launch(warm.uid, **changes), {"TOKEN": ""})
        refused = await said(warm, "launcher.(refused|exit|ready)")

    assert words in refused
    assert sorted(path.name for path in (node.root / "node").iterdir()) == ["warm"]
    assert list((node.root / "promoted").iterdir()) == []


@pytest.mark.slow  # two node agents one after the other, one of them in a process of its own
@pytest.mark.parametrize("step", ["announced", "marked", "mounted", "held"])
async def test_a_promotion_survives_kill_9_of_the_agent(
    node: Node, warm: WarmPod, step: str
) -> None:
    with node.agent_process(step) as dying:
        await begin(warm)
        assert (await asyncio.to_thread(warm.promote, node.launch(warm.uid), {"TOKEN": "x"}))[
            0
        ] == 202
        await asyncio.to_thread(dying.wait, 30)
        assert dying.returncode == -signal.SIGKILL
    async with node.agent() as agent:
        ready = await said(warm, "launcher.(ready|timeout|refused|exit)")
        assert "start=COLD" in ready
        assert (await asyncio.to_thread(warm.call, x=1))[:2] == [2, "x"]
        assert [session.uid for session in agent.sessions()] == [warm.uid]
    async with node.agent() as agent:  # and it is known to the next agent
        while not agent.sessions():
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(warm.call, x=1)
