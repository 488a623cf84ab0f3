"""`Sandbox`: a slot for code that agents write, with commands, files, a lifetime and a network
policy.

It is one submitted call: its id is the call's, the call's record says how it ended and what it
cost, and it lives on without its creator. Equal options make one function of the app, deployed when
the first such sandbox is created (`pilotlight.spec.sandboxes`)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from pilotlight.client import sandbox_answers, sessions
from pilotlight.client.responses import is_finished, parse_record_result
from pilotlight.errors import ClientClosedRequest, DeadlineExceeded, InvalidInput, NotFound
from pilotlight.protocol import CONTENT_JSON, HEADER_TIMEOUT, CallRecord
from pilotlight.sdk import active_app
from pilotlight.sdk.declared_app import DeclaredApp
from pilotlight.sdk.image import Image
from pilotlight.sdk.sandboxes.declaration import SandboxDeclaration, sandbox_declaration
from pilotlight.sdk.sandboxes.files import SandboxFile, send_for_path
from pilotlight.sdk.sandboxes.process import InputWriter, OutputReader, SandboxProcess
from pilotlight.sdk.sandboxes.requests import CallStep, CancelStep, sandbox_step
from pilotlight.sdk.secret import Secret
from pilotlight.sdk.steps import Operation, Steps
from pilotlight.sdk.storage.volume import Volume
from pilotlight.sdk.sync_async import SyncAsyncMethod
from pilotlight.sdk.unsupported import refuse, refuse_attributes
from pilotlight.spec.sandboxes import (
    DEFAULT_TIMEOUT_S,
    LABEL,
    MAX_TIMEOUT_S,
    QUEUE_S,
    SLACK_S,
    WAIT_S,
    sandbox_name,
)

_MAIN = 0
_KILLED = 137
"""Return code of a sandbox that was terminated: 128 + SIGKILL."""
_LIVE = ("QUEUED", "RUNNING")


class SandboxCreation:
    """What `Sandbox.create` was asked for.

    Attributes:
        app, function: names of the deployed app, and of the function that makes such sandboxes.
        arguments, headers: of the call."""

    def __init__(self, args: Sequence[str], app: Any, options: Mapping[str, Any]) -> None:
        if not isinstance(app, DeclaredApp):
            raise InvalidInput(
                'Sandbox.create(app=…): name an app: App.lookup("name", create_if_missing=True)',
                parameter="app",
            )
        given = dict(options)
        timeout_s = _seconds("timeout", given.pop("timeout", None)) or DEFAULT_TIMEOUT_S
        self.arguments = {
            "args": _texts(args),
            "timeout_s": timeout_s,
            "idle_timeout_s": _seconds("idle_timeout", given.pop("idle_timeout", None)),
            "workdir": os.fspath(given.pop("workdir", None) or ""),
            "env": _environment(given.pop("env", None)),
        }
        # the sandbox ends itself; this is for one whose code stopped its worker
        self.headers = {
            "content-type": CONTENT_JSON,
            "accept": CONTENT_JSON,
            HEADER_TIMEOUT: f"{timeout_s + QUEUE_S + SLACK_S:g}",
        }
        self._app = app
        self.app = active_app.deployed_name(app.name)
        self._declaration = sandbox_declaration(app, given)
        self.function = self._name()

    @property
    def body(self) -> bytes:
        """The arguments of the call."""
        return json.dumps(self.arguments).encode()

    def deploy(self) -> None:
        """Deploy the function, beside the others of the app."""
        from pilotlight.packaging.deploy import deploy

        deploy(
            self.declared(self.function),
            client=sessions.client(),
            name=self.app,
            message="sandbox",
            terms={"keep_others": True},
        )

    def _name(self) -> str:
        from pilotlight.packaging.build import build

        with build(self.declared(self._declaration.name), name=self.app) as built:
            return sandbox_name(built.functions[0].digest())

    def declared(self, name: str) -> DeclaredApp:
        """Return an app with the function alone, under this name."""
        declared = DeclaredApp(self._app.name)
        declaration: SandboxDeclaration = dataclasses.replace(self._declaration, name=name)
        declared.declarations[name] = declaration
        return declared


class SandboxOptions(TypedDict, total=False):
    """Keywords of `Sandbox.create`, all optional. Times are in seconds.

    Life:
        timeout: how long it lives (300), at most a day.
        idle_timeout: it ends earlier, once no command ran and no request came for this long.

    Environment:
        workdir: where commands run; made if it is missing. By default the slot's own directory.
        env: environment variables, for this sandbox alone.
        image, secrets, volumes: as of `@app.function()`; by default the app's image.
        block_network: True: it reaches nothing.
        egress: private networks to permit, if the operator lets functions ask for them.

    Resources:
        cpu, memory: as of `@app.function()`.
        buffer_instances: spare instances while sandboxes run (1), in which the next ones begin.
        max_instances: how many of these sandboxes run at once (100); further ones wait.
        scaledown_window: how long a spare instance is kept (60).
        snapshot: False: instances start without snapshots.
        tags: for grouping of bills."""

    timeout: float | None
    idle_timeout: float | None
    workdir: str | os.PathLike[str] | None
    env: Mapping[str, str | None] | None
    image: Image | None
    secrets: Sequence[Secret]
    volumes: Mapping[str, Volume]
    block_network: bool
    egress: Sequence[str]
    cpu: float | tuple[float, float]
    memory: str | int | tuple[int, int]
    buffer_instances: int | str
    max_instances: int
    scaledown_window: float
    snapshot: bool
    tags: Mapping[str, str]


def _create(
    *args: str, app: DeclaredApp | None = None, **options: Unpack[SandboxOptions]
) -> Sandbox:
    """Create a sandbox in an app. With `args` it executes that command, and ends with it.

    The first one with these options deploys a function of the app, and builds its image. Returns
    before the sandbox has an instance: its first operation waits for it.

    Keywords: `pilotlight.packaging.sandbox.SandboxOptions`. Raises InvalidInput naming a wrong
    one, and Forbidden where the function must be deployed and the key may not."""
    made = SandboxCreation(args, app, options)
    client = sessions.client()
    try:
        call = client.submit(made.app, made.function, made.body, headers=made.headers)
    except NotFound:
        made.deploy()
        call = client.submit(made.app, made.function, made.body, headers=made.headers)
    return Sandbox(call)


async def _create_aio(
    *args: str, app: DeclaredApp | None = None, **options: Unpack[SandboxOptions]
) -> Sandbox:
    made = SandboxCreation(args, app, options)
    client = await sessions.async_client()
    try:
        call = await client.submit(made.app, made.function, made.body, headers=made.headers)
    except NotFound:
        await asyncio.to_thread(made.deploy)
        call = await client.submit(made.app, made.function, made.body, headers=made.headers)
    return Sandbox(call)


def _list(app: DeclaredApp | str | None = None) -> Iterator[Sandbox]:
    """Iterate over the sandboxes of the environment, or of an app, that have not ended, newest
    first."""
    for state in _LIVE:
        for record in sessions.client().calls(state=state, app=_app_name(app), limit=1000):
            if LABEL in record.labels:
                yield Sandbox(record.id)


async def _list_aio(app: DeclaredApp | str | None = None) -> AsyncIterator[Sandbox]:
    for found in await asyncio.to_thread(lambda: list(_list(app))):
        yield found


@refuse_attributes
class Sandbox:
    """A slot in which you execute commands: `Sandbox.create(app=app)`, `sandbox.exec("ls")`.

    Its processes run as a uid of your tenant, with its options' network, memory and processors, and
    without a key of the platform. It ends with its command, after its `timeout` or by
    `terminate()`, and with it its processes and files. Methods have asynchronous forms, such as
    `await sandbox.exec.aio("ls")`.

    Raises NotFound for operations after its end."""

    create = SyncAsyncMethod(_create, _create_aio)
    list = SyncAsyncMethod(_list, _list_aio)

    def __init__(self, sandbox_id: str) -> None:
        self.id = sandbox_id
        self._main = SandboxProcess(sandbox_id, _MAIN)
        self.returncode: int | None = None

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Sandbox, (self.id,)

    @property
    def object_id(self) -> str:
        """Its id, that of its call (`pilotlight.FunctionCall.from_id`)."""
        return self.id

    @classmethod
    def from_id(cls, sandbox_id: str, **options: Any) -> Sandbox:
        """Return the handle of a sandbox. Makes no request."""
        refuse(options, "Sandbox.from_id")
        return cls(sandbox_id)

    @property
    def stdout(self) -> OutputReader:
        """Standard output of the command that it was created with."""
        return self._main.stdout

    @property
    def stderr(self) -> OutputReader:
        """Standard error of that command."""
        return self._main.stderr

    @property
    def stdin(self) -> InputWriter:
        """Standard input of that command."""
        return self._main.stdin

    @Operation
    def exec(
        self,
        /,
        *args: str,
        timeout: float | None = None,
        workdir: str | os.PathLike[str] | None = None,
        env: Mapping[str, str | None] | None = None,
        text: bool = True,
        **options: Any,
    ) -> Steps[SandboxProcess]:
        """Execute a command, and return its handle while it runs.

        Args:
            timeout: it is killed after so many seconds, with return code 124.
            workdir: where it runs, below that of the sandbox unless it is absolute.
            env: further environment variables.
            text: False: its output is bytes."""
        refuse(options, "Sandbox.exec")
        body = {
            "args": _texts(args),
            "timeout_s": _seconds("timeout", timeout),
            "workdir": os.fspath(workdir or ""),
            "env": _environment(env),
        }
        answer = yield sandbox_step(self.id, "POST", "exec", json_body=body)
        number = sandbox_answers.number(answer, "process")
        process = SandboxProcess(self.id, number, text=text)
        process.receive(answer)
        return process

    @Operation
    def open(self, path: str | os.PathLike[str], mode: str = "r") -> Steps[SandboxFile]:
        """Open a file; a relative path begins at the sandbox's `workdir`. Raises OSError."""
        return (yield from SandboxFile(self.id, os.fspath(path), mode).begin())

    @Operation
    def ls(self, path: str | os.PathLike[str] = ".") -> Steps[Sequence[str]]:
        """Return the names in a directory, sorted. Raises OSError, for more than 10,000 too."""
        place = os.fspath(path)
        found = yield from send_for_path(
            sandbox_step(self.id, "GET", "directory", path=place), place
        )
        return sandbox_answers.entries(found)

    @Operation
    def mkdir(self, path: str | os.PathLike[str], parents: bool = False) -> Steps[None]:
        """Make a directory; `parents`: also those above it, and it may be there. Raises OSError."""
        place = os.fspath(path)
        step = sandbox_step(self.id, "POST", "directory", path=place, parents=parents)
        yield from send_for_path(step, place)

    @Operation
    def rm(self, path: str | os.PathLike[str], recursive: bool = False) -> Steps[None]:
        """Remove a file, or a directory: with `recursive` one that is not empty. Raises
        OSError."""
        place = os.fspath(path)
        yield from send_for_path(
            sandbox_step(self.id, "DELETE", "files", path=place, recursive=recursive), place
        )

    @Operation
    def terminate(self) -> Steps[None]:
        """End it: its processes are killed. Has no effect on one that has ended."""
        try:
            yield CancelStep(self.id)
        except NotFound:
            yield CallStep(self.id)  # it has ended, or never was: then this raises it

    @Operation
    def wait(self, raise_on_termination: bool = True) -> Steps[int]:
        """Wait for its end, read its command's output, and return the return code.

        `raise_on_termination`: raise DeadlineExceeded if it reached its timeout, and
        ClientClosedRequest if it was terminated; False returns 124 and 137. Raises WorkerCrashed,
        StartFailed and others if it failed."""
        try:
            while not self._main.is_ended:
                yield from self._main.pull(WAIT_S)
        except NotFound:
            pass  # it has ended, or has no such command
        while True:
            record = yield CallStep(self.id, WAIT_S)
            if is_finished(record):
                break
        reason = self._ended(record)
        if raise_on_termination and reason == "timeout":
            raise DeadlineExceeded(f"sandbox {self.id} reached its timeout", clock="execution")
        if raise_on_termination and reason == "terminated":
            raise ClientClosedRequest(f"sandbox {self.id} was terminated")
        assert self.returncode is not None
        return self.returncode

    @Operation
    def poll(self) -> Steps[int | None]:
        """Return its return code once it has ended, None before."""
        record = yield CallStep(self.id)
        if is_finished(record):
            self._ended(record)
        return self.returncode

    def _ended(self, record: CallRecord) -> str:
        """Take how it ended, and return the reason: exited, idle, timeout or terminated. Raises
        what ended it otherwise."""
        if record.state == "CANCELLED":
            self.returncode = _KILLED
            return "terminated"
        if record.state == "FAILED" and record.status == DeadlineExceeded.status:
            self.returncode = 124
            return "timeout"
        result = parse_record_result(record, pickles=False)
        self._main.finish(result)
        self.returncode = self._main.returncode
        return str(result.get("reason", ""))


def _app_name(app: DeclaredApp | str | None) -> str | None:
    if app is None:
        return None
    return active_app.deployed_name(app.name if isinstance(app, DeclaredApp) else app)


def _texts(args: Sequence[Any]) -> Sequence[str]:
    for one in args:
        if not isinstance(one, str):
            raise InvalidInput(
                f"command {one!r:.80}: must consist of texts, one for each argument: "
                f'exec("ls", "-l")',
                parameter="args",
            )
    return [*args]


def _seconds(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidInput(f"{name} = {value!r}: must be seconds above 0", parameter=name)
    if value > MAX_TIMEOUT_S:
        raise InvalidInput(
            f"{name} = {value:g}: must be at most {MAX_TIMEOUT_S:g} s", parameter=name
        )
    return float(value)


def _environment(env: Mapping[str, str | None] | None) -> Mapping[str, str]:
    found = {name: value for name, value in (env or {}).items() if value is not None}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"env: {name!r} must be a text, as its value", parameter="env")
    return found
