"""A node agent that restores into waiting pods: real CRIU, real snapshots, the real launcher in
namespaces that stand in for a pod's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pilotlight.protocol import POD_CONTROL_PORT, POD_FORK, POD_PROMOTE
from pilotlight.spec.record_json import to_json
from snapshotter.agent.agent import Agent
from snapshotter.agent.app import own_runtime
from snapshotter.errors import Unsupported
from snapshotter.images.code_bundles import Bundles
from snapshotter.images.oci.container_images import ContainerImages
from snapshotter.pods import tenant_listeners
from snapshotter.pods.entry.processes import EntryProcesses
from snapshotter.pods.pod_process import require_own_namespaces
from snapshotter.pods.restoring import PodRestores
from snapshotter.pods.tenant_listeners import Tenants
from snapshotter.types import CONTAINER_IMAGE_LABEL, LaunchSpec
from tests.fakes.agent_home import AgentHome
from tests.fakes.bundle import pack
from tests.fakes.fake_shim import function_spec
from tests.fakes.gpu_memory import FakeGpuMemory
from tests.fakes.image_registry import ImageRegistry
from tests.fakes.launched_pod import IN_SIGHT, Pod, pod
from tests.fakes.pod_weights import FakePodWeights
from tests.fakes.pushed_image import images_of_node

pytestmark = [
    pytest.mark.root,
    pytest.mark.usefixtures("criu", "patient_restores"),
    pytest.mark.timeout(120),
]

PATIENCE_S = 30.0
UID = 20001
AS_A_POD = f"""
ip link set lo up
{IN_SIGHT}
mount -t tmpfs none /usr/local/sbin
exec setpriv --reuid=20001 --regid=20001 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""
"""A tenant's uid, no CRIU, and an interpreter that is in sight."""
NAMESPACES = [
    "--mount",
    "--uts",
    "--ipc",
    "--net",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]


@contextlib.asynccontextmanager
async def serving(
    home: AgentHome, agent: Agent, container_images: ContainerImages | None = None
) -> AsyncIterator[Tenants]:
    """The agent's side of pods, which restores."""
    processes = EntryProcesses()
    restores = PodRestores(
        agent.snapshots,
        processes=processes,
        runtime=home.runtime,
        directory=home.paths.home / "node" / "pods",
        container_images=container_images,
    )
    root = home.paths.home.parent / "tenants"
    (root / "t-1").mkdir(parents=True, exist_ok=True)
    weights = FakePodWeights(home.paths.home / "models")
    async with (
        contextlib.aclosing(processes),
        tenant_listeners.open_tenants(
            root,
            bundles=Bundles(home.paths.home),
            weights=weights,
            memory=FakeGpuMemory(),
            restores=restores,
        ) as found,
    ):
        yield found


@pytest.fixture
def stand_in(home: AgentHome) -> Iterator[Pod]:
    wrapper = ["unshare", *NAMESPACES, "sh", "-ec", AS_A_POD, "sh"]
    with pod(
        {}, function_spec(), wrapper=wrapper, node=home.paths.home.parent / "tenants" / "t-1"
    ) as made:
        made.root.chmod(0o755)
        os.chown(made.work, UID, UID)
        yield made


def announce(stand_in: Pod, launch: LaunchSpec) -> None:
    """Have the pod run that."""
    file = stand_in.root / "launch.json"
    file.write_text(json.dumps(launch.to_json()))
    file.chmod(0o644)
    stand_in.begin()


def first_pid(stand_in: Pod) -> int:
    wrapper = stand_in.process.pid
    return int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()[0])


