"""Uploads of batch files: `multipart/form-data` (RFC 7578), stored part by part as it arrives."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

import anyio
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from pilotlight.controller.batches import files
from pilotlight.controller.batches.files import (
    INPUT,
    KEEP_S,
    MAX_FILE_BYTES,
    MIN_KEEP_S,
    PART_BYTES,
    UPLOAD_S,
    BatchFile,
)
from pilotlight.controller.context import Context
from pilotlight.controller.database import audit_trail
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity.access_control import Principal
from pilotlight.errors import InvalidInput, TooLarge, TooManyRequests

FED_BYTES: Final = 256 * 1024
"""Parsed at once in a thread: handing over costs more than parsing a few KiB."""
MAX_HEAD_BYTES: Final = 4096
MAX_FIELD_BYTES: Final = 1024
MAX_FIELDS: Final = 16
MAX_BOUNDARY_BYTES: Final = 200
BUSY_RETRY_S: Final = 5.0
_OVERHEAD_BYTES: Final = 65_536
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f/\\]{1,255}\Z")


class UploadForm:
    """Parses a form of fields and one file, without keeping more than it was fed.

    Attributes:
        fields: complete fields by name.
        filename: of the file; None = none has begun.
        data: bytes of the file that were not taken.
    """

    def __init__(self, content_type: str) -> None:
        """Raises InvalidInput."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise InvalidInput(
                "send the file as multipart/form-data with the fields purpose and file",
                parameter="content-type",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.data = bytearray()
        self._name = ""
        self._is_file = False
        self._is_over = False
        self._value = bytearray()
        self._header = (bytearray(), bytearray())
        self._head_bytes = 0
        self._disposition = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": partial(self._on_header, 0),
                "on_header_value": partial(self._on_header, 1),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def __repr__(self) -> str:
        return f"<UploadForm {sorted(self.fields)} {self.filename!r}>"

    def feed(self, data: bytes) -> None:
        """Parse more of the body. Raises InvalidInput, TooLarge."""
        try:
            self._parser.write(data)
        except FormParserError as e:
            raise InvalidInput(f"the form is malformed: {e!s:.200}", parameter="body") from e

    def require_end(self) -> None:
        """Raise InvalidInput unless the form is complete, and has a file for a batch."""
        if not self._is_over or self.filename is None:
            raise InvalidInput(
                "the form is incomplete: it needs the field purpose and one file", parameter="file"
            )
        if (purpose := self.fields.get("purpose", "")) != INPUT:
            raise InvalidInput(
                f"purpose = {purpose[:80]!r}: files are stored for batches only (purpose: batch)",
                parameter="purpose",
            )

    def keep_s(self) -> float:
        """Return how long the file is kept after its upload. Raises InvalidInput."""
        given = self.fields.get("expires_after[seconds]")
        if given is None:
            return KEEP_S
        seconds = int(given) if given.isascii() and given.isdigit() and len(given) < 9 else 0
        if not MIN_KEEP_S <= seconds <= KEEP_S:
            raise InvalidInput(
                f"expires_after[seconds] = {given[:80]!r}: a whole number from {MIN_KEEP_S} to "
                f"{KEEP_S:.0f}",
                parameter="expires_after",
            )
        return float(seconds)

    # -- callbacks of the parser -------------------------------------------------------------------
    def _begin(self) -> None:
        self._name, self._is_file, self._disposition, self._head_bytes = "", False, b"", 0
        self._value.clear()

    def _on_header(self, part: int, data: bytes, start: int, end: int) -> None:
        self._head_bytes += end - start
        if self._head_bytes > MAX_HEAD_BYTES:
            raise TooLarge(
                f"the head of a part of the form has more than {MAX_HEAD_BYTES} bytes",
                limit_bytes=MAX_HEAD_BYTES,
            )
        self._header[part].extend(data[start:end])

    def _end_header(self) -> None:
        name, value = (bytes(one) for one in self._header)
        if name.lower() == b"content-disposition":
            self._disposition = value
        for one in self._header:
            one.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        self._is_file = filename is not None or self._name == "file"
        if not self._is_file:
            if len(self.fields) >= MAX_FIELDS:
                raise InvalidInput(f"the form has more than {MAX_FIELDS} fields", parameter="body")
            return
        if self.filename is not None:
            raise InvalidInput("the form has more than one file", parameter="file")
        text = (filename or b"batch.jsonl").decode("utf-8", "replace")
        if not _NAME.match(text):
            raise InvalidInput(
                "the file's name: 1 to 255 characters, without / and control characters",
                parameter="file",
            )
        self.filename = text

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.data += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise TooLarge(
                f"the field {self._name[:80]!r} has more than {MAX_FIELD_BYTES} bytes",
                limit_bytes=MAX_FIELD_BYTES,
            )

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._is_over = True


