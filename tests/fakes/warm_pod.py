"""A warm pod without a cluster: the real launcher, in namespaces and a control group as a pod's, with
the warm pods' directory of its node; and its activator's requests."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pilotlight.protocol import POD_PROMOTE, WORKER_STATUS
from snapshotter.types import LaunchSpec
from tests.fakes.fake_shim import function_spec
from tests.fakes.knative.pod_group import PodGroup
from tests.fakes.launched_pod import IN_SIGHT, Pod, pod

UID = 20001
TARGET = Path("/srv/pilotlight")
"""Where the pods see their directory of the node: not below /tmp, which a restore covers."""
_NEWNET = 0x40000000
_WAIT_S = 30.0
T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


class WarmPod:
    """Owns one launcher in warm mode.

    Attributes:
        uid: the pod's.
        target: where it sees its directory of the node.
    """

    def __init__(self, made: Pod, warm: Path, uid: str, groups: Sequence[Path]) -> None:
        self.pod = made
        self.uid = uid
        self.target = TARGET
        made.root.chmod(0o755)
        os.chown(made.work, UID, UID)
        script = f"""
            ip link set lo up
            mount -t tmpfs -o mode=755 none {self.target.parent}
            mkdir {self.target}
            mount --bind {warm} {self.target}
            mount -o remount,bind,ro {self.target}
            {IN_SIGHT}
            mount -t tmpfs none /usr/local/sbin
            exec setpriv --reuid={UID} --regid={UID} --clear-groups --no-new-privs \\
                --inh-caps=-all --bounding-set=-all "$@"
        """
        names = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
        inner = ["unshare", *names, "--kill-child", "sh", "-ec", script, "sh"]
        enter = "".join(f"echo 0 > {group}; " for group in groups)
        made.wrapper = ["sh", "-ec", f'{enter}exec "$@"', "sh", *inner]
        del made.variables["PILOTLIGHT_LAUNCH"]
        made.variables |= {
            "PILOTLIGHT_WARM": "1",
            "PILOTLIGHT_CONTROL": "127.0.0.1:0",
            "PILOTLIGHT_NODE": str(self.target),
        }

    @property
    def first_pid(self) -> int:
        """Of its first process, by our numbers."""
        wrapper = self.pod.process.pid
        return int(Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()[0])

    @property
    def seen(self) -> Path:
        """What it sees at `target`, for us."""
        return Path(f"/proc/{self.first_pid}/root{self.target}")

    def wait_warm(self) -> None:
        """Until its probe says that it is warm."""
        self.pod.wait_said("launcher.begin")
        until = time.monotonic() + _WAIT_S
        while self.request("GET", WORKER_STATUS)[0] != 200:
            assert time.monotonic() < until, self.pod.said
            time.sleep(0.01)

    def request(
        self, method: str, path: str, body: bytes | None = None, *, worker: bool = False
    ) -> tuple[int, Any]:
        """Status and JSON of its control port's answer, or its worker's."""
        port = "listen" if worker else "control"
        line = next(line for line in self.pod.said.splitlines() if "launcher.begin" in line)
        host, _, number = dict(word.split("=", 1) for word in line.split() if "=" in word)[
            port
        ].rpartition(":")

        def ask() -> tuple[int, Any]:
            connection = http.client.HTTPConnection(host, int(number), timeout=_WAIT_S)
            with contextlib.closing(connection):
                headers = {"content-type": "application/json"} if body is not None else {}
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read() or b"null")

        return in_network(self.first_pid, ask)

    def promote(
        self, launch: LaunchSpec, secrets: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """What its activator does."""
        document = {"launch": launch.to_json(), "secrets": dict(secrets or {})}
        return self.request("POST", POD_PROMOTE, json.dumps(document).encode())

    def call(self, **arguments: Any) -> Any:
        """A call of its function."""
        status, answer = self.request(
            "POST", "/invoke/", json.dumps(arguments).encode(), worker=True
        )
        assert status == 200, answer
        return answer


def in_network(pid: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread that is in the network namespace of a process."""

    def enter_and_work() -> T:
        fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if _libc.setns(fd, _NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)
        return work()

    with ThreadPoolExecutor(1) as thread:  # which ends with it
        return thread.submit(enter_and_work).result()


@contextlib.contextmanager
def warm_pod(warm: Path, *, uid: str | None = None) -> Iterator[WarmPod | None]:
    """A warm pod that has not begun; None where no control groups can be made. `warm`: the warm
    pods' directory of the node."""
    uid = uid or str(uuid.uuid4())
    group = PodGroup(uid)
    files = group.make()
    if not files:
        yield None
        return
    try:
        with pod({}, function_spec()) as made:
            yield WarmPod(made, warm, uid, files)
    finally:
        group.remove()
