"""Files in Modal's style on a real platform: what the platform itself does for them. The others run
in one process, in `tests/functions/sdk`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest

KINDS = Path(__file__).parents[2] / "examples/modal_style"
pytestmark = pytest.mark.timeout(240)


def test_classes_with_parameters_have_instances_of_their_own(platform: PlatformUnderTest) -> None:
    ran = platform.cli("run", str(KINDS / "parameters.py")).stdout.splitlines()
    said = ["Hallo, Ada!", "Bonjour, dear Ada!", "['Hallo, Bo!', 'Bonjour, Bo!']"]
    assert [line for line in ran if line in said] == said
    assert "large: 332833500" in platform.cli("run", str(KINDS / "with_options.py")).stdout
    several = platform.cli("run", str(KINDS / "several_files/main.py"))
    assert "difference: 2" in several.stdout


def test_files_are_at_absolute_paths_and_in_the_working_directory(
    platform: PlatformUnderTest,
) -> None:
    ran = platform.cli("run", str(KINDS / "local_files.py")).stdout
    assert "read: (['red', 'green', 'blue'], 'cm')" in ran


def test_a_volume_keeps_what_an_instance_wrote(platform: PlatformUnderTest) -> None:
    assert "read: kept" in platform.cli("run", str(KINDS / "volume.py")).stdout


def test_functions_and_callers_share_a_dict_and_a_queue(platform: PlatformUnderTest) -> None:
    ran = platform.cli("run", str(KINDS / "dict_and_queue.py")).stdout.splitlines()
    said = [
        "measured: 3 3",
        "lengths: [('one', 3), ('seven', 5), ('three', 5)] 0 True",
        "stored once: False 3",
        "left: 1 0",
    ]
    assert [line for line in ran if line in said] == said


@pytest.mark.root
def test_a_sandbox_runs_what_somebody_else_wrote(platform: PlatformUnderTest) -> None:
    file = KINDS / "sandbox.py"
    done = subprocess.run(
        [sys.executable, str(file)],
        env=platform.environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "said: 42\n"), done.stderr


def ask(platform: PlatformUnderTest, path: str, **options: Any) -> httpx.Response:
    method = "POST" if "json" in options else "GET"
    url = f"{platform.url}/fn/{path}"
    return httpx.request(method, url, headers=platform.headers, timeout=120, **options)


def test_a_web_server_answers(platform: PlatformUnderTest) -> None:
    platform.cli("deploy", str(KINDS / "web_server.py"), "--no-wait")

    assert ask(platform, "style-web-server/files/").text == "Hello from a process"
    assert ask(platform, "style-web-server/files/absent.html").status_code == 404
    # as the server says
    assert ask(platform, "style-web-server/files/", json={}).status_code == 501


def test_web_applications_with_packages_of_their_own_answer(platform: PlatformUnderTest) -> None:
    for name in ("endpoint_on_class", "endpoints", "wsgi"):
        platform.cli("deploy", str(KINDS / f"{name}.py"), "--no-wait")

    answer = ask(platform, "style-endpoint-on-class/Counter-web", params={"text": "aha"})
    assert answer.json() == {"vowels": 2}
    assert ask(platform, "style-endpoints/greet?user=Ada").json() == {"greeting": "Hello, Ada!"}
    assert ask(platform, "style-endpoints/order", json={"item": "tea"}).json() == {
        "ordered": ["tea"]
    }
    assert ask(platform, "style-wsgi/site/").text == "Hello from Flask"
    assert ask(platform, "style-wsgi/site/echo", json={"a": 1}).json() == {"a": 1}
