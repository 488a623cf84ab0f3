"""Client methods for what deploys refer to: blobs, images, and the storage of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from pilotlight.client.json_stream import Json
from pilotlight.client.resources.node import NodeResources
from pilotlight.client.transport import path_segment
from pilotlight.spec.function import ImageSpec
from pilotlight.spec.record_json import to_json

_FILE_PIECE_BYTES = 1 << 20


class BlobBody(Protocol):
    """A request body of known length that can be sent again: each iteration yields all of it."""

    @property
    def size_bytes(self) -> int:
        """Total size of an iteration."""

    def __iter__(self) -> Iterator[bytes]: ...


class _FileBody:
    """A file as a BlobBody."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as f:
            while piece := f.read(_FILE_PIECE_BYTES):
                yield piece


class ArtifactResources(NodeResources):
    """Methods of `pilotlight.client.client.Client` for blobs and images."""

    def has_blob(self, digest: str) -> bool:
        """Whether the platform has the blob with this sha256."""
        return (
            self._transport.request(
                "HEAD", f"/v1/blobs/{digest}", accept_status=frozenset({404})
            ).status_code
            != 404
        )

    def put_blob(
        self, digest: str, data: bytes | Path | BlobBody, *, chunked: bool = False
    ) -> None:
        """Upload a blob. The platform verifies its digest: a sha256, or with `chunked`, for files
        of weights, that of the hashes of its chunks.

        Uploading twice is harmless. Files and BlobBody are streamed; a body that raises, or breaks
        off, stores nothing."""
        params = {"chunked": "true"} if chunked else None
        if isinstance(data, bytes):
            self._transport.request("PUT", f"/v1/blobs/{digest}", content=data, params=params)
            return
        body = _FileBody(data) if isinstance(data, Path) else data
        headers = {"content-length": str(body.size_bytes)}
        self._transport.request(
            "PUT", f"/v1/blobs/{digest}", content=body, headers=headers, params=params
        )

    def build_image(self, spec: ImageSpec) -> Iterator[Json]:
        """Build an image unless it exists, and yield its progress: `{"step", "text", …}`, and
        `{"image": digest}` last."""
        return self._transport.stream_objects("POST", "/v1/images", json=to_json(spec))

    def container_image(self, app: str, digest: str) -> Json:
        """Where the container image of an app's Image is: `repository` to push it to (None: the
        platform builds images itself), and `reference` if it is there."""
        return dict(self._transport.request("GET", _image_path(app, digest)).json())

    def record_container_image(self, app: str, spec: ImageSpec, reference: str) -> None:
        """Record the container image, by digest, of which the app's next revisions with that Image
        consist."""
        body = {"image": to_json(spec), "reference": reference}
        self._transport.request("PUT", _image_path(app, spec.digest()), json=body)

    def images(self) -> list[Json]:
        """List the images that this tenant has built: digest, size, and the functions that use
        them."""
        return self._list("/v1/images", "images")

    def delete_image(self, digest: str) -> None:
        """Delete an image. Raises NotFound, or Conflict while a revision uses it."""
        self._transport.request("DELETE", f"/v1/images/{path_segment(digest)}")

    def collect_storage(
        self, *, unused_s: float | None = None, dry_run: bool = False, all_tenants: bool = False
    ) -> Json:
        """Delete unreferenced blobs. Requires a key with scope admin."""
        body = {"unused_s": unused_s, "dry_run": dry_run, "all_tenants": all_tenants}
        return dict(self._transport.request("POST", "/v1/storage:collect", json=body).json())


def _image_path(app: str, digest: str) -> str:
    return f"/v1/apps/{path_segment(app)}/images/{path_segment(digest)}"
