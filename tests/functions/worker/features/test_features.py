"""Online features in a real worker with a real Redis: what the function gets, what the answer says,
and what happens when the Redis is gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import httpx
import pytest
import redis

import pilotlight
from pilotlight.spec.features.schema import Feature, FeatureSchema
from pilotlight.spec.features.sources import FeaturesSpec, RedisFeatures
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.policies import BatchPolicy
from pilotlight.worker.features.reader import FeatureReader
from tests.fakes.fake_shim import PICKLED, FakeInstance, FakeShim, call, function_spec
from tests.fakes.freezing_shim import FreezingShim
from tests.fakes.plain_http import NO_TLS
from tests.fakes.redis_server import MortalRedis

URL = "FEATURES_REDIS_URL"
USER = FeatureSchema(
    {
        "trips": Feature(int, default=0, low=0),
        "rating": Feature(float, nullable=True),
        "taste": Feature(list, default=[0.0, 0.0], size=2),
    }
)
DEFAULTS = {"trips": 0, "rating": None, "taste": [0.0, 0.0]}
ADA = {"trips": 12, "rating": 4.5, "taste": [1, 0.5], "home": "not in the schema"}
SOURCE = RedisFeatures(key="user:{user_id}", schema=USER, deadline_ms=1000)
CODE = """
import pilotlight

class Ranker:
    @pilotlight.method(example=["example"])
    def plain(self, user_id: str, factor: int = 1, features: dict = None):
        return [user_id, factor, dict(features), features.degraded]

    async def later(self, user_id: str, *, features):
        return [dict(features), features.degraded]

    def items(self, user_id: str, *, features):
        yield dict(features)
        yield features.degraded

    @pilotlight.batched(max_batch_size=4, wait_ms=50)
    def batch(self, user_id: list[str], features: list) -> list:
        return [[one, dict(found), len(user_id)] for one, found in zip(user_id, features)]

    def fail(self, user_id: str, features):
        raise ValueError("no")

    def without(self, features: int):
        return features
