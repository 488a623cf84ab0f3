"""`Dict` and `Queue` of the SDK, over the real controller."""

from __future__ import annotations

import asyncio
import json
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pilotlight
from pilotlight.cli.main import build
from pilotlight.client import sessions
from pilotlight.controller.collections import collections
from pilotlight.errors import (
    InvalidInput,
    NotFound,
    RemoteError,
    StorageQuotaExceeded,
    TooLarge,
)
from pilotlight.profile import Profile
from pilotlight.spec.collection import MAX_VALUE_BYTES, CollectionKind, decode_key, encode_key
from tests.fakes.served_controller import ServedController
from tests.fakes.tcp_link import TcpLink

KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.text(max_size=8)
    | st.binary().filter(lambda b: len(b) < 20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=4,
)


@pytest.fixture(name="served", scope="module")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedController]:
    with ServedController(tmp_path_factory.mktemp("served")) as served:
        profile = Profile(url=served.url, api_key=served.key, environment="main")
        with sessions.use_profile(profile):
            yield served
        sessions.close()


@pytest.fixture(name="d")
def _dict(served: ServedController, request: pytest.FixtureRequest) -> pilotlight.Dict:
    name = f"d-{abs(hash(request.node.name))}"
    return pilotlight.Dict.from_name(name, create_if_missing=True)


@pytest.fixture(name="q")
def _queue(served: ServedController, request: pytest.FixtureRequest) -> pilotlight.Queue:
    name = f"q-{abs(hash(request.node.name))}"
    return pilotlight.Queue.from_name(name, create_if_missing=True)


def test_a_dict_is_used_as_a_dictionary(d: pilotlight.Dict) -> None:
    d["one"] = 1
    d[("a", 2, None)] = {"nested": [1.5]}
    d.update({b"\x00": "bytes"}, word="kwarg")
    assert d["one"] == 1
    assert d[("a", 2, None)] == {"nested": [1.5]}
    assert len(d) == d.len() == 4
    assert "one" in d
    assert "two" not in d
    assert dict(d.items())[b"\x00"] == "bytes"
    assert set(d) == set(d.keys()) == {"one", ("a", 2, None), b"\x00", "word"}
    assert "kwarg" in list(d.values())
    assert d.get("two") is None
    assert d.get("two", 7) == 7
    assert d.pop("two", 8) == 8
    assert d.put("one", 2, skip_if_exists=True) is False
    assert d.put("one", 3) is True
    assert d.pop("one") == 3
    for missing in (lambda: d["one"], lambda: d.pop("one"), lambda: d.__delitem__("one")):
        with pytest.raises(KeyError, match="one"):
            missing()
    d["none"] = None
    assert ("none" in d, d["none"]) == (True, None)
    del d["none"]
    d.clear()
    assert (len(d), list(d.items())) == (0, [])


def test_keys_that_are_equal_in_python_may_be_several(d: pilotlight.Dict) -> None:
    for key in (1, 1.0, True, "1", b"1", (1,)):
        d[key] = repr(key)
    assert sorted(d.values()) == sorted(["1", "1.0", "True", "'1'", "b'1'", "(1,)"])


def test_more_than_one_request_holds(d: pilotlight.Dict, q: pilotlight.Queue) -> None:
    d.update({str(number): b"x" * 3000 for number in range(700)})
    assert len(dict(d.items())) == len(list(d.keys())) == 700
    q.put_many([bytes([number % 256]) * 3000 for number in range(700)])
    assert q.len() == 700
    assert q.get_many(600) == [bytes([number % 256]) * 3000 for number in range(600)]
    assert len(q.get_many(600)) == 100


