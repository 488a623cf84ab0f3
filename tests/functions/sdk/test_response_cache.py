"""`cache=pilotlight.ResponseCache(…)`: what it records, and what it says when it is used wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import pilotlight
from pilotlight.errors import InvalidInput
from pilotlight.sdk.options import resolve_options
from pilotlight.spec.engines import GuardSpec
from pilotlight.spec.features.schema import Feature, FeatureSchema
from pilotlight.spec.features.sources import FeaturesSpec, RedisFeatures
from pilotlight.spec.function import FunctionKind, FunctionSpec, MethodSpec
from pilotlight.spec.policies import DEFAULT_CACHE_BYTES, ResponseCacheSpec
from pilotlight.spec.record_json import from_json, to_json
from tests.activator.llm.openai.conftest import llm
from tests.fakes.routes import spec_of


def test_a_function_has_a_cache_if_it_asks_for_one() -> None:
    cache = pilotlight.ResponseCache("1h")
    assert cache == ResponseCacheSpec(ttl_s=3600, max_bytes=DEFAULT_CACHE_BYTES, shared=False)
    assert resolve_options({"cache": cache}, concurrent=None).policies["cache"] == cache
    assert resolve_options({}, concurrent=None).policies["cache"] is None


@pytest.mark.parametrize(
    "ttl, ttl_s", [("30s", 30), ("5m", 300), ("1h", 3600), ("7d", 604_800), (90, 90), (90.0, 90)]
)
def test_a_time_is_a_text_or_seconds(ttl: Any, ttl_s: int) -> None:
    assert pilotlight.ResponseCache(ttl).ttl_s == ttl_s


@pytest.mark.parametrize(
    "more, said",
    [
        ({"ttl": "1w"}, 'must be such as "30s"'),
        ({"ttl": "0s"}, 'must be such as "30s"'),
        ({"ttl": 1.5}, "whole seconds"),
        ({"ttl": True}, "whole seconds"),
        ({"ttl": float("inf")}, "whole seconds"),
        ({"ttl": float("nan")}, "whole seconds"),
        ({"ttl": None}, "whole seconds"),
        ({"ttl": 0}, "must be 1 s to 30 days"),
        ({"ttl": "31d"}, "must be 1 s to 30 days"),
        ({"ttl": "1h", "max_bytes": 1000}, "must be 1048576 to 1073741824 bytes"),
        ({"ttl": "1h", "max_bytes": "16MiB"}, "must be a number of bytes"),
    ],
)
def test_a_value_out_of_range_is_named(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        pilotlight.ResponseCache(**more)
    assert caught.value.detail["parameter"] == "cache"


def test_what_is_no_cache_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"pilotlight.ResponseCache\(…\)"):
        resolve_options({"cache": "1h"}, concurrent=None)


def test_a_function_whose_answers_cannot_be_kept_is_refused_by_name() -> None:
    cache = pilotlight.ResponseCache("1h")
    schema = FeatureSchema({"trips": Feature(int, default=7)})
    online = FeaturesSpec(online=(RedisFeatures(key="user:{x}", schema=schema),))
    reading = MethodSpec(parameters=("x",), takes_features=True)
    cases: tuple[tuple[Callable[..., FunctionSpec], dict[str, Any], str], ...] = (
        (spec_of, {"kind": FunctionKind.ASGI}, "not compared"),
        (spec_of, {"features": online, "methods": (reading,)}, "online features change"),
        (spec_of, {"methods": (MethodSpec(is_generator=True),)}, "streams are not kept"),
        (llm, {"guard": GuardSpec(patterns=("email",))}, "its guard is asked"),
    )
    for make, options, said in cases:
        make(**options)
        with pytest.raises(InvalidInput, match=said) as caught:
            make(cache=cache, **options)
        assert caught.value.detail["parameter"] == "cache"


def test_it_is_part_of_the_spec() -> None:
    spec = spec_of(cache=pilotlight.ResponseCache("1h", shared=True))
    assert from_json(FunctionSpec, to_json(spec)) == spec
    assert spec.digest() != spec_of().digest()
