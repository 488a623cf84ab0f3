"""`python -m snapshotter` on a node of a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.core.crypto import PlatformKey
from snapshotter.agent.launch_signature import KEY_LABEL, LaunchSigner
from tests.fakes.agent_home import REPOSITORY, AgentHome
from tests.fakes.fake_shim import function_spec
from tests.fakes.launched_pod import pod


@pytest.mark.parametrize("restores", ["false", "true"])
async def test_the_agent_of_a_node_serves_its_pods(short_tmp: Path, restores: str) -> None:
    home = AgentHome(short_tmp)
    node = short_tmp / "tenants"
    (node / "t-1").mkdir(parents=True)
    key = short_tmp / "key"
    grants = LaunchSigner(PlatformKey.load_or_create(key).derived(KEY_LABEL))
    config = short_tmp / "platform.yaml"
    config.write_text(
        f"platform: {{fleet: knative, home: {home.paths.home}, run: {home.paths.run}, "
        f"key_file: {key}}}\n"
        f"snapshotter: {{metrics_listen: null, pods: {node}, restore_into_pods: {restores}"
        f"{', snapshots: false' if restores == 'true' else ''}}}\n"
    )
    readable, writable = os.pipe()
    argv = [
        sys.executable,
        "-m",
        "snapshotter",
        "--config",
        str(config),
        "--ready-fd",
        str(writable),
    ]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'functions'}",
        "NODE_NAME": "node-1",
    }
    agent = await asyncio.to_thread(
        subprocess.Popen,
        argv,
        pass_fds=[writable],
        env=environ,
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
    )
    os.close(writable)
    try:
        with os.fdopen(readable, "rb") as ready:
            assert await asyncio.to_thread(ready.read, 1) == b"\n"
        with pod(
            {},
            function_spec(),
            bundle=home.bundle,
            labels={"tenant": "t-1"},
            uid=os.geteuid(),
            node=node / "t-1",
        ) as launched:
            (launched.root / "launch.json").write_text(
                json.dumps(grants.signed(launched.launch).to_json())
            )
            launched.begin()
            said = await asyncio.to_thread(launched.wait_said, "launcher.(boot |refused)")
    finally:
        agent.terminate()
        _, log = await asyncio.to_thread(agent.communicate)

    assert said.startswith("launcher.boot"), said
    assert agent.returncode == 0, log.decode()
    assert b"report.not_taken node=node-1" in log  # there is no controller here
