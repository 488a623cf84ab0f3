"""A pod's life as its kubelet and its node agent see it: the real launcher with real workers, on a
loopback address."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.spec.function import FunctionKind
from snapshotter.types import WeightsMount
from tests.fakes.fake_shim import function_spec
from tests.fakes.launched_pod import BUNDLE, IN_SIGHT, Pod, pod
from tests.fakes.pod_agent import FakePodAgent

CODE = {
    "app.py": """
        import os
        print("imported")
        def f(x=1): return x + 1
        def where():
            try:
                open("/opt/x", "w")
            except OSError as e:
                return os.getuid(), str(e)
        def zombie():
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                left = os.fork()
                if left:
                    os.write(writing, str(left).encode())
                os._exit(0)
            return os.waitpid(child, 0)[1], int(os.read(reading, 100))
    """
}


@pytest.fixture
def plain() -> Iterator[Pod]:
    with pod(CODE, function_spec(), env={"COLOUR": "green"}) as made:
        yield made


def test_a_pod_serves_what_its_node_agent_gave_it(plain: Pod) -> None:
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("wait", why="fetching weights: 1 of 2 GiB")
            line.say(
                "cold", code=str(plain.code), weights={}, phases_ms={"code": 3.0, "weights": 4.0}
            )
            said = line.hear()

            with plain.client() as client:
                answer = client.post("/invoke/", json={"x": 41}).json()
                status = client.get("/pilotlight/health").json()

    assert answer == 42
    assert line.announced["op"] == "announce"
    assert line.announced["launch"] == json.loads(json.dumps(plain.launch.to_json()))
    assert line.announced["pod"] == "pod-1"
    assert line.announced["running"] is False
    assert said["op"] == "ready"
    assert (status["instance"], status["running"], status["start_kind"]) == ("pod-1", 0, "COLD")
    assert list(status["phases_ms"]) == [
        "agent",
        "code",
        "weights",
        "boot",
        "import",
        "enter",
        "warmup",
        "serve",
        "wake",
    ]
    assert 'launcher.wait why="fetching weights: 1 of 2 GiB"' in plain.said
    assert "imported" in plain.printed()


def test_a_probe_is_refused_until_the_worker_listens(plain: Pod) -> None:
    import httpx

    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept(), plain.client() as client, pytest.raises(httpx.ConnectError):
            client.get("/pilotlight/health")


def test_an_application_is_served_on_the_address() -> None:
    application = """
        def f():
            return application

        async def application(scope, receive, send):
            if scope["type"] == "http":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": scope["path"].encode()})
            else:
                while (await receive())["type"] == "lifespan.startup":
                    await send({"type": "lifespan.startup.complete"})
                await send({"type": "lifespan.shutdown.complete"})
    """
    with (
        pod({"app.py": application}, function_spec(kind=FunctionKind.ASGI)) as made,
        FakePodAgent(made.node) as agent,
    ):
        made.begin()
        with agent.accept() as line:
            line.say("cold", code=str(made.code), weights={})
            line.hear()
            with made.client() as client:
                assert client.get("/asgi/hello").text == "/hello"
                assert client.get("/pilotlight/health").json()["start_kind"] == "COLD"


def test_weights_and_code_are_named_below_the_tenants_directory() -> None:
    code = {
        "app.py": "import os, json\ndef f(): return json.loads(os.environ['PILOTLIGHT_WEIGHTS'])\n"
    }
    mounts = [WeightsMount(name="model", manifest="a" * 64)]
    with pod(code, function_spec(), weights=mounts) as made, FakePodAgent(made.node) as agent:
        (made.node / "bundles").mkdir()
        made.code.rename(made.node / "bundles" / BUNDLE)
        made.begin()
        with agent.accept() as line:
            line.say("cold", code=f"bundles/{BUNDLE}", weights={"model": f"weights/{'a' * 64}"})
            line.hear()
            with made.client() as client:
                assert client.post("/invoke/", json={}).json() == {
                    "model": f"{made.node}/weights/{'a' * 64}"
                }


def test_secrets_are_out_of_sight_until_the_worker_is_an_instance() -> None:
    code = """
        import os
        SEEN = "s3cret" in open("/proc/self/environ").read()
        def token(): return [SEEN, os.environ["TOKEN"]]
    """
    with (
        pod({"app.py": code}, function_spec(qualname="token"), secrets={"TOKEN": "s3cret"}) as made,
        FakePodAgent(made.node) as agent,
    ):
        made.begin()
        with agent.accept() as line:
            line.say("cold", code=str(made.code), weights={})
            line.hear()
            with made.client() as client:
                assert client.post("/invoke/", json={}).json() == [False, "s3cret"]
        assert "s3cret" not in json.dumps(line.announced)
        assert "s3cret" not in (made.work / "launch.json").read_text()


def test_a_secret_that_the_pod_does_not_have_is_named() -> None:
    with pod(CODE, function_spec(), secrets={"TOKEN": "x"}) as made:
        del made.variables["TOKEN"]
        made.begin()

        assert made.wait_exit() == 78
        assert "TOKEN" in made.said
        assert "envFrom" in made.said


def test_the_workers_environment_is_the_images_without_what_is_the_launchers(plain: Pod) -> None:
    (plain.code / "app.py").write_text("import os\ndef f(): return dict(os.environ)\n")
    plain.variables["CUDA_HOME"] = "/usr/local/cuda"
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("cold", code=str(plain.code), weights={})
            line.hear()
            with plain.client() as client:
                env = client.post("/invoke/", json={}).json()

    assert env["CUDA_HOME"] == "/usr/local/cuda"
    assert env["COLOUR"] == "green"
    assert env["HOME"] == str(plain.work / "work")
    assert env["TMPDIR"] == str(plain.work / "tmp")
    assert "PILOTLIGHT_LAUNCH" not in env
    assert "PILOTLIGHT_NODE" not in env


def test_an_agent_that_restarts_changes_nothing_for_a_running_worker(plain: Pod) -> None:
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("cold", code=str(plain.code), weights={})
            line.hear()
    with FakePodAgent(plain.node) as agent, agent.accept() as line, plain.client() as client:
        line.say("refused", code="no_capacity", message="anything")
        line.say("cold", code="/elsewhere", weights={})
        line.shout(b"not json\n")

        assert line.hear() == {}  # it hung up on nonsense
        assert client.post("/invoke/", json={"x": 1}).json() == 2
        with agent.accept() as again:
            assert again.announced["running"] is True
    assert line.announced["running"] is True


def test_an_agent_that_comes_back_before_the_code_was_there_is_asked_again(plain: Pod) -> None:
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("wait", why="unpacking")
    with FakePodAgent(plain.node) as agent, agent.accept() as line:
        assert line.announced["running"] is False
        line.say("cold", code=str(plain.code), weights={})
        assert line.hear()["op"] == "ready"


@pytest.mark.slow  # starts a worker, and waits for its clock
def test_without_an_agent_the_images_own_code_is_booted(plain: Pod) -> None:
    plain.code.rename(plain.baked / "code")
    (plain.baked / "bundle.sha256").write_text(f"{BUNDLE}  bundle.tar.gz\n")
    plain.begin()
    plain.wait_said("launcher.alone")
    plain.wait_said("launcher.ready")

    with plain.client() as client:
        assert client.post("/invoke/", json={"x": 1}).json() == 2


@pytest.mark.slow  # starts a worker, and waits for its clock
def test_code_of_another_bundle_is_not_taken_and_the_startup_clock_ends_the_wait(
    plain: Pod,
) -> None:
    with pod(CODE, function_spec(), startup_s=6.0) as made:
        made.code.rename(made.baked / "code")
        (made.baked / "bundle.sha256").write_text("c" * 64)
        made.begin()

        assert made.wait_exit() == 75
        assert "launcher.timeout status=75 startup_s=6.0" in made.said
        assert "no node agent has created" in made.said


def test_what_the_agent_refuses_is_said_and_ends_the_pod(plain: Pod) -> None:
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say(
                "refused", code="bundle_unavailable", message="bundle bbbb is not in the blob store"
            )

            assert plain.wait_exit() == 69
    assert (
        'launcher.refused status=69 code=bundle_unavailable message="bundle bbbb is not in the '
        'blob store"' in plain.said
    )


def test_user_code_that_raises_is_named_in_the_last_lines() -> None:
    with (
        pod({"app.py": "raise ValueError('no such model')"}, function_spec()) as made,
        FakePodAgent(made.node) as agent,
    ):
        made.begin()
        with agent.accept() as line:
            line.say("cold", code=str(made.code), weights={})

            assert made.wait_exit() == 1
    assert 'launcher.failed phase=import type=ValueError message="no such model"' in made.said
    assert "Traceback" in made.said


def test_sigterm_drains_the_worker_and_its_status_is_passed_on(plain: Pod) -> None:
    (plain.code / "app.py").write_text(
        "import atexit\natexit.register(print, 'left in order')\ndef f(): return 1\n"
    )
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("cold", code=str(plain.code), weights={})
            line.hear()
            plain.terminate()

            assert plain.wait_exit() == 0
            assert line.hear()["op"] == "ended"
    assert "left in order" in plain.printed()


def test_sigterm_while_it_waits_ends_it_at_once(plain: Pod) -> None:
    plain.begin()
    plain.wait_said("launcher.wait")
    plain.terminate()

    assert plain.wait_exit() == 143


def test_sigterm_while_it_is_still_imported_ends_it_at_once(plain: Pod, tmp_path: Path) -> None:
    """The first process of a container would not get it without a handler."""
    slow = "import sys, time\nprint('importing', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "selectors.py").write_text(slow)  # which the launcher imports
    plain.variables["PYTHONPATH"] = f"{tmp_path / 'slow'}:{plain.variables['PYTHONPATH']}"
    plain.begin()
    plain.wait_said("importing")
    plain.terminate()

    assert plain.wait_exit() == 143  # by itself, where a process without a handler has -15


def test_a_worker_that_is_killed_is_told_by_its_signal(plain: Pod) -> None:
    (plain.code / "app.py").write_text(
        "import os, signal\ndef f(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("cold", code=str(plain.code), weights={})
            line.hear()
            with (
                plain.client() as client,
                pytest.raises(Exception, match=r"disconnected|reset|closed"),
            ):
                client.post("/invoke/", json={})
            assert plain.wait_exit() == 137
    assert "launcher.exit status=137 signal=SIGKILL state=serving" in plain.said


@pytest.mark.root
def test_as_the_containers_first_process_it_reaps_what_others_leave() -> None:
    wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with (
        pod(CODE, function_spec(qualname="zombie"), wrapper=wrapper) as made,
        FakePodAgent(made.node) as agent,
    ):
        made.begin()
        with agent.accept() as line:
            line.say("cold", code=str(made.code), weights={})
            line.hear()
            with made.client() as client:
                status, left = client.post("/invoke/", json={}).json()
            assert status == 0
            # it ends by itself, and is there until somebody asked for its status
            while left in _processes_below(made.process.pid):
                time.sleep(0.01)
            assert _zombies_below(made.process.pid) == []


AS_A_CONTAINER = f"""
work=$1; shift
{IN_SIGHT}
mount --bind "$work" "$work"
mount -o remount,bind,ro /
exec setpriv --reuid=21234 --regid=21234 --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


