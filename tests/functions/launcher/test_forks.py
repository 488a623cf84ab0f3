"""Further instances in a pod: forks of its Template, at ports of their own. The real launcher with
real workers, on a loopback address."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.launcher.memory_limit import memory_limit, room
from pilotlight.protocol import (
    POD_CONTROL_PORT,
    POD_FORK,
    POD_INSTANCES,
    POD_PROMOTE,
    POD_STOP,
    WORKER_STATUS,
)
from pilotlight.spec.function import MIB, FunctionKind, FunctionSpec, MethodSpec
from tests.fakes.fake_shim import function_spec
from tests.fakes.knative.pod_group import PodGroup
from tests.fakes.launched_pod import WAIT_S, Pod, pod
from tests.fakes.pod_agent import FakePodAgent
from tests.fakes.pod_maker import free_loopback

CODE = {
    "app.py": """
        import os, random, time
        BORN = os.getpid()
        def f(x=0):
            print("called")
            time.sleep(x)
            return [os.getpid(), BORN, os.environ.get("TOKEN"), random.random()]
    """
}
SPEC = function_spec()
CLASS = function_spec(qualname="C", kind=FunctionKind.CLASS, methods=(MethodSpec(name="f"),))


class ForkingPod:
    """A warm pod that is promoted."""

    def __init__(self, made: Pod) -> None:
        self.made = made
        self.host = free_loopback()
        del made.variables["PILOTLIGHT_LAUNCH"]
        made.variables |= {
            "PILOTLIGHT_WARM": "1",
            "PILOTLIGHT_LISTEN": f"{self.host}:8080",
            "PILOTLIGHT_CONTROL": f"{self.host}:{POD_CONTROL_PORT}",
        }
        self._control = httpx.Client(
            base_url=f"http://{self.host}:{POD_CONTROL_PORT}", timeout=WAIT_S
        )

    def begin(self, agent: FakePodAgent) -> dict[str, Any]:
        """Start and promote it; what it said when it was ready."""
        self.made.begin()
        return self.promote(agent)

    def promote(self, agent: FakePodAgent) -> dict[str, Any]:
        """Promote it; what it said when it was ready."""
        with agent.accept() as line:
            self.send_document()
            assert "launch" in line.hear()
            line.say("cold", code=str(self.made.code), weights={})
            return line.hear()

    def send_document(self) -> None:
        """Send it its document."""
        document = {"launch": self.made.launch.to_json(), "secrets": {"TOKEN": "one"}}
        self._control.post(POD_PROMOTE, json=document).raise_for_status()

    def fork(self, name: str, token: str | None = "more") -> httpx.Response:
        """Ask for an instance."""
        secrets = {"TOKEN": token} if token is not None else {}
        return self._control.post(POD_FORK, json={"instance": name, "secrets": secrets})

    def stop(self, port: int, grace_s: float = WAIT_S) -> None:
        """Stop an instance."""
        self._control.post(POD_STOP, json={"port": port, "grace_s": grace_s}).raise_for_status()

    def instances(self) -> list[dict[str, Any]]:
        """All of the pod."""
        told: list[dict[str, Any]] = self._control.get(POD_INSTANCES).json()["instances"]
        return told

    def until(self, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        """Wait for a state of the instances."""
        deadline = time.monotonic() + WAIT_S
        while not holds(told := self.instances()):
            assert time.monotonic() < deadline, told
            time.sleep(0.01)
        return told

    def call(self, port: int, x: float = 0.0) -> list[Any]:
        """One call."""
        with httpx.Client(base_url=f"http://{self.host}:{port}", timeout=WAIT_S) as client:
            answer: list[Any] = client.post("/invoke/", json={"x": x}).json()
            return answer

    def status(self, port: int) -> dict[str, Any]:
        """What an instance says about itself."""
        with httpx.Client(base_url=f"http://{self.host}:{port}", timeout=WAIT_S) as client:
            answer: dict[str, Any] = client.get(WORKER_STATUS).json()
            return answer

    def close(self) -> None:
        """Close the connections."""
        self._control.close()


@contextlib.contextmanager
def forking(
    code: Mapping[str, str] = CODE, spec: FunctionSpec = SPEC
) -> Iterator[tuple[ForkingPod, FakePodAgent]]:
    """A pod of small instances, and its node agent."""
    with pod(code, spec, secrets={"TOKEN": "one"}) as made:
        made.launch = replace(made.launch, memory_bytes=1024**2)
        with FakePodAgent(made.node) as agent, contextlib.closing(ForkingPod(made)) as it:
            yield it, agent


def test_instances_are_forks_with_ports_secrets_and_randomness_of_their_own() -> None:
    with forking() as (it, agent):
        said = it.begin(agent)
        two = it.fork("i-2", "two").json()["port"]
        answered = it.call(two)
        again = it.fork("i-2", "two").json()["port"]
        three = it.fork("i-3").json()["port"]
        answers = [it.call(8080), answered, it.call(three)]
        status = it.status(two)
        it.made.wait_said("launcher.ready start=FORK instance=i-3")
        printed = it.made.printed()

    assert said["start_kind"] == "COLD"
    assert (two, again, three) == (8081, 8081, 8082)
    assert len({pid for pid, *_ in answers}) == 3
    assert len({born for _, born, *_ in answers}) == 1
    assert [token for *_, token, _ in answers] == ["one", "two", "more"]
    assert len({number for *_, number in answers}) == 3
    assert (status["instance"], status["start_kind"]) == ("i-2", "FORK")
    assert list(status["phases_ms"]) == ["fork", "wake"]
    assert [line.partition("\x1f")[0] for line in printed.split("\n") if "called" in line] == [
        "\x1e@i-2",
        "called",
        "\x1e@i-3",
    ], "a further instance is named in its lines"


def test_a_further_instance_answers_within_a_tenth_of_a_second() -> None:
    took_s = []
    with forking() as (it, agent):
        it.begin(agent)
        for number in range(5):
            began = time.monotonic()
            it.call(it.fork(f"i-{number}").json()["port"])
            took_s.append(time.monotonic() - began)

    print("first answer of a fork:", ", ".join(f"{one * 1000:.1f} ms" for one in sorted(took_s)))
    assert min(took_s) <= 0.10


def test_an_instance_that_is_stopped_finishes_its_call_and_ends_alone() -> None:
    with forking() as (it, agent):
        it.begin(agent)
        it.fork("i-2")
        it.stop(8080)
        it.until(lambda told: [one["port"] for one in told if one["state"] != "ended"] == [8081])

        assert it.call(8081)[1] > 0
        it.stop(8081)
        it.until(lambda told: all(one["state"] == "ended" for one in told))
        it.made.wait_said("launcher.idle")
        port = it.fork("i-3").json()["port"]
        assert port == 8082, "a port is used again as late as possible"
        assert it.call(port)


def test_a_killed_instance_leaves_the_others_and_is_told_with_its_signal() -> None:
    with forking() as (it, agent):
        it.begin(agent)
        victim = it.call(it.fork("i-2").json()["port"])[0]
        os.kill(victim, signal.SIGKILL)
        told = it.until(lambda told: told[-1]["state"] == "ended")

        assert (told[-1]["instance"], told[-1]["status"]) == ("i-2", 137)
        assert it.call(8080)
        assert it.call(it.fork("i-3").json()["port"])


def test_without_its_template_a_pod_serves_on_and_ends_with_its_last_instance() -> None:
    with forking() as (it, agent):
        it.begin(agent)
        pid, template, *_ = it.call(it.fork("i-2").json()["port"])
        os.kill(template, signal.SIGKILL)
        it.made.wait_said("launcher.template_ended status=137 instances=2")

        assert it.call(8080)
        assert it.call(8081)
        refused = it.fork("i-3")
        assert (refused.status_code, refused.json()["detail"]) == (409, "the pod has no template")
        it.stop(8080)
        it.until(lambda told: len([one for one in told if one["state"] != "ended"]) == 1)
        os.kill(pid, signal.SIGKILL)
        assert it.made.wait_exit() in (1, 137)  # an orphan of a launcher that is not its init


def test_the_pods_memory_bounds_its_instances_and_one_that_ends_makes_room() -> None:
    limit = memory_limit()
    with forking() as (it, agent):
        it.made.launch = replace(it.made.launch, memory_bytes=limit // 2)
        it.begin(agent)
        assert it.fork("i-2").status_code == 200
        refused = it.fork("i-3")
        assert refused.status_code == 409
        assert refused.json()["detail"].startswith("no room: 2 instances")
        it.stop(8081)
        it.made.wait_said("launcher.ended instance=i-2")
        assert it.fork("i-4").status_code == 200


def test_a_fork_before_the_first_instance_serves_is_one_to_ask_for_again() -> None:
    code = "import time\ntime.sleep(0.3)\ndef f(): return 1\n"
    with forking({"app.py": code}) as (it, agent), ThreadPoolExecutor(1) as pool:
        it.made.begin()
        begun = pool.submit(it.promote, agent)
        it.made.wait_said("launcher.boot")
        early = it.fork("i-2")
        assert early.status_code == 503
        assert early.json()["detail"] == "its first instance is booting"
        begun.result()
        assert it.fork("i-2").status_code == 200


@pytest.mark.root
def test_a_pod_that_is_resized_waits_for_its_memory_and_has_room_by_its_new_limit() -> None:
    """In a control group as a kubelet's: smaller than its function at first, then larger."""
    group = PodGroup(str(uuid.uuid4()))
    files = group.make()
    if not files or not group.set_limit(400 * MIB):
        pytest.skip("no control groups with a memory limit can be made here")
    try:
        with forking() as (it, agent):
            enter = "".join(f"echo 0 > {file}; " for file in files)
            it.made.wrapper = ["sh", "-ec", f'{enter}exec "$@"', "sh"]
            it.made.launch = replace(it.made.launch, memory_bytes=500 * MIB)
            it.made.begin()
            with agent.accept() as line:
                it.send_document()
                assert line.is_silent(0.2)
                group.set_limit(1000 * MIB)
                assert "launch" in line.hear()
                line.say("cold", code=str(it.made.code), weights={})
                assert line.hear()["phases_ms"]["resize"] >= 100
            assert it.fork("i-2").status_code == 200
            group.set_limit(999 * MIB)
            refused = it.fork("i-3")
            assert refused.json()["detail"].startswith("no room: 2 instances")
            group.set_limit(1500 * MIB)
            assert it.fork("i-4").status_code == 200
    finally:
        group.remove()


