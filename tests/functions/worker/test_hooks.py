"""Hooks have deadlines, and whatever goes wrong in one names it."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
import time
import types

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.sdk.decorators import enter, exit
from pilotlight.spec.function import Clocks, FunctionKind, FunctionSpec, MethodSpec
from pilotlight.worker.snapshot import hooks
from pilotlight.worker.user_code.target import Target
from tests.fakes.fake_shim import FakeShim, call, function_spec

CODE = """
    import asyncio, time, pilotlight
    app = pilotlight.App("demo")

    @app.cls()
    class Service:
        @pilotlight.enter({before})
        {before_body}

        @pilotlight.enter(snap=False{after})
        {after_body}

        @pilotlight.method()
        def ask(self): return "fine"

        @pilotlight.exit({leave})
        {leave_body}
"""
FINE = "def {}(self): pass"


def code(**parts: str) -> str:
    given = {
        "before": "",
        "after": "",
        "leave": "",
        "before_body": "",
        "after_body": "",
        "leave_body": "",
        **parts,
    }
    for name in ("before", "after", "leave"):
        given[f"{name}_body"] = given[f"{name}_body"] or FINE.format(name)
    return CODE.format(**given)


def spec(**clocks: float) -> FunctionSpec:
    made = function_spec(
        qualname="Service", kind=FunctionKind.CLASS, methods=[MethodSpec(name="ask")]
    )
    return dataclasses.replace(made, clocks=Clocks(**clocks))


def failure(shim: FakeShim) -> dict[str, object]:
    while True:
        message = shim.receive()
        if message["event"] == "failed":
            error = message["error"]
            assert isinstance(error, dict)
            return {**error, "phase": message["phase"]}


HANGS = "def {name}(self): time.sleep(60)"
HANGS_ASYNC = "async def {name}(self): await asyncio.sleep(60)"
BLOCKS_ASYNC = "async def {name}(self): time.sleep(60)"
STUBBORN = """def {name}(self):
            while True:
                try:
                    time.sleep(60)
                except Exception:
                    pass"""


@pytest.mark.parametrize("body", [HANGS, HANGS_ASYNC, STUBBORN])
def test_a_hook_before_the_snapshot_that_hangs_is_ended_by_the_startup_clock_and_named(
    body: str,
) -> None:
    with FakeShim(
        {"app.py": code(before_body=body.format(name="load"))}, spec(startup_s=1.0)
    ) as shim:
        error = failure(shim)
        assert error["phase"] == "enter"
        assert str(error["message"]).startswith(
            "Service.load (app.py:7), marked @enter(snap=True), did not return within 0."
        )
        assert shim.wait_exit() == 1


@pytest.mark.parametrize("body", [HANGS, HANGS_ASYNC])
def test_a_hook_after_the_wake_that_hangs_is_ended_and_named(body: str) -> None:
    with FakeShim(
        {"app.py": code(after=", timeout_s=0.2", after_body=body.format(name="wake"))}, spec()
    ) as shim:
        shim.order("fork", "i-1")
        error = failure(shim)
        assert error["phase"] == "wake"
        assert str(error["message"]).startswith(
            "Service.wake (app.py:10), marked @enter(snap=False), did not return within 0.2 s"
        )
        assert "time.sleep(60)" in str(error["traceback"]) or "asyncio.sleep(60)" in str(
            error["traceback"]
        )


def test_an_asynchronous_hook_that_blocks_is_ended_too() -> None:
    with FakeShim(
        {"app.py": code(after=", timeout_s=0.2", after_body=BLOCKS_ASYNC.format(name="wake"))},
        spec(),
    ) as shim:
        shim.order("fork", "i-1")
        assert "did not return within 0.2 s" in str(failure(shim)["message"])


def test_a_hook_that_raises_is_named_beside_its_error() -> None:
    body = "def load(self): 1 / 0"
    with FakeShim({"app.py": code(before_body=body)}, spec()) as shim:
        error = failure(shim)
        assert error["type"] == "ZeroDivisionError"
        assert (
            error["message"]
            == "division by zero (in the hook Service.load (app.py:7), marked @enter(snap=True))"
        )


def test_an_exit_hook_that_hangs_does_not_keep_the_instance() -> None:
    with FakeShim(
        {"app.py": code(leave="timeout_s=0.2", leave_body=HANGS.format(name="leave"))}, spec()
    ) as shim:
        instance = shim.start("i-1")
        assert call(instance, "ask") == "fine"
        os.kill(shim.wait_event("forked")["pid"], signal.SIGTERM)
        assert shim.wait_event("exited")["status"] == 0
        assert b"marked @exit(), did not return within 0.2 s" in os.read(instance.stderr, 65536)


def test_memory_of_a_gpu_that_torch_keeps_for_later_is_given_back_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[str] = []
    used = False
    cuda = types.SimpleNamespace(
        is_initialized=lambda: used, empty_cache=lambda: given_back.append("cache")
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    try:
        hooks.drop_caches()
        assert given_back == []
        used = True
        hooks.drop_caches()
        assert given_back == ["cache"]
    finally:
        gc.unfreeze()


def test_hooks_in_time_leave_no_alarm_behind() -> None:
    seen = []

    def load() -> None:
        seen.append(signal.getitimer(signal.ITIMER_REAL)[0])

    before = signal.getsignal(signal.SIGALRM)
    hooks.run_before_snapshot(Target(methods={}, enter_before_snapshot=(load,)), within_s=5.0)
    assert 0 < seen[0] <= 5.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_hooks_share_the_startup_clock() -> None:
    left: list[float] = []

    def first() -> None:
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        time.sleep(0.15)

    def second() -> None:
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        signal.setitimer(signal.ITIMER_REAL, 0.01)  # the end of its time, sooner
        time.sleep(60)

    with pytest.raises(hooks.HookTimedOut, match="second"):
        hooks.run_before_snapshot(
            Target(methods={}, enter_before_snapshot=(first, second)), within_s=30.0
        )
    assert left[1] <= left[0] - 0.14


@pytest.mark.parametrize("snapshot, limit_s", [(True, 10), (False, 300)])
def test_the_usual_limit_after_the_wake(snapshot: bool, limit_s: int) -> None:
    body = (
        "def wake(self): import signal; print(round(signal.getitimer(signal.ITIMER_REAL)[0]), "
        "flush=True)"
    )
    with FakeShim(
        {"app.py": code(after_body=body)}, dataclasses.replace(spec(), snapshot=snapshot)
    ) as shim:
        instance = shim.start("i-1", op="serve")
        assert os.read(instance.stdout, 100) == f"{limit_s}\n".encode()


@pytest.mark.parametrize("timeout_s", [0, -1, True, "5", 1e9])
def test_a_deadline_that_is_none_is_refused(timeout_s: object) -> None:
    with pytest.raises(InvalidInput, match="timeout_s="):
        enter(timeout_s=timeout_s)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="timeout_s="):
        exit(timeout_s=timeout_s)  # type: ignore[arg-type]


def test_a_timeout_error_of_the_hooks_own_stays_what_it_is() -> None:
    async def load() -> None:
        raise TimeoutError("the database did not answer")

    with pytest.raises(TimeoutError, match="the database did not answer"):
        hooks.run_before_snapshot(Target(methods={}, enter_before_snapshot=(load,)), within_s=5.0)
