"""A worker stands still, is revived, and is a worker at its snapshot point again: whole lives, with
the real worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
from pathlib import Path

import httpx
import pytest

from pilotlight.errors import InvalidInput
from pilotlight.sdk.decorators import asgi_app
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.worker.snapshot.quiesce import refuse_snapshot
from pilotlight.worker.snapshot.snapshot_blockers import SnapshotBlocker
from tests.fakes.fake_shim import (
    ShimTimeout,
    call,
    function_spec,
    read_until,
    signal_pidfd,
)
from tests.fakes.freezing_shim import FreezingShim
from tests.fakes.plain_http import NO_TLS

SERVICE = """
    import os, pilotlight
    app = pilotlight.App("demo")

    @app.cls()
    class Service:
        @pilotlight.enter()
        def load(self):
            self.loaded = [1, 2, 3]
            self.diary = ["load"]

        @pilotlight.enter(snap=False)
        def wake(self):
            self.diary.append("wake " + os.environ["PILOTLIGHT_INSTANCE"])

        @pilotlight.method(example=[2])
        def scale(self, n: int) -> list:
            return [n * x for x in self.loaded]

        @pilotlight.method()
        def read(self, name: str = "") -> list:
            return [self.diary, os.environ.get(name)]
"""


def service(*names: str) -> FunctionSpec:
    methods = [MethodSpec(name="scale", example=[2]), MethodSpec(name="read")]
    return function_spec(qualname="Service", kind=FunctionKind.CLASS, methods=methods)


def links(pid: int) -> dict[int, str]:
    found = {}
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            found[int(entry)] = os.readlink(f"/proc/{pid}/fd/{entry}")
    return found


@pytest.mark.root  # /proc of a Template and of what is dumped is closed to their own user
def test_a_pristine_fork_holds_its_listener_and_nothing_else() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        shim.start("i-1")  # so that there is a pidfd of a sibling to let go of
        forked = shim.wait_event("forked")
        assert forked["instance"] == "i-1"
        shim.checkpoint()
        pid = shim.wait_event("forked", instance="c-1")["pid"]
        held = links(pid)
        assert [held.pop(n) for n in (0, 1, 2)] == ["/dev/null"] * 3
        sockets = [link for link in held.values() if link.startswith("socket:")]
        pipes = [link for link in held.values() if link.startswith("pipe:")]
        assert len(sockets) == 1
        assert len(set(pipes)) * 2 == len(pipes)  # libuv's own, with both ends
        assert len(sockets) + len(pipes) == len(held), held
        assert os.getsid(pid) == pid
        assert len(os.listdir(f"/proc/{pid}/task")) == 1


def test_the_phase_and_the_obstacles_are_told() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        point = shim.wait_event("snapshot_point")
        assert (point["obstacles"], point["listens"]) == ([], [])
        said = shim.checkpoint().said
        assert said.pop("phases_ms").keys() == {"quiesce"}
        assert said == {
            "event": "quiesced",
            "obstacles": [],
            "listens": [],
            "connections_inside": 0,
        }


def test_a_revived_fork_serves_in_place_and_its_control_socket_is_gone() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        frozen = shim.freeze()
        instance = shim.order("serve", "i-1", {"SECRET": "s3"})
        assert list(shim.wait_event("ready")["phases_ms"]) == ["serve", "wake"]
        assert call(instance, "scale", [3]) == [3, 6, 9]
        assert call(instance, "read", ["SECRET"]) == [["load", "wake i-1"], "s3"]
        assert not Path(frozen.path).exists()


def test_a_revived_fork_is_a_template_again() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        shim.freeze()
        assert call(shim.start("i-1"), "read") == [["load", "wake i-1"], None]
        assert call(shim.assign(shim.park(), "i-2"), "read") == [["load", "wake i-2"], None]


def test_a_revived_fork_can_be_checkpointed_again() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        shim.freeze("c-1")
        shim.freeze("c-2")
        assert call(shim.start("i-1"), "scale", [1]) == [1, 2, 3]


def test_a_revived_fork_leaves_with_its_shim() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        frozen = shim.checkpoint()
        shim.wait_event("forked", instance="c-1")
        pidfd = shim.pids[-1]
        shim.revive(frozen)
        shim.hang_up()
        assert select.select([pidfd], [], [], 30)[0]


def test_a_fork_ends_with_its_shim_though_its_worker_went_first_and_it_stands_still() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        shim.freeze()
        [pidfd] = map(os.dup, shim.pids)
        shim.wait_exit()
        signal_pidfd(pidfd, signal.SIGSTOP)
    assert select.select([pidfd], [], [], 5)[0]
    os.close(pidfd)


def test_a_restored_process_knows_how_long_it_was_frozen() -> None:
    code = "import os\ndef f(): return float(os.environ['PILOTLIGHT_FROZEN_S'])"
    with FreezingShim({"app.py": code}, function_spec()) as shim:
        shim.freeze()
        seconds = call(shim.start())
        assert isinstance(seconds, float)
        assert 0 <= seconds < 5  # no clock was stopped here


def test_the_template_goes_on_after_a_checkpoint_was_taken_of_it() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        shim.checkpoint()
        assert call(shim.start("i-1"), "scale", [1]) == [1, 2, 3]
        os.kill(shim.wait_event("forked", instance="c-1")["pid"], signal.SIGKILL)
        assert os.WTERMSIG(shim.wait_event("exited", instance="c-1")["status"]) == signal.SIGKILL


THREADED = """
    import os, subprocess, sys, threading, queue
    asked, answered = queue.Queue(), queue.Queue()

    def work():
        while True:
            answered.put(asked.get() * 2)

    threading.Thread(target=work, daemon=True, name="work").start()
    child = subprocess.Popen([sys.executable, "-c", "while True: print(input().upper(), flush=True)"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print("imported", flush=True)

    def f(n: int, text: str):
        asked.put(n)
        child.stdin.write(text + "\\n")
        child.stdin.flush()
        return [answered.get(), child.stdout.readline().strip()]
"""


@pytest.mark.root  # as above
def test_a_worker_with_threads_and_processes_is_checkpointed_in_place() -> None:
    with FreezingShim({"app.py": THREADED}, function_spec()) as shim:
        assert shim.wait_event("snapshot_point")["threads"] == ["work"]
        shim.freeze(in_place=True)
        assert links(shim.pid)[1] == str(shim.root / "stderr")  # its own output stayed
        instance = shim.start("i-1", op="serve")
        assert call(instance, "", [4, "abc"]) == [8, "ABC"]


def test_a_worker_with_threads_is_not_forked_for_a_checkpoint() -> None:
    with FreezingShim({"app.py": THREADED}, function_spec()) as shim:
        with pytest.raises(ShimTimeout, match="without a word"):
            shim.checkpoint()
        with pytest.raises(ShimTimeout, match="threads are running at the snapshot point: work"):
            shim.wait_event("quiesced")


CONNECTED = """
    import json, os, socket
    class Service:
        def __init__(self):
            where = json.load(open("where"))
            self.connection = socket.create_connection(tuple(where))
        def close(self):
            self.connection.close()
            return True
"""


def connected_shim(port: int) -> FreezingShim:
    spec = function_spec(
        qualname="Service", kind=FunctionKind.CLASS, methods=[MethodSpec(name="close")]
    )
    code = CONNECTED.replace('json.load(open("where"))', f'["127.0.0.1", {port}]')
    return FreezingShim({"app.py": code}, spec)


@pytest.mark.parametrize("in_place", [False, True])
def test_an_open_connection_is_named_and_the_worker_goes_on(in_place: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with connected_shim(port) as shim:
            (obstacle,) = shim.wait_event("snapshot_point")["obstacles"]
            assert (obstacle["kind"], obstacle["what"], obstacle["where"]) == (
                "connection",
                f"TCP to 127.0.0.1:{port}",
                "app.py:6",
            )
            message = (
                rf"enter\(\) left a connection open: descriptor \d+, TCP to "
                rf"127.0.0.1:{port} \(app.py:6\). Close it, or open it in @enter"
            )
            assert re.match(message, obstacle["message"])

            said = shim.checkpoint(in_place=in_place).said
            assert said["obstacles"] == [obstacle]
            if not in_place:
                assert shim.wait_event("exited", instance="c-1")["status"] == 0
            assert call(shim.start("i-1"), "close") is True


def test_a_worker_whose_forks_run_is_not_checkpointed_in_place() -> None:
    with FreezingShim({"app.py": SERVICE}, service()) as shim:
        shim.start("i-1")
        with pytest.raises(ShimTimeout, match="without a word"):
            shim.checkpoint(in_place=True)
        with pytest.raises(ShimTimeout, match="1 forks of it are running"):
            shim.wait_event("quiesced")
        assert call(shim.start("i-2"), "scale", [1]) == [1, 2, 3]


UNIQUE = """
    import asyncio, json, os, platform, random, secrets, socket, ssl, tempfile, uuid
    import multiprocessing, multiprocessing.synchronize, multiprocessing.process
    import numpy, numpy.random, torch

    random.random(), numpy.random.random(), torch.rand(1), ssl.RAND_bytes(1), next(tempfile._get_candidate_names()), uuid.uuid1()
    lock = multiprocessing.Lock()

    def f():
        return {
            "random": random.random(),
            "numpy": float(numpy.random.random()),
            "torch": float(torch.rand(1)),
            "openssl": ssl.RAND_bytes(8).hex(),
            "tempfile": tempfile.mktemp(),
            "uuid1": str(uuid.uuid1())[15:],  # without the fast half of its clock
            "uuid node": uuid.getnode(),
            "uuid4": str(uuid.uuid4()),
            "urandom": os.urandom(8).hex(),
            "secrets": secrets.token_hex(8),
            "authkey": bytes(multiprocessing.process.current_process().authkey).hex(),
            "semaphore": next(multiprocessing.synchronize.SemLock._rand),
            "instance": os.environ["PILOTLIGHT_INSTANCE"],
        }
"""


@pytest.mark.slow  # numpy, torch and five lives
def test_two_lives_of_one_process_have_nothing_random_in_common() -> None:
    """Forks of one frozen process: each begins with the same bytes in memory, as two restores
    do."""
    with FreezingShim({"app.py": UNIQUE}, function_spec()) as shim:
        shim.freeze()
        lives = [call(shim.start(f"i-{n}")) for n in range(3)]
        lives.append(call(shim.assign(shim.park(), "i-3")))
        lives.append(call(shim.start("i-4", op="serve")))  # without a fork, as after a restore
        for source in lives[0]:  # type: ignore[attr-defined]
            values = [json.dumps(life[source]) for life in lives]  # type: ignore[index]
            assert len(set(values)) == len(lives), (source, values)


def test_output_of_a_frozen_fork_goes_nowhere_and_that_of_its_instance_to_its_pipes() -> None:
    with FreezingShim({"app.py": "def f(): print('said')"}, function_spec()) as shim:
        shim.freeze()
        instance = shim.start("i-1", op="serve")
        call(instance)
        assert b"said" in read_until(instance.stdout)
        assert "said" not in shim.worker_output()


SERVER = """
    import itertools, os, subprocess, sys, threading, pilotlight
    app = pilotlight.App("demo")
    built = itertools.count(1)

    @app.cls()
    class Site:
        @pilotlight.enter()
        def load(self):
            self.ticks = threading.Event()
            self.thread = threading.Thread(target=self.ticks.wait, name="ticker", daemon=True)
            self.thread.start()
            self.child = subprocess.Popen([sys.executable, "-S", "-c", "while True: print(input().upper(), flush=True)"],
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        @pilotlight.asgi_app(ASGI_OPTIONS)
        def web(self):
            from fastapi import FastAPI
            site = FastAPI()
            number = next(built)
            with open("imports", "a") as log:
                log.write("x")

            @site.get("/shout/{text}")
            async def shout(text: str):
                self.child.stdin.write(text + "\\n")
                self.child.stdin.flush()
                name = os.environ.get("PILOTLIGHT_INSTANCE", "nobody")
                return {"text": self.child.stdout.readline().strip(), "thread": self.thread.is_alive(), "built": number, "name": name}

            @site.get("/health")
            def health(): return "fine"

            @site.get("/broken")
            def broken(): return 1 / 0
            return site
"""


def server_shim(options: str = "") -> FreezingShim:
    return FreezingShim(
        {"app.py": SERVER.replace("ASGI_OPTIONS", options)},
        function_spec(qualname="Site", kind=FunctionKind.ASGI),
    )


@pytest.mark.parametrize("options", ["", "example='/health'"])
def test_a_web_application_with_threads_and_processes_comes_back(options: str) -> None:
    with server_shim(options) as shim:
        assert "ticker" in shim.wait_event("snapshot_point")["threads"]
        shim.freeze(in_place=True)
        instance = shim.start("i-1", op="serve")
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
            base_url="http://worker",
            timeout=30,
        ) as client:
            answer = client.get("/asgi/shout/abc").json()
            assert answer == {"text": "ABC", "thread": True, "built": 1, "name": "i-1"}
            assert client.get("/pilotlight/health").json()["start_kind"] == "RESTORE"


def test_a_web_application_with_an_example_is_built_before_the_snapshot_and_proven() -> None:
    with server_shim("example='/health'") as shim:
        point = shim.wait_event("snapshot_point")
        assert point["threads"] == ["ticker"]  # those of the first request are gone
        shim.freeze(in_place=True)
        proved = shim.prove()
        assert (proved["ok"], proved["error"]) == (True, None)
        assert proved["phases_ms"]["first_answer"] > 0
        assert (shim.work / "imports").read_text() == "x"  # no import of a framework in it


def test_a_web_application_whose_example_fails_does_not_start() -> None:
    with server_shim("example='/broken'") as shim:
        failed = shim.receive()
        assert (failed["event"], failed["phase"], failed["error"]["type"]) == (
            "failed",
            "warmup",
            "ZeroDivisionError",
        )


@pytest.mark.parametrize("example", ["health", 5, ["/"]])
def test_the_example_of_a_web_application_is_a_path(example: object) -> None:
    with pytest.raises(InvalidInput, match="must be a path"):
        asgi_app(example=example)  # type: ignore[arg-type]


def test_what_is_known_to_stand_in_the_way_is_told_without_standing_still() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = os.open(os.devnull, os.O_RDONLY)

    refuse_snapshot(
        (listener, theirs.detach()),
        SnapshotBlocker(
            kind="process", fd=None, what="engine", where=None, message="it does not fall asleep"
        ),
    )

    with ours:
        told = json.loads(ours.recv(65536))
        assert (told["event"], told["obstacles"][0]["message"]) == (
            "quiesced",
            "it does not fall asleep",
        )
        assert ours.recv(1) == b""


RECORDED = """
    import threading, pathlib, pilotlight

    app = pilotlight.App("a")

    @app.function(example=[1])
    def f(n):
        with open("where", "a") as f:
            f.write(f"{n} in {threading.current_thread() is threading.main_thread()}\\n")
        return n
"""


def test_a_worker_whose_memory_is_recorded_serves_its_examples_and_stays() -> None:
    """A start and a call access memory that the answer of a proof alone does not: the call's
    thread, the HTTP server."""
    with FreezingShim({"app.py": RECORDED}, function_spec()) as shim:
        shim.freeze(in_place=True)
        (shim.work / "where").unlink()
        assert shim.prove(records=True)["ok"]
        assert (shim.work / "where").read_text() == "1 in True\n1 in False\n"
        assert shim.process.poll() is None
        shim.hang_up()
        assert shim.wait_exit() == 0
