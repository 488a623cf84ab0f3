"""The worker of a sandbox, in this process: commands and their output, files, and its end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pilotlight.errors import InvalidInput, TooManyRequests
from pilotlight.spec.sandboxes import MAX_PROCESSES, PIECE_BYTES, UNREAD_BYTES
from pilotlight.worker.http.sandbox_requests import SandboxServer
from pilotlight.worker.sandbox.lifetime import Sandbox
from pilotlight.worker.sandbox.processes import Output


class Served:
    """A sandbox that lives, and a client of its server."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        application: Any = SandboxServer(sandbox).answer
        transport = httpx.ASGITransport(application)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://worker/sandbox")

    async def execute(self, *args: str, **more: Any) -> dict[str, Any]:
        """Execute a command, and return all of its output, as text."""
        found = (await self.client.post("/exec", json={"args": args, **more})).json()
        ends = {"stdout": 0, "stderr": 0}
        texts = {"stdout": b"", "stderr": b""}
        while True:
            for name in ends:
                piece = base64.b64decode(found[name])
                texts[name] += piece
                ends[name] += len(piece)
            if found["is_ended"]:
                return {**found, **{name: text.decode() for name, text in texts.items()}}
            query = {**ends, "wait_s": 20}
            found = (await self.client.get(f"/processes/{found['process']}", params=query)).json()


@contextlib.asynccontextmanager
async def living(directory: Path, **more: Any) -> AsyncIterator[Served]:
    sandbox = Sandbox()
    given = {"timeout_s": 30.0, "idle_timeout_s": None, "env": {"A": "1"}, **more}
    life = asyncio.create_task(sandbox.run((), workdir=str(directory), **given))
    served = Served(sandbox)
    try:
        async with served.client:
            yield served
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        for process in sandbox.processes.values():
            await process.wait()


async def test_a_command_has_output_status_environment_and_directory(tmp_path: Path) -> None:
    async with living(tmp_path) as served:
        said = await served.execute(
            "sh", "-c", "pwd; echo $A$B >&2; exit 3", workdir="", env={"B": "2"}
        )
        assert (said["stdout"], said["stderr"]) == (f"{tmp_path}\n", "12\n")
        assert said["returncode"] == 3
        assert (await served.execute("sh", "-c", "kill -9 $$"))["returncode"] == 137
        assert (await served.execute("python", "-c", "print(1)"))["stdout"] == "1\n"


async def test_a_command_beyond_its_time_is_killed_with_what_it_started(tmp_path: Path) -> None:
    async with living(tmp_path) as served:
        said = await served.execute("sh", "-c", "sleep 50; echo late", timeout_s=0.1)
        assert (said["returncode"], said["stdout"]) == (124, "")


async def test_output_ends_with_its_command_while_another_process_has_it_open(
    tmp_path: Path,
) -> None:
    async with living(tmp_path) as served:
        said = await served.execute("sh", "-c", "sleep 50 & echo $!")
        assert said["returncode"] == 0
        await served.execute("kill", said["stdout"].strip())


async def test_a_command_waits_for_the_reader_of_its_output(tmp_path: Path) -> None:
    size = 3 * UNREAD_BYTES
    code = f"import sys; sys.stdout.write('x' * {size}); open('done', 'w')"
    async with living(tmp_path) as served:
        begun = await served.client.post("/exec", json={"args": [sys.executable, "-c", code]})
        number = begun.json()["process"]
        process = served.sandbox.process(number)
        await process.wait_output(0, 0, 10)
        async with asyncio.timeout(10):
            while not process.stdout.is_full:
                await process.wait_output(process.stdout.end, 0, 1)
        assert process.stdout.end < UNREAD_BYTES + PIECE_BYTES
        assert not (tmp_path / "done").exists()
        read = 0
        while True:
            query = {"stdout": read, "wait_s": 20}
            news = (await served.client.get(f"/processes/{number}", params=query)).json()
            read += len(base64.b64decode(news["stdout"]))
            if news["is_ended"]:
                break
        assert read == size
        assert (tmp_path / "done").exists()


def test_output_is_read_from_the_last_offset_again_and_not_from_before() -> None:
    output = Output()
    output.append(b"abcdef")
    assert output.read(0) == output.read(0) == b"abcdef"
    assert output.read(4) == output.read(4) == b"ef"
    assert repr(output) == "<Output 4+2 open>"
    for offset in (0, 7):
        with pytest.raises(InvalidInput, match="bytes 4 to 6 are kept"):
            output.read(offset)


async def test_standard_input_is_written_and_closed(tmp_path: Path) -> None:
    async with living(tmp_path) as served:
        number = (await served.client.post("/exec", json={"args": ["cat"]})).json()["process"]
        place = f"/processes/{number}"
        await served.client.post(f"{place}/stdin", content=b"one ")
        await served.client.post(f"{place}/stdin?eof=1", content=b"two")
        await served.sandbox.process(number).wait()
        news = (await served.client.get(place)).json()
        assert news["is_ended"]
        assert base64.b64decode(news["stdout"]) == b"one two"
        refused = await served.client.post(f"{place}/stdin", content=b"more")
        assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (
            400,
            "invalid-input",
        )


