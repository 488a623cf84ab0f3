"""Room for answers: for each function, its callers, and all."""

from __future__ import annotations

from activator.calls.response_store import ResponseOwner, ResponseStore, StoredResponse
from activator.worker_client.connection import WorkerResponse

BODY = b"x" * 1232
"""With the overhead, 2000 bytes."""


def owner(tenant: str = "t", function: str = "f", caller: str = "t") -> ResponseOwner:
    return ResponseOwner(tenant, f"{tenant}/main/shop/{function}", caller)


def put(
    store: ResponseStore, name: str, whose: ResponseOwner, *, max_bytes: int | None = None
) -> None:
    answer = StoredResponse(WorkerResponse(None, 200, [], BODY), 0.0)
    assert answer.size == 2000
    store.store(name.encode(), whose, answer, max_bytes=max_bytes)


def found(store: ResponseStore, *names: str) -> str:
    return "".join(
        name for name in names if store.find(name.encode(), max_age_s=1.0, now=0.0) is not None
    )


def test_the_longest_unused_makes_room() -> None:
    store = ResponseStore(6000)
    for name in "abc":
        put(store, name, owner())
    assert found(store, "a") == "a"
    put(store, "d", owner())
    assert found(store, *"abcd") == "acd"
    assert (store.size_bytes, repr(store)) == (6000, "<ResponseStore 3 responses, 6000/6000 bytes>")


def test_a_newer_answer_replaces_the_older_one() -> None:
    store = ResponseStore(6000)
    put(store, "a", owner())
    put(store, "a", owner(caller="other"))
    assert (store.size_bytes, store.sizes()) == (2000, {"t/main/shop/f": 2000})


def test_an_answer_is_found_until_it_is_too_old() -> None:
    store = ResponseStore()
    put(store, "a", owner())
    assert store.find(b"a", max_age_s=5.0, now=5.0) is not None
    assert store.find(b"a", max_age_s=5.0, now=5.1) is None


def test_a_function_has_its_own_limit() -> None:
    store = ResponseStore(100_000)
    dropped: list[ResponseOwner] = []
    store.on_dropped = dropped.append
    for name in "abc":
        put(store, name, owner(function="small"), max_bytes=4000)
    for name in "de":
        put(store, name, owner(function="other"), max_bytes=8000)
    assert found(store, *"abcde") == "bcde"
    assert dropped == [owner(function="small")]


def test_a_caller_that_fills_a_function_drops_its_own_answers() -> None:
    store = ResponseStore(100_000)
    put(store, "z", owner(caller="quiet"), max_bytes=10_000)
    for number in range(50):
        put(store, f"n{number}", owner(caller="loud"), max_bytes=10_000)
    assert found(store, "z") == "z"
    assert store.size_bytes == 10_000


def test_a_tenant_that_fills_the_store_drops_its_own_answers() -> None:
    store = ResponseStore(10_000)
    put(store, "z", owner("quiet"))
    for number in range(20):
        for function in ("f", "g", "h"):
            put(store, f"{function}{number}", owner("loud", function))
    assert found(store, "z") == "z"
    assert store.sizes()["quiet/main/shop/f"] == 2000
    assert store.size_bytes <= 10_000


def test_what_is_larger_than_the_limit_is_not_stored() -> None:
    store = ResponseStore(1000)
    put(store, "a", owner())
    assert (found(store, "a"), store.size_bytes, store.sizes()) == ("", 0, {})