@pytest.mark.parametrize(
    "code",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
        "import subprocess\nCHILD = subprocess.Popen(['sleep', '99'])\n",
    ],
    ids=["threads", "processes"],
)
def test_a_worker_that_cannot_be_forked_serves_in_place(code: str) -> None:
    with forking({"app.py": code + "def f(): return 1\n"}) as (it, agent):
        it.begin(agent)
        refused = it.fork("i-2")
        assert (refused.status_code, refused.json()["detail"]) == (409, "the pod has no template")
        assert [one["port"] for one in it.instances()] == [8080]


def test_a_fork_whose_hook_raises_is_told_with_the_error_and_wrong_requests_are_refused() -> None:
    code = """
        import os, pilotlight
        class C:
            @pilotlight.enter(snap=False)
            def hook(self):
                if os.environ.get("TOKEN") == "bad":
                    raise ValueError("no such token")
            @pilotlight.method()
            def f(self): return 1
    """
    with forking({"app.py": code}, CLASS) as (it, agent):
        it.begin(agent)
        assert it.fork("not an id").status_code == 400
        assert it.fork("i-2", "x" * 150_000).status_code == 409
        assert it.fork("i-2", None).status_code == 400, "its secrets are missing"
        it.fork("i-3", "bad")
        told = it.until(lambda told: told[-1]["state"] == "ended")

    assert "no such token" in told[-1]["error"]["message"]
    assert (told[-1]["error"]["phase"], told[-1]["status"]) == ("wake", 1)


