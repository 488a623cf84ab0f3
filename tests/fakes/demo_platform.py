"""A controller that serves over TCP, with a month of records behind it and a node beside it: what a
browser can look at."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from pilotlight.controller import http_app
from pilotlight.controller.analytics import traces
from pilotlight.controller.billing import ledger
from pilotlight.controller.context import Context
from pilotlight.controller.database.change_notifier import ChangeNotifier
from pilotlight.controller.database.store import Store
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.server import bootstrap
from pilotlight.controller.server.metrics import Metrics
from pilotlight.controller.settings import ControllerConfig, ControllerSettings
from pilotlight.controller.slo import observations
from pilotlight.controller.slo.loop import evaluate_all
from pilotlight.controller.weights import weight_names
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.core.crypto import PlatformKey
from pilotlight.core.object_store import DirectoryStore
from pilotlight.core.rpc import SendPart
from pilotlight.core.settings import Paths
from pilotlight.protocol import ARGUMENTS_PREFIX
from pilotlight.spec.pricing import GIB, PriceSettings, Rates
from pilotlight.spec.quotas import BUILT_IN_PLANS
from snapshotter.client import AgentClient
from snapshotter.types import InstanceId, InstanceInfo, StartKind, TemplateInfo
from tests.fakes import demo_books, demo_observations, demo_traces
from tests.fakes.databases import empty_sqlite
from tests.fakes.plain_http import NO_TLS
from tests.fakes.quiet_server import QuietServer
from tests.fakes.small_cache import SmallCache
from tests.functions.controller.parts import (
    BUNDLE,
    BUNDLE_DIGEST,
    SmallAgent,
    instance,
    snapshot,
    spec,
    usage,
)
from tests.functions.controller.test_weights import upload
from weight_cache.client import WeightCacheClient

BATCH = 1000
PRICES = PriceSettings(
    gpu_s={"L4": "0.000222", "H100": "0.001097"},
    token_in="0.00000015",
    token_out="0.0000006",
    request="0.0000002",
    start_factor="0.5",
)
_PROMISES = {"latency_p99_ms": 20_000, "availability": 0.995, "utilisation": 0.6}
_BOUNDS = {"requests_per_s": 200, "instances": 12, "gpus": 4, "tokens_per_min": 200_000}
PLANS = {
    **BUILT_IN_PLANS,
    "enterprise": BUILT_IN_PLANS["enterprise"].with_overrides({**_PROMISES, **_BOUNDS}),
}


@dataclass
class DemoCache(SmallCache):
    """A cache whose models have sizes. Owner: its loop."""

    sizes: dict[str, int] = field(default_factory=dict)
    now: float = 0.0

    async def _list(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        models = [
            {
                "manifest": m,
                "size_bytes": size,
                "files": 3 + n,
                "leases": int(m in self.in_memory),
                "last_used_at": self.now - 400 * n,
                "is_pinned": m in self.pinned,
            }
            for n, (m, size) in enumerate(self.sizes.items())
        ]
        return {"models": models, "leases": []}

    async def _stat(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        used = {
            "used_bytes": sum(self.sizes.values()),
            "max_bytes": 400 * GIB,
            "models": len(self.sizes),
            "hits": 412,
            "misses": 6,
        }
        return {**await super()._stat(args, part), **used}


@dataclass
class DemoAgent(SmallAgent):
    """An agent on a machine worth a look. Owner: its loop."""

    async def _logs(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        every = self.lines
        labels, call = args["labels"], args["call_id"]
        wanted = [
            line
            for line in every
            if call in (None, line["call"]) and args["instance_id"] in (None, line["instance"])
        ]
        mine = {str(one.id) for one in self.instances if labels.items() <= one.labels.items()}
        self.lines = [line for line in wanted if line["instance"] in mine]
        try:
            return await super()._logs(args, part)
        finally:
            self.lines = every

    async def _capabilities(self, args: Mapping[str, Any], part: SendPart) -> dict[str, Any]:
        features = (
            ("fork", "a Template was forked"),
            ("snapshots", "CRIU 4.1 dumped and restored a process"),
            ("namespaces", "made and left"),
            ("seccomp", "a filter holds"),
            ("cgroup memory", "limits are kept"),
            ("GPU checkpoint", "2 GPUs, driver 570"),
        )
        gpus = [
            {"index": n, "name": "NVIDIA L4", "memory_bytes": 24 * GIB, "driver": "570.86"}
            for n in range(2)
        ]
        node = {
            "host": "node-1",
            "kernel": "6.12.3",
            "cpus": 48,
            "memory_bytes": 384 * GIB,
            "disk_free_bytes": 1700 * GIB,
            "gpus": gpus,
        }
        return {
            "features": [{"name": name, "on": True, "why": why} for name, why in features],
            "node": node,
        }


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What runs. `url` is of the controller itself; `keys` by scope, of the operator's tenant;
    `other_key`: admin of another tenant."""

    url: str
    context: Context
    http: httpx.AsyncClient
    agent: SmallAgent
    cache: DemoCache
    tenant: str
    keys: dict[str, str]
    other_key: str
    ids: dict[str, str]
    revisions: dict[str, str]

    @property
    def rates(self) -> Rates:
        """What calls cost."""
        return PRICES.rates()

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Take records into the ledger, as the activators' own arrive."""
        for begin in range(0, len(rows), BATCH):
            with self.context.store.write() as write:
                ledger.add_rows(write, rows[begin : begin + BATCH])


