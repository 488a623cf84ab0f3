"""What tenants' pods find on a node, and what is left when they are gone. Pods are played over the
real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pilotlight.core.background_tasks import BackgroundTasks
from snapshotter.agent.launch_signature import LaunchSigner
from snapshotter.images.code_bundles import Bundles
from snapshotter.pods import hardlinks, tenant_listeners
from snapshotter.pods.tenant_listeners import Tenants
from snapshotter.pods.tenant_mounts import TenantMounts
from snapshotter.types import LaunchSpec, RevisionKey, WeightsMount
from tests.fakes.bundle import pack
from tests.fakes.gpu_memory import FakeGpuMemory, gpu
from tests.fakes.pod_weights import GIB, FakePodWeights
from weight_cache.errors import ManifestInvalid, WeightCacheUnavailable

PATIENCE_S = 20.0
MODEL, OTHER = "a" * 64, "b" * 64


@dataclass(eq=False)
class Pod:
    """A pod's line."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def hear(self) -> dict[str, Any]:
        """The next message; {} at the end."""
        async with asyncio.timeout(PATIENCE_S):
            line = await self.reader.readline()
        message: dict[str, Any] = json.loads(line) if line else {}
        return message

    async def hear_last(self) -> dict[str, Any]:
        """The first that is no `wait`."""
        while (message := await self.hear()).get("op") == "wait":
            continue
        return message

    def say(self, **message: Any) -> None:
        """One message."""
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def leave(self) -> None:
        """As an evicted pod does."""
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@dataclass(eq=False)
class Node:
    """A node's directories."""

    root: Path
    weights: FakePodWeights
    memory: FakeGpuMemory
    bundle: str = ""
    pods: list[Pod] = field(default_factory=list)

    @property
    def tenant(self) -> Path:
        return self.root / "node" / "t-1"

    @contextlib.asynccontextmanager
    async def agent(self, grants: LaunchSigner | None = None) -> AsyncIterator[Tenants]:
        """Serving."""
        bundles = Bundles(self.root / "home")
        root = self.root / "node"
        async with tenant_listeners.open_tenants(
            root, bundles=bundles, weights=self.weights, memory=self.memory, grants=grants
        ) as found:
            yield found

    def launch(self, **changes: Any) -> LaunchSpec:
        spec = LaunchSpec(
            revision=RevisionKey("f-1@v1"),
            trust_domain="t-1",
            uid=os.geteuid(),
            bundle=self.bundle,
            image=None,
            entry={},
            memory_bytes=1,
            cpu=1.0,
            startup_timeout_s=60.0,
            labels={"tenant": "t-1"},
        )
        return replace(spec, **changes)

    async def connect(self, tenant: str = "t-1") -> Pod:
        """A line without a word on it."""
        pod = Pod(*await asyncio.open_unix_connection(self.root / "node" / tenant / "agent.sock"))
        self.pods.append(pod)
        return pod

    async def announce(self, launch: LaunchSpec, *, tenant: str = "t-1", **more: Any) -> Pod:
        """A pod that has announced itself."""
        pod = await self.connect(tenant)
        pod.say(op="announce", pod="pod-1", namespace="fn-acme", launch=launch.to_json(), **more)
        return pod

    def shown(self) -> list[str]:
        """What the tenant's pods see, but for the socket."""
        return sorted(
            str(path.relative_to(self.tenant))
            for kind in ("bundles", "weights")
            for path in (self.tenant / kind).glob("*")
        )

    async def wait_released(self, *, but: Sequence[str] = ()) -> None:
        """Until weights are held for pods that use these models alone."""
        async with asyncio.timeout(PATIENCE_S):
            while [lease.manifest for lease in self.weights.held.values()] != list(but):
                await asyncio.sleep(0.01)

    async def wait_shown(self, *wanted: str) -> None:
        """Until that is all that is there."""
        async with asyncio.timeout(PATIENCE_S):
            while self.shown() != sorted(wanted):
                await asyncio.sleep(0.01)


@pytest.fixture
async def node(short_tmp: Path) -> AsyncIterator[Node]:
    (short_tmp / "weights").mkdir()
    made = Node(short_tmp, FakePodWeights(short_tmp / "weights"), FakeGpuMemory())
    made.bundle = pack(short_tmp / "home", {"app.py": b"x = 1\n", "pkg/data.txt": b"data"})
    made.tenant.mkdir(parents=True)
    yield made
    for pod in made.pods:
        await pod.leave()


def with_model(node: Node, *manifests: str, **changes: Any) -> LaunchSpec:
    mounts = tuple(
        WeightsMount(name=f"m{i}", manifest=manifest) for i, manifest in enumerate(manifests)
    )
    return node.launch(weights=mounts, **changes)


