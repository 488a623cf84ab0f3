"""Ships ready files to the controller, oldest first. A file is removed once the controller has it,
and sent again after a crash in between: the controller stores each name once."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import httpx

from activator.prediction_log.spool import READY
from pilotlight.core.backoff import JITTER, Backoff, delay_s
from pilotlight.core.transport.controller_client import controller_client
from pilotlight.core.transport.endpoint import Endpoint
from pilotlight.protocol import PREDICTIONS_PATH

log = logging.getLogger(__name__)

EVERY_S: Final = 1.0
FIRST_RETRY_S, MAX_RETRY_S = 1.0, 30.0
TIMEOUT_S: Final = 30.0
LAST_S: Final = 5.0
"""For what is ready at shutdown; the next process ships the rest."""
_NAME: Final = re.compile(r".+~[0-9]{1,9}\.(parquet|sketch)")
_SKETCH: Final = ".sketch"
_REFUSED: Final = (400, 413)
"""Statuses of a file that the controller would not store on another attempt either."""


class PutResult(NamedTuple):
    """The controller's answer.

    Attributes:
        status: of HTTP.
        is_stored: False with status 200: the function is deleted, or its window over.
        problem: type of the problem, for another status than 200.
    """

    status: int
    is_stored: bool = True
    problem: str = ""


class _Retry(NamedTuple):
    """How often a file was answered with an error, and when (monotonic) it is sent again."""

    failures: int
    at: float


class PredictionStore(Protocol):
    """Destination of files."""

    async def put(self, name: str, data: bytes) -> PutResult:
        """Store a file. Raises httpx.HTTPError if there was no answer."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


class ControllerPredictions:
    """The controller's endpoint."""

    def __init__(self, *, controller: Endpoint, token: str) -> None:
        self._client = controller_client(controller, token=token, timeout_s=TIMEOUT_S)

    async def put(self, name: str, data: bytes) -> PutResult:
        """See PredictionStore."""
        answer = await self._client.put(f"{PREDICTIONS_PATH}/{name}", content=data)
        if answer.status_code == 200:
            return PutResult(200, is_stored=_member(answer, "stored") is not False)
        problem = str(_member(answer, "type")).rpartition("/")[2]
        return PutResult(answer.status_code, problem=problem)

    async def aclose(self) -> None:
        """See PredictionStore."""
        await self._client.aclose()


class PredictionShipper:
    """Ships the files of one directory. Owner: the event loop; `run` is one task.

    Attributes:
        shipped: rows that the store has.
        dropped: rows that the controller refused for good, by reason: `quota`, `deleted` (the
            function is), `refused`.
        oldest_at: when the oldest file that waits was made, seconds since the epoch; None = none
            waits.
    """

    def __init__(
        self, directory: Path, store: PredictionStore, *, every_s: float = EVERY_S
    ) -> None:
        self._ready = directory / READY
        self._store = store
        self._every_s = every_s
        self.shipped = 0
        self.dropped: Counter[str] = Counter()
        self.oldest_at: float | None = None
        self._counted: set[str] = set()  # files that have been answered, and are still there
        self._retries: dict[str, _Retry] = {}
        self._is_away = False

    def __repr__(self) -> str:
        return f"<PredictionShipper {self.shipped} rows shipped>"

    async def run(self) -> None:
        """Ship until cancelled."""
        backoff = Backoff(first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S)
        while True:
            await self.ship()
            if self._is_away:
                await backoff.pause()
            else:
                backoff.reset()
                await asyncio.sleep(self._every_s)

    async def aclose(self) -> None:
        """Ship what is ready, and close."""
        try:
            async with asyncio.timeout(LAST_S):
                await self.ship()
        except TimeoutError:
            log.info("prediction log: files wait for the next process directory=%s", self._ready)
        await self._store.aclose()

    async def ship(self) -> bool:
        """Send the files that are ready. Returns whether none of them waits for another attempt.

        A file that is answered with an error is sent again after a pause of its own, which delays
        no other tenant's."""
        waits, self._is_away = False, True
        try:
            found = await asyncio.to_thread(_ready_files, self._ready)
            self.oldest_at = found[0][0] if found else None
            names = {path.name for _, path in found}
            self._retries = {name: r for name, r in self._retries.items() if name in names}
            for _, path in found:
                if self._is_postponed(path.name) or (
                    path.suffix == _SKETCH and path.with_suffix(".parquet").exists()
                ):
                    waits = True  # the controller knows a sketch by its rows
                else:
                    waits |= not await self._send(path)
            self._is_away = False
        except (httpx.HTTPError, OSError) as e:
            log.warning("prediction log: files not shipped directory=%s error=%r", self._ready, e)
            return False
        if not waits:
            self.oldest_at = None
        return not waits

    async def _send(self, path: Path) -> bool:
        """Send a file. Returns False if it has to be sent again. Raises httpx.HTTPError,
        OSError."""
        answer = await self._store.put(path.name, await asyncio.to_thread(path.read_bytes))
        reason = _refusal_reason(answer)
        if reason is None and not (answer.status == 200 and answer.is_stored):
            log.warning("prediction log: file=%s waits status=%d", path.name, answer.status)
            self._postpone(path.name)
            return False
        self._count(path.name, reason)
        await asyncio.to_thread(path.unlink, missing_ok=True)
        self._counted.discard(path.name)
        return True

    def _is_postponed(self, name: str) -> bool:
        retry = self._retries.get(name)
        return retry is not None and retry.at > time.monotonic()

    def _postpone(self, name: str) -> None:
        """Send a file again: in the next round, and after more failures later."""
        known = self._retries.get(name)
        failures = 1 if known is None else known.failures + 1
        pause_s = (
            0.0
            if failures == 1
            else delay_s(failures - 2, first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S, jitter=JITTER)
        )
        self._retries[name] = _Retry(failures, time.monotonic() + pause_s)

    def _count(self, name: str, refused: str | None) -> None:
        """Count the rows of a file, once: it is sent again where the attempt before was cancelled
        between the answer and the removal."""
        if name in self._counted:
            return
        self._counted.add(name)
        rows = rows_of(name)
        if refused is None:
            self.shipped += rows
        else:
            self.dropped[refused] += rows
            log.warning("prediction log: file=%s dropped rows=%d why=%s", name, rows, refused)


def _ready_files(directory: Path) -> list[tuple[float, Path]]:
    """Return the files by their time, oldest first."""
    found = []
    for path in directory.glob("*~*"):
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            found.append((path.stat().st_mtime, path))
        except FileNotFoundError:
            continue
    return sorted(found)


def rows_of(name: str) -> int:
    """Return the number of rows in a ready file, which is part of its name; 0 for a sketch."""
    rows = name.removesuffix(".parquet").rpartition("~")[2]
    return 0 if rows.endswith(_SKETCH) else int(rows)


def _refusal_reason(answer: PutResult) -> str | None:
    """Why a file was refused for good; None = it was not."""
    if answer.status == 200:
        return None if answer.is_stored else "deleted"
    if answer.problem == "storage-quota":
        return "quota"
    return "refused" if answer.status in _REFUSED else None


def _member(answer: httpx.Response, name: str) -> object:
    """Return a member of a JSON object; None for another answer."""
    try:
        return answer.json()[name]
    except (ValueError, KeyError, TypeError):
        return None


def age_s(oldest_at: float | None) -> float:
    """Return the age of a file made at `oldest_at`; 0 for None."""
    return 0.0 if oldest_at is None else max(0.0, time.time() - oldest_at)