@pytest.mark.root
def test_a_tenants_uid_and_one_directory_to_write_to_are_enough() -> None:
    """The root filesystem is read-only, and the interpreter, which may lie in root's home here, is
    in sight."""
    with pod(CODE, function_spec(qualname="where")) as made, FakePodAgent(made.node) as agent:
        made.wrapper = ["unshare", "--mount", "sh", "-ec", AS_A_CONTAINER, "sh", str(made.work)]
        made.root.chmod(0o755)
        os.chown(made.work, 21234, 21234)
        made.begin()
        with agent.accept() as line:
            line.say("cold", code=str(made.code), weights={})
            assert line.hear()["op"] == "ready", made.wait_exit() and made.said
            with made.client() as client:
                uid, error = client.post("/invoke/", json={}).json()
    assert uid == 21234
    assert "Read-only" in error


def test_a_restored_worker_that_dies_before_it_serves_ends_the_pod(plain: Pod) -> None:
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                line.say(
                    "restored", fds=[theirs.fileno()], pid=2**22 - 1, phases_ms={"restore": 20.0}
                )
                order = json.loads(ours.recv(65536))
            assert plain.wait_exit() == 75
    assert order == {"op": "serve", "instance": "pod-1", "env": {}}
    assert "launcher.lost" in plain.said