async def test_a_pod_finds_its_code_and_its_weights_in_its_tenants_directory(node: Node) -> None:
    async with node.agent():
        pod = await node.announce(with_model(node, MODEL))
        answer = await pod.hear_last()

        assert answer["op"] == "cold"
        assert (answer["code"], answer["weights"]) == (
            f"bundles/{node.bundle}",
            {"m0": f"weights/{MODEL}"},
        )
        assert list(answer["phases_ms"]) == ["code", "weights"]
        code, model = node.tenant / answer["code"], node.tenant / answer["weights"]["m0"]
        assert (code / "pkg/data.txt").read_bytes() == b"data"
        assert (model / "sub/config.json").samefile(node.weights.model(MODEL) / "sub/config.json")
        assert [
            path.stat().st_mode & 0o777
            for path in (code, model, model / "sub", model / "sub/config.json")
        ] == [0o555] * 3 + [0o444]
        assert (node.tenant / "weights").stat().st_mode & 0o777 == 0o755


async def test_what_a_pod_held_is_gone_when_it_is_evicted(node: Node) -> None:
    async with node.agent() as agent:
        pod = await node.announce(with_model(node, MODEL))
        await pod.hear_last()
        (lease,) = node.weights.held.values()
        assert lease.holder == "pods/t-1"

        await pod.leave()

        await node.wait_shown()
        await node.wait_released()
        assert agent.sessions() == []
        assert (node.weights.model(MODEL) / "model.safetensors").exists()


async def test_pods_of_one_tenant_share_and_the_last_one_takes_it_away(node: Node) -> None:
    async with node.agent():
        first = await node.announce(with_model(node, MODEL))
        second = await node.announce(with_model(node, MODEL, OTHER))
        for pod in (first, second):
            assert (await pod.hear_last())["op"] == "cold"
        await second.leave()
        await node.wait_shown(f"bundles/{node.bundle}", f"weights/{MODEL}")
        await node.wait_released(but=(MODEL,))
        third = await node.announce(with_model(node, MODEL))
        await first.leave()
        assert (await third.hear_last())["op"] == "cold"
        await node.wait_shown(f"bundles/{node.bundle}", f"weights/{MODEL}")


async def test_tenants_see_nothing_of_each_other(node: Node) -> None:
    (node.root / "node" / "t-2").mkdir()
    async with node.agent():
        pod = await node.announce(with_model(node, MODEL))
        await pod.hear_last()
        refused = await (await node.announce(with_model(node, MODEL), tenant="t-2")).hear()

        assert (refused["op"], refused["code"]) == ("refused", "not_admitted")
        assert "tenant 't-1'" in refused["message"]
        assert [path.name for path in (node.root / "node" / "t-2").iterdir()] == ["agent.sock"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"uid": 4711}, "set runAsUser"),
        ({"bundle": "../../../etc"}, "64 hex digits"),
        ({"weights": (WeightsMount(name="m", manifest="../t-2/weights"),)}, "64 hex digits"),
        (
            {"weights": tuple(WeightsMount(name=f"m{i}", manifest=MODEL) for i in range(17))},
            "the limit is 16",
        ),
        ({"labels": {}}, "tenant None"),
    ],
)
async def test_what_does_not_agree_with_the_directory_and_the_kernel_is_refused(
    node: Node, changes: Mapping[str, Any], words: str
) -> None:
    async with node.agent():
        refused = await (await node.announce(node.launch(**changes))).hear()

        assert (refused["op"], refused["code"]) == ("refused", "not_admitted")
        assert words in refused["message"]
        assert node.shown() == []


@pytest.mark.parametrize(
    "line",
    [b"nonsense\n", b"[]\n", b'{"op": "ready"}\n', b'{"op": "announce"}\n', b"\n", b"x" * 2**21],
)
async def test_nonsense_ends_the_line_and_nothing_else(node: Node, line: bytes) -> None:
    async with node.agent():
        pod = await node.connect()
        pod.writer.write(line)
        with contextlib.suppress(ConnectionError):
            assert (await pod.hear()).get("op") in (None, "refused")
            assert await pod.hear() == {}

        assert (await (await node.announce(node.launch())).hear_last())["op"] == "cold"