async def receive(
    context: Context, caller: Principal, request: Request, request_id: str
) -> BatchFile:
    """Store an uploaded file. Raises InvalidInput, TooLarge, TooManyRequests,
    StorageQuotaExceeded, StorageFull, Unavailable; then nothing of it remains for long."""
    form = UploadForm(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_FILE_BYTES + _OVERHEAD_BYTES:
        raise _too_large()
    uploads = context.uploads.share(caller.tenant)
    if uploads.locked():
        raise TooManyRequests(
            "this tenant uploads too many batch files at once: wait until one has ended",
            retry_after_s=BUSY_RETRY_S,
        )
    async with uploads:
        file = await _store(context, caller, form, request.stream())
    after = {"file": file.id, "bytes": file.size_bytes}

    def finish() -> BatchFile:
        with context.store.write() as write:
            done = files.finish(write, file.id, purpose=INPUT, expires_at=write.now + form.keep_s())
            audit_trail.record(
                write,
                tenant=caller.tenant,
                actor=caller.key,
                action="batch_file.create",
                subject=file.id,
                after=after,
                request=request_id,
            )
        return done

    return await context.threads.run(caller.tenant, finish)


async def _store(
    context: Context, caller: Principal, form: UploadForm, body: AsyncIterator[bytes]
) -> BatchFile:
    file: BatchFile | None = None
    try:
        async with asyncio.timeout(UPLOAD_S):
            async for data in _gathered(body):
                await context.threads.run(caller.tenant, form.feed, data)
                if form.filename is not None and file is None:
                    file = await context.write(caller.tenant, _creation(caller, form.filename))
                while file is not None and len(form.data) >= PART_BYTES:
                    part = bytes(form.data[:PART_BYTES])
                    del form.data[:PART_BYTES]
                    file = await _append(context, file, part)
            form.require_end()
            form.keep_s()
            assert file is not None
            if form.data:
                file = await _append(context, file, bytes(form.data))
            if not file.size_bytes:
                raise InvalidInput("the file is empty", parameter="file")
            return file
    except BaseException as e:
        if file is not None:
            broken = file.id
            with anyio.CancelScope(shield=True):
                await context.write(caller.tenant, lambda write: files.end(write, broken))
        if isinstance(e, TimeoutError):
            raise InvalidInput(f"an upload may take {UPLOAD_S:g} s", parameter="file") from e
        raise


async def _append(context: Context, file: BatchFile, part: bytes) -> BatchFile:
    if file.size_bytes + len(part) > MAX_FILE_BYTES:
        raise _too_large()
    return await files.append(context, file.id, part)


async def _gathered(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    gathered = bytearray()
    async for piece in body:
        gathered += piece
        if len(gathered) >= FED_BYTES:
            yield bytes(gathered)
            gathered.clear()
    if gathered:
        yield bytes(gathered)


def _creation(caller: Principal, filename: str) -> Callable[[Write], BatchFile]:
    return lambda write: files.create(
        write,
        tenant=caller.tenant,
        environment=caller.environment,
        key=caller.key,
        filename=filename,
        purpose=INPUT,
        expires_at=write.now + UPLOAD_S,
    )


def _too_large() -> TooLarge:
    return TooLarge(
        f"a batch file has at most {MAX_FILE_BYTES} bytes: split it into several",
        limit_bytes=MAX_FILE_BYTES,
    )
