"""Functions that come back from snapshots: what they hold before it, what they must find different
after it, and what stands in its way."""

import functools
import multiprocessing
import os
import random
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pilotlight

app = pilotlight.App("frozen")
vault = pilotlight.Secret.from_name("vault")
small = functools.partial(app.cls, cpu=0.25, memory="256MiB", scaledown_window=300, timeout=20)


def meet(at: list[Any] | None) -> None:
    """Wait at this host and port until all who are expected there have come; None: for nobody."""
    if at is not None:
        with socket.create_connection((str(at[0]), int(at[1])), timeout=60) as meeting:
            assert meeting.recv(100)


@small(max_instances=4, timeout=90)
class Greeter:
    """Nothing special."""

    @pilotlight.enter()
    def load(self) -> None:
        self.table = [n * n for n in range(1000)]
        self.loaded_by = os.getpid()

    @pilotlight.method(example=[3])
    def square(self, n: int) -> int:
        print(f"squaring {n}")
        return self.table[n]

    @pilotlight.method()
    def who(self, met: list[Any] | None = None) -> str:
        meet(met)
        return os.environ["PILOTLIGHT_INSTANCE"]


@small(secrets=[vault])
class Keeper:
    """Uses a secret when it may; what the secret says decides how its hook ends after a restore."""

    @pilotlight.enter()
    def load(self) -> None:
        self.events = ["enter"]

    @pilotlight.enter(snap=False, timeout_s=2.0)
    def connect(self) -> None:
        mood = os.environ.get("MOOD", "")
        restored = "PILOTLIGHT_FROZEN_S" in os.environ
        if mood == "raise" or (mood == "raise-restored" and restored):
            raise RuntimeError("the hook is in a bad mood")
        if mood == "hang" or (mood == "hang-restored" and restored):
            time.sleep(3600)
        self.events.append("connect")

    @pilotlight.exit()
    def leave(self) -> None:
        print("the hook says goodbye")

    @pilotlight.method()
    def token(self) -> str | None:
        return os.environ.get("VAULT_TOKEN")

    @pilotlight.method()
    def history(self) -> list[str]:
        return self.events


@small(env={"PEER": os.environ.get("FROZEN_PEER", "127.0.0.1:9")})
class Dialer:
    """Opens a connection too early."""

    @pilotlight.enter()
    def load(self) -> None:
        host, port = os.environ["PEER"].split(":")
        self.peer = socket.create_connection((host, int(port)))

    @pilotlight.method()
    def ask(self) -> str:
        return "fine"


@small(memory="1GiB", max_instances=4, timeout=90)
@pilotlight.concurrent(max_inputs=1)
class Lottery:
    """Everything that two copies of one memory must not have in common."""

    @pilotlight.enter()
    def load(self) -> None:
        import numpy as np
        import torch

        torch.set_num_threads(1)
        self.numpy, self.torch = np, torch
        self.generator = random.Random(4)
        self.names = tempfile._get_candidate_names()  # type: ignore[attr-defined]
        self.began = time.time()

    @pilotlight.method(example=[])
    def draw(self, met: list[Any] | None = None) -> dict[str, Any]:
        meet(met)
        return {
            "random": random.getrandbits(64),
            "numpy": int(self.numpy.random.randint(2**62)),
            "torch": int(self.torch.randint(2**62, (1,))),
            "ssl": ssl.RAND_bytes(16).hex(),
            "secrets": secrets.token_hex(8),
            "uuid1": str(uuid.uuid1()),
            "uuid4": str(uuid.uuid4()),
            "tempfile": next(self.names),
            "hostname": socket.gethostname(),
            "instance": os.environ.get("PILOTLIGHT_INSTANCE"),
            "now": time.time(),
            "frozen_s": os.environ.get("PILOTLIGHT_FROZEN_S"),
        }


