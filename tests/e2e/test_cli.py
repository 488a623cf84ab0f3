"""The command line against a real platform: what a newcomer types, in the order they would."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import fcntl
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pilotlight import profile
from pilotlight.cli.commands.operations.doctor import api_key
from pilotlight.cli.supervisor import local_platform
from pilotlight.cli.supervisor.supervisor import PROCESSES
from snapshotter.linux.cgroups import Cgroups
from tests.e2e.harness import PlatformUnderTest, platform_up, wait_for
from tests.fakes.ports import free_port
from tests.fakes.process_trees import is_running

HELLO = str(Path(__file__).parents[2] / "examples/hello.py")
STREAM = str(Path(__file__).parents[2] / "examples/stream.py")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def hello(platform: PlatformUnderTest) -> PlatformUnderTest:
    """The platform, with examples/hello.py deployed."""
    platform.cli("deploy", HELLO, "-m", "first")
    return platform


def as_json(platform: PlatformUnderTest, *words: str) -> Any:
    return json.loads(platform.cli(*words, "--json").stdout)


@contextlib.contextmanager
def not_outliving(process: subprocess.Popen[str]) -> Iterator[None]:
    """A test that fails ends its process: `with Popen` would wait for it, without end."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


def test_deploy_proves_the_function_and_says_where_it_is(hello: PlatformUnderTest) -> None:
    out = hello.cli("deploy", HELLO).stdout
    assert "(unchanged)" in out
    assert f"POST {hello.url}/v1/functions/hello/hello:invoke" in out
    assert as_json(hello, "app", "history", "hello")[-1]["message"] == "first"


def test_call_prints_the_result_and_how_it_came_about(hello: PlatformUnderTest) -> None:
    done = hello.cli("call", "hello/hello", "--arg", "name=Ada")
    assert done.stdout.strip() == '"Hello, Ada!"'
    assert "exec" in done.stderr
    assert "cost" in done.stderr
    assert as_json(hello, "call", "hello/hello", '["Bob"]')["result"] == "Hello, Bob!"
    assert (
        hello.cli("call", "hello/hello", "-", "--raw", input='{"name": "Eve"}').stdout
        == '"Hello, Eve!"'
    )


def test_a_submitted_call_is_found_again(hello: PlatformUnderTest) -> None:
    call = hello.cli("call", "hello/hello", "-a", "name=Zoe", "--submit").stdout.strip()
    record = as_json(hello, "call", "get", call, "--wait")
    assert (record["state"], record["result"]) == ("SUCCEEDED", "Hello, Zoe!")
    shown = hello.cli("call", "get", call)
    assert shown.stdout == '"Hello, Zoe!"\n'
    assert "SUCCEEDED · hello/hello · attempt 1 · " in shown.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (("call", "hello/hello", "-a", "nme=x"), "nme"),
        (("call", "hello/nobody"), "nobody"),
        (("call", "hello"), "not the address of a function"),
        (("app", "show", "nope"), "nope"),
        (("deploy", "/no/such/file.py"), "no such file"),
        (("instance", "stop", "i-nope"), "no instance"),
        (("app", "delete", "hello"), "Cannot ask"),
    ],
)
def test_mistakes_end_with_1_two_lines_and_no_traceback(
    hello: PlatformUnderTest, words: tuple[str, ...], message: str
) -> None:
    done = hello.cli(*words, check=False)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert message in lines[-2]
    assert lines[-2].startswith("error ")
    assert lines[-1].startswith("try   ")
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_imported_is_shown_by_its_own_line(
    hello: PlatformUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "broken_app.py").write_text("import pilotlight\nimport no_such_package\n")
    done = hello.cli("deploy", str(tmp_path / "broken_app.py"), check=False)
    assert done.returncode == 1
    assert "broken_app.py:2  import no_such_package" in done.stderr
    assert "no_such_package` is not installed in it" in done.stderr


