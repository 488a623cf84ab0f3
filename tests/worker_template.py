"""Programs: the process that workers of pytest-xdist are forked from (`main`, started by
`tests/parallel.py`), and what stands for a worker where pytest-xdist starts one (this file).

To import the tests, what they test, and the libraries of both takes some eight seconds of CPU time,
which each worker would take for itself. A worker is otherwise what it is elsewhere: it reads its
options, loads its plugins and collects, and finds what it imports imported.

pytest-xdist starts this file instead of Python (`python=` of execnet's specification). It asks for
a fork, hands over its standard streams, environment and directory, and ends with the worker's
status. When it is killed, so is the worker. Without a process that forks, because a test's module
ended it or it has threads, this file becomes the ordinary worker that it was started as. There is
one beside each worker, so it imports little; and whatever pytest is to rewrite may be imported by
pytest alone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FORKED = b"+"
"""What a client reads once it has a worker; the worker's status follows at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client hands over."""

    streams: list[int]
    environment: dict[str, str]
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A fork, as the process that made it sees it."""

    pidfd: int
    client: socket.socket


def main(descriptors: Sequence[int], arguments: list[str]) -> None:
    """Import the tests that `arguments` name, and fork for each client until the owner and all
    workers are gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a word
    owner, listener = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    gc.disable()  # nothing of what is imported is garbage
    _import_tests(arguments)
    gc.freeze()
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"workers are not forked: importing the tests left {threads} threads")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers end by it, and this process by their end
    if (request := _serve(owner, listener)) is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.enable()
        _become_worker(request)


def _import_tests(arguments: list[str]) -> None:
    """As pytest does when it collects. A module that cannot be imported is left to the workers,
    which say why."""
    from _pytest.config import _prepareconfig
    from _pytest.outcomes import OutcomeException
    from _pytest.pathlib import import_path
    from _pytest.warnings import catch_warnings_for_item

    config = _prepareconfig([*arguments, "--capture=no"], None)
    if (inputs := config.pluginmanager.get_plugin("hypothesispytest")) is not None:
        inputs.pytest_configure(config)  # its profile, which modules read when they are imported
    from hypothesis import is_hypothesis_test

    modules: list[ModuleType] = []
    for file in _files(config):
        before = set(sys.modules)
        try:
            with catch_warnings_for_item(config, config.hook, "collect", None):
                modules.append(
                    import_path(
                        file,
                        mode=config.getoption("importmode"),
                        root=config.rootpath,
                        consider_namespace_packages=config.getini("consider_namespace_packages"),
                    )
                )
        except (Exception, OutcomeException, SystemExit):  # noqa: BLE001 (whatever it raises)
            for name in set(sys.modules) - before:
                if getattr(sys.modules[name], "__file__", None) == str(file):
                    del sys.modules[name]
    has_inputs = any(
        isinstance(one, FunctionType) and is_hypothesis_test(one)
        for module in modules
        for one in vars(module).values()
    )
    _prepare(has_inputs=has_inputs)


def _prepare(*, has_inputs: bool) -> None:
    """What each worker would make once, at its first need of it. `has_inputs`: for Hypothesis."""
    if "tests.functions.controller.conftest" in sys.modules:
        from pilotlight.controller import http_app
        from tests.fakes import databases

        http_app.openapi_document()  # reads all routes, which FastAPI analyses when they are read
        databases.empty_bytes()
    if has_inputs:
        from hypothesis.errors import HypothesisSideeffectWarning

        from tests.conftest import prepare_hypothesis

        with warnings.catch_warnings():  # it takes time here, for all workers
            warnings.simplefilter("ignore", HypothesisSideeffectWarning)
            prepare_hypothesis()


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        if path.is_dir():
            yield from sorted([*path.rglob("conftest.py"), *path.rglob("test_*.py")])
        elif path.suffix == ".py":
            yield path


def _serve(owner: socket.socket, listener: socket.socket) -> Request | None:
    """Returns the request in the process of a worker; None in this one, at the end."""
    with selectors.PollSelector() as selector:
        selector.register(owner, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while selector.get_map():
            key, _ = selector.select()[0]  # one at a time: it may unregister others
            if key.fileobj is owner:
                for socket_ in (owner, listener):
                    selector.unregister(socket_)
                    socket_.close()
            elif key.fileobj is listener:
                if (request := _fork(listener, selector)) is not None:
                    return request
            else:
                _end(key, selector)
    return None


def _fork(listener: socket.socket, selector: selectors.BaseSelector) -> Request | None:
    """Make a worker for the next client; returns its request in the process of the worker."""
    client, _ = listener.accept()
    if (request := _receive(client)) is None:
        client.close()
        return None
    if (pid := os.fork()) == 0:
        client.close()
        for key in selector.get_map().values():
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        return request
    for stream in request.streams:
        os.close(stream)
    worker = Worker(pidfd=os.pidfd_open(pid), client=client)
    selector.register(worker.pidfd, selectors.EVENT_READ, worker)
    selector.register(client, selectors.EVENT_READ, worker)
    with contextlib.suppress(OSError):  # a client that was killed: seen at its socket
        client.sendall(FORKED)
    return None


def _end(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """Tell a client that its worker ended; end a worker whose client did."""
    worker: Worker = key.data
    selector.unregister(key.fileobj)
    if key.fileobj is worker.client:
        worker.client.close()
        signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        return
    ended = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
    assert ended is not None, "only WNOHANG returns none"
    os.close(worker.pidfd)
    if worker.client.fileno() != -1:
        selector.unregister(worker.client)
        status = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
        with contextlib.suppress(OSError):  # the client was killed at the same time
            worker.client.sendall(b"%d" % status)
        worker.client.close()


def _receive(client: socket.socket) -> Request | None:
    """Returns None if the client ended before it had sent all."""
    head, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as reader:
        text = reader.read(int.from_bytes(head, "big"))
    try:
        body = json.loads(text)
    except ValueError:
        for stream in streams:
            os.close(stream)
        return None
    return Request(streams=streams, environment=body["environment"], directory=body["directory"])


def _become_worker(request: Request) -> None:
    """As `python -u -c` does with the line that execnet gives it."""
    import __main__

    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    exec(eval(sys.stdin.readline()), vars(__main__))


def _stand_for_worker(path: str, arguments: Sequence[str]) -> int:
    """Returns the status of the worker that the process at the other end of `path` forks; without
    such a process, becomes Python with `arguments`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = json.dumps({"environment": dict(os.environ), "directory": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
            socket.send_fds(connection, [len(request).to_bytes(8, "big")], [0, 1, 2])
            connection.sendall(request)
            is_forked = connection.recv(len(FORKED)) == FORKED
        except OSError:
            is_forked = False
        if not is_forked:
            os.execv(sys.executable, [sys.executable, *arguments])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker has it too, and ends by it
        # who reads the worker's output waits for the worker's end, not for this one's
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        status = b"".join(iter(lambda: connection.recv(16), b""))
    return int(status or 1)


if __name__ == "__main__":
    sys.exit(_stand_for_worker(sys.argv[1], sys.argv[2:]))
