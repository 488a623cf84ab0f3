"""Upload of weights: builds the manifest of a source, and sends its files, chunk by chunk, to the
blob store.

A source is read once to hash it and once to send what the platform lacks. Nothing is copied to the
local disk."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.errors import InvalidInput
from pilotlight.packaging.manifest_cache import ManifestCache
from pilotlight.packaging.progress import PACKAGE, UPLOAD, Progress, ProgressEvent, ignore_progress

if TYPE_CHECKING:
    from pilotlight.client.client import Client
    from weight_cache.manifest import Manifest
    from weight_cache.sources import Source, SourceFile

HashProgress = Callable[[str, int, int], None]
"""Callback (what, bytes done, total bytes) while weights are hashed."""

_PIECE_BYTES = 1 << 20
"""Size of pieces given to a connection, which copies what one send(2) did not accept."""
_SMALL_AT_ONCE = 8
_LARGE_AT_ONCE = 2
"""Parallel uploads. Small ones wait for responses, large ones for bandwidth; either way at most 128
MiB of chunks are in memory."""
_AHEAD = 4
"""Chunks of one file that are read ahead while earlier ones are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """The result of a push.

    Attributes:
        manifest: digest of the manifest, which identifies the model.
        size_bytes, files: size and number of files of the model.
        uploaded_bytes: bytes of files and manifest that the platform did not have."""

    manifest: str
    size_bytes: int
    files: int
    uploaded_bytes: int


@dataclass(frozen=True, slots=True)
class SourceBody:
    """One file of a source as a request body. Each attempt to send it reads it from the start."""

    source: Source
    file: SourceFile
    forget: Callable[[], None] = field(compare=False)
    """Called when the platform finds that the file does not match its manifest."""

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.file.size_bytes

    def __str__(self) -> str:
        return self.file.path

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks():
            for begin in range(0, len(chunk), _PIECE_BYTES):
                yield chunk[begin : begin + _PIECE_BYTES]

    def _chunks(self) -> Iterator[bytes]:
        """Yield the chunks of the file in order, with read-ahead if the source supports it."""
        from weight_cache.manifest import CHUNK_BYTES

        offsets = iter(range(0, self.size_bytes, CHUNK_BYTES))
        if not self.file.is_ranged or self.size_bytes <= CHUNK_BYTES:
            yield from map(self._chunk, offsets)
            return
        with ThreadPoolExecutor(_AHEAD, "read weights") as pool:
            waiting: deque[Future[bytes]] = deque()
            try:
                for offset in offsets:
                    waiting.append(pool.submit(self._chunk, offset))
                    if len(waiting) == _AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _chunk(self, offset: int) -> bytes:
        from weight_cache.manifest import CHUNK_BYTES

        return self.source.read(self.file, offset, min(CHUNK_BYTES, self.size_bytes - offset))


Blob = bytes | SourceBody


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedWeights:
    """A source with its manifest. `blobs`: digest → content of its files, and of the manifest
    last."""

    manifest: Manifest
    digest: str
    blobs: Mapping[str, Blob]


def push_weights(
    client: Client,
    source: str | Path | Sequence[str],
    *,
    name: str,
    include: Sequence[str] = (),
    token: str | None = None,
    progress: Progress | None = None,
) -> PushResult:
    """Upload the model at `source` (as in `Weights(source)`, but a directory is relative to the
    working directory) to the platform.

    `name` is used in progress events; the caller registers the model under it. `include`: as in
    `Weights(include=)`. `token`: for the model hub or web server. Raises InvalidInput for a source
    that cannot be read or is not a model, and the exceptions of the client."""
    from weight_cache.sources import open_source

    report = progress or ignore_progress
    with source_errors_as_invalid_input(name):
        opened = open_source(source, include=include, token=token)
    try:
        model = prepare_weights(opened, name=name, say=lambda *said: report(hashing_event(*said)))
        uploaded = upload_blobs(client, model.blobs, report=report)
    finally:
        opened.close()
    files = model.manifest.files
    return PushResult(
        manifest=model.digest,
        size_bytes=model.manifest.size_bytes,
        files=len(files),
        uploaded_bytes=uploaded,
    )


def prepare_weights(
    source: Source,
    *,
    name: str,
    say: HashProgress | None = None,
    cache: ManifestCache | None = None,
) -> PreparedWeights:
    """Hash a source, unless its manifest is cached. Raises InvalidInput."""
    from weight_cache.sources.manifest_builder import build_manifest

    kept = cache or ManifestCache.of_user(os.environ)
    with source_errors_as_invalid_input(name):
        files = source.files()
        manifest = kept.get(source.name, files)
        if manifest is None:
            manifest = build_manifest(
                source,
                files=files,
                progress=(lambda d, t: say(f"weights {name}", d, t)) if say else None,
            )
            if _is_worth_keeping(source, manifest):
                kept.put(source.name, files, manifest)
    raw = manifest.to_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    bodies = {f.path: SourceBody(source, f, lambda: kept.forget(source.name, files)) for f in files}
    return PreparedWeights(
        manifest=manifest,
        digest=digest,
        blobs={**{f.digest: bodies[f.path] for f in manifest.files}, digest: raw},
    )