def test_sigterm_drains_all_instances_and_ends_the_pod() -> None:
    with forking() as (it, agent):
        it.begin(agent)
        it.fork("i-2")
        it.call(8081)
        it.made.terminate()
        assert it.made.wait_exit() == 0


def test_the_limit_of_a_container_is_read_with_both_versions_of_control_groups(
    tmp_path: Path,
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "memory/kube/pod").mkdir(parents=True)
    groups = tmp_path / "cgroup"
    groups.write_text("0::/a/b\n")
    machines = memory_limit(groups=groups, root=tmp_path)
    assert machines > 1024**2
    (tmp_path / "a/b/memory.max").write_text("max\n")
    (tmp_path / "a/memory.max").write_text("4096\n")
    assert memory_limit(groups=groups, root=tmp_path) == 4096
    (tmp_path / "memory.max").write_text("1024\n")
    assert memory_limit(groups=groups, root=tmp_path) == 1024

    groups.write_text("8:cpu,cpuacct:/x\n5:memory:/kube/pod\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(groups=groups, root=tmp_path) == machines
    (tmp_path / "memory/kube/pod/memory.limit_in_bytes").write_text("2048\n")
    assert memory_limit(groups=groups, root=tmp_path) == 2048


def test_room_is_at_least_one_instance_and_at_most_what_fits() -> None:
    assert [room(100, limit, most=16) for limit in (50, 100, 350, 10**9)] == [1, 1, 3, 16]