def test_a_restored_worker_without_its_channel_is_not_taken_for_one(plain: Pod) -> None:
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        with agent.accept() as line:
            line.say("restored", pid=5)
            line.say("cold", code=str(plain.code), weights={})
            assert line.hear()["start_kind"] == "COLD"
        plain.wait_said("launcher.not_understood")


@pytest.mark.parametrize(
    "variable, value, word",
    [
        ("PILOTLIGHT_LAUNCH", "/nowhere/launch.json", "/nowhere/launch.json cannot be read"),
        ("PILOTLIGHT_NODE", "", "absolute path"),
        ("PILOTLIGHT_LISTEN", "8080", "host:port"),
        ("PILOTLIGHT_WORK", "/proc/none", "cannot be written"),
    ],
)
def test_a_pod_that_was_put_together_wrongly_is_told_so(
    plain: Pod, variable: str, value: str, word: str
) -> None:
    plain.variables[variable] = value
    with FakePodAgent(plain.node) as agent:
        plain.begin()
        if variable == "PILOTLIGHT_WORK":
            with agent.accept() as line:
                line.say("cold", code=str(plain.code), weights={})
                plain.wait_exit()

        assert plain.wait_exit() == 78
    assert "launcher.misplaced" in plain.said
    assert word in plain.said


def _processes_below(wrapper: int) -> dict[int, str]:
    """What stands in /proc/<pid>/status of those in the namespace whose first process is the
    wrapper's child."""
    found = {}
    for child in Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split():
        for status in Path(f"/proc/{child}/root/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):  # it has just gone
                found[int(status.parent.name)] = status.read_text()
    return found


def _zombies_below(wrapper: int) -> list[int]:
    return [pid for pid, status in _processes_below(wrapper).items() if "State:\tZ" in status]