@contextlib.asynccontextmanager
async def demo(
    home: Path, run: Path, *, clock: Any, port: int = 0, **settings: Any
) -> AsyncIterator[Demo]:
    """A controller in this process over fresh directories, without any record yet; `settings` of
    section `controller`."""
    paths = Paths(home=home, run=run)
    agent, cache = DemoAgent(), DemoCache(now=clock())
    servers = [
        await agent.serve(paths.socket("snapshotter")),
        await cache.serve(paths.socket("weight_cache")),
    ]
    bell = ChangeNotifier()
    store = Store(empty_sqlite(home / "controller.db"), clock=clock, on_fed=bell.ring)
    key = bootstrap.ensure_admin(store, uid_base=20_000)
    assert key is not None
    context = Context(
        config=ControllerConfig(
            settings=ControllerSettings(**settings),
            paths=paths,
            trust="isolated",
            uid_base=20_000,
            plans=PLANS,
            prices=PRICES,
        ),
        store=store,
        files=BlobStore(
            objects=DirectoryStore(home / "blobs"),
            incoming=home / "blobs" / "incoming",
            limit_bytes=1_000_000,
            read_bytes=70_000,
        ),
        key=PlatformKey.load_or_create(home / "platform.key"),
        agent=AgentClient(paths.socket("snapshotter")),
        cache=WeightCacheClient(paths.socket("weight_cache")),
        notifier=bell,
        metrics=Metrics(),
        clock=clock,
    )
    listener = socket.create_server(("127.0.0.1", port))
    server = QuietServer(
        uvicorn.Config(
            http_app.build_app(context), lifespan="off", log_config=None, access_log=False
        )
    )
    serving = asyncio.create_task(server.serve([listener]), name="demo controller")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30, verify=NO_TLS
        ) as http:
            yield await _settle(context, http, agent=agent, cache=cache, key=key)
    finally:
        bell.close()
        server.should_exit = True
        await serving
        await context.agent.aclose()
        await context.cache.aclose()
        for one in servers:
            one.close()
        store.close()


async def _settle(
    context: Context, http: httpx.AsyncClient, *, agent: SmallAgent, cache: DemoCache, key: str
) -> Demo:
    (await http.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)).raise_for_status()
    tenant = str((await http.get("/v1/whoami")).json()["tenant"]["id"])
    keys = {"admin": key}
    for scope in ("deploy", "invoke", "read-billing"):
        keys[scope] = (
            await http.post("/v1/keys", json={"scope": scope, "name": f"{scope} key"})
        ).json()["secret"]
    other = (await http.post("/v1/tenants", json={"name": "meridian"})).json()["key"]["secret"]
    weights = await upload(http, context.config.paths.home / "model")
    ids, revisions = {}, {}
    for app in dict.fromkeys(habit.app for habit in demo_books.HABITS):
        mine = [habit for habit in demo_books.HABITS if habit.app == app]
        answer = await http.post(
            f"/v1/apps/{app}/deploy",
            json={"functions": [_spec(habit, weights) for habit in mine]},
        )
        assert answer.status_code in (200, 201), answer.text
        for found in (await http.get(f"/v1/apps/{app}")).json()["functions"]:
            ids[f"{app}/{found['name']}"] = found["id"]
        for made in answer.json()["functions"]:
            revisions[f"{app}/{made['function']}"] = made["revision"]
    url = str(http.base_url).rstrip("/")
    return Demo(
        url=url,
        context=context,
        http=http,
        agent=agent,
        cache=cache,
        tenant=tenant,
        keys=keys,
        other_key=other,
        ids=ids,
        revisions=revisions,
    )


