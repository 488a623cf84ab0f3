"""The known answer and the sleep mode, asked of the fake engine as a program, over its socket."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pilotlight.spec.engines import EngineSpec, Task
from pilotlight.worker.engine import reference_answer, sleep
from pilotlight.worker.engine.client import ServerClient
from pilotlight.worker.engine.errors import ServerDied, ServerHung, ServerRefused, WrongAnswer
from pilotlight.worker.engine.process_tree import EngineProcess
from pilotlight.worker.engine.reference_answer import KnownAnswer
from tests.fakes.engine.environment import HERE

PATIENCE_S = 30.0
ENGINE = EngineSpec(model="m", max_model_len=512)


@dataclass(frozen=True)
class Running:
    """A fake engine in a process of its own."""

    tree: EngineProcess
    asker: ServerClient


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("engine")
    path = f"/tmp/pl-known-{os.getpid()}.sock"
    environment = {**os.environ, "PYTHONPATH": f"{HERE / 'site'}:{HERE.parents[2]}"}
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(directory),
        "--uds",
        path,
    ]
    tree = EngineProcess(
        [*command, "--served-model-name", "assistant"], environment, directory=str(directory)
    )
    asker = ServerClient(path)
    try:
        asker.wait_healthy(within_s=PATIENCE_S, require_alive=tree.require_alive)
        yield Running(tree, asker)
    finally:
        tree.end(5.0)
        Path(path).unlink(missing_ok=True)


def test_an_engine_says_the_same_again(running: Running) -> None:
    learned = reference_answer.learn(ENGINE, "assistant", running.asker, within_s=PATIENCE_S)

    assert len(learned.value) == reference_answer.TOKENS
    learned.require_same(
        reference_answer.ask(ENGINE, "assistant", running.asker, within_s=PATIENCE_S)
    )


def test_the_beginning_of_the_answer_is_enough_before_serving(running: Running) -> None:
    learned = reference_answer.learn(ENGINE, "assistant", running.asker, within_s=PATIENCE_S)
    short = reference_answer.ask(ENGINE, "assistant", running.asker, within_s=PATIENCE_S, tokens=2)

    assert len(short.value) == 2
    learned.require_same(short)


def test_another_answer_is_told_with_both() -> None:
    with pytest.raises(WrongAnswer, match=r"\[7, 8\]; before the snapshot it answered \[7, 9\]"):
        KnownAnswer(value=(7, 9)).require_same(KnownAnswer(value=(7, 8)))


def test_no_answer_is_none() -> None:
    with pytest.raises(WrongAnswer):
        KnownAnswer(value=(7, 9)).require_same(KnownAnswer(value=()))


def test_numbers_are_the_same_on_either_side_of_a_rounding() -> None:
    learned = KnownAnswer(value=(0.0124999, -0.5), is_close=True)

    learned.require_same(KnownAnswer(value=(0.0125001, -0.5), is_close=True))
    for wrong in ((0.0124999, -0.4), (0.0124999,), (), (0.0, 0.0), (float("nan"), -0.5)):
        with pytest.raises(WrongAnswer):
            learned.require_same(KnownAnswer(value=wrong, is_close=True))


def test_of_an_engine_that_does_not_say_the_same_twice_only_what_it_did_is_known() -> None:
    learned = KnownAnswer(value=(7, 9, 3)).also(KnownAnswer(value=(7, 9, 4)))

    learned.require_same(KnownAnswer(value=(7, 9, 5)))
    with pytest.raises(WrongAnswer):
        learned.require_same(KnownAnswer(value=(7, 8, 3)))
    assert KnownAnswer(value=(1, 2)).also(KnownAnswer(value=(3, 2))).value == (1, 2)


def test_a_short_model_is_asked_for_what_fits(running: Running) -> None:
    short = EngineSpec(model="m", max_model_len=4)
    assert (
        len(reference_answer.ask(short, "assistant", running.asker, within_s=PATIENCE_S).value) == 3
    )


def test_a_model_that_embeds_is_compared_by_its_numbers(running: Running) -> None:
    embedding = EngineSpec(model="m", max_model_len=512, task=Task.EMBED)
    learned = reference_answer.learn(embedding, "assistant", running.asker, within_s=PATIENCE_S)

    assert len(learned.value) == 8
    learned.require_same(
        reference_answer.ask(embedding, "assistant", running.asker, within_s=PATIENCE_S)
    )


def test_a_short_model_that_embeds_is_asked_for_what_fits(running: Running) -> None:
    short = EngineSpec(model="m", max_model_len=4, task=Task.EMBED)
    longer = EngineSpec(model="m", max_model_len=512, task=Task.EMBED)
    learned = reference_answer.learn(short, "assistant", running.asker, within_s=PATIENCE_S)

    assert (
        learned.value
        != reference_answer.ask(longer, "assistant", running.asker, within_s=PATIENCE_S).value
    )


def test_what_an_engine_refuses_is_told_in_its_words(running: Running) -> None:
    with pytest.raises(ServerRefused, match=r"404.*does not exist"):
        reference_answer.ask(ENGINE, "nobody", running.asker, within_s=PATIENCE_S)


def test_an_engine_that_hangs_is_told_by_its_time(running: Running) -> None:
    with pytest.raises(ServerHung, match=r"within 0\.2 s"):
        running.asker.ask(
            "POST",
            "/v1/completions",
            {"model": "assistant", "prompt": "!hang", "max_tokens": 1},
            within_s=0.2,
        )


def test_sleep_and_wake_go_in_the_engines_order(running: Running) -> None:
    sleep.suspend_engine(running.asker, level=2)
    assert running.asker.ask("GET", "/is_sleeping", within_s=PATIENCE_S) == {"is_sleeping": True}

    sleep.resume_engine(running.asker, level=2)
    assert running.asker.ask("GET", "/is_sleeping", within_s=PATIENCE_S) == {"is_sleeping": False}
    assert running.asker.ask("GET", "/sleeps", within_s=PATIENCE_S) == [
        "sleep 2",
        "wake weights",
        "reload_weights",
        "wake kv_cache",
    ]


def test_an_engine_that_ends_before_it_is_healthy_is_told_with_its_last_words(
    tmp_path: Path,
) -> None:
    tree = EngineProcess(
        [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"],
        os.environ,
        directory=str(tmp_path),
    )
    asker = ServerClient(str(tmp_path / "nobody"))

    with pytest.raises(ServerDied, match=r"exit status 3: no such model"):
        asker.wait_healthy(within_s=PATIENCE_S, require_alive=tree.require_alive)
    tree.end(1.0)


def test_an_engine_that_is_not_healthy_in_time_is_told_so(tmp_path: Path) -> None:
    asker = ServerClient(str(tmp_path / "nobody"))
    with pytest.raises(ServerHung, match="startup_timeout"):
        asker.wait_healthy(within_s=0.1, require_alive=lambda: None)


def test_the_death_of_any_process_of_the_tree_is_noticed(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import time; "
        "time.sleep(600)'])"
    )
    tree = EngineProcess([sys.executable, "-c", script], os.environ, directory=str(tmp_path))
    while len(tree.names()) < 2:
        assert not tree.wait_end(0.01)
    with tree.watched() as deaths:
        assert deaths.names() == []
        os.kill(int(tree.names()[1].rpartition("(")[2].rstrip(")")), signal.SIGKILL)
        select.select([deaths], [], [], PATIENCE_S)
        assert any("python" in name for name in deaths.names())
    tree.end(1.0)


def test_no_process_outlives_the_tree_although_its_server_died_before(tmp_path: Path) -> None:
    """A core whose server is gone is nobody's child any more."""
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'import time; "
        "time.sleep(600)'])"
    )
    tree = EngineProcess([sys.executable, "-c", script], os.environ, directory=str(tmp_path))
    while len(tree.names()) < 2:
        assert not tree.wait_end(0.01)
    core = os.pidfd_open(int(tree.names()[1].rpartition("(")[2].rstrip(")")))
    os.kill(tree.pid, signal.SIGKILL)
    assert tree.wait_end(PATIENCE_S)

    tree.end(1.0)

    ended, _, _ = select.select([core], [], [], PATIENCE_S)
    os.close(core)
    assert ended
