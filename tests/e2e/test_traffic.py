"""Traffic on a whole platform: a split by hand, a tag's own address, a shadow, and the way there
and back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.harness import PlatformUnderTest, wait_for
from tests.fakes.plain_http import NO_TLS

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]
APP = """
import pilotlight

app = pilotlight.App("split")


@app.function(cpu=0.25, memory="256MiB", max_instances=1)
def greet() -> str:
    return "{word}"
"""
FOLLOWED_S = 10.0
"""A change is followed at once: before it is answered. This is how long a loaded machine is
given."""


@pytest.fixture(scope="module")
def revisions(
    platform: PlatformUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[str]]:
    """`split/greet` in two revisions, which say `old` and `new`; the second one serves."""
    file: Path = tmp_path_factory.mktemp("split") / "split.py"
    made = []
    for word in ("old", "new"):
        file.write_text(APP.format(word=word))
        platform.cli("deploy", str(file), "--no-wait")
        wait_for(partial(says, platform, word), f"{word} to answer")
        made.append(platform.post("split/greet").headers["pilotlight-revision"])
    yield made
    platform.cli("app", "delete", "split", "--yes")


def says(platform: PlatformUnderTest, word: str) -> bool:
    return ask(platform).text == f'"{word}"'


def ask(platform: PlatformUnderTest, where: str = "split/greet", **headers: str) -> httpx.Response:
    return httpx.post(
        f"{platform.url}/v1/functions/{where}:invoke",
        json={},
        headers={**platform.headers, **headers},
        timeout=60,
        verify=NO_TLS,
    )


def traffic(platform: PlatformUnderTest, method: str = "GET", **body: Any) -> httpx.Response:
    where = f"{platform.url}/v1/functions/split/greet/traffic"
    return httpx.request(
        method, where, json=body or None, headers=platform.headers, timeout=60, verify=NO_TLS
    )


def test_there_and_back_by_hand(platform: PlatformUnderTest, revisions: list[str]) -> None:
    old, new = revisions
    assert traffic(platform).json()["weights"] == {new: 100}
    changed = traffic(
        platform, "PATCH", tags={"before": old}, shadow={"revision": old, "max_compute": 1.0}
    )
    assert changed.status_code == 200, changed.text
    assert (ask(platform).text, ask(platform, "split/greet@before").text) == ('"new"', '"old"')
    assert ask(platform, **{"pilotlight-tag": old}).headers["pilotlight-revision"] == old
    assert ask(platform, "split/greet@nobody").status_code == 404

    split = traffic(platform, "PATCH", weights={old: 50, new: 50}, sticky="header:x-user")
    assert (split.status_code, split.json()["shadow"]) == (200, None), split.text
    by_user = {f"user-{n}": ask(platform, **{"x-user": f"user-{n}"}).text for n in range(32)}
    assert set(by_user.values()) == {'"old"', '"new"'}
    more = traffic(platform, "PATCH", weights={old: 60, new: 40})
    assert more.status_code == 200
    assert all(
        ask(platform, **{"x-user": user}).text == '"old"'
        for user, text in by_user.items()
        if text == '"old"'
    )

    began = time.monotonic()
    assert (
        traffic(
            platform, "PATCH", weights={new: 100}, generation=more.json()["generation"]
        ).status_code
        == 200
    )
    assert ask(platform).text == '"new"'
    assert time.monotonic() - began < FOLLOWED_S
    assert (
        traffic(
            platform, "PATCH", weights={old: 100}, generation=more.json()["generation"]
        ).status_code
        == 409
    )


def test_copies_reach_the_shadow_and_cost_nothing(
    platform: PlatformUnderTest, revisions: list[str]
) -> None:
    old, new = revisions
    assert (
        traffic(
            platform, "PATCH", weights={new: 100}, shadow={"revision": old, "max_compute": 1.0}
        ).status_code
        == 200
    )

    def copies() -> list[dict[str, Any]]:
        assert ask(platform).text == '"new"'
        return platform.usage("kind = ?", "SHADOW")

    wait_for(copies, "a copy in the ledger")
    assert {(row["revision"], float(row["cost"]), row["arm"]) for row in copies()} == {
        (old, 0.0, "~shadow")
    }
    assert traffic(platform, "PATCH", shadow=None).status_code == 200