def _spec(habit: demo_books.Habit, weights: str) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": habit.cpu, "memory_bytes": habit.memory_bytes}
    if habit.gpu:
        resources |= {"gpu": [habit.gpu], "gpu_count": 1}
    scaling = {
        "min_instances": 1 if habit.reserved else 0,
        "max_instances": 8,
        "scaledown_window_s": 300.0 if habit.idle else 60.0,
    }
    objectives = {"availability": 0.995, "warm_latency_s": 0.2, "freeze": habit.app == "search"}
    engine: dict[str, Any] = {}
    if any(habit.tokens):
        engine = {
            "kind": "engine",
            "module": "",
            "qualname": "",
            "engine": {"model": "llama-3b", "max_model_len": 8192, "max_num_seqs": 16},
            "weights": [{"name": "llama-3b", "manifest": weights}],
        }
    return spec(
        habit.function,
        **engine,
        resources=resources,
        scaling=scaling,
        tags={"team": habit.app},
        objectives=objectives,
    )


async def furnish(made: Demo, *, now: float) -> None:
    """A month of records of two tenants, instances, snapshots, models and budgets."""
    made.add(
        list(
            demo_books.records(
                tenant=made.tenant,
                ids=made.ids,
                revisions=made.revisions,
                rates=made.rates,
                now=now,
            )
        )
    )
    other = httpx.AsyncClient(
        base_url=made.url, headers={"authorization": f"Bearer {made.other_key}"}, verify=NO_TLS
    )
    async with other:
        theirs = str((await other.get("/v1/whoami")).json()["tenant"]["id"])
        (await other.put(f"/v1/blobs/{BUNDLE_DIGEST}", content=BUNDLE)).raise_for_status()
        (
            await other.post("/v1/apps/search/deploy", json={"functions": [spec("embed")]})
        ).raise_for_status()
        found = (await other.get("/v1/apps/search")).json()["functions"][0]
    ids = {"search/embed": found["id"]}
    rows = demo_books.records(
        tenant=theirs,
        ids=ids,
        revisions={"search/embed": "v1-77aa01"},
        rates=made.rates,
        now=now,
        seed=3,
        scale=0.6,
    )
    made.add(list(rows))
    wanted: tuple[dict[str, Any], ...] = (
        {"period": "month", "amount": "30", "alerts": [50, 80, 100], "hard": True},
        {"period": "day", "app": "chat", "environment": "main", "amount": "1.50", "hard": True},
        {"period": "month", "environment": "main", "app": "media", "amount": "4", "hard": False},
    )
    for body in wanted:
        answer = await made.http.put("/v1/budgets", json=body)
        assert answer.status_code < 300, answer.text
    with made.context.store.write() as write:
        observations.add(
            write,
            list(
                demo_observations.observations(
                    tenant=made.tenant, ids=made.ids, revisions=made.revisions, now=now
                )
            ),
        )
        traces.put(
            write,
            list(demo_traces.traces(tenant=made.tenant, revisions=made.revisions, now=now)),
            keep=1000,
        )
    evaluate_all(made.context.store, now=made.context.clock())
    _name_models(made)
    _run(made, theirs, now)
    await _fail(made, now)
    for name, variables in (("hub", ("HF_TOKEN",)), ("store", ("S3_KEY", "S3_SECRET"))):
        values = {"values": dict.fromkeys(variables, "made up")}
        (await made.http.put(f"/v1/secrets/{name}", json=values)).raise_for_status()


def _name_models(made: Demo) -> None:
    made.cache.sizes = {
        "c0" * 32: 91 * 1024**2,
        "5e" * 32: 6 * GIB,
        "9b" * 32: 3 * GIB,
        "17" * 32: 440 * 1024**2,
    }
    made.cache.here |= set(made.cache.sizes)
    made.cache.in_memory |= {"c0" * 32, "9b" * 32}
    made.cache.pinned.add("9b" * 32)
    holder = EnvironmentRef(tenant=made.tenant, environment="main", actor="demo")
    with made.context.store.write() as write:
        for name, (manifest, size) in zip(
            ("minilm", "llama-3b", "whisper", "cross-encoder"),
            made.cache.sizes.items(),
            strict=True,
        ):
            model = weight_names.NamedWeights(manifest=manifest, size_bytes=size, files=4)
            weight_names.put(write, holder, name=name, model=model, source=f"hf://demo/{name}")


FAILED_CALL = "req-0000000000000000000000000000fa11"


