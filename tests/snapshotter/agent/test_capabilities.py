"""Capabilities are proven by doing, and one that is missing says why and what to do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from snapshotter.agent.capabilities import Feature, isolation, probe
from snapshotter.linux import kernel_probes
from snapshotter.linux.cgroups import Cgroups
from snapshotter.linux.slot_network import Network

NONE = Cgroups(bases={}, version=0, why_not="no hierarchy")


def feature(body: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(f for f in body["features"] if f["name"] == name)
    return found


def script(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


async def test_what_is_off_says_why(tmp_path: Path) -> None:
    body = await probe(
        home=tmp_path / "not" / "there", environ={"PATH": str(tmp_path)}, cgroups=NONE
    )
    assert all(f["why"] for f in body["features"] if not f["on"])
    assert "no hierarchy" in feature(body, "cgroup memory")["why"]
    assert "not installed" in feature(body, "RESTORE")["why"]
    assert "no GPU" in feature(body, "GPU")["why"]
    assert body["node"]["disk_free_bytes"] > 0
    assert body["node"]["gpus"] == []


async def test_tools_that_are_there_are_asked(tmp_path: Path) -> None:
    script(
        tmp_path / "bin",
        "nvidia-smi",
        "echo '0, NVIDIA H100 80GB HBM3, 81559, 550.54'; echo garbage",
    )
    script(tmp_path / "bin", "criu", "echo 'Version: 4.2.1'")
    body = await probe(
        home=tmp_path, environ={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, cgroups=NONE
    )
    assert body["node"]["gpus"] == [
        {
            "index": 0,
            "name": "NVIDIA H100 80GB HBM3",
            "memory_bytes": 81559 * 1024**2,
            "driver": "550.54",
        }
    ]
    assert feature(body, "GPU") == {"name": "GPU", "on": True, "why": "NVIDIA H100 80GB HBM3"}
    assert not feature(body, "RESTORE")["on"]
    assert "FORK and COLD work" in feature(body, "RESTORE")["why"], (
        "a criu that only tells its version proves nothing"
    )


async def test_memory_group_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    lost = Cgroups(bases={"memory": tmp_path / "gone" / "ours"}, version=2)
    body = await probe(home=tmp_path, environ={"PATH": ""}, cgroups=lost)
    assert not feature(body, "cgroup memory")["on"]
    assert "No such file" in feature(body, "cgroup memory")["why"]
    control = feature(body, "device control")
    assert not control["on"]
    assert control["why"].startswith("no devices controller: functions are kept from GPUs")


def test_a_probe_that_is_killed_is_off_alone() -> None:
    def killed(_: str) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    def broken(argument: str) -> str:
        raise OSError(f"no such file: {argument}")

    assert kernel_probes.in_fork(killed, "") == f"the probe ended with status -{signal.SIGKILL:d}"
    assert kernel_probes.in_fork(broken, "/x") == "no such file: /x"
    assert kernel_probes.in_fork(kernel_probes.seccomp, "") == ""
    assert kernel_probes.in_fork(kernel_probes.fork_server, "") == ""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and uids need root")
async def test_root_has_slots_and_uids(tmp_path: Path) -> None:
    cgroups = Cgroups.find(tmp_path)
    try:
        body = await probe(home=tmp_path, environ=dict(os.environ), cgroups=cgroups)
    finally:
        cgroups.remove_empty()
    for name in ("root", "namespaces", "uid separation", "seccomp", "fork server"):
        assert feature(body, name) == {"name": name, "on": True, "why": ""}
    assert feature(body, "isolation")["on"], feature(body, "isolation")
    control = feature(body, "device control")
    assert control["on"] is (cgroups.why_no_devices is None)
    assert f"cgroup v{cgroups.version}" in control["why"] or not control["on"]
    networks = feature(body, "function networks")
    assert networks["on"] or "have no network" in networks["why"]
    assert body["node"]["memory_bytes"] > 0
    assert body["node"]["interpreters"]


@pytest.mark.parametrize(
    "off, network, shared",
    [
        ((), Network.HOST, ["the machine's network (snapshotter.function_network: host)"]),
        (
            ("namespaces", "uid separation"),
            Network.OWN,
            ["the machine's files, processes and network", "one user", "Suitable for one tenant"],
        ),
        (("seccomp",), Network.OWN, ["every system call", "Suitable for one tenant"]),
    ],
)
def test_what_functions_share_is_said_by_the_mechanism_that_is_missing(
    off: tuple[str, ...], network: Network, shared: list[str]
) -> None:
    kernel = [
        Feature(name=name, on=name not in off, why="")
        for name in ("namespaces", "uid separation", "seccomp")
    ]
    found = isolation(kernel, network)
    assert not found.on
    assert all(text in found.why for text in shared), found.why
