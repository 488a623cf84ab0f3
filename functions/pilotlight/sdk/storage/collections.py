"""`Dict` and `Queue`: values that functions and clients of an environment share, by name.

Values are pickled here and unpickled here; the platform stores their bytes. Handles hold no
connection: they may be module-level objects, arguments of functions, and parts of a snapshot."""

from __future__ import annotations

import base64
import os
import queue
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
)
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from pilotlight.client import pickling, sessions
from pilotlight.client.async_client import AsyncClient
from pilotlight.client.client import Client
from pilotlight.client.json_stream import Json
from pilotlight.client.responses import LONG_POLL_S
from pilotlight.errors import (
    InvalidInput,
    PilotlightError,
    RemoteError,
    StorageQuotaExceeded,
    TooLarge,
)
from pilotlight.sdk.calls import poll_delays_s
from pilotlight.sdk.steps import Operation, Steps, run, run_aio
from pilotlight.sdk.sync_async import SyncAsyncMethod
from pilotlight.sdk.unsupported import refuse, refuse_attributes
from pilotlight.spec.collection import (
    MAX_REQUEST_VALUES,
    MAX_VALUE_BYTES,
    CollectionKind,
    decode_key,
    encode_key,
)
from pilotlight.spec.identifiers import require_name

R = TypeVar("R")
C = TypeVar("C", bound="_Collection")
_FULL = ("queue_entries", "queue_bytes")
"""Quotas of one queue, which taking values frees."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class _Step:
    """A request about a collection; `is_repeatable`: it may be sent again when its connection was
    lost."""

    of: _Collection
    body: Json
    is_repeatable: bool = False

    def send(self, client: Client) -> Json:
        """Return its answer."""
        of, repeatable = self.of, self.is_repeatable
        return client.operate_collection(of.kind, of.name, self.body, repeatable=repeatable)

    async def send_aio(self, client: AsyncClient) -> Json:
        """Return its answer."""
        of, repeatable = self.of, self.is_repeatable
        return await client.operate_collection(of.kind, of.name, self.body, repeatable=repeatable)


class _Collection:
    """What a Dict and a Queue have in common."""

    kind: CollectionKind

    def __init__(self, name: str, *, create_if_missing: bool = False) -> None:
        self.name = require_name(self.kind, name, parameter="name")
        self.create_if_missing = create_if_missing

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.name, self.create_if_missing)

    @classmethod
    def from_name(cls, name: str, *, create_if_missing: bool = False, **options: Any) -> Self:
        """Refer to one of the environment. `create_if_missing`: the first operation creates it.
        Makes no request."""
        refuse(options, f"{cls.__name__}.from_name")
        return cls(name, create_if_missing=create_if_missing)

    def _request(self, op: str, *, repeatable: bool = False, **body: Any) -> _Step:
        return _Step(self, {"op": op, "create": self.create_if_missing, **body}, repeatable)

    def _dump(self, value: Any) -> str:
        """A value as base64 of its pickle. Raises InvalidInput, TooLarge."""
        data = pickling.dumps(value)
        if len(data) > MAX_VALUE_BYTES:
            raise TooLarge(
                f"{self.kind} {self.name!r}: a value of {len(data)} bytes, pickled: at most "
                f"{MAX_VALUE_BYTES} are allowed; keep larger ones in a pilotlight.Volume, and put "
                f"their path here",
                limit_bytes=MAX_VALUE_BYTES,
            )
        return base64.b64encode(data).decode()

    def _load(self, text: str) -> Any:
        """The value of base64 of a pickle, which code of the own tenant stored. Raises
        RemoteError."""
        try:
            return pickling.loads(base64.b64decode(text))
        except pickling.UnpicklingFailed as e:
            raise RemoteError(
                f"a value of {self.kind} {self.name!r} cannot be loaded in this process: {e}"
            ) from e


def _restored(kind: type[C], name: str, create_if_missing: bool) -> C:
    return kind(name, create_if_missing=create_if_missing)


def _deletion(kind: CollectionKind) -> SyncAsyncMethod[..., None, Awaitable[None]]:
    def delete(name: str, **options: Any) -> None:
        """Delete one, and its values. Raises NotFound."""
        refuse(options, f"{kind.title()}.delete")
        sessions.client().delete_collection(kind, name)

    async def delete_aio(name: str, **options: Any) -> None:
        refuse(options, f"{kind.title()}.delete")
        await (await sessions.async_client()).delete_collection(kind, name)

    return SyncAsyncMethod(delete, delete_aio)


@refuse_attributes
class Dict(_Collection):
    """A dictionary of the environment, by name: `Dict.from_name("seen", create_if_missing=True)`.

    A key is a str, int, float, bool, None, bytes, or a tuple of these; `1`, `1.0` and `True` are
    three keys. A value is anything that can be pickled. Each operation is one transaction, and of
    two writers of a key the last one wins. Methods have asynchronous forms, such as `await
    d.get.aio(key)`.

    Raises NotFound where there is no such dict, InvalidInput for a key, TooLarge for a value, and
    StorageQuotaExceeded when it is full."""

    kind = CollectionKind.DICT
    delete = _deletion(CollectionKind.DICT)

    @Operation
    def get(self, key: Any, default: Any = None) -> Steps[Any]:
        """Return the value of a key, `default` where there is none."""
        answer = yield self._request("get", repeatable=True, keys=[encode_key(key)])
        return self._load(answer["entries"][0]["value"]) if answer["entries"] else default

    @Operation
    def contains(self, key: Any) -> Steps[bool]:
        """Whether a key is there."""
        answer = yield self._request("get", repeatable=True, keys=[encode_key(key)])
        return bool(answer["entries"])

    @Operation
    def put(self, key: Any, value: Any, *, skip_if_exists: bool = False) -> Steps[bool]:
        """Store a value. `skip_if_exists`: leave the key as it is if it is there. Returns whether
        it was stored."""
        entries = [{"key": encode_key(key), "value": self._dump(value)}]
        answer = yield self._request(
            "put",
            repeatable=True,
            entries=entries,
            skip_if_exists=skip_if_exists,
            id=_new_id() if skip_if_exists else "",
        )
        return bool(answer["count"])

    @Operation
    def update(self, other: Any = None, /, **kwargs: Any) -> Steps[None]:
        """Store all values of a mapping, or of pairs, and of keywords. One transaction for 500 keys
        or 1 MiB; more are several, in their order."""
        given = {encode_key(key): value for key, value in {**dict(other or {}), **kwargs}.items()}
        entries = ({"key": key, "value": self._dump(value)} for key, value in given.items())
        for batch in _batches(entries, lambda entry: len(entry["value"])):
            yield self._request("put", repeatable=True, entries=batch)

    @Operation
    def pop(self, key: Any, default: Any = _MISSING) -> Steps[Any]:
        """Remove a key and return its value. Raises KeyError where there is none, and no
        `default`."""
        answer = yield self._request("pop", repeatable=True, key=encode_key(key), id=_new_id())
        if answer["entries"]:
            return self._load(answer["entries"][0]["value"])
        if default is _MISSING:
            raise KeyError(key)
        return default

    @Operation
    def clear(self) -> Steps[None]:
        """Remove all keys."""
        yield self._request("clear", repeatable=True)

    @Operation
    def len(self) -> Steps[int]:
        """Return the number of keys."""
        answer = yield self._request("count", repeatable=True)
        return int(answer["count"])

    @property
    def keys(self) -> SyncAsyncMethod[[], Iterator[Any], AsyncIterator[Any]]:
        """Iterate over the keys, in the order of their text, page by page."""
        return self._iteration(lambda entry: decode_key(entry["key"]), values=False)

    @property
    def values(self) -> SyncAsyncMethod[[], Iterator[Any], AsyncIterator[Any]]:
        """Iterate over the values, in the order of their keys."""
        return self._iteration(lambda entry: self._load(entry["value"]), values=True)

    @property
    def items(
        self,
    ) -> SyncAsyncMethod[[], Iterator[tuple[Any, Any]], AsyncIterator[tuple[Any, Any]]]:
        """Iterate over keys and values."""
        return self._iteration(
            lambda entry: (decode_key(entry["key"]), self._load(entry["value"])), values=True
        )

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def __contains__(self, key: Any) -> bool:
        return self.contains(key)

    def __len__(self) -> int:
        return self.len()

    def __iter__(self) -> Iterator[Any]:
        return self.keys()

    def _iteration(
        self, pick: Callable[[Json], R], *, values: bool
    ) -> SyncAsyncMethod[[], Iterator[R], AsyncIterator[R]]:
        def page(after: str) -> Steps[Json]:
            answer: Json = yield self._request("list", repeatable=True, after=after, values=values)
            return answer

        def blocking() -> Iterator[R]:
            after: str | None = ""
            while after is not None:
                answer = run(page(after))
                yield from map(pick, answer["entries"])
                after = answer["next"]

        async def aio() -> AsyncIterator[R]:
            after: str | None = ""
            while after is not None:
                answer = await run_aio(page(after))
                for entry in answer["entries"]:
                    yield pick(entry)
                after = answer["next"]

        return SyncAsyncMethod(blocking, aio)


@refuse_attributes
class Queue(_Collection):
    """A queue of the environment, by name: `Queue.from_name("jobs", create_if_missing=True)`. Its
    partitions, named by a text of up to 256 bytes, are queues of their own.

    A value that was put is stored. A value is given to one taker, at most once: if the taker dies,
    it is lost. An answer that is lost on its way is asked for again. Methods have asynchronous
    forms, such as `await q.get.aio()`.

    Raises NotFound where there is no such queue, TooLarge for a value, and StorageQuotaExceeded
    when the tenant's storage is full."""

    kind = CollectionKind.QUEUE
    delete = _deletion(CollectionKind.QUEUE)

    @Operation
    def put(
        self,
        /,
        v: Any,
        block: bool = True,
        timeout: float | None = None,
        *,
        partition: str | None = None,
        **options: Any,
    ) -> Steps[None]:
        """Append a value. `block`: while the queue is full, wait, at most `timeout` seconds. Raises
        `queue.Full`."""
        refuse(options, "Queue.put")
        yield from self._put([v], block, timeout, partition)

    @Operation
    def put_many(
        self,
        /,
        vs: Iterable[Any],
        block: bool = True,
        timeout: float | None = None,
        *,
        partition: str | None = None,
        **options: Any,
    ) -> Steps[None]:
        """Append values, as `put`. One transaction for 500 values or 1 MiB; more are several, in
        their order."""
        refuse(options, "Queue.put_many")
        yield from self._put(vs, block, timeout, partition)

    @Operation
    def get(
        self,
        block: bool = True,
        timeout: float | None = None,
        *,
        partition: str | None = None,
    ) -> Steps[Any]:
        """Remove and return the first value. `block`: wait for one, at most `timeout` seconds, and
        raise `queue.Empty`; otherwise return None where there is none."""
        values = yield from self._get(1, block, timeout, partition)
        return values[0] if values else None

    @Operation
    def get_many(
        self,
        n_values: int,
        block: bool = True,
        timeout: float | None = None,
        *,
        partition: str | None = None,
    ) -> Steps[list[Any]]:
        """Remove and return the first values, at most `n_values`, as `get`: waits for one, and does
        not wait for more."""
        return (yield from self._get(n_values, block, timeout, partition))

    @Operation
    def len(self, *, partition: str | None = None, total: bool = False) -> Steps[int]:
        """Return the number of values in a partition, with `total` in all."""
        answer = yield self._request(
            "count", repeatable=True, partition=_chosen(partition, total, "total")
        )
        return int(answer["count"])

    @Operation
    def clear(self, *, partition: str | None = None, all: bool = False) -> Steps[None]:
        """Remove the values of a partition, with `all` of all."""
        yield self._request("clear", repeatable=True, partition=_chosen(partition, all, "all"))

    def _put(
        self, values: Iterable[Any], block: bool, timeout: float | None, partition: str | None
    ) -> Steps[None]:
        deadline = _deadline(timeout)
        for batch in _batches(map(self._dump, values), len):
            # with an id, it may be sent again when its connection was lost
            put = {"values": batch, "partition": partition or "", "id": _new_id()}
            for pause in poll_delays_s():
                try:
                    yield self._request("put", repeatable=True, **put)
                    break
                except StorageQuotaExceeded as e:
                    if e.detail.get("quota") not in _FULL:
                        raise
                    left = deadline - time.monotonic()
                    if not block or left <= 0:
                        raise queue.Full(str(e)) from e
                yield min(pause, left)

    def _get(
        self, number: int, block: bool, timeout: float | None, partition: str | None
    ) -> Steps[list[Any]]:
        if number < 1:
            raise InvalidInput(f"n_values = {number}: must be at least 1", parameter="n_values")
        deadline = _deadline(timeout)
        for pause in poll_delays_s():
            asked = time.monotonic()
            wait_s = max(0.0, min(LONG_POLL_S, deadline - asked)) if block else 0.0
            answer = yield self._take(number, partition, wait_s)
            if answer["values"] or not block:
                break
            now = time.monotonic()
            if now >= deadline:
                raise queue.Empty(f"{self!r} had no value for {timeout:g} s")
            # an answer without a wait: the platform holds no more requests of this tenant
            yield max(0.0, min(pause, deadline - now) - (now - asked))
        found = list(answer["values"])
        while answer["values"] and len(found) < number:
            try:
                answer = yield self._take(number - len(found), partition, 0.0)
            except PilotlightError:
                break  # those that were taken are in this process alone
            found += answer["values"]
        return list(map(self._load, found))

    def _take(self, number: int, partition: str | None, wait_s: float) -> _Step:
        number = min(number, MAX_REQUEST_VALUES)
        return self._request(
            "get",
            repeatable=True,
            number=number,
            partition=partition or "",
            wait_s=wait_s,
            id=_new_id(),
        )


def _new_id() -> str:
    """An id of one operation, under which it may be sent again when its connection was lost."""
    return os.urandom(10).hex()


def _batches(items: Iterable[R], size_of: Callable[[R], int]) -> Iterator[list[R]]:
    """Items in batches for one request each: `size_of` is that of an item's base64."""
    batch: list[R] = []
    size = 0
    for item in items:
        if batch and (
            len(batch) >= MAX_REQUEST_VALUES or size + size_of(item) > MAX_VALUE_BYTES * 4 // 3
        ):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch


def _chosen(partition: str | None, is_all: bool, option: str) -> str | None:
    if is_all and partition is not None:
        raise InvalidInput(f"give partition or {option}=True, not both", parameter=option)
    return None if is_all else partition or ""


def _deadline(timeout: float | None) -> float:
    return float("inf") if timeout is None else time.monotonic() + timeout
