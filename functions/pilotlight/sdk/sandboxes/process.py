"""Commands in a sandbox, and their streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from pilotlight.client import sandbox_answers
from pilotlight.errors import InvalidInput
from pilotlight.sdk.sandboxes.requests import sandbox_step
from pilotlight.sdk.steps import Operation, Steps, run, run_aio
from pilotlight.spec.sandboxes import FILE_PIECE_BYTES, WAIT_S


class SandboxProcess:
    """A command in a sandbox, started by `Sandbox.exec`. Methods have asynchronous forms, such as
    `await process.wait.aio()`.

    One handle reads the output of a command: what it has taken is not kept in the sandbox. A
    command whose output is not read waits once there is 1 MiB of it; `wait()` reads.

    Attributes:
        stdout, stderr, stdin: its streams.
        returncode: None until it is known that it has ended; 128 + the number of the signal that
            ended it, 124 after its own timeout."""

    def __init__(self, sandbox: str, number: int, *, text: bool = True) -> None:
        self._sandbox = sandbox
        self._number = number
        self._is_ended = False
        self.returncode: int | None = None
        self.stdout, self.stderr = OutputReader(self, text), OutputReader(self, text)
        self.stdin = InputWriter(sandbox, number)

    def __repr__(self) -> str:
        state = "running" if self.returncode is None else f"ended {self.returncode}"
        return f"<SandboxProcess {self._number} of {self._sandbox} {state}>"

    @property
    def is_ended(self) -> bool:
        """Whether all of its output was received."""
        return self._is_ended

    @Operation
    def wait(self) -> Steps[int]:
        """Wait for its end, and return its return code."""
        while not self._is_ended:
            yield from self.pull(WAIT_S)
        assert self.returncode is not None
        return self.returncode

    @Operation
    def poll(self) -> Steps[int | None]:
        """Return its return code if it has ended, else None."""
        if self.returncode is None:
            yield from self.pull(0.0)
        return self.returncode

    @Operation
    def kill(self) -> Steps[None]:
        """Kill it, with the processes of its session."""
        yield sandbox_step(self._sandbox, "POST", f"processes/{self._number}/kill", repeatable=True)

    def pull(self, wait_s: float) -> Steps[None]:
        """Receive further output, waiting up to `wait_s` for some."""
        answer = yield sandbox_step(
            self._sandbox,
            "GET",
            f"processes/{self._number}",
            stdout=self.stdout.end,
            stderr=self.stderr.end,
            wait_s=wait_s,
        )
        self.receive(answer)

    def receive(self, answer: Any) -> None:
        """Take an answer with output that follows the one before. Raises WorkerCrashed for what is
        none."""
        output = sandbox_answers.process_output(answer)
        self.stdout.append(output.stdout)
        self.stderr.append(output.stderr)
        self.returncode, self._is_ended = output.returncode, output.is_ended

    def finish(self, result: Any) -> None:
        """Take what a sandbox that ended with its command had left of its output. Raises
        WorkerCrashed for what is no result of one."""
        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            data, end = sandbox_answers.ended_output(result, name)
            first = (stream.end if end is None else end) - len(data)
            stream.append(data[max(0, stream.end - first) :])
        self.returncode = sandbox_answers.number(result, "returncode")
        self._is_ended = True


class OutputReader:
    """Standard output or error of a command: `read()`, or lines by iteration."""

    def __init__(self, process: SandboxProcess, text: bool) -> None:
        self._process = process
        self._is_text = text
        self._unread = bytearray()
        self.end = 0
        """Number of bytes that were received."""

    def __repr__(self) -> str:
        return f"<OutputReader {self.end} bytes, {len(self._unread)} unread>"

    def append(self, data: bytes) -> None:
        """Take received bytes."""
        self._unread += data
        self.end += len(data)

    @Operation
    def read(self) -> Steps[Any]:
        """Return all that follows, once the command has ended: text, or bytes with
        `text=False`."""
        while not self._process.is_ended:
            yield from self._process.pull(WAIT_S)
        data, self._unread = self._unread, bytearray()
        return self._value(data)

    def __iter__(self) -> Iterator[Any]:
        while (line := run(self._line())) is not None:
            yield line

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (line := await run_aio(self._line())) is not None:
            yield line

    def _line(self) -> Steps[Any]:
        """Return the next line; None at the end."""
        searched = 0
        while (at := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if self._process.is_ended:
                break
            yield from self._process.pull(WAIT_S)
        cut = at + 1 if at >= 0 else len(self._unread)
        data = self._unread[:cut]
        del self._unread[:cut]
        return self._value(data) if data else None

    def _value(self, data: bytearray) -> Any:
        return data.decode(errors="replace") if self._is_text else bytes(data)


class InputWriter:
    """Standard input of a command: `write(…)`, then `drain()`, which sends it."""

    def __init__(self, sandbox: str, number: int) -> None:
        self._sandbox = sandbox
        self._number = number
        self._unsent = bytearray()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<InputWriter {len(self._unsent)} bytes unsent>"

    def write(self, data: str | bytes | bytearray) -> None:
        """Add data, which `drain` sends. Raises InvalidInput after `write_eof`."""
        if self._is_closed:
            raise InvalidInput("standard input is closed: write before write_eof()")
        self._unsent += data.encode() if isinstance(data, str) else data

    def write_eof(self) -> None:
        """End standard input, with the next `drain`."""
        self._is_closed = True

    @Operation
    def drain(self) -> Steps[None]:
        """Send what was written. Raises InvalidInput if the command reads no more."""
        while True:
            piece = bytes(self._unsent[:FILE_PIECE_BYTES])
            is_last = len(piece) == len(self._unsent)
            if not piece and not self._is_closed:
                return
            eof = True if is_last and self._is_closed else None
            path = f"processes/{self._number}/stdin"
            yield sandbox_step(self._sandbox, "POST", path, content=piece, eof=eof)
            del self._unsent[: len(piece)]
            if is_last:
                return