def test_run_calls_once_and_leaves_nothing_behind(hello: PlatformUnderTest, tmp_path: Path) -> None:
    (tmp_path / "speaker.py").write_text(
        "import pilotlight\napp = pilotlight.App('speaker')\nprint('imported')\n\n"
        "@app.function()\ndef say(what: str) -> int:\n    print(what)\n    return len(what)\n"
    )
    done = hello.cli("run", str(tmp_path / "speaker.py"), "--what", "apple")
    assert done.stdout.splitlines() == ["imported", "5"]  # printed here by the import, and there
    lines = done.stderr.splitlines()
    assert lines.index("speaker/say: calling") < lines.index("apple")
    assert (lines.count("imported"), lines.count("apple")) == (1, 1)
    assert (
        hello.cli("run", f"{STREAM}::count", "--upto", "2").stdout.splitlines()[-1]
        == "{'number': 2, 'square': 4}"
    )
    assert [app["name"] for app in as_json(hello, "app", "list") if "run" in app["name"]] == []


def test_lists_show_what_is_there(hello: PlatformUnderTest) -> None:
    assert "hello/hello" in hello.cli("app", "show", "hello").stdout
    assert "hello" in hello.cli("app", "list").stdout
    hello.cli("call", "hello/hello")
    instance = as_json(hello, "instance", "list", "--app", "hello")[0]["id"]
    assert instance in hello.cli("instance", "list").stdout
    assert (
        hello.cli(
            "instance", "exec", instance, "--", "sh", "-c", "echo out; exit 3", check=False
        ).returncode
        == 3
    )


def test_a_shell_keeps_its_variables_and_directory_between_lines(hello: PlatformUnderTest) -> None:
    done = hello.cli("shell", "hello/hello", input="cd /tmp\nx=7\necho $x $PWD\nexit\nnever\n")
    assert done.stdout.splitlines() == ["7 /tmp"]
    assert hello.cli("shell", "hello/hello", "-c", "echo $((6*7))").stdout.strip() == "42"


