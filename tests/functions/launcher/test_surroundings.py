"""What a pod tells its launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotlight.launcher.log import log_event
from pilotlight.launcher.pod_environment import PodEnvironment
from snapshotter.types import LaunchSpec, RevisionKey


def surroundings(tmp_path: Path, *, offline: bool = False, **environ: str) -> PodEnvironment:
    launch = LaunchSpec(
        revision=RevisionKey("f@v1"),
        trust_domain="t",
        uid=1,
        bundle="b" * 64,
        image=None,
        entry={},
        memory_bytes=1,
        cpu=1.0,
        startup_timeout_s=1.0,
        secret_variables=("TOKEN",),
        offline=offline,
    )
    (tmp_path / "launch.json").write_text(json.dumps(launch.to_json()))
    places = {
        "PILOTLIGHT_LAUNCH": str(tmp_path / "launch.json"),
        "PILOTLIGHT_NODE": "/pilotlight",
        "PILOTLIGHT_WORK": "/scratch",
    }
    return PodEnvironment.of({**places, "TOKEN": "s3cret", **environ})


@pytest.mark.parametrize(
    "visible, gpus",
    [
        ("", ()),
        ("all", ()),
        ("void", ()),
        ("GPU-1,GPU-2", ("GPU-1", "GPU-2")),
        ("0,1", ("0", "1")),
        ("MIG-1", ("MIG-1",)),
        ("GPU-1,all", ()),
    ],
)
def test_the_gpus_are_those_that_the_device_plugin_gave(
    tmp_path: Path, visible: str, gpus: tuple[str, ...]
) -> None:
    assert surroundings(tmp_path, NVIDIA_VISIBLE_DEVICES=visible).gpus == gpus


def test_the_address_is_every_interfaces_unless_said_otherwise(tmp_path: Path) -> None:
    plain, other = (
        surroundings(tmp_path),
        surroundings(tmp_path, PILOTLIGHT_LISTEN="[::]:9000", HOSTNAME="pod-7"),
    )

    assert (plain.host, plain.port) == ("0.0.0.0", 8080)
    assert (other.host, other.port, other.pod) == ("::", 9000, "pod-7")


def test_secrets_and_what_is_the_launchers_own_are_not_inherited(tmp_path: Path) -> None:
    found = surroundings(tmp_path, CUDA_HOME="/cuda")

    assert found.env == {"CUDA_HOME": "/cuda"}
    assert found.secrets == {"TOKEN": "s3cret"}


def test_a_worker_finds_the_nodes_socket_for_its_calls_unless_it_has_no_network(
    tmp_path: Path,
) -> None:
    calls = {"PILOTLIGHT_CALLS": "/pilotlight/calls.sock"}
    assert surroundings(tmp_path).calls_env() == calls
    assert surroundings(tmp_path, offline=True).calls_env() == {}


def test_a_line_is_one_line_whatever_is_in_it(capfd: pytest.CaptureFixture[str]) -> None:
    log_event("launcher.wait", why='a "b"\nc', waited_s=1.23456, word="plain", none="")

    assert (
        capfd.readouterr().err
        == 'launcher.wait why="a \\"b\\"\\nc" waited_s=1.2 word=plain none=""\n'
    )
