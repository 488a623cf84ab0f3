"""A node agent with packages of its own, and functions that import them, for tests of IMPORT."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import tarfile
import textwrap
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pilotlight.spec.function import MethodSpec
from pilotlight.spec.record_json import to_json
from snapshotter.agent.app import own_runtime
from snapshotter.client import AgentClient
from snapshotter.images.image_layout import ImageLayout
from snapshotter.images.images import Images, own_layout
from snapshotter.types import ENVIRONMENT_PREFIX, InstanceInfo, LaunchSpec
from tests.fakes.agent_home import MIB, AgentHome, begin
from tests.fakes.fake_shim import FakeInstance, call, function_spec

PACKAGES = {
    "alpha/__init__.py": "import os, time\ntime.sleep(0.15)\nMODE = os.environ.get('MODE')\n",
    "alpha/part.py": "VALUE = 3\n",
    "beta.py": "import alpha, alpha.part\nSEEN = []\n",
    "registry.py": "import importlib, time\ntime.sleep(0.15)\nKNOWN = []\n"
    "def resolve():\n    if not KNOWN: importlib.import_module('first')\n",
    "first.py": "",
    "late.py": "import registry\nregistry.KNOWN.append(1)\n",
    "opened.py": "import alpha, gamma, beta\nimport registry\nregistry.KNOWN.append(1)\n",
    "gamma.py": "import time\ntime.sleep(0.4)\n",
    "threads.py": "import threading, time\ntime.sleep(0.15)\n"
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "sly.py": "import os, time, threading\ntime.sleep(0.15)\n"
    "if not os.path.exists('/run/pilotlight/slot/code/app.py'):\n"
    "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
    "different.py": "import os, time\ntime.sleep(0.15)\n"
    "WHERE = os.path.exists('/run/pilotlight/slot/code/app.py')\n",
    "hanging.py": "import os, time\ntime.sleep(0.15)\n"
    "if not os.path.exists('/run/pilotlight/slot/code/app.py'): os._exit(3)\n",
}
APP = """
    import pilotlight
    {imports}
    app = pilotlight.App("demo")

    @app.function(example=[2])
    def go(n: int) -> list:
        return [n, {version}, {answer}]
"""


class OneMoreDirectory(Images):
    """The platform's own environment, and the packages of the test."""

    def __init__(self, home: Path, packages: Path) -> None:
        super().__init__(home, environ=os.environ, requirements=())
        self._packages = packages

    def layout(
        self, digest: str | None, engine: str | None = None, *, uid: int | None = None
    ) -> ImageLayout:
        own = own_layout()
        return replace(own, site=(self._packages, *own.site))


class ImportHome(AgentHome):
    """The real worker, and functions that are given as source."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.runtime = own_runtime()
        self.packages = root / "packages"
        for name, text in PACKAGES.items():
            (self.packages / name).parent.mkdir(parents=True, exist_ok=True)
            (self.packages / name).write_text(text)

    def function(
        self,
        revision: str,
        imports: str = "import alpha, beta",
        *,
        answer: str = "1",
        **changes: Any,
    ) -> LaunchSpec:
        """A launch of `go`, which answers its argument, the number of its revision, and `answer`."""
        version = int(revision.rpartition("v")[2])
        code = textwrap.dedent(APP).format(imports=imports, version=version, answer=answer)
        spec = function_spec(qualname="go", methods=[MethodSpec(name="", example=[2])])
        labels = {"tenant": "t-1", "environment": "main", "function": "go"}
        given = {"entry": to_json(spec), "labels": labels, "memory_bytes": 256 * MIB, **changes}
        return self.launch(revision, bundle=self._pack(code), **given)

    def _pack(self, code: str) -> str:
        raw, data = io.BytesIO(), code.encode()
        with tarfile.open(fileobj=raw, mode="w:gz") as archive:
            info = tarfile.TarInfo("app.py")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        digest = hashlib.sha256(raw.getvalue()).hexdigest()
        blob = self.paths.home / "blobs" / digest[:2] / digest
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(raw.getvalue())
        return digest


@contextlib.asynccontextmanager
async def serving(home: ImportHome, **settings: Any) -> AsyncIterator[AgentClient]:
    images = OneMoreDirectory(home.paths.home, home.packages)
    settings = {"environment_snapshots": 16, **settings}
    async with (
        home.agent(snapshots=True, images=images, **settings),
        home.client() as client,
    ):
        yield client


def environments(home: AgentHome) -> list[dict[str, Any]]:
    """The manifests of the environment snapshots that are proven."""
    files = sorted((home.paths.home / "node/snapshots").glob("sn-*/manifest.json"))
    manifests = [json.loads(file.read_bytes()) for file in files]
    return [
        one
        for one in manifests
        if one["identity"]["revision"].startswith(ENVIRONMENT_PREFIX) and one["proof"] is not None
    ]


async def said(client: AgentClient) -> Mapping[str, Any]:
    """What the agent says of imports."""
    answer: Mapping[str, Any] = (await client.capabilities())["node"]["snapshots"]["imports"]
    return answer


async def settled(client: AgentClient) -> Mapping[str, Any]:
    """The same, once nothing is pending."""
    async with asyncio.timeout(60):
        while (answer := await said(client))["pending"]:
            await asyncio.sleep(0.02)
    return answer


async def made(home: AgentHome, client: AgentClient) -> dict[str, Any]:
    """The environment snapshot, once it is proven and nothing is pending."""
    async with asyncio.timeout(60):
        while not (ready := environments(home)):
            await asyncio.sleep(0.02)
    await settled(client)
    return ready[0]


def imports_of(environment: Mapping[str, Any]) -> list[str]:
    modules: list[str] = environment["point"]["launch"]["entry"]["imports"]
    return modules


async def answer(info: InstanceInfo) -> Any:
    instance = FakeInstance(id=info.id, path=info.socket, stdout=-1, stderr=-1, go=-1)
    return await asyncio.to_thread(call, instance, "", [7])


async def from_zero(client: AgentClient, launch: LaunchSpec) -> InstanceInfo:
    await client.drop_template(launch.revision)
    return await begin(client, launch)