@small(max_instances=2)
class Crew:
    """A thread and a subprocess: its whole tree is one snapshot."""

    @pilotlight.enter()
    def load(self) -> None:
        self.ticks = 0
        self.child = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-u",
                "-c",
                "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._tick, name="ticker", daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(0.005)
            self.ticks += 1

    @pilotlight.method(example=["abc"])
    def reverse(self, text: str) -> str:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        print(text, file=self.child.stdin, flush=True)
        return self.child.stdout.readline().strip()

    @pilotlight.method()
    def ticking(self) -> list[int]:
        before = self.ticks
        while self.ticks == before:
            time.sleep(0.01)
        return [before, self.ticks]


@small()
class Team:
    """A pool of forked processes."""

    @pilotlight.enter()
    def load(self) -> None:
        self.pool = multiprocessing.get_context("fork").Pool(2)

    @pilotlight.method(example=[2])
    def absolute(self, n: int) -> int:
        return int(self.pool.apply(abs, (-n,)))


@small(max_instances=4, timeout=90)
@pilotlight.concurrent(max_inputs=1)
class Listener:
    """Listens on a TCP port of its own, always the same one."""

    @pilotlight.enter()
    def load(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 47114))
        threading.Thread(target=self._serve, name="server", daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.server.accept()
            with connection:
                connection.sendall(socket.gethostname().encode())

    @pilotlight.method(example=[])
    def port(self) -> int:
        return int(self.server.getsockname()[1])

    @pilotlight.method()
    def ask_itself(self, met: list[Any] | None = None) -> str:
        meet(met)
        with socket.create_connection(("127.0.0.1", 47114), timeout=30) as mine:
            return mine.recv(100).decode()


@small()
class Files:
    """Everything on a file system, and in shared memory, that must be there afterwards."""

    @pilotlight.enter()
    def load(self) -> None:
        Path("notes.txt").write_text("in the working directory")
        self.temporary = Path(tempfile.gettempdir(), "scratch.txt")
        self.temporary.write_text("in the temporary directory")
        Path("/dev/shm/shared.txt").write_text("in shared memory")
        self.log = open("my.log", "a+", buffering=1)  # noqa: SIM115
        self.log.write("before\n")
        self.deleted = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.deleted.write("has no name")
        self.deleted.flush()
        self.lock: Any = multiprocessing.get_context("fork").Semaphore(3)
        self.lock.acquire()

    @pilotlight.method(example=[])
    def look(self) -> dict[str, Any]:
        self.log.write("and then\n")
        self.log.seek(0)
        self.deleted.seek(0)
        print("looking at the files")
        return {
            "work": Path("notes.txt").read_text(),
            "tmp": self.temporary.read_text(),
            "shm": Path("/dev/shm/shared.txt").read_text(),
            "log": self.log.read().split()[:2],
            "deleted": self.deleted.read(),
            "semaphore": self.lock.get_value(),
        }


@small(memory="1GiB")
class Heavy:
    """A heap that takes a while to write."""

    @pilotlight.enter()
    def load(self) -> None:
        self.block = secrets.token_bytes(192 * 1024 * 1024)

    @pilotlight.method(example=[])
    def size(self) -> int:
        return len(self.block)


@small(snapshot=False)
class Never:
    """Its author does not want it."""

    @pilotlight.method(example=[])
    def ask(self) -> str:
        return "fine"


@app.function(cpu=0.25, memory="256MiB")
@pilotlight.concurrent(max_inputs=10)
@pilotlight.asgi_app(example="/health")
def site() -> Any:
    """A web application that is built before the snapshot."""
    from fastapi import FastAPI

    web = FastAPI()
    made = {"at": time.time(), "by": os.getpid()}

    @web.get("/health")
    async def health() -> dict[str, str]:
        return {"state": "fine"}

    @web.get("/age")
    async def age() -> dict[str, Any]:
        return {"age_s": time.time() - made["at"], "restored": "PILOTLIGHT_FROZEN_S" in os.environ}

    return web
