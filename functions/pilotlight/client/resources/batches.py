"""Client methods for batches and their files."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from pilotlight.client.json_stream import Json, without_none
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.protocol import HEADER_CUSTOMER

_PIECE_BYTES: Final = 256 * 1024


class BatchResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for batches."""

    def upload_batch_file(self, path: Path) -> Json:
        """Upload a file of JSON lines for a batch. Raises TooLarge, StorageQuotaExceeded."""
        form = _Form(path)
        headers = {"content-type": form.content_type, "content-length": str(form.size_bytes)}
        response = self._transport.request(
            "POST", "/v1/files", content=form, headers=headers, repeatable=True
        )
        return dict(response.json())

    def download_batch_file(self, file_id: str, target: IO[bytes]) -> None:
        """Write the content of a file to `target`."""
        with self._transport.stream("GET", f"{_file(file_id)}/content") as response:
            for piece in response.iter_bytes():
                target.write(piece)

    def batch_files(self, *, after: str | None = None, limit: int = 100) -> list[Json]:
        """List batch files, newest first."""
        return self._list("/v1/files", "data", after=after, limit=limit)

    def delete_batch_file(self, file_id: str) -> None:
        """Delete a file. Raises Conflict while a batch reads it."""
        self._transport.request("DELETE", _file(file_id))

    def create_batch(
        self,
        input_file: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        customer: str | None = None,
    ) -> Json:
        """Run the lines of an uploaded file, for a customer. Raises InvalidInput, NotFound,
        StorageQuotaExceeded."""
        body = without_none(
            {
                "input_file_id": input_file,
                "endpoint": endpoint,
                "completion_window": completion_window,
                "metadata": dict(metadata) if metadata else None,
            }
        )
        headers = {HEADER_CUSTOMER: customer} if customer else {}
        response = self._transport.request("POST", "/v1/batches", json=body, headers=headers)
        return dict(response.json())

    def batches(self, *, after: str | None = None, limit: int = 20) -> list[Json]:
        """List batches, newest first."""
        return self._list("/v1/batches", "data", after=after, limit=limit)

    def batch(self, batch_id: str) -> Json:
        """Return a batch. Raises NotFound."""
        return dict(self._transport.request("GET", _batch(batch_id)).json())

    def cancel_batch(self, batch_id: str) -> Json:
        """Cancel a batch. Raises Conflict for one that has ended."""
        path = f"{_batch(batch_id)}/cancel"
        return dict(self._transport.request("POST", path, repeatable=True).json())


class _Form:
    """A multipart form with a file, which is read anew each time that the form is sent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        boundary = secrets.token_hex(16)
        self.content_type = f"multipart/form-data; boundary={boundary}"
        part = f'--{boundary}\r\ncontent-disposition: form-data; name="'
        name = re.sub(r"[^A-Za-z0-9._ -]", "_", path.name)
        self._head = (
            f'{part}purpose"\r\n\r\nbatch\r\n{part}file"; filename="{name}"\r\n'
            f"content-type: application/jsonl\r\n\r\n"
        ).encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self.size_bytes = len(self._head) + path.stat().st_size + len(self._tail)

    def __iter__(self) -> Iterator[bytes]:
        yield self._head
        with self._path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
        yield self._tail


def _file(file_id: str) -> str:
    return f"/v1/files/{path_segment(file_id)}"


def _batch(batch_id: str) -> str:
    return f"/v1/batches/{path_segment(batch_id)}"
