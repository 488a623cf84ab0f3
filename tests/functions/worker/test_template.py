"""From boot to the snapshot point, forks, wakes, drains and exits, through the real worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import cloudpickle
import httpx
import pytest

from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from tests.fakes.fake_shim import (
    FakeShim,
    ShimTimeout,
    call,
    function_spec,
    read_until,
    signal_pidfd,
)
from tests.fakes.plain_http import NO_TLS

HOOKS = """
import atexit, os, random, ssl, tempfile, pathlib
LOG = pathlib.Path("log")  # the working directory is ours to write

def mark(**marks):
    def put(f):
        f._pilotlight_marks = marks
        return f
    return put

def log(text):
    with LOG.open("a") as f:
        f.write(text + "\\n")

atexit.register(log, "atexit")

class Base:
    @mark(enter={"snap": True})
    def load_base(self):
        log("load_base")

class Service(Base):
    def __init__(self):
        log("init")

    @mark(enter={"snap": False})
    def wake(self):
        log("wake " + os.environ["PILOTLIGHT_INSTANCE"] + " " + os.environ["SECRET"])

    @mark(enter={"snap": True})
    async def load(self):
        log("load")

    @mark(method={"example": ["warm"], "check": lambda answer, expected: answer == expected})
    def echo(self, text):
        log("echo " + text)
        return text

    def unique(self):
        values = [random.random(), ssl.RAND_bytes(8).hex(), next(tempfile._get_candidate_names())]
        try:
            import numpy
            values.append(float(numpy.random.random()))
        except ImportError:
            pass
        return values

    @mark(exit=True)
    async def leave(self):
        log("exit hook")