"""
TAKERS = ("plain", "later", "items", "batch", "fail")


def ranker(*sources: RedisFeatures) -> FunctionSpec:
    methods = [
        MethodSpec(
            name=name,
            takes_features=True,
            is_generator=name == "items",
            batch=BatchPolicy(max_batch_size=4, wait_ms=50) if name == "batch" else None,
        )
        for name in TAKERS
    ]
    spec = function_spec(
        qualname="Ranker",
        kind=FunctionKind.CLASS,
        methods=[*methods, MethodSpec(name="without")],
        max_inputs=8,
    )
    return replace(spec, features=FeaturesSpec(online=sources or (SOURCE,)))


def ask(
    instance: FakeInstance, method: str = "plain", arguments: object = ("ada",)
) -> httpx.Response:
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS),
        base_url="http://worker",
        timeout=30,
    ) as client:
        headers = {"content-type": "application/json"}
        return client.post(f"/invoke/{method}", content=json.dumps(arguments), headers=headers)


@pytest.fixture(scope="module")
def template() -> Iterator[FakeShim]:
    with FreezingShim({"app.py": CODE}, ranker(), secret_variables=[URL]) as shim:
        yield shim


@pytest.fixture
def instance(template: FakeShim, redis_url: str, request: pytest.FixtureRequest) -> FakeInstance:
    return template.start(f"i-{abs(hash(request.node.name))}", {URL: redis_url})


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as server:
        yield server


def test_each_kind_of_callable_gets_the_features_of_its_entity(
    instance: FakeInstance, server: redis.Redis
) -> None:
    server.set(SOURCE.key_of(user_id="ada"), json.dumps(ADA))
    found = {"trips": 12, "rating": 4.5, "taste": [1.0, 0.5]}
    answer = ask(instance, arguments={"user_id": "ada", "factor": 3})
    assert answer.json() == ["ada", 3, found, {}]
    assert "pilotlight-degraded" not in answer.headers
    assert ask(instance, "later").json() == [found, {}]
    assert ask(instance, "batch").json() == ["ada", found, 1]
    items = ask(instance, "items")
    assert [json.loads(line) for line in items.text.splitlines()] == [found, {}]
    assert "pilotlight-degraded" not in items.headers
    assert ask(instance, "without", {"features": 7}).json() == 7


@pytest.mark.parametrize("method", TAKERS)
def test_a_response_says_that_features_are_defaults(instance: FakeInstance, method: str) -> None:
    answer = ask(instance, method, ["nobody"])
    assert answer.status_code == (500 if method == "fail" else 200)
    assert answer.headers["pilotlight-degraded"] == "features=missing"
    if method == "plain":
        missing = dict.fromkeys(USER.names, "missing")
        assert answer.json() == ["nobody", 1, DEFAULTS, missing]


def test_callers_cannot_pass_features(instance: FakeInstance) -> None:
    refused = ask(instance, arguments={"user_id": "ada", "features": {"trips": 99}})
    assert (refused.status_code, refused.json()["parameter"]) == (400, "features")
    body = cloudpickle.dumps((("ada",), {"features": {"trips": 99}}))
    with httpx.Client(transport=httpx.HTTPTransport(uds=instance.path, verify=NO_TLS)) as client:
        pickled = client.post("http://worker/invoke/plain", content=body, headers=PICKLED)
    assert pickled.status_code == 400
    beyond = ask(instance, arguments=["ada", 1, {"trips": 99}])
    assert beyond.status_code == 400


def test_an_argument_names_no_other_entity(instance: FakeInstance, server: redis.Redis) -> None:
    server.set("user:ada", json.dumps(ADA))
    server.set("user:ada:secret", json.dumps({**ADA, "trips": 99}))
    server.set("user:eve%3Aada", json.dumps({**ADA, "trips": 7}))
    assert ask(instance, arguments=["ada:secret"]).json()[2] == DEFAULTS
    assert ask(instance, arguments=["eve:ada"]).json()[2]["trips"] == 7
    for wrong in ("", "x" * 257, None, 1.5, True, ["ada"], "\ud800"):
        refused = ask(instance, arguments={"user_id": wrong})
        assert refused.status_code == 400, wrong
        assert refused.headers["pilotlight-outcome"] == "invalid"


def test_a_redis_that_is_killed_in_the_middle_of_a_call_does_not_fail_it(
    template: FakeShim, mortal_redis: MortalRedis
) -> None:
    instance = template.start("i-killed", {URL: mortal_redis.url})
    with redis.Redis.from_url(mortal_redis.url) as server:
        server.set("user:ada", json.dumps(ADA))
    assert ask(instance).json()[3] == {}
    mortal_redis.freeze()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(ask(instance)))
    asking.start()
    time.sleep(0.1)  # the command is with the frozen server
    assert answers == []
    mortal_redis.kill()
    asking.join(30)
    (answer,) = answers
    assert answer.headers["pilotlight-degraded"] == "features=unavailable"
    assert answer.json() == ["ada", 1, DEFAULTS, dict.fromkeys(USER.names, "unavailable")]
    began = time.monotonic()
    for _ in range(20):
        assert ask(instance).status_code == 200
    assert time.monotonic() - began < 10
    mortal_redis.start()
    with redis.Redis.from_url(mortal_redis.url) as server:
        server.set("user:ada", json.dumps(ADA))
    until = time.monotonic() + 30
    while ask(instance).json()[3]:
        assert time.monotonic() < until


def test_a_hung_redis_costs_a_call_its_deadline(
    template: FakeShim, mortal_redis: MortalRedis
) -> None:
    source = replace(SOURCE, deadline_ms=30)
    with FreezingShim({"app.py": CODE}, ranker(source), secret_variables=[URL]) as shim:
        instance = shim.start("i-hung", {URL: mortal_redis.url})
        deadline = time.monotonic() + 30
        while ask(instance).json()[3] != dict.fromkeys(USER.names, "missing"):
            assert time.monotonic() < deadline, "a busy machine answers once in time"
        mortal_redis.freeze()
        assert ask(instance).headers["pilotlight-degraded"] == "features=deadline"


def test_one_dead_server_of_two_costs_its_own_features_only(redis_url: str) -> None:
    item = RedisFeatures(
        key="item:{user_id}:{factor}",
        schema=FeatureSchema({"price": Feature(float, default=1.0)}),
        url="ITEMS_URL",
        deadline_ms=1000,
    )
    with redis.Redis.from_url(redis_url) as server:
        server.set("user:ada", json.dumps(ADA))
        server.set("item:ada:1", json.dumps({"price": 9}))
    variables = [URL, "ITEMS_URL"]
    with FreezingShim({"app.py": CODE}, ranker(SOURCE, item), secret_variables=variables) as shim:
        dead = shim.start("i-1", {URL: redis_url, "ITEMS_URL": "unix:///nowhere/r.sock"})
        answer = ask(dead)
        assert answer.json()[2:] == [
            {"trips": 12, "rating": 4.5, "taste": [1.0, 0.5], "price": 1.0},
            {"price": "unavailable"},
        ]
        assert answer.headers["pilotlight-degraded"] == "features=unavailable"
        assert ask(shim.start("i-2", {URL: redis_url, "ITEMS_URL": redis_url})).json()[3] == {}


def test_sources_of_one_server_are_read_by_one_command(redis_url: str) -> None:
    item = RedisFeatures(
        key="item:{factor}",
        schema=FeatureSchema({"price": Feature(float, default=1.0)}),
        deadline_ms=1000,
    )
    with (
        FreezingShim({"app.py": CODE}, ranker(SOURCE, item), secret_variables=[URL]) as shim,
        redis.Redis.from_url(redis_url) as server,
    ):
        instance = shim.start("i-1", {URL: redis_url})
        ask(instance)
        server.config_resetstat()
        ask(instance)
        stats = server.info("commandstats")
        assert stats["cmdstat_mget"]["calls"] == 1
        assert set(stats) <= {"cmdstat_mget", "cmdstat_config|resetstat", "cmdstat_info"}


def test_a_snapshot_holds_no_connection_and_its_proof_reads_nothing(redis_url: str) -> None:
    with (
        FreezingShim({"app.py": CODE}, ranker(), secret_variables=[URL]) as shim,
        redis.Redis.from_url(redis_url) as server,
    ):
        server.set("user:ada", json.dumps(ADA))
        before = server.info("stats")["total_connections_received"]
        shim.freeze()  # expects that nothing was in the way
        assert server.info("stats")["total_connections_received"] == before
        for name in ("i-1", "i-2"):
            assert ask(shim.start(name, {URL: redis_url})).json()[3] == {}
        assert server.info("stats")["total_connections_received"] == before + 2


def test_a_template_answers_its_example_with_defaults() -> None:
    with FreezingShim({"app.py": CODE}, ranker(), secret_variables=[URL]) as shim:
        shim.freeze()
        proved = shim.prove(records=False)
        assert proved["ok"], proved


def test_a_function_whose_address_nothing_sets_does_not_start() -> None:
    with FreezingShim({"app.py": CODE}, ranker()) as shim:
        failed = shim.receive()
        assert failed["event"] == "failed"
        assert f"the Redis at {URL}, which is no environment variable" in failed["error"]["message"]


def test_an_address_that_is_none_gives_defaults(template: FakeShim) -> None:
    answer = ask(template.start("i-none", {URL: "cache:6379"}))
    assert answer.headers["pilotlight-degraded"] == "features=unavailable"
    assert answer.json()[2] == DEFAULTS


def test_a_function_without_features_imports_nothing_of_them() -> None:
    code = """
        import sys
        def f(): return [name for name in sys.modules if "worker.features" in name]
    """
    with FakeShim({"app.py": code}, function_spec()) as shim:
        assert call(shim.start()) == []


AGED = replace(SOURCE, max_age_s=60.0)


@pytest.mark.parametrize(
    "source, written, wanted, degraded",
    [
        (SOURCE, {"trips": 3}, {"trips": 3}, {"rating": "missing", "taste": "missing"}),
        (SOURCE, {**ADA, "rating": None}, {"rating": None, "trips": 12}, {}),
        (SOURCE, {**ADA, "trips": None}, {"trips": 0}, {"trips": "missing"}),
        (SOURCE, {**ADA, "trips": "12"}, {"trips": 0}, {"trips": "invalid"}),
        (SOURCE, {**ADA, "trips": 1.5}, {"trips": 0}, {"trips": "invalid"}),
        (SOURCE, {**ADA, "trips": -1}, {"trips": 0}, {"trips": "invalid"}),
        (SOURCE, {**ADA, "trips": True}, {"trips": 0}, {"trips": "invalid"}),
        (SOURCE, {**ADA, "taste": [1]}, {"taste": [0.0, 0.0]}, {"taste": "invalid"}),
        (SOURCE, {**ADA, "rating": 10**400}, {"rating": None}, {"rating": "invalid"}),
        (
            SOURCE,
            b'{"trips": NaN, "rating": Infinity}',
            DEFAULTS,
            ["invalid", "invalid", "missing"],
        ),
        (SOURCE, b"[1]", DEFAULTS, ["invalid"] * 3),
        (SOURCE, b"\xff", DEFAULTS, ["invalid"] * 3),
        (SOURCE, b"[" * 100_000, DEFAULTS, ["invalid"] * 3),
        (AGED, ADA, DEFAULTS, ["stale"] * 3),
        (AGED, {**ADA, "updated_at": "yesterday"}, DEFAULTS, ["stale"] * 3),
        (AGED, {**ADA, "updated_at": "2001-01-01T00:00:00Z"}, DEFAULTS, ["stale"] * 3),
        (AGED, {**ADA, "updated_at": "2201-01-01T00:00:00Z"}, DEFAULTS, ["stale"] * 3),
        (AGED, {**ADA, "updated_at": time.time() + 1e9}, DEFAULTS, ["stale"] * 3),
        (AGED, {**ADA, "updated_at": 10**400}, DEFAULTS, ["stale"] * 3),
    ],
)
async def test_what_does_not_fit_is_its_default(
    redis_url: str, source: RedisFeatures, written: Any, wanted: Any, degraded: Any
) -> None:
    found = await read(redis_url, source, written)
    assert wanted.items() <= found.items()
    if isinstance(degraded, list):
        degraded = dict(zip(USER.names, degraded, strict=True))
    assert found.degraded == degraded


async def test_a_fresh_value_is_used_whatever_writes_its_time(redis_url: str) -> None:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    for at in (now, int(now) - 30, f"{stamp}Z", f"{stamp}+00:00", stamp):
        found = await read(redis_url, AGED, {**ADA, "updated_at": at})
        assert (found.degraded, found["trips"]) == ({}, 12)
    named = replace(AGED, timestamp="at")
    assert (await read(redis_url, named, {**ADA, "at": now})).degraded == {}


async def read(url: str, source: RedisFeatures, written: object) -> pilotlight.Features:
    with redis.Redis.from_url(url) as server:
        value = written if isinstance(written, bytes) else json.dumps(written)
        server.set("user:ada", value)
    reader = FeatureReader(FeaturesSpec(online=(source,)))
    reader.open({source.url: url})
    try:
        return await reader.read({"user_id": "ada"})
    finally:
        reader.close()


@pytest.mark.parametrize(
    "reasons, wanted",
    [
        ([], b""),
        (["missing", "stale", "invalid"], b"pilotlight-degraded: features=invalid\r\n"),
        (["missing", "unavailable"], b"pilotlight-degraded: features=unavailable\r\n"),
        (["deadline", "stale"], b"pilotlight-degraded: features=deadline\r\n"),
    ],
)
def test_the_worst_reason_is_said(reasons: Sequence[str], wanted: bytes) -> None:
    degraded = {f"f{number}": reason for number, reason in enumerate(reasons)}
    assert FeatureReader.header_line(pilotlight.Features({}, degraded=degraded)) == wanted
