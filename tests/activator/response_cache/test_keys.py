"""Which calls are equal."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.calls.call import Call
from activator.calls.caller import Caller
from activator.http.payloads import JSON, PICKLE, Payload
from activator.response_cache.keys import (
    MAX_CANONICAL_BYTES,
    CacheControl,
    cache_control,
    cache_key,
    canonical,
)
from activator.routing.call_target import CallTarget
from pilotlight.spec.pricing import Rates
from pilotlight.spec.record_json import canonical_json
from tests.fakes.routes import route_of, spec_of, split_route

V1, V2 = "v1-aaaaaa", "v2-bbbbbb"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def target_at(revision: str = V1, generation: int = 3, function: str = "hello") -> CallTarget:
    route = split_route(spec_of(function), {revision: 100}, generation=generation)
    return CallTarget(route, revision, Rates(version="test"))


def key_for(
    target: CallTarget | None = None,
    body: bytes = b'{"x":1}',
    *,
    content_type: bytes = JSON,
    accept: bytes = b"",
    method: str = "",
    key_id: str = "k",
    tenant: str = "",
) -> bytes:
    return cache_key(
        Call(
            id="req-1",
            target=target or target_at(),
            method=method,
            payload=Payload(body, content_type, accept),
            caller=Caller(key_id=key_id, tenant=tenant),
        )
    )


@pytest.mark.parametrize(
    "same",
    [b'{"y":2,"x":1}', b'{ "x" : 1 , "y" : 2 }', b'{"y":0,"x":1,"y":2}', b'{"\\u0078":1,"y":2}'],
    ids=["order", "white space", "the last of two members", "escapes"],
)
def test_equal_arguments_have_one_key(same: bytes) -> None:
    assert key_for(body=same) == key_for(body=b'{"x":1,"y":2}')


@pytest.mark.parametrize(
    "other",
    [b'{"x":1.0}', b'{"x":"1"}', b'{"x":true}', b'{"x":[1]}', b'{"x":-1}', b'{"y":1}', b"[1]", b""],
)
def test_what_a_function_can_tell_apart_has_another_key(other: bytes) -> None:
    assert key_for(body=other) != key_for()


@pytest.mark.parametrize(
    "spelling", [b'{"x":1.50}', b'{"x":15e-1}', b'{"x":0.15E1}', b'{"x":1.5000000000000000001}']
)
def test_a_number_has_one_spelling(spelling: bytes) -> None:
    assert key_for(body=spelling) == key_for(body=b'{"x":1.5}')


@given(VALUES)
def test_a_value_is_written_in_one_way(value: object) -> None:
    written = canonical_json({"x": value})
    found = canonical(written, is_json=True)
    assert found[:1] in (b"v", b"b")
    assert canonical(b" " + written, is_json=True) == (
        found if found[:1] == b"v" else b"b " + written
    )
    if found[:1] == b"v":
        assert canonical(found[1:], is_json=True) == found


def test_every_part_of_a_call_counts() -> None:
    keys = [
        key_for(),
        key_for(target_at(V2)),
        key_for(target_at(generation=4)),
        key_for(target_at(function="other")),
        key_for(method="m"),
        key_for(accept=b"text/plain"),
        key_for(content_type=PICKLE),
        key_for(key_id=""),
        key_for(tenant="t-2"),
        key_for(tenant="t-3"),
    ]
    assert len(set(keys)) == len(keys)
    assert len(keys[0]) == 32


def test_keys_of_one_tenant_share_answers() -> None:
    assert key_for(key_id="k-2") == key_for(key_id="k")


def test_a_rollback_does_not_bring_back_the_answers_from_before() -> None:
    """v1 → v2 → v1: each change of the traffic is a new generation."""
    before, after = target_at(V1, 3), target_at(V1, 5)
    assert before.key == after.key
    assert key_for(before) != key_for(after)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 8000,
        b'{"x":1e999}',
        b'{"x":NaN}',
        b'{"x":' + b"9" * 5000 + b"}",
        b"\xff",
        b'{"x":"' + b"a" * MAX_CANONICAL_BYTES + b'"}',
    ],
    ids=["too deep", "beyond a float", "not a number", "too many digits", "no UTF-8", "large"],
)
def test_what_is_not_worth_parsing_goes_by_its_bytes(body: bytes) -> None:
    assert canonical(body, is_json=True) == b"b" + body
    assert canonical(body, is_json=False) == b"b" + body


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * (MAX_CANONICAL_BYTES // 2 - 2) + b"1]",
        b"[" * 400 + b"]" * 400,
        b"[" + b"{}," * (MAX_CANONICAL_BYTES // 3 - 2) + b"1]",
        b'{"x":"' + b"\\u00ff" * (MAX_CANONICAL_BYTES // 6 - 2) + b'"}',
        b"{" + b",".join(b'"%d":0' % n for n in range(1700)) + b"}",
        b"[" + b"1e9," * (MAX_CANONICAL_BYTES // 4 - 2) + b"1]",
    ],
    ids=["numbers", "depth", "objects", "escapes", "members", "floats"],
)
def test_the_work_is_bounded(body: bytes) -> None:
    assert len(body) <= MAX_CANONICAL_BYTES
    began = time.thread_time()
    for _ in range(10):
        canonical(body, is_json=True)
    assert (time.thread_time() - began) / 10 < 0.02


@pytest.mark.parametrize(
    "given, control",
    [
        (b"", CacheControl.USE),
        (b"max-age=0", CacheControl.USE),
        (b"no-cache", CacheControl.REFRESH),
        (b"max-age=0, No-Cache", CacheControl.REFRESH),
        (b"no-cache, no-store", CacheControl.BYPASS),
        (b"no-store", CacheControl.BYPASS),
        (b"x" * 300, CacheControl.BYPASS),
    ],
)
def test_callers_say_what_they_accept(given: bytes, control: CacheControl) -> None:
    assert cache_control({b"cache-control": given}) is control
    assert cache_control({}) is CacheControl.USE


def test_the_route_of_a_single_revision_is_generation_zero() -> None:
    assert CallTarget(route_of(spec_of()), "v1-abcdef", Rates(version="test")).generation == 0
