"""An inference server in a slot: cold, checkpointed as a whole tree, restored; and every way in
which it fails. With the fake engine."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import (
    Clocks,
    FunctionKind,
    FunctionSpec,
    MethodSpec,
    Resources,
    WeightsSpec,
)
from pilotlight.spec.record_json import to_json
from snapshotter.agent.app import own_runtime
from snapshotter.client import AgentClient
from snapshotter.cuda.devices import Suspension
from snapshotter.cuda.gpu_mapping import DeviceRecord
from snapshotter.errors import BundleUnavailable, StartFailed
from snapshotter.types import InstanceInfo, LaunchSpec, SnapshotState, StartKind, WeightsMount
from tests.fakes.agent_home import MIB, AgentHome, instance_id
from tests.fakes.engine.environment import make_environment
from tests.fakes.engine.server import WRONG_AFTER_RESTORE
from tests.fakes.fake_nvml import H100, gpus

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.usefixtures("criu", "patient_restores"),
    pytest.mark.timeout(180),
]

PATIENCE_S = 60.0
MANIFEST = "0" * 64
KV_BYTES = 128 * MIB
"""More than all else in it."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("engines") / "vllm")


@pytest.fixture
def home(short_tmp: Path, environment: Path) -> AgentHome:
    home = AgentHome(short_tmp)
    home.runtime = dict(own_runtime())
    (home.paths.home / "engines").mkdir()
    (home.paths.home / "engines/vllm").symlink_to(environment)
    return home


GPU_MS = 400.0
"""How long `Diary` takes to put a tree back onto its GPU."""


class Diary:
    """Devices that write down when they are asked, and have a tree with one process on a GPU."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def before_dump(self, pids: Sequence[int], *, granted: Sequence[str] = ()) -> Suspension:
        """See Devices."""
        self.lines.append("before dump")
        return Suspension(record=DeviceRecord(processes=1))

    async def rollback(self, suspension: Suspension, reason: str) -> None:
        """See Devices."""
        self.lines.append("rollback")

    def check_restore(self, record: DeviceRecord, *, target: Sequence[str] = ()) -> None:
        """See Devices."""

    async def after_restore(
        self, pids: Sequence[int], record: DeviceRecord, *, target: Sequence[str] = ()
    ) -> Mapping[str, float]:
        """See Devices."""
        self.lines.append("after restore")
        await asyncio.sleep(GPU_MS / 1000)
        return {"cuda_restore": GPU_MS}


def function(
    home: AgentHome,
    *,
    memory_bytes: int = 512 * MIB,
    engine: str = "vllm",
    gpu: str | None = None,
    **env: str,
) -> LaunchSpec:
    """A function that is the fake engine."""
    spec = FunctionSpec(
        name="assistant",
        kind=FunctionKind.ENGINE,
        module="",
        qualname="",
        bundle=home.bundle,
        methods=(MethodSpec(),),
        weights=(WeightsSpec(name="m", manifest=MANIFEST),),
        engine=EngineSpec(model="m", max_model_len=512, max_num_seqs=4, kv_bytes=KV_BYTES),
        resources=Resources(
            cpu=1.0, memory_bytes=memory_bytes, gpu=(gpu,) if gpu else (), gpu_count=1 if gpu else 0
        ),
        clocks=Clocks(startup_s=PATIENCE_S),
        env=env,
    )
    return home.launch(
        "f-llm@v1-abc",
        entry=to_json(spec),
        memory_bytes=memory_bytes,
        engine=engine,
        offline=True,
        startup_timeout_s=PATIENCE_S,
        weights=(WeightsMount(name="m", manifest=MANIFEST),),
        env=env,
        gpu=(gpu,) if gpu else (),
        gpu_count=1 if gpu else 0,
    )


async def start(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    """One instance."""
    return await client.start(launch, instance_id=instance_id(), lessee="me", secret_env={})


class Connection(http.client.HTTPConnection):
    """To an instance."""

    def __init__(self, path: str) -> None:
        super().__init__("instance", timeout=PATIENCE_S)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(path)


def ask(path: str, prompt: str, **more: Any) -> Any:
    """The answer to a prompt; raises HTTPException or OSError when the connection ends before
    it."""
    connection = Connection(path)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({"model": "assistant", "prompt": prompt, "max_tokens": 8, **more}),
        )
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def text(path: str, prompt: str) -> str:
    """What it says."""
    return str(ask(path, prompt)["choices"][0]["text"])


def read(path: str, resource: str) -> Any:
    """The JSON of one of its resources."""
    connection = Connection(path)
    try:
        connection.request("GET", resource)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def metric(path: str, name: str) -> float:
    """One of its own figures."""
    connection = Connection(path)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return next(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{")
    )


async def wait_for(question: Callable[[], bool]) -> None:
    """Until the answer is yes, which only asking tells."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(question):
            await asyncio.sleep(0.02)


