"""Values of dicts and queues, on SQLite and on PostgreSQL."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from pilotlight.controller.collections import collections, recent_operations
from pilotlight.controller.collections.collections import Collection, CollectionScope
from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.identity import tenants
from pilotlight.errors import Conflict, NotFound, StorageQuotaExceeded
from pilotlight.spec.collection import MAX_REQUEST_VALUES, CollectionKind
from pilotlight.spec.quotas import Plan
from tests.fakes.stored_bytes import checked_usage
from tests.functions.controller.parts import ManualClock, at_once

DICT, QUEUE = CollectionKind.DICT, CollectionKind.QUEUE


@pytest.fixture(name="scope")
def _scope(store: Store) -> CollectionScope:
    with store.write() as write:
        tenant = tenants.create(write, name="one", uid_base=20_000, actor="k").id
    return CollectionScope(tenant=tenant, environment="main", kind=DICT, name="mine")


def of_kind(scope: CollectionScope, kind: CollectionKind) -> CollectionScope:
    return dataclasses.replace(scope, kind=kind)


@pytest.fixture(name="write")
def _write(store: Store, scope: CollectionScope) -> Iterator[Write]:
    with store.write() as write:
        yield write


def now(write: Write, scope: CollectionScope) -> Collection:
    return collections.find(write.sql, scope)


def test_a_dict_keeps_bytes_by_key(
    write: Write, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = collections.create(write, scope)
    assert collections.create(write, scope) == made
    given = {'"b"': b"\x00\xff", '"ü%_"': b"", '"a"': b"1"}
    assert collections.put(write, made, Plan(), given) == 3
    assert collections.put(write, made, Plan(), {'"a"': b"22", '"c"': b"3"}) == 2
    skipped = {'"a"': b"other", '"d"': b"4"}
    assert collections.put(write, made, Plan(), skipped, skip_if_exists=True) == 1
    entries, is_more = collections.entries(write.sql, made)
    assert dict(entries) == {**given, '"a"': b"22", '"c"': b"3", '"d"': b"4"}
    assert not is_more
    found, _ = collections.entries(write.sql, made, keys=['"a"', '"A"', '"none"'])
    assert found == [('"a"', b"22")]
    assert collections.keys(write.sql, made, after=entries[0][0]) == [k for k, _ in entries[1:]]
    assert collections.pop(write, made, '"b"') == b"\x00\xff"
    assert collections.pop(write, made, '"b"') is None
    size = sum(len(key.encode()) + len(value) for key, value in entries) - 5
    found_now = now(write, scope)
    assert (found_now.entries, found_now.size_bytes) == (4, size)
    usage = checked_usage(write.sql, scope.tenant)
    assert (usage.collection_bytes, usage.total_bytes) == (size, size)
    monkeypatch.setattr(collections, "CLEARED_AT_ONCE", 3)
    assert [collections.clear(write, made) for _ in range(3)] == [3, 1, 0]
    assert now(write, scope).size_bytes == 0


def test_pages_and_answers_have_bounds(
    write: Write, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = collections.create(write, scope)
    for begin in range(0, 1200, MAX_REQUEST_VALUES):
        given = {str(n): b"x" for n in range(begin, min(1200, begin + MAX_REQUEST_VALUES))}
        collections.put(write, made, Plan(), given)
    after, seen, is_more = "", [], True
    while is_more:
        entries, is_more = collections.entries(write.sql, made, after=after)
        seen += [key for key, _ in entries]
        after = entries[-1][0] if entries else after
    assert sorted(seen) == sorted(str(n) for n in range(1200))
    monkeypatch.setattr(collections, "MAX_ANSWER_BYTES", 10)
    entries, is_more = collections.entries(write.sql, made)
    assert (len(entries), is_more) == (3, True)  # keys count: 1, 1 and 2 bytes, and values of 1


def test_a_queue_gives_values_in_their_order_by_partition(
    write: Write, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = of_kind(scope, QUEUE)
    collections.create(write, scope)
    collections.push(write, now(write, scope), Plan(), "", [b"1", b"2", b"3"])
    collections.push(write, now(write, scope), Plan(), "other", [b"a"])
    collections.push(write, now(write, scope), Plan(), "", [b"4"])
    made = now(write, scope)
    assert collections.take(write, made, "", 2) == [b"1", b"2"]
    assert collections.count(write.sql, made, "") == 2
    assert not collections.is_empty(write.sql, made, "other")
    monkeypatch.setattr(collections, "MAX_ANSWER_BYTES", 0)
    assert collections.take(write, made, "", 9) == [b"3"]  # one value always has room
    assert collections.clear(write, made, "other") == 1
    assert collections.take(write, made, "", 9) == [b"4"]
    assert collections.take(write, made, "", 9) == []
    assert (now(write, scope).entries, now(write, scope).size_bytes) == (0, 0)


def test_what_does_not_fit_is_refused_by_name_and_nothing_is_stored(
    store: Store, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store_two(plan: Plan) -> None:
        with store.write() as write:
            made = collections.create(write, scope)
            collections.put(write, made, plan, {"k": b"12345", "l": b"6"})

    def refused(quota: str, plan: Plan | None = None) -> None:
        with pytest.raises(StorageQuotaExceeded, match=quota) as e:
            store_two(plan or Plan())
        assert e.value.detail["quota"] == quota
        with store.read() as sql, pytest.raises(NotFound, match="no dict 'mine'"):
            collections.find(sql, scope)

    refused("stored_bytes", Plan(stored_bytes=7))
    for name, quota in (
        ("MAX_ENTRIES", "dict_entries"),
        ("MAX_BYTES", "dict_bytes"),
        ("MAX_TENANT_BYTES", "collection_bytes"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(collections, name, 1)
            refused(quota)
    monkeypatch.setattr(collections, "MAX_COLLECTIONS", 0)
    with store.write() as write, pytest.raises(Conflict, match="the maximum"):
        collections.create(write, scope)


def test_a_put_under_an_id_is_stored_once_for_as_long_as_ids_are_known(
    store: Store, clock: ManualClock, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = of_kind(scope, QUEUE)

    def push(put_id: str) -> None:
        with store.write() as write:
            made = collections.create(write, scope)
            collections.push(write, made, Plan(), "", [b"v", b"w"], operation_id=put_id)

    def ids() -> int:
        with store.read() as sql:
            return len(sql.execute(sa.select(tables.collection_operations)).all())

    for put_id in ("a", "a", "b", "a", "", ""):
        push(put_id)
    with store.write() as write:
        assert checked_usage(write.sql, scope.tenant).total_bytes == 8
        assert collections.take(write, now(write, scope), "", 99) == [b"v", b"w"] * 4
    push("a")
    assert ids() == 2
    clock.now += recent_operations.MEMORY_S + 1
    monkeypatch.setattr(recent_operations, "FORGET_EVERY", 1)
    push("a")
    assert ids() == 1
    with store.write() as write:
        assert collections.count(write.sql, now(write, scope), "") == 2
        collections.delete(write, scope)
    assert ids() == 0


def test_of_many_ids_puts_forget_more_than_they_add(
    store: Store, clock: ManualClock, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_operations, "FORGET_EVERY", 1)
    monkeypatch.setattr(recent_operations, "FORGOTTEN_AT_ONCE", 3)
    left = []
    with store.write() as write:
        collections.create(write, of_kind(scope, QUEUE))
    for number in range(9):
        clock.now += recent_operations.MEMORY_S * (number == 5) + 1
        with store.write() as write:
            made = now(write, of_kind(scope, QUEUE))
            collections.push(write, made, Plan(), "", [b""], operation_id=str(number))
            left.append(len(write.sql.execute(sa.select(tables.collection_operations)).all()))
    assert left == [1, 2, 3, 4, 5, 3, 2, 3, 4]


def test_an_operation_under_an_id_is_done_once_and_has_one_answer(
    store: Store, scope: CollectionScope
) -> None:
    def done(
        kind: CollectionKind, change: Callable[[Write, Collection], object], times: int = 3
    ) -> list[object]:
        answers = []
        for _ in range(times):
            with store.write() as write:
                answers.append(change(write, collections.create(write, of_kind(scope, kind))))
        return answers

    def put(write: Write, made: Collection) -> int:
        given = {"k": b"1", "l": b"\x00" * 9}
        return collections.put(
            write, made, Plan(), given, skip_if_exists=True, operation_id="put:a"
        )

    assert done(DICT, put) == [2, 2, 2]
    again = done(DICT, lambda w, made: collections.put(w, made, Plan(), {"k": b"2"}), 1)
    assert again == [1]
    assert done(DICT, lambda w, m: collections.pop(w, m, "k", operation_id="pop:a")) == [b"2"] * 3
    assert (
        done(DICT, lambda w, m: collections.pop(w, m, "none", operation_id="pop:b")) == [None] * 3
    )
    done(DICT, lambda w, m: collections.put(w, m, Plan(), {"none": b"3"}), 1)
    # it was not there when it was done
    assert (
        done(DICT, lambda w, m: collections.pop(w, m, "none", operation_id="pop:b")) == [None] * 3
    )
    assert (
        done(DICT, lambda w, m: collections.pop(w, m, "none", operation_id="pop:c")) == [b"3"] * 3
    )

    values = [b"", b"\xff" * 300, b"3", b"4"]
    done(QUEUE, lambda w, m: collections.push(w, m, Plan(), "", values), 1)
    taken = done(QUEUE, lambda w, m: collections.take(w, m, "", 2, operation_id="get:a"))
    assert taken == [values[:2]] * 3
    assert done(QUEUE, lambda w, m: collections.take(w, m, "", 9, operation_id="get:b"), 1) == [
        values[2:]
    ]
    # one that took nothing takes what comes later
    assert done(QUEUE, lambda w, m: collections.take(w, m, "", 9, operation_id="get:c"), 1) == [[]]
    done(QUEUE, lambda w, m: collections.push(w, m, Plan(), "", [b"5"]), 1)
    assert (
        done(QUEUE, lambda w, m: collections.take(w, m, "", 9, operation_id="get:c"))
        == [[b"5"]] * 3
    )


def test_one_that_is_refused_may_be_repeated(store: Store, scope: CollectionScope) -> None:
    with store.write() as write:
        made = collections.create(write, of_kind(scope, QUEUE))
    for limit, expected in ((1, StorageQuotaExceeded), (10, None)):
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(expected) if expected else contextlib.nullcontext(),
            store.write() as write,
        ):
            patch.setattr(collections, "MAX_ENTRIES", limit)
            collections.push(write, made, Plan(), "", [b"", b""], operation_id="put:a")
    with store.read() as sql:
        assert collections.count(sql, made, "") == 2


def test_answers_are_kept_within_bounds_and_repeats_of_others_are_told(
    store: Store, clock: ManualClock, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = of_kind(scope, QUEUE)

    def take(number: int) -> list[bytes]:
        with store.write() as write:
            made = collections.create(write, scope)
            if not recent_operations.is_known(write.sql, made.id, f"get:{number}"):
                value = bytes([number]) * (900_000 if number < 4 else 1)
                collections.push(write, made, Plan(), "", [value])
            clock.now += 1
            return collections.take(write, made, "", 1, operation_id=f"get:{number}")

    for number in range(4):
        take(number)
    assert [len(take(number)[0]) for number in (2, 3)] == [900_000] * 2
    for number in (0, 1):
        with pytest.raises(Conflict, match=r"operation 'get:[01]' was done before"):
            take(number)
    monkeypatch.setattr(recent_operations, "KEPT_ANSWERS", 3)
    monkeypatch.setattr(recent_operations, "FORGET_EVERY", 1)
    for number in range(4, 9):
        take(number)
    assert [take(number) for number in (6, 7, 8)] == [[b"\x06"], [b"\x07"], [b"\x08"]]
    with pytest.raises(Conflict, match="no longer kept"):
        take(5)
    with store.read() as sql:
        sizes = sa.select(sa.func.sum(sa.func.length(tables.collection_operations.c.answer)))
        assert sql.execute(sizes).scalar_one() == 3 * 5


def test_answers_of_all_collections_of_a_tenant_have_a_bound(
    store: Store, clock: ManualClock, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_operations, "TENANT_BYTES", 300_000)
    with store.write() as write:
        other = tenants.create(write, name="two", uid_base=20_000, actor="k").id

    def pop(tenant: str, number: int) -> bytes | None:
        mine = dataclasses.replace(scope, tenant=tenant, name=f"mine-{number}")
        with store.write() as write:
            made = collections.create(write, mine)
            if not recent_operations.is_known(write.sql, made.id, "pop:a"):
                collections.put(write, made, Plan(), {"k": bytes(100_000)})
            clock.now += 1
            return collections.pop(write, made, "k", operation_id="pop:a")

    assert pop(other, 0) == bytes(100_000)
    for number in range(4):
        assert pop(scope.tenant, number) == bytes(100_000)
    for number in (2, 3):
        assert pop(scope.tenant, number) == bytes(100_000)
    for number in (0, 1):
        with pytest.raises(Conflict, match="no longer kept"):
            pop(scope.tenant, number)
    assert pop(other, 0) == bytes(100_000)


def test_of_two_takers_with_one_id_both_get_the_same(store: Store, scope: CollectionScope) -> None:
    scope = of_kind(scope, QUEUE)
    with store.write() as write:
        collections.push(write, collections.create(write, scope), Plan(), "", [b"1", b"2", b"3"])
    taken: list[list[bytes]] = []

    def take() -> None:
        with store.write() as write:
            taken.append(collections.take(write, now(write, scope), "", 1, operation_id="get:a"))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [[b"1"]] * 8
    with store.read() as sql:
        assert collections.count(sql, collections.find(sql, scope), "") == 2


def test_no_choice_of_puts_keeps_their_ids(
    store: Store, clock: ManualClock, scope: CollectionScope
) -> None:
    """Puts with an id at the positions of a queue at which none forgot, and without one at the
    others."""
    queue = of_kind(scope, QUEUE)
    with store.write() as write:
        collections.create(write, queue)
    most = 0
    for number in range(600):
        clock.now += recent_operations.MEMORY_S + 1
        with store.write() as write:
            made = now(write, queue)
            known_as = "" if made.position % recent_operations.FORGET_EVERY == 0 else str(number)
            collections.push(write, made, Plan(), "", [b""], operation_id=known_as)
            collections.take(write, made, "", 1)
            most = len(write.sql.execute(sa.select(tables.collection_operations)).all())
            if number > 40 and most < 5:
                return  # they were forgotten: with a chance of 1e-15 they are not
    raise AssertionError(f"{most} ids of puts are kept")


def test_empty_values_count_too(
    write: Write, scope: CollectionScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "MAX_ENTRIES", 2)
    made = collections.create(write, of_kind(scope, QUEUE))
    with pytest.raises(StorageQuotaExceeded, match="queue_entries"):
        collections.push(write, made, Plan(), "", [b"", b"", b""])


def test_each_value_is_given_to_one_taker(store: Store, scope: CollectionScope) -> None:
    scope = of_kind(scope, QUEUE)
    values = [b"%d" % n for n in range(60)]
    with store.write() as write:
        collections.push(write, collections.create(write, scope), Plan(), "", values)

    def take(store: Store) -> list[bytes]:
        taken: list[bytes] = []
        while True:
            with store.write() as write:
                found = collections.take(write, now(write, scope), "", 3)
            if not found:
                return taken
            taken.extend(found)

    assert sorted(itertools.chain(*at_once(take, [store] * 4)), key=int) == values


def test_tenants_and_environments_have_their_own(store: Store, scope: CollectionScope) -> None:
    with store.write() as write:
        other = tenants.create(write, name="two", uid_base=20_000, actor="k").id
        tenants.create_environment(write, tenant=scope.tenant, name="staging", actor="k")
        collections.put(write, collections.create(write, scope), Plan(), {"k": b"v"})
    elsewhere = (
        dataclasses.replace(scope, tenant=other),
        dataclasses.replace(scope, environment="staging"),
        of_kind(scope, QUEUE),
    )
    for place in elsewhere:
        with store.write() as write:
            assert collections.find_or_none(write.sql, place) is None
            collections.create(write, place)
            assert collections.entries(write.sql, now(write, place))[0] == []
            assert len(collections.listing(write.sql, place)) == 1
    staging = {"tenant": scope.tenant, "name": "staging", "actor": "k"}
    with store.write() as write, pytest.raises(Conflict, match=r"dicts or queues \(mine\)"):
        tenants.delete_environment(write, **staging)
    with store.write() as write:
        collections.delete(write, elsewhere[1])
        tenants.delete_environment(write, **staging)
        collections.delete(write, scope)
        assert checked_usage(write.sql, scope.tenant).total_bytes == 0
