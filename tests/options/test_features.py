"""Proofs of features: through a worker's reader with a real Redis, and what a deploy refuses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import redis

from pilotlight.errors import InvalidInput
from pilotlight.spec.features.schema import Feature, FeatureSchema
from pilotlight.spec.features.sources import Features, FeaturesSpec, RedisFeatures
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.policies import ModelCard
from pilotlight.worker.features.reader import FeatureReader
from tests.fakes.redis_server import MortalRedis
from tests.fakes.routes import spec_of
from tests.options.contract import proves

TRIPS = FeatureSchema({"trips": Feature(int, default=7, low=0, high=100)})
SOURCE = RedisFeatures(key="user:{x}", schema=TRIPS, deadline_ms=1000)


async def read(url: str, source: RedisFeatures) -> Features:
    reader = FeatureReader(FeaturesSpec(online=(source,)))
    reader.open({source.url: url})
    try:
        return await reader.read({"x": 1})
    finally:
        reader.close()


def write(url: str, key: str, value: Any) -> None:
    with redis.Redis.from_url(url) as server:
        server.set(key, json.dumps(value))


@proves(
    "RedisFeatures.key",
    "RedisFeatures.url",
    "RedisFeatures.max_age_s",
    "RedisFeatures.timestamp",
)
async def test_a_source_is_read_where_it_is_declared(fleet: str, redis_url: str) -> None:
    write(redis_url, "user:1", {"trips": 3, "at": time.time() - 100})
    assert (await read(redis_url, SOURCE))["trips"] == 3
    for other, reason in (
        (replace(SOURCE, key="item:{x}"), "missing"),
        (replace(SOURCE, max_age_s=50.0, timestamp="at"), "stale"),
        (replace(SOURCE, max_age_s=500.0, timestamp="written"), "stale"),
    ):
        found = await read(redis_url, other)
        assert (found["trips"], found.degraded) == (7, {"trips": reason})
    aged = replace(SOURCE, url="OTHER_URL", max_age_s=500.0, timestamp="at")
    assert (await read(redis_url, aged))["trips"] == 3


@proves("RedisFeatures.deadline_ms")
async def test_a_read_has_its_deadline(fleet: str, mortal_redis: MortalRedis) -> None:
    reader = FeatureReader(FeaturesSpec(online=(replace(SOURCE, deadline_ms=40.0),)))
    reader.open({SOURCE.url: mortal_redis.url})
    await reader.read({"x": 1})
    mortal_redis.freeze()
    began = time.monotonic()
    assert (await reader.read({"x": 1})).degraded == {"trips": "deadline"}
    assert 0.03 < time.monotonic() - began < 10  # the server never answers
    reader.close()


@proves(
    "Feature.type",
    "Feature.default",
    "Feature.low",
    "Feature.high",
    "Feature.size",
    "Feature.nullable",
    "Feature.name",
)
async def test_values_are_those_of_the_schema(fleet: str, redis_url: str) -> None:
    write(redis_url, "user:1", {"trips": 101, "v": [1, 2, 3], "rating": None})
    schema = FeatureSchema(
        {
            "trips": Feature(int, default=7, low=0, high=100),
            "v": Feature(list, default=[0, 0], size=2),
            "rating": Feature(float, nullable=True),
        }
    )
    found = await read(redis_url, replace(SOURCE, schema=schema))
    assert found == {"trips": 7, "v": [0.0, 0.0], "rating": None}
    assert found.degraded == {"trips": "invalid", "v": "invalid"}
    assert next((one.name, one.type, one.low) for one in schema.features) == ("trips", "int", 0.0)


@proves("FeatureSchema.version", "ModelCard.features", "MethodSpec.takes_features")
async def test_features_are_those_of_the_training(fleet: str) -> None:
    given = FeaturesSpec(arguments=TRIPS)
    assert spec_of("hello", features=given, card=ModelCard(features=TRIPS.hash)).features == given
    changed = FeatureSchema(TRIPS.features, version="2")
    with pytest.raises(InvalidInput, match="model card"):
        spec_of("hello", features=given, card=ModelCard(features=changed.hash))
    online = FeaturesSpec(online=(SOURCE,))
    with pytest.raises(InvalidInput, match="does not take them"):
        spec_of("hello", features=online, methods=(MethodSpec(takes_features=False),))