def ask(stand_in: Pod, path: str, body: bytes | None = None, port: int | None = None) -> str:
    """What the worker answers on the pod's own loopback address."""
    base = stand_in.base_url if port is None else f"http://127.0.0.1:{port}"
    request = (
        f"urllib.request.Request({base + path!r}, {body!r}, {{'content-type': 'application/json'}})"
    )
    code = (
        f"import urllib.request; print(urllib.request.urlopen({request}, "
        f"timeout=20).read().decode())"
    )
    command = ["nsenter", "--net", "--target", str(first_pid(stand_in)), sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow  # makes an image, dumps and restores
@pytest.mark.timeout(600)  # compiles an interpreter's library, once
async def test_a_pod_of_a_functions_own_image_receives_its_worker_in_that_root(
    home: AgentHome, stand_in: Pod, image_registry: ImageRegistry, pushed: str
) -> None:
    images = images_of_node(home.paths.home, image_registry)
    await images.ensure(pushed, tenant="t-1")
    launch = home.launch(
        boot=["remember:warm"],
        labels={"tenant": "t-1", CONTAINER_IMAGE_LABEL: pushed},
        uid=UID,
        image="e" * 64,
    )
    async with (
        home.agent(snapshots=True, container_images=images) as agent,
        serving(home, agent, images),
    ):
        await agent.snapshots.checkpoint(launch)
        announce(stand_in, launch)
        ready = await asyncio.to_thread(
            stand_in.wait_said, "launcher.(ready|timeout|refused|boot )"
        )

        assert "start=RESTORE" in ready
        assert json.loads(await asyncio.to_thread(ask, stand_in, "/memory")) == ["warm"]
        worker = worker_of(stand_in)
        assert not Path(f"/proc/{worker}/root/home").exists()
        assert Path(f"/proc/{worker}/root/opt/pilotlight/files/only_here.py").exists()


def worker_of(stand_in: Pod) -> int:
    """Our pid of the worker: a child of the pod's first process."""
    first = first_pid(stand_in)
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    return int(children[-1])


async def test_a_pod_receives_the_worker_of_a_proven_snapshot(
    home: AgentHome, stand_in: Pod
) -> None:
    launch = home.launch(boot=["remember:warm"], labels={"tenant": "t-1"}, uid=UID)
    async with home.agent(snapshots=True) as agent, serving(home, agent) as pods:
        await agent.snapshots.checkpoint(launch)
        announce(stand_in, launch)
        ready = await asyncio.to_thread(
            stand_in.wait_said, "launcher.(ready|timeout|refused|boot )"
        )

        assert "start=RESTORE" in ready
        assert json.loads(await asyncio.to_thread(ask, stand_in, "/memory")) == ["warm"]
        assert json.loads(await asyncio.to_thread(ask, stand_in, "/restored")) is True
        assert [line.is_ready for line in pods.sessions()] == [True]
        (info,) = agent.snapshots.infos({})
        assert info.restores == 1
        os.kill(first_pid(stand_in), 15)
        assert await asyncio.to_thread(stand_in.wait_exit) == 0
        assert list((home.paths.home / "node" / "pods").glob("p-*")) == []


async def test_a_worker_with_threads_comes_back_whole(home: AgentHome, stand_in: Pod) -> None:
    launch = home.launch(boot=["thread", "remember:warm"], labels={"tenant": "t-1"}, uid=UID)
    async with home.agent(snapshots=True) as agent, serving(home, agent):
        await agent.snapshots.checkpoint(launch)
        announce(stand_in, launch)
        ready = await asyncio.to_thread(
            stand_in.wait_said, "launcher.(ready|timeout|refused|boot )"
        )

        assert "start=RESTORE" in ready
        assert json.loads(await asyncio.to_thread(ask, stand_in, "/threads")) != []


async def test_a_real_function_answers_as_an_instance_that_was_restored(
    home: AgentHome, stand_in: Pod
) -> None:
    home.runtime = dict(own_runtime())
    bundle = pack(
        home.paths.home,
        {
            "app.py": b"import os\nBORN = os.getpid()\ndef f(x=1): return [x + 1, BORN, "
            b"os.environ['TOKEN']]\n"
        },
    )
    launch = home.launch(
        labels={"tenant": "t-1"},
        uid=UID,
        bundle=bundle,
        entry=to_json(function_spec()),
        secret_variables=("TOKEN",),
        startup_timeout_s=60.0,
    )
    stand_in.variables["TOKEN"] = "s3cret"
    async with home.agent(snapshots=True) as agent, serving(home, agent):
        await agent.snapshots.checkpoint(launch)
        announce(stand_in, launch)
        ready = await asyncio.to_thread(
            stand_in.wait_said, "launcher.(ready|timeout|refused|boot )"
        )
        assert "start=RESTORE" in ready
        status = json.loads(await asyncio.to_thread(ask, stand_in, "/pilotlight/health"))
        answer = json.loads(await asyncio.to_thread(ask, stand_in, "/invoke/", b"{}"))

    assert (status["instance"], status["start_kind"]) == ("pod-1", "RESTORE")
    phases = [
        name for name in status["phases_ms"] if name != "queue"
    ]  # a busy machine's restores wait
    assert phases == ["agent", "code", "pod", "restore", "serve", "wake"]
    assert answer[0] == 2
    assert answer[2] == "s3cret"


@pytest.mark.parametrize("is_template", [False, True], ids=["in place", "as template"])
async def test_a_restored_worker_answers_itself_or_is_the_template_of_others(
    home: AgentHome, stand_in: Pod, is_template: bool
) -> None:
    home.runtime = dict(own_runtime())
    code = b"import os\nBORN = os.getpid()\ndef f(x=1): return [os.getpid(), BORN]\n"
    launch = home.launch(
        labels={"tenant": "t-1"},
        uid=UID,
        bundle=pack(home.paths.home, {"app.py": code}),
        entry=to_json(function_spec()),
        startup_timeout_s=60.0,
    )
    stand_in.variables["PILOTLIGHT_LISTEN"] = "127.0.0.1:8080"
    async with contextlib.AsyncExitStack() as stack:
        agent = await stack.enter_async_context(home.agent(snapshots=True))
        await agent.snapshots.checkpoint(launch)
        if is_template:
            stand_in.variables["PILOTLIGHT_CONTROL"] = f"127.0.0.1:{POD_CONTROL_PORT}"
            stand_in.variables["PILOTLIGHT_WARM"] = "1"
            del stand_in.variables["PILOTLIGHT_LAUNCH"]
            stand_in.begin()
            await asyncio.to_thread(stand_in.wait_said, "launcher.wait")
            body = json.dumps({"launch": launch.to_json(), "secrets": {}}).encode()
            await asyncio.to_thread(ask, stand_in, POD_PROMOTE, body, POD_CONTROL_PORT)
        else:
            announce(stand_in, launch)
        await stack.enter_async_context(serving(home, agent))
        ready = await asyncio.to_thread(
            stand_in.wait_said, "launcher.(ready|timeout|refused|boot )"
        )
        print(ready)
        answered = [json.loads(await asyncio.to_thread(ask, stand_in, "/invoke/", b"{}"))]
        if is_template:
            order = json.dumps({"instance": "i-2", "secrets": {}}).encode()
            told = await asyncio.to_thread(ask, stand_in, POD_FORK, order, POD_CONTROL_PORT)
            assert json.loads(told) == {"port": 8081}
            answer = await asyncio.to_thread(ask, stand_in, "/invoke/", b"{}", 8081)
            answered.append(json.loads(answer))
            print(await asyncio.to_thread(stand_in.wait_said, "launcher.ready start=FORK"))

    assert "start=RESTORE" in ready
    restored = re.search(r"launcher.restored .*pid=(\d+)", stand_in.said)
    assert restored is not None
    assert {born for _, born in answered} == {answered[0][1]}
    assert len({pid for pid, _ in answered}) == len(answered)
    assert (answered[0][0] == int(restored.group(1))) is not is_template


async def test_without_a_snapshot_and_with_one_that_is_of_no_use_here_the_pod_boots(
    home: AgentHome, stand_in: Pod
) -> None:
    launch = home.launch(labels={"tenant": "t-1"}, uid=UID)
    async with home.agent(snapshots=True) as agent, serving(home, agent):
        announce(stand_in, launch)
        said = await asyncio.to_thread(stand_in.wait_said, "launcher.(restored|boot )")

    assert said.startswith("launcher.boot")


async def test_a_process_that_has_no_namespaces_of_its_own_is_never_entered() -> None:
    """It would be the node whose /run is mounted over."""
    with pod({}, function_spec()) as made:
        made.begin()
        pidfd = os.pidfd_open(made.process.pid)
        with pytest.raises(Unsupported, match="shares namespaces with its node"):
            require_own_namespaces(pidfd)
        os.close(pidfd)


async def test_a_pod_on_the_nodes_own_network_boots_cold(home: AgentHome, stand_in: Pod) -> None:
    launch = home.launch(labels={"tenant": "t-1"}, uid=UID)
    stand_in.wrapper.remove("--net")
    async with home.agent(snapshots=True) as agent, serving(home, agent):
        await agent.snapshots.checkpoint(launch)
        announce(stand_in, launch)
        said = await asyncio.to_thread(stand_in.wait_said, "launcher.(restored|boot )")

    assert said.startswith("launcher.boot")