async def test_the_way_of_weights_is_told_while_a_pod_waits(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotter.pods.pod_session.SAY_S", 0.0)
    node.weights.arriving[MODEL] = asyncio.Event()
    async with node.agent():
        pod = await node.announce(with_model(node, MODEL))
        await node.weights.waiting.wait()
        node.weights.tell(3 * GIB, 14 * GIB)
        said = {(await pod.hear())["why"] for _ in range(3)}
        node.weights.arrive(MODEL)

        assert said == {
            "unpacking the code",
            f"fetching weights {MODEL[:12]}",
            f"fetching weights {MODEL[:12]}: 3.0 GiB of 14.0 GiB",
        }
        assert (await pod.hear_last())["op"] == "cold"


async def test_a_pod_that_dies_while_it_waits_is_waited_for_by_nobody(node: Node) -> None:
    node.weights.arriving[MODEL] = asyncio.Event()
    async with node.agent():
        pod, other = (
            await node.announce(with_model(node, MODEL)),
            await node.announce(with_model(node, MODEL)),
        )
        await node.weights.waiting.wait()
        await pod.leave()
        node.weights.arrive(MODEL)

        assert (await other.hear_last())["op"] == "cold"
        await other.leave()
        await node.wait_shown()
        await node.wait_released()


async def test_a_bundle_that_is_nowhere_is_refused_by_name(node: Node) -> None:
    async with node.agent():
        refused = await (await node.announce(node.launch(bundle="c" * 64))).hear_last()

        assert (refused["op"], refused["code"]) == ("refused", "bundle_unavailable")
        assert "deploy again" in refused["message"]


async def test_weights_that_are_wrong_are_refused_and_a_cache_that_restarts_is_asked_again(
    node: Node,
) -> None:
    node.weights.arriving[MODEL] = asyncio.Event()
    node.weights.failures = [
        WeightCacheUnavailable("nobody answers"),
        ManifestInvalid("the manifest is none"),
    ]
    async with node.agent():
        refused = await (await node.announce(with_model(node, MODEL))).hear_last()

        assert (refused["op"], refused["message"]) == ("refused", "the manifest is none")


async def test_directories_that_appear_later_get_a_socket(node: Node) -> None:
    async with node.agent():
        (node.root / "node" / "t-9").mkdir()
        path = node.root / "node" / "t-9" / "agent.sock"
        async with asyncio.timeout(PATIENCE_S):
            while not path.exists():
                await asyncio.sleep(0.01)

        launch = node.launch(labels={"tenant": "t-9"})
        assert (await (await node.announce(launch, tenant="t-9")).hear_last())["op"] == "cold"


async def test_a_directory_that_was_made_anew_is_another_one(node: Node) -> None:
    async with node.agent() as agent:
        pod = await node.announce(node.launch())
        await pod.hear_last()
        node.tenant.rename(node.root / "moved")
        await agent.refresh()
        node.tenant.mkdir()
        await agent.refresh()

        assert await pod.hear() == {}
        assert (await (await node.announce(node.launch())).hear_last())["op"] == "cold"


async def test_pods_keep_what_they_hold_over_a_restart_and_what_nobody_comes_for_goes(
    node: Node,
) -> None:
    async with node.agent():
        staying = await node.announce(with_model(node, MODEL))
        leaving = await node.announce(with_model(node, OTHER))
        for pod in (staying, leaving):
            await pod.hear_last()
    assert node.shown() == sorted(
        [f"bundles/{node.bundle}", f"weights/{MODEL}", f"weights/{OTHER}"]
    )
    assert len(node.weights.held) == 2
    (node.tenant / "weights" / ".tmp-half").mkdir()

    async with node.agent() as agent:
        back = await node.announce(with_model(node, MODEL), running=True)
        assert (await back.hear_last())["op"] == "cold"
        swept = await agent.sweep()

        assert swept == 1  # OTHER, and its lease with it
        assert node.shown() == sorted([f"bundles/{node.bundle}", f"weights/{MODEL}"])
        assert [lease.manifest for lease in node.weights.held.values()] == [MODEL]
        assert not (node.tenant / "weights" / ".tmp-half").exists()


async def test_leases_of_others_are_not_swept(node: Node) -> None:
    await node.weights.open(MODEL, holder="s-0123456789abcdef")
    async with node.agent() as agent:
        await agent.sweep()

        assert len(node.weights.held) == 1


async def test_one_tenant_holds_only_so_much(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshotter.pods.tenant_mounts.MAX_HELD", 2)
    async with node.agent():
        kept = await node.announce(with_model(node, MODEL, OTHER))
        await kept.hear_last()
        refused = await (await node.announce(with_model(node, "c" * 64))).hear_last()

        assert (refused["op"], refused["code"]) == ("refused", "no_capacity")


async def test_a_pod_with_gpus_waits_until_their_memory_is_free_and_hears_who_holds_it(
    node: Node,
) -> None:
    node.memory.gpus = (gpu(0, used_gib=61.0, holders=["vllm (pid 4711): 61.0 GiB"]), gpu(1))
    async with node.agent():
        pod = await node.announce(node.launch(gpu=("H100",), gpu_count=1), gpus=["GPU-0000"])
        while (said := await pod.hear())["op"] == "wait" and "GPU" not in said["why"]:
            continue
        node.memory.gpus = (gpu(0, used_gib=0.5), gpu(1))
        answer = await pod.hear_last()

    assert "61.0 GiB of 80.0 GiB in use by vllm (pid 4711)" in said["why"]
    assert answer["op"] == "cold"
    assert list(answer["phases_ms"]) == ["code", "gpu"]


async def test_a_pod_that_runs_already_does_not_wait_for_its_own_memory(node: Node) -> None:
    node.memory.gpus = (gpu(0, used_gib=61.0, holders=["vllm (pid 4711): 61.0 GiB"]),)
    async with node.agent():
        pod = await node.announce(
            node.launch(gpu=("H100",), gpu_count=1), gpus=["GPU-0000"], running=True
        )

        assert (await pod.hear_last())["op"] == "cold"
        assert node.memory.reads == 0


async def test_when_half_of_the_startup_clock_is_over_it_goes_on_all_the_same(node: Node) -> None:
    node.memory.gpus = (gpu(0, used_gib=61.0),)
    async with node.agent():
        pod = await node.announce(node.launch(gpu=("H100",), gpu_count=1, startup_timeout_s=0.02))
        said = []
        while (message := await pod.hear())["op"] == "wait":
            said.append(message["why"])

    assert message["op"] == "cold"
    assert any("continuing although GPU 0" in why for why in said)


async def test_code_in_a_pod_cannot_have_what_it_only_knows_the_digest_of(node: Node) -> None:
    grants = LaunchSigner(b"the key of nodes")
    written = grants.signed(with_model(node, MODEL))
    async with node.agent(grants):
        for forged in (
            replace(written, weights=(WeightsMount(name="m0", manifest=OTHER),)),
            replace(written, memory_bytes=1 << 40),
            with_model(node, MODEL),
            LaunchSigner(b"another key").signed(with_model(node, MODEL)),
        ):
            answer = await (await node.announce(forged)).hear_last()
            assert (answer["op"], answer["code"]) == ("refused", "not_admitted")
        assert not node.weights.held

        assert (await (await node.announce(written)).hear_last())["op"] == "cold"


@pytest.mark.parametrize(
    "changes",
    [{"pod": "a\npods.ready"}, {"pod": "x" * 300}, {"revision": "f-1@v1\n"}, {"revision": ""}],
)
async def test_names_that_would_tear_up_our_log_are_refused(
    node: Node, changes: dict[str, Any]
) -> None:
    async with node.agent():
        pod = await node.connect()
        launch = {
            **node.launch().to_json(),
            **{key: value for key, value in changes.items() if key == "revision"},
        }
        pod.say(op="announce", pod=changes.get("pod", "pod-1"), launch=launch)
        assert (await pod.hear_last())["code"] == "not_admitted"


async def test_a_pod_that_says_ready_without_end_is_logged_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snapshotter.pods.pod_session")
    async with node.agent() as agent:
        pod = await node.announce(node.launch())
        await pod.hear_last()
        for _ in range(50):
            pod.say(op="ready", phases_ms={"x" * 5000: 1})
        pod.writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            while agent.sessions():
                await asyncio.sleep(0.01)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("pods.ready")
    ]
    assert len(said) < 1000


async def test_a_sweep_never_takes_away_what_a_pod_is_just_given(node: Node) -> None:
    said: list[str] = []
    bundles = Bundles(node.root / "home")
    for _ in range(10):
        leftover = node.tenant / "bundles" / node.bundle
        leftover.mkdir(parents=True)
        background_tasks = BackgroundTasks()
        holds = TenantMounts(
            node.tenant, bundles=bundles, weights=node.weights, background_tasks=background_tasks
        )
        sweep = asyncio.create_task(holds.sweep())
        while not holds.is_held("bundles", node.bundle) and not sweep.done():
            await asyncio.sleep(0)
        async with holds.code(node.bundle, said.append):
            await sweep
            assert (leftover / "app.py").exists()
        await background_tasks.aclose()
        assert not leftover.exists()


def test_a_tree_is_taken_away_beside_what_a_killed_agent_of_the_same_number_left(
    short_tmp: Path,
) -> None:
    target = short_tmp / "bundles" / ("b" * 64)
    for place in (target, target.parent / f".tmp-gone-{target.name[:16]}-{os.getpid()}"):
        place.mkdir(parents=True)
        (place / "file").touch()
    hardlinks.remove_links(target)
    assert not target.exists()
