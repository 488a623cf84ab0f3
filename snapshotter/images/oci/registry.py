"""Pull of a container image's documents and layers from its registry, each verified by its digest.

Source: OCI Distribution Specification 1.1, "Pull"."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from pilotlight.core.oci.image_reference import Repository
from pilotlight.core.oci.registry_login import Login
from pilotlight.core.oci.repository_access import AccessRefused, RepositoryAccess
from snapshotter.errors import BundleUnavailable

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_DOCUMENT_BYTES = 4 * 1024**2
_TIMEOUT = httpx.Timeout(connect=10.0, read=60.0, write=30.0, pool=None)
_MAX_REDIRECTS = 5


class Registry:
    """One repository of a registry. A context manager. Blocking; owner: one thread."""

    def __init__(self, repository: Repository, login: Login | None) -> None:
        self.repository = repository
        self._access = RepositoryAccess(repository, login, actions="pull", timeout=_TIMEOUT)

    def __repr__(self) -> str:
        return f"<Registry {self._access.origin} {self.repository.name}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._access.http.close()

    def manifest(self, digest: str) -> Mapping[str, Any]:
        """The manifest `sha256:…`. Raises BundleUnavailable."""
        found = self._document(f"manifests/{digest}", digest, accept=", ".join(MANIFESTS))
        if not isinstance(found.get("config"), dict) or not isinstance(found.get("layers"), list):
            raise BundleUnavailable(f"{self.repository}@{digest} is no image for one platform")
        return found

    def document(self, digest: str) -> Mapping[str, Any]:
        """A blob that is a JSON object. Raises BundleUnavailable."""
        return self._document(f"blobs/{digest}", digest)

    def fetch(
        self, digest: str, size_bytes: int, target: Path, *, check: Callable[[], None]
    ) -> None:
        """Write a blob of that size to the new file `target`. `check`: called for each piece, ends
        the transfer by raising. Raises BundleUnavailable if it is another blob, OSError."""
        total, left = hashlib.sha256(), size_bytes
        with target.open("xb") as out, self._get(f"blobs/{digest}") as response:
            for piece in response.iter_bytes():
                left -= len(piece)
                if left < 0:
                    break
                check()
                total.update(piece)
                out.write(piece)
        if left or f"sha256:{total.hexdigest()}" != digest:
            raise BundleUnavailable(
                f"registry {self.repository.host} sent another blob than {digest[:19]}"
            )

    def _document(self, path: str, digest: str, *, accept: str = "*/*") -> Mapping[str, Any]:
        raw = bytearray()
        with self._get(path, accept=accept) as response:
            for piece in response.iter_bytes():
                raw += piece
                if len(raw) > MAX_DOCUMENT_BYTES:
                    raise BundleUnavailable(f"{digest[:19]} is too large for a document")
        if f"sha256:{hashlib.sha256(raw).hexdigest()}" != digest:
            raise BundleUnavailable(
                f"registry {self.repository.host} sent another document than {digest[:19]}"
            )
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError) as e:
            raise BundleUnavailable(f"{digest[:19]} is not JSON: {e}") from e
        if not isinstance(found, dict):
            raise BundleUnavailable(f"{digest[:19]} is not a JSON object")
        return found

    @contextlib.contextmanager
    def _get(self, path: str, *, accept: str = "*/*") -> Iterator[httpx.Response]:
        """The response to a GET, its redirects followed. Raises BundleUnavailable."""
        url = httpx.URL(f"{self._access.origin}/v2/{self.repository.name}/{path}")
        try:
            response = self._send(url, accept)
            if response.status_code == 401:
                response.close()
                self._authorize(response)
                response = self._send(url, accept)
            try:
                if not response.is_success:
                    raise self._refused(response.status_code)
                yield response
            finally:
                response.close()
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise BundleUnavailable(
                f"registry {self.repository.host} does not answer: {e or type(e).__name__}"
            ) from e

    def _send(self, url: httpx.URL, accept: str) -> httpx.Response:
        for _ in range(_MAX_REDIRECTS):
            headers = {"accept": accept}
            if self._access.authorization and self._access.is_own(url):
                headers["authorization"] = self._access.authorization
            request = self._access.http.build_request("GET", url, headers=headers)
            response = self._access.http.send(request, stream=True, follow_redirects=False)
            if not response.is_redirect:
                return response
            response.close()
            url = url.join(response.headers["location"])
            if url.scheme != "https" and not self._access.is_own(url):
                raise BundleUnavailable(
                    f"registry {self.repository.host} leads to {url.host} without TLS"
                )
        raise BundleUnavailable(f"registry {self.repository.host} redirects without end")

    def _authorize(self, response: httpx.Response) -> None:
        try:
            self._access.authorize(response)
        except AccessRefused as e:
            if e.status:
                raise self._refused(e.status) from e
            raise BundleUnavailable(f"registry {self.repository.host}: {e}") from e

    def _refused(self, status: int) -> BundleUnavailable:
        way_out = (
            ": name a login for it in snapshotter.registry_login" if status in (401, 403) else ""
        )
        return BundleUnavailable(
            f"registry {self.repository.host} does not give {self.repository.name} to this node: "
            f"{status}{way_out}"
        )