async def test_files_and_directories(tmp_path: Path) -> None:
    async with living(tmp_path) as served:
        client = served.client
        assert (await client.put("/files?path=a", content=b"one")).json() == {"offset": 3}
        assert (await client.put("/files?path=a", content=b" two")).json() == {"offset": 7}
        assert (await client.put("/files?path=a&offset=0", content=b"O")).json() == {"offset": 1}
        assert (await client.get("/files?path=a&offset=1&limit=4")).content == b"ne t"
        assert (await client.post("/directory?path=d/e&parents=1")).json() == {}
        assert (await client.get("/directory?path=.")).json() == {"entries": ["a", "d"]}
        assert (await client.get("/directory?path=a&stat=1")).json()["size_bytes"] == 7
        assert (await client.delete("/files?path=d&recursive=1")).json() == {}
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "method, place, status, number",
    [
        ("GET", "/files?path=absent", 404, 2),
        ("GET", "/files?path=/dev/null", 400, 22),
        ("GET", "/files?path=pipe", 400, 22),
        ("GET", "/files?path=.", 400, 21),
        ("PUT", "/files?path=here&exclusive=1", 409, 17),
        ("DELETE", "/files?path=full", 409, 39),
        ("GET", "/files?path=", 400, None),
        ("GET", "/files?path=here&offset=-1", 400, None),
        ("GET", "/processes/9", 404, None),
        ("GET", "/nothing", 404, None),
    ],
)
async def test_what_cannot_be_done_is_said_with_the_kernels_number(
    tmp_path: Path, method: str, place: str, status: int, number: int | None
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "here").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/one").touch()
    async with living(tmp_path) as served, asyncio.timeout(5):
        answer = await served.client.request(method, place)
        assert (answer.status_code, answer.json().get("errno")) == (status, number)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b'{"args": "ls"}', b'{"args": [1]}', b'{"args": [], "env": {}}'),
        *(b'{"args": ["ls"], "env": {"a": 1}}', b'{"args": ["ls"], "timeout_s": 0}'),
        *(b'{"args": ["no-such-command"]}', b'{"args": ["ls"], "workdir": "absent"}'),
        b'{"args": ["a\\u0000b"]}',
    ],
)
async def test_what_is_no_command_is_refused(tmp_path: Path, body: bytes) -> None:
    async with living(tmp_path) as served:
        answer = await served.client.post("/exec", content=body)
        assert answer.status_code == 400


async def test_commands_at_once_are_bounded(tmp_path: Path) -> None:
    async with living(tmp_path) as served:
        sandbox = served.sandbox
        await sandbox.wait_started()

        async def execute() -> Any:
            return await sandbox.execute(["sleep", "50"], workdir="", env={}, timeout_s=None)

        running = [await execute() for _ in range(MAX_PROCESSES)]
        with pytest.raises(TooManyRequests, match="64 commands run"):
            await execute()
        for process in running:
            process.kill()
            await process.wait()


async def test_each_way_to_end_says_so_and_leaves_what_was_not_read(tmp_path: Path) -> None:
    ended: list[str] = []
    ways: dict[str, dict[str, Any]] = {
        "exited": {"args": ["sh", "-c", "echo out; exit 4"], "timeout_s": 30},
        "timeout": {"args": ["sleep", "50"], "timeout_s": 0.1},
        "idle": {"args": [], "timeout_s": 30, "idle_timeout_s": 0.05},
    }
    for reason, how in ways.items():
        sandbox = Sandbox()
        sandbox.on_end = lambda reason=reason: ended.append(reason)  # type: ignore[misc]
        given = {"idle_timeout_s": None, "workdir": str(tmp_path), "env": {}, **how}
        result = await sandbox.run(given.pop("args"), **given)
        assert result["reason"] == reason
        if reason == "exited":
            assert (result["returncode"], result["stdout"], result["stdout_end"]) == (
                4,
                base64.b64encode(b"out\n").decode(),
                4,
            )
        for process in sandbox.processes.values():
            process.kill()
            await process.wait()
    assert ended == list(ways)


async def test_a_request_that_overtakes_the_call_waits_for_it(tmp_path: Path) -> None:
    sandbox = Sandbox()
    waiting = asyncio.create_task(sandbox.wait_started())
    await asyncio.sleep(0)
    life = asyncio.create_task(
        sandbox.run((), timeout_s=5, idle_timeout_s=None, workdir=str(tmp_path), env={})
    )
    await waiting
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    with pytest.raises(Exception, match="is ending"):
        await sandbox.execute(["true"], workdir="", env={}, timeout_s=None)


def test_the_platforms_variables_are_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTLIGHT_API_KEY", "pl_secret")
    monkeypatch.setenv("SECRET_OF_THE_TENANT", "theirs")

    async def printed() -> str:
        async with living(tmp_path) as served:
            return str((await served.execute("env"))["stdout"])

    lines = asyncio.run(printed()).splitlines()
    assert "SECRET_OF_THE_TENANT=theirs" in lines
    assert not [line for line in lines if line.startswith("PILOTLIGHT_")]