def upload_blobs(
    client: Client, blobs: Mapping[str, Blob], *, report: Progress = ignore_progress
) -> int:
    """Upload the blobs that the platform lacks, and return their size. Raises InvalidInput if a
    file has changed."""
    from weight_cache.manifest import CHUNK_BYTES

    digests = list(blobs)
    with ThreadPoolExecutor(_SMALL_AT_ONCE, "ask for blobs") as pool:
        missing = [
            d
            for d, is_there in zip(digests, pool.map(client.has_blob, digests), strict=True)
            if not is_there
        ]
    files = {d: body for d in missing if isinstance(body := blobs[d], SourceBody)}
    sending = _Sending(client, {d: blobs[d] for d in missing}, report)
    sending.send(
        [d for d, body in files.items() if body.size_bytes <= CHUNK_BYTES], at_once=_SMALL_AT_ONCE
    )
    sending.send(
        [d for d, body in files.items() if body.size_bytes > CHUNK_BYTES], at_once=_LARGE_AT_ONCE
    )
    # a manifest must be uploaded after its files
    sending.send([d for d in missing if d not in files], at_once=1)
    return sending.total_bytes


class _BrokenOff(Exception):
    """Raised in an upload to stop it because another one failed."""


class _Sending:
    """The uploads of one deploy or push, by several threads. The lock guards counts and the order
    of reports."""

    def __init__(self, client: Client, blobs: Mapping[str, Blob], report: Progress) -> None:
        self.total_bytes = sum(blob_size(blob) for blob in blobs.values())
        self._client = client
        self._blobs = blobs
        self._report = report
        self._sent = dict.fromkeys(blobs, 0)
        self._done_bytes = 0
        self._has_ended = False
        self._lock = threading.Lock()

    def send(self, digests: Sequence[str], *, at_once: int) -> None:
        """Upload all of these. Raises the first error, which stops the others."""
        with ThreadPoolExecutor(at_once, "upload") as pool:
            jobs = [pool.submit(self._send, digest) for digest in digests]
            try:
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                self._has_ended = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _send(self, digest: str) -> None:
        blob = self._blobs[digest]
        if isinstance(blob, bytes):
            self._client.put_blob(digest, blob)
            self._report_progress(digest, digest[:12], len(blob))
            return
        body = _Counted(blob, lambda count: self._report_progress(digest, str(blob), count))
        try:
            with source_errors_as_invalid_input(str(blob)):
                self._client.put_blob(digest, body, chunked=True)
        except InvalidInput as e:
            if "actual" not in e.detail:
                raise
            blob.forget()
            raise InvalidInput(
                f"{blob} has changed since it was hashed: deploy or push again",
                parameter="weights",
            ) from e
        self._report_progress(digest, str(blob), blob.size_bytes)

    def _report_progress(self, digest: str, text: str, count: int) -> None:
        with self._lock:
            if self._has_ended:
                raise _BrokenOff(text)
            self._done_bytes += count - self._sent[digest]
            self._sent[digest] = count
            self._report(
                ProgressEvent(
                    stage=UPLOAD,
                    text=text,
                    done_bytes=self._done_bytes,
                    total_bytes=self.total_bytes,
                )
            )


@dataclass(frozen=True, slots=True)
class _Counted:
    """A body that reports how much of it was sent in this attempt."""

    body: SourceBody
    taken: Callable[[int], None]

    @property
    def size_bytes(self) -> int:
        return self.body.size_bytes

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for piece in self.body:
            yield piece
            count += len(piece)
            self.taken(count)


def blob_size(blob: Blob) -> int:
    """Return the size of a blob."""
    return len(blob) if isinstance(blob, bytes) else blob.size_bytes


@contextmanager
def source_errors_as_invalid_input(name: str) -> Iterator[None]:
    """Convert exceptions of a source to InvalidInput that names the weights."""
    from weight_cache.errors import ManifestInvalid, SourceInvalid, TensorsInvalid
    from weight_cache.sources.retries import TransientSourceError

    try:
        yield
    except TransientSourceError as e:
        raise InvalidInput(
            f"weights {name!r}: {e}",
            parameter="weights",
            hint="Check this machine's network, and try again.",
        ) from e
    except (ManifestInvalid, SourceInvalid, TensorsInvalid) as e:
        raise InvalidInput(f"weights {name!r}: {e}", parameter="weights") from e


def hashing_event(what: str, done: int, total: int) -> ProgressEvent:
    """Return the progress event for hashing."""
    return ProgressEvent(stage=PACKAGE, text=what, done_bytes=done, total_bytes=total)


def _is_worth_keeping(source: Source, manifest: Manifest) -> bool:
    """Whether hashing the source again would take long."""
    from weight_cache.manifest import CHUNK_BYTES
    from weight_cache.sources import is_remote

    return is_remote(source.name) or manifest.size_bytes > CHUNK_BYTES