def test_a_queue_is_used_as_a_queue(q: pilotlight.Queue) -> None:
    q.put(1)
    q.put_many([2, 3])
    q.put("else", partition="p")
    assert (q.len(), q.len(partition="p"), q.len(total=True)) == (3, 1, 4)
    assert [q.get(), q.get(block=False), q.get(timeout=1)] == [1, 2, 3]
    assert q.get(block=False) is None
    assert q.get_many(5, block=False) == []
    with pytest.raises(queue.Empty, match=r"0\.05 s"):
        q.get(timeout=0.05)
    q.put(4)
    q.clear()
    assert q.len(total=True) == 1
    q.clear(all=True)
    assert q.len(total=True) == 0


async def test_a_put_to_a_queue_whose_answer_is_lost_is_stored_once(
    served: ServedController,
) -> None:
    where = urlsplit(served.url)
    link = TcpLink(str(where.hostname), where.port or 0)
    link.mend()
    profile = Profile(url=f"http://127.0.0.1:{link.port}", api_key=served.key, environment="main")
    try:
        with sessions.use_profile(profile):
            q = pilotlight.Queue.from_name("lossy", create_if_missing=True)
            link.lose_answer()
            q.put(1)
            link.lose_answer()
            await q.put_many.aio([2, 3])
            q.put(2)
            assert q.get_many(10) == [1, 2, 3, 2]
    finally:
        sessions.close()
        link.close()


async def test_answers_that_are_lost_are_asked_for_again(served: ServedController) -> None:
    where = urlsplit(served.url)
    link = TcpLink(str(where.hostname), where.port or 0)
    link.mend()
    profile = Profile(url=f"http://127.0.0.1:{link.port}", api_key=served.key, environment="main")
    try:
        with sessions.use_profile(profile):
            d = pilotlight.Dict.from_name("lossy-d", create_if_missing=True)
            link.lose_answer()
            assert d.put("k", 1, skip_if_exists=True)
            link.lose_answer()
            assert not await d.put.aio("k", 2, skip_if_exists=True)
            link.lose_answer()
            assert d.pop("k") == 1
            link.lose_answer()
            assert d.pop("k", None) is None
            q = pilotlight.Queue.from_name("lossy-q", create_if_missing=True)
            q.put_many([1, 2, 3])
            link.lose_answer()
            assert q.get() == 1
            link.lose_answer()
            assert await q.get_many.aio(5) == [2, 3]
            link.lose_answer()
            assert q.get(block=False) is None
            assert q.len() == 0
    finally:
        sessions.close()
        link.close()


async def test_each_method_has_an_asynchronous_form(
    d: pilotlight.Dict, q: pilotlight.Queue
) -> None:
    await d.put.aio("k", 1)
    assert await d.get.aio("k") == 1
    assert [pair async for pair in d.items.aio()] == [("k", 1)]
    assert await d.pop.aio("k") == 1
    with pytest.raises(KeyError):
        await d.pop.aio("k")
    waiting = asyncio.ensure_future(q.get.aio())
    await q.put_many.aio([1, 2])
    assert [await waiting, await q.get.aio(), await q.len.aio()] == [1, 2, 0]
    await pilotlight.Dict.delete.aio(d.name)
    await pilotlight.Queue.delete.aio(q.name)


def test_a_get_that_waits_gets_what_is_put_and_each_getter_its_own(
    served: ServedController, q: pilotlight.Queue
) -> None:
    got: list[Any] = []
    getters = [threading.Thread(target=lambda: got.append(q.get(timeout=30))) for _ in range(4)]
    q.len()  # it is there
    began = time.monotonic()
    for getter in getters:
        getter.start()
    for number in range(4):
        q.put(number)
    for getter in getters:
        getter.join()
    assert sorted(got) == [0, 1, 2, 3]
    assert time.monotonic() - began < 15  # not by the end of a wait