async def wait_gone(client: AgentClient, instance: InstanceInfo) -> str:
    """Why it ended, as its event says."""
    async with asyncio.timeout(PATIENCE_S):
        async for event in client.watch():
            if event.kind == "instance_gone" and event.subject == instance.id:
                return event.reason
    raise AssertionError("the events ended")


async def test_restored_engines_say_what_was_said_before_and_live_side_by_side(
    client: AgentClient, home: AgentHome
) -> None:
    launch = function(home)
    cold = await start(client, launch)
    said = await asyncio.to_thread(text, cold.socket, "how are you")
    snapshot = await client.checkpoint(launch)
    clones = [await start(client, launch), await start(client, launch)]

    assert (cold.start_kind, *(clone.start_kind for clone in clones)) == (
        StartKind.COLD,
        StartKind.RESTORE,
        StartKind.RESTORE,
    )
    assert snapshot.state is SnapshotState.READY
    assert snapshot.in_place
    assert snapshot.image_bytes < KV_BYTES  # a cache that holds nothing is not carried
    assert all("prove" in clone.phases_ms for clone in clones)
    assert [await asyncio.to_thread(text, clone.socket, "how are you") for clone in clones] == [
        said,
        said,
    ]


async def test_one_that_answers_wrongly_is_set_aside_and_its_caller_is_served_cold(
    client: AgentClient, home: AgentHome
) -> None:
    launch = function(home)
    snapshot = await client.checkpoint(launch)
    (home.paths.home.parent / "weights" / WRONG_AFTER_RESTORE).touch()

    served = await start(client, launch)

    assert served.start_kind is StartKind.COLD
    assert await asyncio.to_thread(text, served.socket, "how are you")
    (there,) = [s for s in await client.snapshots() if s.id == snapshot.id]
    assert there.state is SnapshotState.QUARANTINED
    assert "answers the known prompt" in there.reason


async def test_one_that_does_not_stand_its_proof_is_never_used(
    client: AgentClient, home: AgentHome
) -> None:
    (home.paths.home.parent / "weights" / WRONG_AFTER_RESTORE).touch()
    launch = function(home)
    await start(client, launch)
    await wait_for_quarantine(client)

    assert (await start(client, launch)).start_kind is StartKind.COLD


async def wait_for_quarantine(client: AgentClient) -> None:
    """Until a snapshot is set aside."""
    async with asyncio.timeout(PATIENCE_S):
        while SnapshotState.QUARANTINED not in [s.state for s in await client.snapshots()]:
            await asyncio.sleep(0.05)


async def test_an_engine_that_crashes_in_the_middle_of_a_stream_ends_its_instance_and_says_so(
    client: AgentClient, home: AgentHome
) -> None:
    instance = await start(client, function(home))
    gone = asyncio.create_task(wait_gone(client, instance))
    await asyncio.sleep(0)
    await client.templates()  # frames of one connection are served in order: we are subscribed

    with pytest.raises((http.client.HTTPException, OSError)):
        await asyncio.to_thread(ask, instance.socket, "!crash", stream=False)

    assert await gone == "server_died"
    assert "the engine died" in (home.paths.home / "node/logs" / f"{instance.id}.log").read_text()


async def test_an_engine_that_takes_too_much_memory_is_told_from_one_that_crashed(
    client: AgentClient, home: AgentHome
) -> None:
    instance = await start(client, function(home, memory_bytes=256 * MIB))
    gone = asyncio.create_task(wait_gone(client, instance))
    await asyncio.sleep(0)
    await client.templates()  # frames of one connection are served in order: we are subscribed

    with pytest.raises((http.client.HTTPException, OSError)):
        await asyncio.to_thread(ask, instance.socket, "!oom")

    assert await gone == "out_of_memory"