"""


def service_spec() -> FunctionSpec:
    return function_spec(
        qualname="Service",
        kind=FunctionKind.CLASS,
        methods=[MethodSpec(name="echo"), MethodSpec(name="unique")],
    )


def diary(shim: FakeShim) -> list[str]:
    return (shim.work / "log").read_text().splitlines()


def test_hooks_run_in_order_and_base_classes_first() -> None:
    with FakeShim({"app.py": HOOKS}, service_spec()) as shim:
        point = shim.wait_event("snapshot_point")
        assert point["threads"] == []
        assert list(point["phases_ms"]) == ["boot", "import", "enter", "warmup"]
        assert diary(shim) == ["init", "load_base", "load", "echo warm"]

        instance = shim.order("fork", "i-1", {"SECRET": "s3"})
        forked = shim.wait_event("forked")
        assert list(shim.wait_event("ready")["phases_ms"]) == ["fork", "wake"]
        assert diary(shim)[4:] == ["wake i-1 s3"]
        assert call(instance, "echo", ["hi"]) == "hi"

        os.kill(forked["pid"], signal.SIGTERM)
        assert shim.wait_event("exited") == {"event": "exited", "instance": "i-1", "status": 0}
        assert diary(shim)[5:] == ["echo hi", "exit hook", "atexit"]


def test_forks_differ_in_everything_random() -> None:
    with FakeShim({"app.py": "import numpy, numpy.random\n" + HOOKS}, service_spec()) as shim:
        first, second = (call(shim.start(f"i-{n}", {"SECRET": ""}), "unique") for n in range(2))
        assert isinstance(first, list)
        assert isinstance(second, list)
        assert len(first) == 4
        assert all(a != b for a, b in zip(first, second, strict=True))


def test_serve_turns_the_worker_itself_into_the_instance() -> None:
    with FakeShim({"app.py": HOOKS}, service_spec()) as shim:
        instance = shim.start("i-1", {"SECRET": ""}, op="serve")
        assert call(instance, "echo", ["hi"]) == "hi"
        os.kill(shim.pid, signal.SIGTERM)
        assert shim.wait_exit() == 0
        assert diary(shim)[-2:] == ["exit hook", "atexit"]


def test_a_fork_that_is_given_up_before_go_leaves_quietly() -> None:
    with FakeShim({"app.py": HOOKS}, service_spec()) as shim:
        shim.wait_event("snapshot_point")
        parked = shim.order("fork", "i-1", {"SECRET": ""}, go=False)
        shim.wait_event("forked")
        os.close(parked.go)
        shim.descriptors.remove(parked.go)
        assert shim.wait_event("exited")["status"] == 0
        assert "wake i-1 " not in diary(shim)


def memory_of(pid: int) -> bytes:
    """All that a process can write to: heap, stack, anonymous memory, its copies of files'
    pages."""
    found = b""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            place, access, *_ = line.split()
            if access.startswith("rw"):
                first, end = (int(address, 16) for address in place.split("-"))
                memory.seek(first)
                found += memory.read(end - first)
    return found


@pytest.mark.root  # /proc of a Template is closed to its own user
def test_nothing_of_an_environment_stays_in_the_template() -> None:
    secret = "planted-4b8e"
    code = "import os\ndef f(name): return os.environ[name]\nKNOWN = 'kept' + str(len('12'))"
    with FakeShim({"app.py": code}, function_spec()) as shim:
        for n in range(3):
            instance = shim.start(f"i-{n}", {"TOKEN": secret, "LONG": secret * 6000})
            assert call(instance, arguments=["LONG"]) == secret * 6000

        memory = memory_of(shim.pid)

    assert b"kept2" in memory
    assert secret.encode() not in memory


def test_an_environment_almost_as_long_as_a_message_arrives() -> None:
    with FakeShim(
        {"app.py": "import os\ndef f(): return len(os.environ['LONG'])"}, function_spec()
    ) as shim:
        assert call(shim.start("i-1", {"LONG": "x" * 120_000}, op="serve")) == 120_000


def test_a_killed_child_is_reported_with_its_wait_status() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        shim.start("i-1")
        os.kill(shim.wait_event("forked")["pid"], signal.SIGKILL)
        assert os.WTERMSIG(shim.wait_event("exited")["status"]) == signal.SIGKILL


@pytest.mark.parametrize("op", ["fork", "serve"])
def test_when_the_shim_dies_template_and_instances_end(op: str) -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        instance = shim.start("i-1", op=op)
        shim.hang_up()
        assert shim.wait_exit() == 0
        # the end of the pipe: nobody holds it any more
        assert read_until(instance.stdout, b"never") == b""


def test_a_shim_that_dies_before_it_is_told_of_a_fork_ends_the_template_cleanly() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        shim.wait_event("snapshot_point")
        os.kill(shim.pid, signal.SIGSTOP)
        shim.order("fork", "i-1")
        shim.hang_up()
        os.kill(shim.pid, signal.SIGCONT)
        assert shim.wait_exit() == 0, shim.worker_output()


def test_sigterm_refuses_new_connections_and_lets_running_calls_finish() -> None:
    code = """
        def f():
            print("begun")
            with open("fifo") as fifo:   # blocks until the test opens the other end
                return fifo.read()
    """
    with FakeShim({"app.py": code}, function_spec(max_inputs=2)) as shim:
        os.mkfifo(shim.work / "fifo")
        instance = shim.start("i-1")
        pid = shim.wait_event("forked")["pid"]
        client = httpx.Client(
            transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
            base_url="http://worker",
            timeout=30,
        )

        async def story() -> None:
            running = asyncio.create_task(asyncio.to_thread(client.post, "/invoke/", json=[]))
            await asyncio.to_thread(read_until, instance.stdout, b"begun\n")
            os.kill(pid, signal.SIGTERM)
            while True:  # until the signal has arrived
                try:
                    _, writer = await asyncio.open_unix_connection(instance.path)
                except ConnectionRefusedError:
                    break
                writer.close()
                await writer.wait_closed()
            (shim.work / "fifo").write_text("late")
            answer = await running
            assert (answer.json(), answer.headers["connection"]) == ("late", "close")

        with client:
            asyncio.run(story())
        assert shim.wait_event("exited")["status"] == 0


def failure(shim: FakeShim) -> dict[str, object]:
    while True:
        message = shim.receive()
        if message["event"] == "failed":
            return message


@pytest.mark.parametrize(
    "code, phase, type_name",
    [
        ("import missing_thing\ndef f(): pass", "import", "ModuleNotFoundError"),
        ("def f(:", "import", "SyntaxError"),
        ("raise SystemExit(4)", "import", "SystemExit"),
        ("g = 1", "import", "AttributeError"),
        ("class f:\n    def __init__(self):\n        1 / 0", "enter", "ZeroDivisionError"),
    ],
)
def test_what_raises_while_starting_is_reported_as_data_and_on_stderr(
    code: str, phase: str, type_name: str
) -> None:
    with FakeShim({"app.py": code}, function_spec()) as shim:
        message = failure(shim)
        error = message["error"]
        assert isinstance(error, dict)
        assert (message["phase"], message["instance"], error["type"]) == (phase, None, type_name)
        assert ("pilotlight/worker" in error["traceback"]) == (
            type_name == "AttributeError"
        )  # raised by us: what was deployed is not there
        assert shim.wait_exit() == 1
        assert type_name in shim.worker_output()


def test_a_huge_error_is_cut_to_fit() -> None:
    with FakeShim({"app.py": "raise ValueError('\\x00' * 1_000_000)"}, function_spec()) as shim:
        error = failure(shim)["error"]
        assert isinstance(error, dict)
        assert len(json.dumps(error)) < 128 * 1024
        assert "characters cut" in error["traceback"]


def test_a_hook_that_raises_after_the_fork_fails_that_instance_only() -> None:
    code = HOOKS.replace('log("wake "', 'os.environ["SECRET"] == "bad" and 1 / 0; log("wake "')
    with FakeShim({"app.py": code}, service_spec()) as shim:
        shim.wait_event("snapshot_point")
        shim.order("fork", "i-1", {"SECRET": "bad"})
        with pytest.raises(ShimTimeout, match="ZeroDivisionError"):
            shim.wait_event("ready")
        assert os.waitstatus_to_exitcode(shim.wait_event("exited")["status"]) == 1
        assert call(shim.start("i-2", {"SECRET": "good"}), "echo", ["hi"]) == "hi"


def test_a_check_that_rejects_its_own_answer_fails_the_start() -> None:
    code = HOOKS.replace("answer == expected", "False")
    with FakeShim({"app.py": code}, service_spec()) as shim:
        message = failure(shim)
        assert message["phase"] == "warmup"
        assert "check= of echo" in str(message["error"])


def test_surplus_threads_are_named_and_forbid_a_fork() -> None:
    code = """
        import threading
        threading.Thread(target=threading.Event().wait, name="lingering", daemon=True).start()
        def f(): return 1
    """
    with FakeShim({"app.py": code}, function_spec()) as shim:
        assert shim.wait_event("snapshot_point")["threads"] == ["lingering"]
        shim.order("fork", "i-1")
        message = failure(shim)
        assert message["phase"] == "fork"
        assert "lingering" in str(message["error"])
        assert call(shim.start("i-2", op="serve")) == 1


def test_the_users_folder_wins_over_everything_of_the_same_name() -> None:
    code = {
        "app.py": """
            import sys
            import functions, utils, helpers, activator, tests, weight_cache_user
            def f():
                import pilotlight
                return [functions.NAME, utils.NAME, helpers.NAME, activator.NAME, tests.NAME, pilotlight.__file__]
        """,
        "weight_cache_user.py": "",
        **{
            f"{name}.py": f"NAME = {name!r}"
            for name in ("utils", "helpers", "activator", "tests", "types_")
        },
        "functions/__init__.py": "NAME = 'functions'",
    }
    with FakeShim(code, function_spec()) as shim:
        answer = call(shim.start())
        assert isinstance(answer, list)
        assert answer[:-1] == ["functions", "utils", "helpers", "activator", "tests"]
        assert Path(answer[-1]).parent.name == "pilotlight"


def test_our_other_packages_are_not_on_the_users_path() -> None:
    code = """
        import sys
        def f():
            found = []
            for name in ("activator", "snapshotter.shim_of_nobody", "tests.fakes", "benchmarks"):
                try:
                    __import__(name)
                    found.append(name)
                except ImportError:
                    pass
            return found
    """
    with FakeShim({"app.py": code}, function_spec()) as shim:
        assert call(shim.start()) == []


def test_the_worker_brings_nothing_heavy_along() -> None:
    code = """
        import sys
        def f():
            return [m for m in ("torch", "numpy", "pydantic", "fastapi", "starlette", "sqlalchemy", "httpx", "wsproto") if m in sys.modules]
    """
    with FakeShim({"app.py": code}, function_spec()) as shim:
        assert call(shim.start()) == []


def test_environment_home_and_working_directory() -> None:
    code = """
        import os
        def f():
            return [os.environ["PLAIN"], os.environ["HOME"], os.getcwd(), os.environ["OMP_NUM_THREADS"], os.environ["PILOTLIGHT_WEIGHTS"]]
    """
    with FakeShim({"app.py": code}, function_spec(), env={"PLAIN": "yes"}) as shim:
        work = str(shim.work)
        assert call(shim.start()) == ["yes", work, work, "1", "{}"]


def test_a_function_that_travels_by_value() -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    # as in a notebook: a module that cannot be imported
    exec("def f(x): return x * factor\nfactor = 3", namespace)
    data = cloudpickle.dumps(namespace["f"])
    with FakeShim(
        {}, function_spec(module="", pickled="f.pickle"), files={"f.pickle": data}
    ) as shim:
        assert call(shim.start(), "", [14]) == 42


def test_decorated_objects_are_unwrapped() -> None:
    code = """
        class Handle:
            def __init__(self, raw):
                self.__pilotlight__ = type("Declared", (), {"raw": staticmethod(raw)})()
            def __call__(self):
                raise TypeError("not called directly")
        @Handle
        def f():
            return "raw"
    """
    with FakeShim({"app.py": code}, function_spec()) as shim:
        assert call(shim.start()) == "raw"


def test_what_the_sdk_declares_runs() -> None:
    code = """
        import os, pilotlight
        app = pilotlight.App("demo")

        @app.function()
        def double(x: int) -> int:
            return 2 * x

        @app.cls()
        class Counter:
            @pilotlight.enter()
            def load(self):
                self.calls = 100

            @pilotlight.enter(snap=False)
            def wake(self):
                self.calls += 1

            @pilotlight.method(example=[1])
            def add(self, n: int) -> int:
                self.calls += n
                return self.calls

        @app.function()
        @pilotlight.asgi_app()
        def web():
            async def answer(scope, receive, send): ...
            return answer
    """
    with FakeShim({"app.py": code}, function_spec(qualname="double")) as shim:
        assert call(shim.start(), "", {"x": 4}) == 8
    spec = function_spec(
        qualname="Counter", kind=FunctionKind.CLASS, methods=[MethodSpec(name="add", example=[1])]
    )
    with FakeShim({"app.py": code}, spec) as shim:
        assert call(shim.start("i-1"), "add", [5]) == 107  # loaded 100, warmed up 1, woken 1
        assert call(shim.start("i-2"), "add", [5]) == 107
    with FakeShim({"app.py": code}, function_spec(qualname="web", kind=FunctionKind.ASGI)) as shim:
        shim.start()


def test_an_instance_is_not_hurt_by_the_death_of_its_template() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        instance = shim.start()
        shim.process.kill()
        assert call(instance) == 1


def test_descriptors_of_one_fork_are_not_held_by_the_next() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        first = shim.start("i-1")
        shim.start("i-2")
        signal_pidfd(shim.pids[0], signal.SIGKILL)
        shim.wait_event("exited", instance="i-1")
        assert read_until(first.stdout, b"never") == b""
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(first.path)


def test_a_fork_enters_its_groups_by_itself_and_before_go() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        shim.wait_event("snapshot_point")
        readable, way_in = os.pipe()  # stands for a `tasks` file of cgroup v1
        instance = shim.order("fork", "i-1", go=False, entry_files=[way_in, way_in])
        os.close(way_in)
        assert read_until(readable, b"never") == b"00"  # and everybody has closed it
        shim.let_wake(instance)
        os.close(readable)
        shim.wait_event("ready")
        assert call(instance) == 1


def test_the_worker_says_that_its_forks_join() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        assert shim.wait_event("snapshot_point")["joins"] is True


def test_a_parked_fork_becomes_an_instance_by_assignment() -> None:
    with FakeShim({"app.py": HOOKS}, service_spec()) as shim:
        parked = shim.park()
        assert diary(shim)[4:] == []  # no user code runs before it has a name

        instance = shim.assign(parked, "i-1", {"SECRET": "s3"})

        assert diary(shim)[4:] == ["wake i-1 s3"]
        assert call(instance, "echo", ["hi"]) == "hi"
        os.kill(parked.pid, signal.SIGTERM)
        assert shim.wait_event("exited") == {"event": "exited", "instance": "p-1", "status": 0}
        assert diary(shim)[5:] == ["echo hi", "exit hook", "atexit"]


def test_the_phases_of_an_assignment() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        parked = shim.park()
        shim.order("assign", "i-1", go=False, to=parked.channel)
        assert list(shim.wait_event("ready")["phases_ms"]) == ["assign", "wake"]
        parked.channel.close()


def test_parked_forks_differ_in_everything_random() -> None:
    with FakeShim({"app.py": "import numpy, numpy.random\n" + HOOKS}, service_spec()) as shim:
        parked = [shim.park(f"p-{n}") for n in range(2)]
        first, second = (
            call(shim.assign(p, f"i-{p.name}", {"SECRET": ""}), "unique") for p in parked
        )
        assert isinstance(first, list)
        assert isinstance(second, list)
        assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_parked_fork_that_nobody_wants_leaves_quietly() -> None:
    with FakeShim({"app.py": HOOKS}, service_spec()) as shim:
        shim.park().channel.close()
        assert shim.wait_event("exited")["status"] == 0
        assert diary(shim)[4:] == []


def test_a_template_with_parked_forks_goes_on_forking() -> None:
    with FakeShim({"app.py": "def f(): return 1"}, function_spec()) as shim:
        parked = shim.park()
        assert call(shim.start("i-1")) == 1
        assert call(shim.assign(parked, "i-2")) == 1


def test_an_assigned_asgi_application_is_built_after_the_assignment() -> None:
    code = """
        import os
        def web():
            name = os.environ["NAME"]
            async def answer(scope, receive, send):
                if scope["type"] == "http":
                    await send({"type": "http.response.start", "status": 200, "headers": []})
                    await send({"type": "http.response.body", "body": name.encode()})
            return answer
    """
    with FakeShim({"app.py": code}, function_spec(qualname="web", kind=FunctionKind.ASGI)) as shim:
        instance = shim.assign(shim.park(), "i-1", {"NAME": "Ada"})
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
            base_url="http://worker",
            timeout=30,
        ) as client:
            assert client.get("/asgi/").text == "Ada"


REACH = """
import ctypes, os, struct

ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # as a tenant's worker: no CAP_SYS_PTRACE, whoever runs the test

def reach(pid: int):
    if pid == 0:
        return os.getpid()
    try:
        with open(f"/proc/{pid}/mem", "r+b"):
            return "open"
    except PermissionError:
        return "refused"
"""


def test_a_call_opens_the_memory_of_an_instance_but_of_no_template_and_no_parked_fork() -> None:
    with FakeShim({"app.py": REACH}, function_spec(qualname="reach")) as shim:
        first, second = shim.start("i-1"), shim.start("i-2")
        other = call(second, "", {"pid": 0})
        assert call(first, "", {"pid": other}) == "open"
        assert call(first, "", {"pid": shim.pid}) == "refused"
        parked = shim.park()
        assert call(first, "", {"pid": parked.pid}) == "refused"
        assigned = shim.assign(parked, "i-3")
        assert call(first, "", {"pid": call(assigned, "", {"pid": 0})}) == "open"
