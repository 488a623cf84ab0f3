"""`pilotlight plan` against the real control plane, with records of calls in its ledger."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from pilotlight.cli.main import build
from pilotlight.controller.billing import ledger
from pilotlight.controller.database import tables
from tests.fakes.served_controller import ServedController
from tests.functions.controller.parts import BUNDLE, BUNDLE_DIGEST, spec, usage

CALLS = 1_200


@pytest.fixture(name="platform", scope="module")
def _platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    """search/hello with measured calls of some 20 ms and a start, and search/new without any."""
    with ServedController(tmp_path_factory.mktemp("plan")) as platform:
        platform.now = time.time()
        with platform.client() as client:
            client.put_blob(BUNDLE_DIGEST, BUNDLE)
            tenant = client.whoami()["tenant"]["id"]
        headers = {"authorization": f"Bearer {platform.key}"}
        body = {"functions": [spec(scaling={"max_instances": 3}), spec("new")]}
        answer = httpx.post(f"{platform.url}/v1/apps/search/deploy", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        f, r = tables.functions.c, tables.revisions.c
        with platform.store.read() as sql:
            function = sql.execute(sa.select(f.id).where(f.name == "hello")).scalar_one()
            revision = sql.execute(sa.select(r.name).where(r.function == function)).scalar_one()
        source = random.Random(1)
        own = {"tenant": tenant, "function_id": function, "revision": revision}
        records = []
        for number in range(CALLS):
            ns = round(source.uniform(10e6, 30e6))
            at = platform.now - 2 - number / 10
            times = {"exec_ms": ns // 1_000_000, "billed_ns": ns, "started_at": at}
            records.append(usage(f"req-{number}/1", **own, **times))
        start = {"kind": "START", "start_kind": "COLD", "billed_ns": 3 * 10**9, "outcome": "span"}
        records.append(usage("i-1/START/1", **own, **start, started_at=platform.now - 60))
        with platform.store.write() as write:
            ledger.add(write, records)
        yield platform


@pytest.fixture(name="key", scope="module")
def _key(platform: ServedController) -> str:
    """A key that may only call, and sees no nodes."""
    with platform.client() as client:
        return str(client.create_key(scope="invoke")["secret"])


def plan(platform: ServedController, key: str, *words: str) -> Result:
    return CliRunner().invoke(
        build(), ["plan", *words], env=platform.environ(key), prog_name="pilotlight"
    )


def test_a_plan_has_instances_cost_and_what_was_measured(
    platform: ServedController, key: str
) -> None:
    done = plan(
        platform, key, "search/hello", "--rate", "50", "--p99", "300ms", "--zones", "3", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["measured"]["calls"] == CALLS
    assert found["measured"]["exec_ms"]["p50"] == pytest.approx(20.0, rel=0.05)
    planned = found["plan"]
    # 65 calls a second of 20 ms keep 1.3 instances busy
    assert (planned["serving"], planned["per_zone"], planned["instances"]) == (2, 1, 3)
    assert planned["p99_at_headroom_ms"] <= 300
    assert found["cost_per_day"]["currency"] == "USD"


def test_the_same_for_people(platform: ServedController, key: str) -> None:
    done = plan(
        platform, key, "search/hello", "--rate", "200", "--p99", "0.1s", "--headroom", "0.1"
    )
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert lines[0].startswith("search/hello v1-")
    assert "200 calls/s, 99 % within 100 ms" in lines[0]
    first = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines[1:] if "  " in line)
    assert first["measured"].startswith(f"{CALLS} calls, ")
    assert first["starts"].startswith("COLD p50 3.00 s")
    assert first["instances"].endswith("reserve 0")
    assert first["load tests"].endswith("ms in 9 of 10 tests of 1000 calls")
    assert "USD (busy" in first["cost a day"]
    assert "! max_instances=3 allows fewer" in done.stdout


def test_what_is_impossible_ends_with_1(platform: ServedController, key: str) -> None:
    done = plan(platform, key, "search/hello", "--rate", "5", "--p99", "12ms")
    assert done.exit_code == 1
    assert "! impossible: with no other call the 99th percentile is 29." in done.stdout
    assert "instances" not in done.stdout.partition("!")[0]


@pytest.mark.parametrize(
    "words, message",
    [
        (("search/hello", "--rate", "0", "--p99", "1s"), "--rate 0: must be more than 0"),
        (("search/hello", "--rate", "nan", "--p99", "1s"), "--rate nan: must be more than 0"),
        (("search/hello", "--rate", "2e6", "--p99", "1s"), "at most 1e+06"),
        (("search/hello", "--rate", "5", "--p99", "fast"), "'fast' is not a duration"),
        (("search/hello", "--rate", "5", "--p99", "0ms"), "--p99 0: must be more than 0"),
        (
            ("search/hello", "--rate", "5", "--p99", "1s", "--headroom", "some"),
            "--headroom 'some' is not a share",
        ),
        (
            ("search/hello", "--rate", "5", "--p99", "1s", "--growth", "9999%"),
            "--growth 9999%: must be at most 1000%",
        ),
        (
            ("search/hello", "--rate", "5", "--p99", "1s", "--tokens-in", "many"),
            "--tokens-in 'many'",
        ),
        (
            ("search/hello", "--rate", "5", "--p99", "1s", "--tokens-out", "20"),
            "it is no language model",
        ),
        (("search/new", "--rate", "5", "--p99", "1s"), "search/new has 0 measured calls"),
        (
            ("search/hello", "--rate", "5", "--p99", "1s", "--since", "1s"),
            "search/hello has 0 measured calls",
        ),
        (("search/gone", "--rate", "5", "--p99", "1s"), "there is no function search/gone"),
        (("list", "--rate", "5", "--p99", "1s"), "pilotlight tenant plans"),
    ],
)
def test_bad_input_is_a_clear_error(
    platform: ServedController, key: str, words: tuple[str, ...], message: str
) -> None:
    done = plan(platform, key, *words)
    assert done.exit_code == 1
    assert message in done.stderr


def test_a_key_that_only_calls_may_plan_and_others_see_nothing(
    platform: ServedController, key: str
) -> None:
    words = ("search/hello", "--rate", "50", "--p99", "300ms", "--json")
    with platform.client() as client:
        stranger = client.create_tenant("acme")["key"]["secret"]
    found = json.loads(plan(platform, key, *words).stdout)
    assert found["plan"]["room"] is None
    refused = plan(platform, stranger, *words)
    assert refused.exit_code == 1
    assert "there is no function search/hello" in refused.stderr
