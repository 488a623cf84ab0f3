"""What may be sent again, and what an answer that is no result becomes."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pilotlight import errors
from pilotlight.client.async_client import AsyncClient
from pilotlight.client.client import Client
from pilotlight.client.errors import error_from_response
from pilotlight.client.pickling import dumps
from pilotlight.client.responses import PickleItemReader
from pilotlight.client.transport import retry_delay_s
from pilotlight.profile import Profile
from pilotlight.protocol import problem
from pilotlight.spec.collection import CollectionKind
from tests.fakes.fake_platform import FakePlatform


def delay(
    *,
    attempt: int = 0,
    waited_s: float = 0,
    may_repeat: bool = True,
    retry_after: float | None = None,
) -> float | None:
    return retry_delay_s(
        attempt=attempt,
        waited_s=waited_s,
        budget_s=10,
        may_repeat=may_repeat,
        retry_after=retry_after,
    )


def test_delays_double_up_to_a_bound_and_the_servers_wish_wins() -> None:
    assert [delay(attempt=n) for n in range(3)] == [0.1, 0.2, 0.4]
    assert delay(attempt=20) == 5
    assert delay(retry_after=3) == 3


def test_nothing_is_waited_for_beyond_the_budget_or_when_repeating_is_not_safe() -> None:
    assert delay(retry_after=11) is None
    assert delay(waited_s=9.95) is None
    assert delay(may_repeat=False) is None


def test_a_lost_connection_is_tried_again_where_that_is_harmless(platform: FakePlatform) -> None:
    platform.refuse(None, times=2)

    with Client(platform.profile()) as client:
        assert client.apps() == []
    assert platform.asked == ["GET /v1/apps"] * 3


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[Profile]:
    """A platform that gives these answers in turn, one on each connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in itertools.cycle(answers):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Profile(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def breaking() -> Iterator[Profile]:
    """A platform whose every other answer breaks off in its body."""
    answer = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"apps":[]}'
    with answering(answer[:-11], answer) as profile:
        yield profile


def stages(*objects: dict[str, object], is_whole: bool = True) -> bytes:
    """The response of a warmup with these stages, or a part of one."""
    lines = b"".join(json.dumps(one).encode() + b"\n" for one in objects)
    length = len(lines) + (0 if is_whole else 1)
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ncontent-length: {length}\r\n\r\n"
    )
    return head.encode() + lines


def failed(kind: type[errors.PilotlightError], *, retry_after_s: float) -> dict[str, object]:
    """The last line of a warmup that ends with this error."""
    extra = {"retry_after_s": retry_after_s}
    return {
        "error": problem(type=kind.type, title="", status=kind.status, detail="reason", extra=extra)
    }


def test_a_warmup_begins_anew_when_the_activator_or_the_node_agent_restarts() -> None:
    began = {"stage": "instance", "elapsed_ms": 1}
    refused = failed(errors.Unavailable, retry_after_s=0.01)
    answers = stages(began, is_whole=False), stages(began, refused), stages({"report": {"n": 1}})
    with answering(*answers) as profile, Client(profile) as client:
        assert list(client.warmup_stages("a", "f")) == [began, began, {"report": {"n": 1}}]


@pytest.mark.parametrize("kind", [errors.Unavailable, errors.StartFailed])
def test_a_warmup_that_failed_or_is_to_be_repeated_too_late_is_not_repeated(
    kind: type[errors.PilotlightError],
) -> None:
    with (
        answering(stages(failed(kind, retry_after_s=5)), stages({"report": {}})) as profile,
        Client(profile, retry_budget_s=1) as client,
        pytest.raises(kind, match="reason"),
    ):
        list(client.warmup_stages("a", "f"))


async def test_an_answer_that_breaks_off_is_one_that_never_came(breaking: Profile) -> None:
    with Client(breaking) as client:
        assert client.apps() == [], "asked again, which is harmless"
        with pytest.raises(errors.Unavailable, match="lost before the response arrived"):
            client.operate_collection(CollectionKind.QUEUE, "q", {"op": "get"}, repeatable=False)
    async with AsyncClient(breaking) as other:
        ask = partial(other.operate_collection, CollectionKind.QUEUE, "q", {"op": "put"})
        await ask(repeatable=True)
        with pytest.raises(errors.Unavailable, match="lost before the response arrived"):
            await ask(repeatable=False)


def test_a_platform_that_is_not_there_is_named(platform: FakePlatform) -> None:
    nobody = platform.profile().__class__(url="http://127.0.0.1:1")

    with (
        Client(nobody, retry_budget_s=0) as client,
        pytest.raises(errors.Unavailable, match=r"no platform answers at .*127\.0\.0\.1:1") as e,
    ):
        client.apps()
    assert "pilotlight up" in str(e.value)
    assert "doctor" in e.value.detail["hint"]


@pytest.mark.parametrize(
    "kind",
    [
        errors.InvalidInput,
        errors.NotFound,
        errors.WorkerCrashed,
        errors.StartFailed,
        errors.StorageFull,
    ],
)
def test_every_problem_type_becomes_its_error(kind: type[errors.PilotlightError]) -> None:
    body = problem(
        type=kind.type,
        title="x",
        status=kind.status,
        detail="what happened",
        instance="req-1",
        extra={"reason": "r"},
    )

    error = error_from_response(kind.status, {"retry-after": "2"}, json.dumps(body).encode())

    assert (type(error), str(error), error.retry_after_s) == (kind, "what happened", 2)
    assert error.detail == {"reason": "r", "request_id": "req-1"}


def test_an_answer_of_something_else_is_quoted() -> None:
    error = error_from_response(503, {}, b"<html>proxy</html>")

    assert isinstance(error, errors.Unavailable)
    assert "<html>proxy</html>" in str(error)
    bodiless = error_from_response(403, {}, b"")
    assert (type(bodiless), str(bodiless)) == (errors.Forbidden, "the server answered status 403")


def test_a_stream_is_cut_into_items_however_it_arrives() -> None:
    items = [dumps(n) for n in (1, "two", None)]
    wire = b"".join(len(i).to_bytes(4, "big") + i for i in items)
    reader = PickleItemReader()

    assert [item for n in range(len(wire)) for item in reader.feed(wire[n : n + 1])] == [
        1,
        "two",
        None,
    ]
    reader.close()


def test_a_stream_that_ends_within_an_item_is_an_error() -> None:
    reader = PickleItemReader()
    assert list(reader.feed(b"\x00\x00\x00\x09abc")) == []

    with pytest.raises(errors.RemoteError, match="middle of an item"):
        reader.close()