async def _fail(made: Demo, now: float) -> None:
    """A call that raised, with what it printed, among lines of others."""
    function, running = "search/rank", made.agent.instances[2]
    failed = usage(
        f"{FAILED_CALL}/1",
        tenant=made.tenant,
        function="rank",
        function_id=made.ids[function],
        revision=made.revisions[function],
        instance=str(running.id),
        started_at=now - 4,
        exec_ms=31,
        status=500,
        outcome="error",
        bytes_in=2841,
    )
    made.add([failed.to_json()])
    said = (
        ("stdout", "rank: 40 candidates"),
        ("stderr", "Traceback (most recent call last):"),
        ("stderr", '  File "app.py", line 31, in rank'),
        ("stderr", "    scores = model.predict(pairs)"),
        ("stderr", "ValueError: the query is empty"),
        ("stderr", f"{ARGUMENTS_PREFIX}query: str of 0, texts: list of 40, top_k: int"),
    )
    made.agent.lines = [
        {
            "time": now - 30 + n / 7,
            "instance": str(made.agent.instances[n % 2].id),
            "stream": "stdout",
            "call": f"req-{n:032x}",
            "text": f"embedded {3 + n % 5} texts in {9 + n % 13} ms",
        }
        for n in range(24)
    ]
    made.agent.lines += [
        {
            "time": now - 4 + n / 100,
            "instance": str(running.id),
            "stream": stream,
            "call": FAILED_CALL,
            "text": text,
        }
        for n, (stream, text) in enumerate(said)
    ]


_RUNNING: tuple[tuple[str, StartKind, float, dict[str, float], dict[str, str], float], ...] = (
    ("search/embed", StartKind.FORK, 380, {"fork": 11.0, "wake": 19.0}, {"minilm": "dram"}, 2),
    ("search/embed", StartKind.FORK, 62, {"fork": 9.0, "wake": 22.0}, {"minilm": "dram"}, 2),
    (
        "search/rank",
        StartKind.RESTORE,
        1490,
        {"restore": 142.0, "wake": 31.0},
        {"cross-encoder": "dram"},
        1,
    ),
    (
        "chat/Assistant",
        StartKind.COLD,
        20_400,
        {"boot": 900.0, "import": 7300.0, "enter": 21_000.0},
        {"llama-3b": "nvme"},
        16,
    ),
    (
        "media/transcribe",
        StartKind.RESTORE,
        44,
        {"restore": 960.0, "wake": 130.0},
        {"whisper": "nvme"},
        12,
    ),
)
"""(function, how it came up, age in seconds, phases of its start in ms, weights by tier, GiB)"""


def _run(made: Demo, theirs: str, now: float) -> None:
    mine = [_instance(made, n, now) for n in range(len(_RUNNING))]
    foreign = replace(
        mine[0],
        id=InstanceId("i-51c2d0a97b3e4f60"),
        labels={**mine[0].labels, "tenant": theirs},
        memory_bytes=GIB,
    )
    made.agent.instances = running = [*mine, foreign]
    made.agent.memory = {str(i.id): round(i.memory_bytes * 0.18) for i in running}
    made.agent.templates = [
        TemplateInfo(
            revision=i.revision,
            pid=100 + n,
            pss_bytes=round(i.memory_bytes * 0.14),
            threads=(),
            phases_ms={"boot": 300.0},
            forks=14 - n,
            last_used_at=now - 40 * n,
            labels=i.labels,
            parked=1,
        )
        for n, i in enumerate(running[1:4])
    ]
    made.agent.snapshots = [
        snapshot(
            i.labels["tenant"],
            i.revision,
            name=f"sn-{0xA51C0FFEE0000000 + 977 * n:016x}",
            labels=i.labels,
            cold_ms=5400.0 + 3000 * n,
            image_bytes=(61 + 40 * n) * 1024**2,
            restore_ms=120.0 + 60 * n,
            restores=31 - 4 * n,
            last_used_at=now - 300 * n,
        )
        for n, i in enumerate(running[1:])
    ]


def _instance(made: Demo, n: int, now: float) -> InstanceInfo:
    name, kind, age_s, phases, tiers, memory_gib = _RUNNING[n]
    app, _, function = name.partition("/")
    revision = f"{made.ids[name]}@{made.revisions[name]}"
    one = instance(
        made.tenant,
        app=app,
        function=function,
        name=f"i-{0x3F2A91C4D5E60700 + n * 7919:016x}",
        revision=revision,
    )
    memory_bytes = round(memory_gib * GIB)
    return replace(
        one,
        start_kind=kind,
        started_at=now - age_s,
        phases_ms=phases,
        weights=tiers,
        memory_bytes=memory_bytes,
    )
