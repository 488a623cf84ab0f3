"""Whose namespaces may be entered, told from what /proc says."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from snapshotter.errors import Unsupported
from snapshotter.pods.pod_process import (
    end_proxy,
    pidfd_of_peer,
    pod_of_groups,
    pod_of_peer,
    require_own_namespaces,
)
from tests.e2e.harness import wait_for
from tests.fakes.knative.pod_group import PodGroup

OWN = {name: f"{name}:[2]" for name in ("mnt", "pid", "net", "ipc", "uts")}
NODES = {name: f"{name}:[1]" for name in OWN}


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def write(proc: Path, pid: int, namespaces: Mapping[str, str], numbers: str) -> None:
    (proc / str(pid) / "ns").mkdir(parents=True)
    for name, value in namespaces.items():
        (proc / str(pid) / "ns" / name).symlink_to(value)
    (proc / str(pid) / "status").write_text(f"Name:\tx\nNSpid:\t{numbers}\n")


@pytest.mark.parametrize(
    "changes, numbers, words",
    [
        ({}, "4711 1", None),
        ({"net": "net:[1]"}, "4711 1", r"shares namespaces with its node \(net\)"),
        ({"pid": "pid:[1]", "mnt": "mnt:[1]"}, "4711 1", r"\(mnt, pid\)"),
        ({"user": "user:[9]"}, "4711 1", "user namespace"),
        ({}, "4711 7", "first process"),
    ],
)
def test_only_a_pod_whose_namespaces_are_all_its_own_is_entered(
    tmp_path: Path,
    stranger: subprocess.Popen[bytes],
    changes: Mapping[str, str],
    numbers: str,
    words: str | None,
) -> None:
    write(tmp_path, os.getpid(), {**NODES, "user": "user:[1]"}, "1")
    write(tmp_path, 1, {**NODES, "user": "user:[1]"}, "1")
    write(tmp_path, stranger.pid, {**OWN, "user": "user:[1]", **changes}, numbers)
    pidfd = os.pidfd_open(stranger.pid)
    try:
        if words is None:
            assert require_own_namespaces(pidfd, proc=tmp_path) == stranger.pid
        else:
            with pytest.raises(Unsupported, match=words):
                require_own_namespaces(pidfd, proc=tmp_path)
    finally:
        os.close(pidfd)


def test_the_peer_is_known_for_certain_or_not_at_all() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        try:
            pidfd = pidfd_of_peer(ours)
        except Unsupported as e:
            pytest.skip(str(e))
        with open(f"/proc/self/fdinfo/{pidfd}") as f:
            assert f"Pid:\t{os.getpid()}\n" in f.read()
        os.close(pidfd)


UID = "1b4e28ba-2fa1-41d2-883f-0016d3cca427"
SYSTEMD = UID.replace("-", "_")
INNER = "00000000-0000-4000-8000-000000000000"


@pytest.mark.parametrize(
    "groups",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-0a.scope",
        f"0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/crio-0a.scope",
        f"0::/../../kubepods-besteffort-pod{SYSTEMD}.slice/cri-containerd-0a.scope",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD}.slice/x.scope",
        f"0::/kubepods/burstable/pod{UID}/0a",
        f"0::/../pod{UID}/0a",
        f"9:name=systemd:/kubepods/pod{UID}/0a\n4:memory:/kubepods/pod{UID}/0a\n0::/",
        f"0::/kubepods/pod{UID}/0a/pod{INNER}/kubepods-pod{INNER.replace('-', '_')}.slice",
    ],
)
def test_the_pod_of_a_process_is_that_of_its_outermost_group(groups: str) -> None:
    assert pod_of_groups(groups + "\n") == UID


@pytest.mark.parametrize(
    "groups",
    [
        "0::/user.slice/user-1000.slice/session-1.scope",
        f"0::/kubepods/notpod{UID}x/0a",
        f"0::/kubepods/pod{UID[:-1]}/0a",
        f"4:memory:/kubepods/pod{UID}/0a\n3:pids:/kubepods/pod{INNER}/0a",
        "",
    ],
)
def test_a_process_in_no_pod_or_in_two_has_none(groups: str) -> None:
    with pytest.raises(Unsupported, match="in no pod of this node"):
        pod_of_groups(groups)


def test_a_peer_in_no_pod_and_one_that_is_not_visible_have_none(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        with pytest.raises(Unsupported, match="in no pod of this node"):
            pod_of_peer(ours)
        with pytest.raises(Unsupported, match="cannot be inspected"):
            pod_of_peer(ours, proc=tmp_path)


INSIDE = """
import socket, sys

with open(sys.argv[1], "w") as group:
    group.write("0")
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[2])
connection.recv(1)
"""


@pytest.mark.root
def test_a_peer_is_in_the_pod_whose_group_the_kubelet_put_it_in(tmp_path: Path) -> None:
    group = PodGroup(UID)
    files = group.make()
    if not files:
        pytest.skip("no control groups can be made on this machine")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "calls.sock"))
        listener.listen()
        listener.settimeout(20)
        argv = [sys.executable, "-c", INSIDE, str(files[0]), str(tmp_path / "calls.sock")]
        inside = subprocess.Popen(argv)
        connection, _ = listener.accept()
        try:
            assert pod_of_peer(connection) == UID
        finally:
            inside.kill()
            inside.wait()
        with pytest.raises(Unsupported, match="or it has exited"):
            pod_of_peer(connection)
        connection.close()
    group.remove()


@pytest.mark.root
def test_only_the_first_process_of_queue_proxy_in_that_pod_is_killed(tmp_path: Path) -> None:
    (program := tmp_path / "queue").write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    uids = [str(uuid.uuid4()) for _ in range(2)]
    groups = [PodGroup(uid) for uid in uids]
    if [] in (files := [group.make() for group in groups]):
        pytest.skip("no control group can be made here")
    container = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c"]
    first, second, other = f"exec {program} 60", f"{program} 60; :", "exec sleep 60"

    def started(group: int, said: str) -> subprocess.Popen[bytes]:
        enter = f"echo $$ > {files[group][0]}; exec " + shlex.join([*container, said])
        return subprocess.Popen(["sh", "-c", enter])

    running = [started(0, first), started(0, second), started(0, other), started(1, first)]
    try:
        wait_for(lambda: end_proxy(uids[0]) == 1, "queue-proxy of the pod to be found")
        assert running[0].wait(10) != 0
        assert [process.poll() for process in running[1:]] == [None] * 3
        assert end_proxy(uids[0]) == 0
        assert end_proxy(uids[1]) == 1
    finally:
        for process in running:
            process.kill()
            process.wait()
        for group in groups:
            group.remove()