def test_serve_deploys_again_on_a_change_and_removes_the_app_at_the_end(
    hello: PlatformUnderTest, tmp_path: Path
) -> None:
    file = tmp_path / "live.py"
    text = (
        "import pilotlight\napp = pilotlight.App('live')\n\n@app.function()\ndef answer() -> "
        "int:\n    return {}\n"
    )
    file.write_text(text.format(1))
    argv = [sys.executable, "-m", "pilotlight", "serve", str(file)]
    with (
        subprocess.Popen(
            argv, env=hello.environ(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as serving,
        not_outliving(serving),
    ):
        assert serving.stderr is not None
        for version in (1, 2):
            assert any("serving live-serve" in line for line in serving.stderr)
            assert hello.cli("call", "live-serve/answer").stdout.strip() == str(version)
            if version == 1:  # a deploy would be under way when it is interrupted
                file.write_text(text.format(2))
        serving.send_signal(signal.SIGINT)
        serving.stderr.read()
        assert serving.wait(60) == 130
    assert "live-serve" not in hello.cli("app", "list").stdout


def test_logs_of_one_call(hello: PlatformUnderTest, tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(
        "import pilotlight\napp = pilotlight.App('talker')\n\n@app.function()\ndef say(what: str) "
        "-> None:\n    print(what, flush=True)\n"
    )
    hello.cli("deploy", str(tmp_path / "talker.py"), "--no-wait")
    first = as_json(hello, "call", "talker/say", "-a", "what=apple")["request_id"]
    hello.cli("call", "talker/say", "-a", "what=pear")
    # what a function prints passes through its slot, and is in the log moments after the answer
    wait_for(
        lambda: "pear" in hello.cli("logs", "talker/say", "--since", "5m", "--tail", "10").stdout,
        "the second line",
    )
    lines = [
        json.loads(line)
        for line in hello.cli("logs", "talker", "--call", first, "--json").stdout.splitlines()
    ]
    assert [line["text"] for line in lines] == ["apple"]


def test_the_curl_lines_of_the_docs_work_as_they_stand(hello: PlatformUnderTest) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0]
    head, *lines = block.splitlines()
    of_hello = [line for line in lines if "hello/hello" in line]
    assert (head.startswith('eval "$(pilotlight token show --shell)"'), len(of_hello)) == (True, 2)
    alias = f'pilotlight() {{ "{sys.executable}" -m pilotlight "$@"; }}'
    script = "\n".join(
        ["set -e", alias, head, *(line.replace("curl", "curl -sS") for line in of_hello)]
    )
    done = subprocess.run(
        ["bash", "-c", script], env=hello.environ(), capture_output=True, text=True, check=True
    )
    assert '"Hello, Ada!"' in done.stdout
    assert '"state": "QUEUED"' in done.stdout


def test_keys_secrets_and_environments(hello: PlatformUnderTest) -> None:
    made = as_json(hello, "token", "create", "--scope", "invoke", "--name", "ci", "--ttl", "1h")
    assert made["secret"].startswith("pl_")
    assert made["secret"] not in hello.cli("token", "list").stdout
    hello.cli("token", "revoke", made["id"], "--yes")
    done = hello.cli("secret", "set", "db", "USER", "PASSWORD", input="ada\nhunter2\n")
    assert "hunter2" not in done.stdout + done.stderr
    assert as_json(hello, "secret", "list")[0]["variables"] == ["PASSWORD", "USER"]
    hello.cli("secret", "delete", "db", "-y")
    hello.cli("environment", "create", "staging")
    assert hello.cli("-e", "staging", "app", "list").stdout.startswith("No apps yet")
    hello.cli("environment", "delete", "staging", "-y")
    assert [e["name"] for e in as_json(hello, "environment", "list")] == ["main"]


def test_the_bill_is_the_sum_of_its_lines(hello: PlatformUnderTest) -> None:
    hello.cli("call", "hello/hello")
    wait_for(lambda: hello.usage("app = 'hello'"), "a record in the ledger")
    bill = as_json(hello, "billing", "report", "--since", "1h", "--by", "app")
    assert sum(Decimal(row["cost"]) for row in bill["rows"]) == Decimal(bill["totals"]["USD"]) > 0
    rows = list(csv.DictReader(io.StringIO(hello.cli("billing", "report", "--csv").stdout)))
    assert {row["app"] for row in rows} >= {"hello"}


def test_top_doctor_and_status(hello: PlatformUnderTest) -> None:
    hello.cli("call", "hello/hello")
    config = ("--config", str(hello.local.config))
    assert "hello/hello" in hello.cli("top", "--once", *config).stdout
    found = {finding["what"]: finding for finding in as_json(hello, "doctor", *config)}
    assert found.keys() >= {"platform", "namespaces", "home", "profile"}
    valid = found["API key"]["detail"]
    assert valid.startswith(f"valid for {hello.url}: ")
    assert valid.endswith("scope admin, tenant default")
    wrong = api_key(dataclasses.replace(hello.profile, api_key="pl_wrong"))
    assert (wrong.state, wrong.detail.partition(":")[0]) == ("broken", "refused by http")
    with hello.client() as client:
        made = client.create_key(scope="invoke", ttl_s=0.1)
    late = dataclasses.replace(hello.profile, api_key=made["secret"])
    wait_for(lambda: api_key(late).detail.startswith("expired by"), "the end of the key")
    state = as_json(hello, "status", *config)
    assert state["running"]
    assert all(state["processes"].values())
    own = {"activator": 19901, "controller": 19902} if os.geteuid() == 0 else {}
    assert state["uids"] == {name: own.get(name, os.geteuid()) for name in state["processes"]}
    told = hello.cli("status", *config).stdout
    users = {name: "root" if uid == 0 else f"uid {uid}" for name, uid in state["uids"].items()}
    assert all(f"process {pid}, {users[name]}" in told for name, pid in state["processes"].items())


def test_state_is_saved_while_running_and_loaded_into_another_home(
    hello: PlatformUnderTest, short_tmp: Path
) -> None:
    config = ("--config", str(hello.local.config))
    hello.cli("state", "backup", str(short_tmp / "b.tar"), *config)
    refused = hello.cli("state", "load", str(short_tmp / "b.tar"), *config, check=False)
    assert refused.returncode == 1
    assert "Stop it first" in refused.stderr
    home = short_tmp / "h"
    (short_tmp / "p.yaml").write_text(f"platform: {{home: {home}, run: {short_tmp}/r}}\n")
    hello.cli("state", "load", str(short_tmp / "b.tar"), "--config", str(short_tmp / "p.yaml"))
    metrics: dict[str, dict[str, object]] = {name: {"metrics_listen": None} for name in PROCESSES}
    with loaded_platform(short_tmp, metrics) as url:  # the same keys open it, the same app is there
        environ = {**hello.environ(), "PILOTLIGHT_URL": url}
        done = subprocess.run(
            [sys.executable, "-m", "pilotlight", "call", "hello/hello", "-a", "name=again"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == '"Hello, again!"'


@contextlib.contextmanager
def loaded_platform(root: Path, sections: dict[str, dict[str, object]]) -> Iterator[str]:
    """`pilotlight up --detach` … `down` on a home that exists."""
    import yaml

    address = f"127.0.0.1:{free_port()}"
    sections["activator"] = {"listen": address, "metrics_listen": None}
    sections["platform"] = {"home": str(root / "h"), "run": str(root / "r")}
    config = root / "p.yaml"
    config.write_text(yaml.safe_dump(sections))
    environ = {**os.environ, "PILOTLIGHT_CONFIG": str(root / "profile.toml")}
    argv = [sys.executable, "-m", "pilotlight"]
    subprocess.run(
        [*argv, "up", "-d", "--config", str(config)], env=environ, check=True, capture_output=True
    )
    try:
        yield f"http://{address}"
    finally:
        subprocess.run(
            [*argv, "down", "--config", str(config)], env=environ, check=True, capture_output=True
        )


def test_up_in_the_terminal_writes_the_first_key_refuses_a_second_and_ends_with_ctrl_c(
    short_tmp: Path,
) -> None:
    import yaml

    config, file = short_tmp / "p.yaml", short_tmp / "profile.toml"
    sections: dict[str, dict[str, object]] = {name: {"metrics_listen": None} for name in PROCESSES}
    config.write_text(
        yaml.safe_dump(
            {**sections, "platform": {"home": str(short_tmp / "h"), "run": str(short_tmp / "r")}}
        )
    )
    environ = {**os.environ, "PILOTLIGHT_CONFIG": str(file), "NO_COLOR": "1"}
    argv = [
        sys.executable,
        "-m",
        "pilotlight",
        "up",
        "--config",
        str(config),
        "--listen",
        f"127.0.0.1:{free_port()}",
    ]
    with (
        subprocess.Popen([*argv, "--json"], env=environ, stdout=subprocess.PIPE, text=True) as up,
        not_outliving(up),
    ):
        assert up.stdout is not None
        body = json.loads(up.stdout.readline())
        assert body["key_file"] == str(file)
        assert file.stat().st_mode & 0o777 == 0o600
        second = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert f"already runs in {short_tmp / 'h'} (process {up.pid}" in second.stderr
        kept = [
            path
            for path in (*(short_tmp / "h").rglob("*"), *(short_tmp / "r").rglob("*"))
            if path.is_file()
        ]
        assert {"controller.db", "controller.db-wal", "controller.pid", "cgroups.json"} <= {
            path.name for path in kept
        }
        assert [path for path in kept if path.stat().st_mode & 0o077] == []
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
    platform = local_platform.find_platform(config=config, home=None, environ={}, cwd=short_tmp)
    assert local_platform.find_running(platform) is None
    assert not list((short_tmp / "r").glob("*.pid"))


@pytest.mark.slow  # starts a platform
def test_an_up_that_fails_changes_no_login_and_the_next_one_loses_none(short_tmp: Path) -> None:
    import yaml

    config, file = short_tmp / "p.yaml", short_tmp / "profile.toml"
    sections: dict[str, dict[str, object]] = {name: {"metrics_listen": None} for name in PROCESSES}
    paths = {"home": str(short_tmp / "h"), "run": str(short_tmp / "r")}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        sections["activator"] = {"listen": f"127.0.0.1:{port}", "metrics_listen": None}
        config.write_text(yaml.safe_dump({**sections, "platform": paths}))
        theirs = profile.Profile(url=f"http://127.0.0.1:{port}", api_key="pl_theirs")
        profile.save(theirs, path=file)
        before = file.read_text()
        environ = {**os.environ, "PILOTLIGHT_CONFIG": str(file), "NO_COLOR": "1"}

        def cli(*words: str) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, "-m", "pilotlight", *words, "--config", str(config)]
            return subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)

        refused = cli("up", "-d")
        assert refused.returncode == 1
        assert str(port) in refused.stderr
        assert file.read_text() == before
    assert (short_tmp / "h/first-admin.key").stat().st_mode & 0o777 == 0o600
    done = cli("up", "-d")
    assert done.returncode == 0, done.stderr
    try:
        kept = profile.load({"PILOTLIGHT_CONFIG": str(file)}, name="default-old-1")
        assert kept == theirs
        assert cli("app", "list").returncode == 0, "the new key is the active login"
        assert not (short_tmp / "h/first-admin.key").exists()
    finally:
        assert cli("down").returncode == 0


@pytest.mark.slow  # starts a platform
def test_a_closed_terminal_stops_the_platform_in_order(short_tmp: Path) -> None:
    import yaml

    config = short_tmp / "p.yaml"
    sections: dict[str, dict[str, object]] = {name: {"metrics_listen": None} for name in PROCESSES}
    sections["activator"]["listen"] = f"127.0.0.1:{free_port()}"
    sections["platform"] = {"home": str(short_tmp / "h"), "run": str(short_tmp / "r")}
    config.write_text(yaml.safe_dump(sections))
    environ = {**os.environ, "PILOTLIGHT_CONFIG": str(short_tmp / "profile.toml")}
    terminal, theirs = pty.openpty()
    with (
        subprocess.Popen(
            [sys.executable, "-m", "pilotlight", "up", "--config", str(config)],
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            text=True,
        ) as up,
        not_outliving(up),
    ):
        os.close(theirs)
        shown = b""
        while b"pilotlight is up at" not in shown:
            shown += os.read(terminal, 4096)
        pids = [int(file.read_text().split()[0]) for file in (short_tmp / "r").glob("*.pid")]
        os.close(terminal)
        assert up.wait(60) == 0
    assert len(pids) == len(PROCESSES)
    assert not [one for one in pids if Path(f"/proc/{one}").exists()]
    assert not list((short_tmp / "r").glob("*.pid"))


def test_down_and_up_after_a_killed_supervisor() -> None:
    """A node agent that is killed with it leaves slots, instances and control groups; an activator
    with a call in flight stays until it is answered."""
    with platform_up() as platform, ThreadPoolExecutor(1) as calls:
        run, config = platform.local.paths.run, str(platform.local.config)
        platform.deploy("pair.py")
        assert platform.result("pair/nap", {"seconds": 0}) == 0
        found = local_platform.find_running(platform.local)
        assert found is not None
        pids = {name: platform.pid(name) for name in PROCESSES}
        os.kill(found.pid, signal.SIGKILL)
        os.kill(pids["snapshotter"], signal.SIGKILL)

        left = as_json(platform, "down", "--config", config)
        assert (left["pid"], left["slots"] >= 1) == (found.pid, True)
        assert not [name for name, pid in pids.items() if is_running(pid)]
        assert [*run.glob("slots/*"), *run.glob("**/*.sock"), *run.glob("*.pid")] == []
        assert Cgroups.find(run).names() == set()
        assert as_json(platform, "down", "--config", config)["pid"] is None

        platform.cli("up", "-d", "--config", config)
        calls.submit(platform.post, "pair/nap", {"seconds": 5})
        wait_for(lambda: as_json(platform, "instance", "list"), "the instance that has the call")
        found = local_platform.find_running(platform.local)
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        platform.cli("up", "-d", "--config", config)
        assert platform.result("pair/nap", {"seconds": 0}) == 0
        platform.cli("down", "--config", config)
        assert local_platform.find_running(platform.local) is None