async def test_a_caller_that_leaves_frees_its_place_in_the_engine(
    client: AgentClient, home: AgentHome
) -> None:
    instance = await start(client, function(home))
    connection = Connection(instance.socket)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps({"model": "assistant", "prompt": "!stall", "max_tokens": 9, "stream": True}),
    )
    assert connection.getresponse().readline().startswith(b"data: ")
    assert metric(instance.socket, "num_requests_running") == 1

    connection.close()

    await wait_for(lambda: metric(instance.socket, "num_requests_running") == 0)


async def test_what_is_in_flight_is_finished_before_an_instance_stops(
    client: AgentClient, home: AgentHome
) -> None:
    instance = await start(client, function(home, FAKE_ENGINE_TOKEN_S="0.1"))
    idle = Connection(instance.socket)
    busy = Connection(instance.socket)
    busy.request(
        "POST",
        "/v1/completions",
        json.dumps({"model": "assistant", "prompt": "slowly", "max_tokens": 8, "stream": True}),
    )
    answer = await asyncio.to_thread(busy.getresponse)
    # the first of eight: it is in flight
    assert (await asyncio.to_thread(answer.readline)).startswith(b"data: ")

    await client.stop(instance.id, grace_s=PATIENCE_S)

    rest = [
        json.loads(line[6:])
        for line in (await asyncio.to_thread(answer.read)).splitlines()
        if line.startswith(b"data: {")
    ]
    assert "length" in [
        choice.get("finish_reason") for chunk in rest for choice in chunk["choices"]
    ]
    idle.close()
    busy.close()


async def test_an_engine_that_hangs_is_ended_when_its_grace_is_over(
    client: AgentClient, home: AgentHome
) -> None:
    instance = await start(client, function(home))
    hanging = asyncio.create_task(asyncio.to_thread(ask, instance.socket, "!hang"))
    await wait_for(lambda: metric(instance.socket, "num_requests_running") == 1)

    await client.stop(instance.id, grace_s=0.5)

    with pytest.raises((http.client.HTTPException, OSError)):
        await hanging
    assert not await client.instances()


async def test_an_engine_that_cannot_load_its_model_fails_with_its_own_words(
    client: AgentClient, home: AgentHome
) -> None:
    launch = function(home)
    broken = {**launch.entry, "engine": {**launch.entry["engine"], "args": {"port": 1}}}
    with pytest.raises(StartFailed, match="is set by the platform"):
        await start(
            client, home.launch(**{**launch.to_json(), "entry": broken, "weights": launch.weights})
        )


async def test_a_node_without_the_environment_says_how_to_make_it(
    client: AgentClient, home: AgentHome
) -> None:
    with pytest.raises(
        BundleUnavailable, match=r"no engine environment 'other'.*available: vllm.*install-vllm-cpu"
    ):
        await start(client, function(home, engine="other"))


async def test_an_engine_that_needs_more_memory_than_there_is_to_start_is_told_so(
    client: AgentClient, home: AgentHome
) -> None:
    with pytest.raises(
        StartFailed, match=r"needed more than its 256 MiB and was killed: raise memory=.*SIGKILL"
    ) as e:
        await start(client, function(home, memory_bytes=256 * MIB, FAKE_ENGINE_START_MIB="500"))
    assert e.value.detail["exit_reason"] == "out_of_memory"


async def test_on_a_gpu_an_engine_sleeps_before_the_checkpoint_and_wakes_after_it_weights_first(
    home: AgentHome,
) -> None:
    diary = Diary()
    async with (
        home.agent(snapshots=True, devices=diary, gpus=gpus(H100)),
        home.client() as client,
    ):
        launch = function(home, gpu="H100")
        made = await client.checkpoint(launch)
        proofs = diary.lines.count("after restore")
        began = time.monotonic()
        restored = await start(client, launch)
        took_ms = 1000 * (time.monotonic() - began)

        assert made.restore_ms >= GPU_MS  # what a later start is expected to take
        assert (
            GPU_MS
            <= sum(ms for phase, ms in restored.phases_ms.items() if phase != "prefetch")
            <= took_ms
        )
        assert diary.lines == ["before dump"] + ["after restore"] * (proofs + 1)
        assert restored.start_kind is StartKind.RESTORE
        assert await asyncio.to_thread(read, restored.socket, "/sleeps") == [
            "sleep 2",
            "wake weights",
            "reload_weights",
            "wake kv_cache",
        ]
        assert await asyncio.to_thread(text, restored.socket, "awake")