def test_what_is_missing_or_refused_is_named(served: ServedController, d: pilotlight.Dict) -> None:
    missing = pilotlight.Dict.from_name("missing")
    with pytest.raises(NotFound, match="no dict 'missing' in environment 'main'"):
        missing["a"] = 1
    with pytest.raises(NotFound, match="no queue 'missing'"):
        pilotlight.Queue.from_name("missing").get(block=False)
    with pytest.raises(NotFound):
        pilotlight.Queue.delete("missing")
    with pytest.raises(InvalidInput, match="dict"):
        pilotlight.Dict.from_name("not a name")
    with pytest.raises(TooLarge, match=f"{MAX_VALUE_BYTES} are allowed; keep larger ones in"):
        d["k"] = b"x" * MAX_VALUE_BYTES
    d["k"] = b"x" * (MAX_VALUE_BYTES - 100)
    assert len(d["k"]) == MAX_VALUE_BYTES - 100
    with pytest.raises(InvalidInput, match="258 bytes of UTF-8, and at most 256"):
        d["x" * 256] = 1
    with pytest.raises(InvalidInput, match="type list is not supported: use str, int"):
        d.get([1])
    with pytest.raises(InvalidInput, match="cannot be serialised"):
        d["k"] = threading.Lock()
    with pytest.raises(pilotlight.NotSupported, match="environment_name="):
        pilotlight.Dict.from_name("a", environment_name="b")
    with pytest.raises(pilotlight.NotSupported, match="partition_ttl= is not supported"):
        pilotlight.Queue.from_name("a").put(1, partition_ttl=60)
    with pytest.raises(pilotlight.NotSupported, match="ephemeral"):
        vars(pilotlight.Dict)["ephemeral"].__get__(None, pilotlight.Dict)
    with pytest.raises(InvalidInput, match="not both"):
        pilotlight.Queue.from_name("a").len(partition="p", total=True)


def test_a_full_queue_blocks_and_a_full_dict_refuses(
    d: pilotlight.Dict, q: pilotlight.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "MAX_ENTRIES", 2)
    q.put_many([1, 2])
    for waits in ({"block": False}, {"timeout": 0.05}):
        with pytest.raises(queue.Full, match="queue_entries"):
            q.put(3, **waits)
    taker = threading.Timer(0.05, q.get)
    taker.start()
    q.put(3)  # once there is room
    taker.join()
    assert q.get_many(5) == [2, 3]
    d.update(a=1, b=2)
    with pytest.raises(StorageQuotaExceeded, match="dict_entries"):
        d["c"] = 3
    d["a"] = 3


def test_the_platform_keeps_bytes_and_a_class_that_is_not_here_is_named(
    served: ServedController, d: pilotlight.Dict
) -> None:
    d["k"] = 1
    with served.client() as client:
        body = {"op": "put", "entries": [{"key": '"bad"', "value": "Y25vd2hlcmUKeAou"}]}
        client.operate_collection(CollectionKind.DICT, d.name, body, repeatable=False)
    with pytest.raises(RemoteError, match="cannot be loaded in this process"):
        d.get("bad")


def test_handles_travel(d: pilotlight.Dict) -> None:
    copy = pickle.loads(pickle.dumps(d))
    assert (repr(copy), copy.create_if_missing) == (repr(d), True)


def test_the_command_line_lists_and_deletes(served: ServedController) -> None:
    pilotlight.Dict.from_name("seen", create_if_missing=True)["k"] = 1
    pilotlight.Queue.from_name("jobs", create_if_missing=True).put(1)

    def run(*words: str) -> str:
        done = CliRunner().invoke(build(), words, env=served.environ())
        assert done.exit_code == 0, done.output
        return done.stdout

    for kind, name in (("dict", "seen"), ("queue", "jobs")):
        rows = {row["name"]: row for row in json.loads(run(kind, "list", "--json"))}
        assert rows[name]["entries"] == 1
        assert name in run(kind, "list")
        assert f"{kind} {name} deleted" in run(kind, "delete", name, "--yes")
        assert name not in run(kind, "list")


@given(KEYS)
def test_keys_come_back(key: Any) -> None:
    try:
        text = encode_key(key)
    except InvalidInput:
        return
    assert repr(decode_key(text)) == repr(key)
    assert encode_key(decode_key(text)) == text
