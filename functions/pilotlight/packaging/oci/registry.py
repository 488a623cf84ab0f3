"""Push of an OCI image layout to a registry: blobs that it lacks, then the manifest.

A blob that was cut off is sent again from its beginning, after a pause; those that arrived are not
sent again, also by the next push. Plain HTTP is used for a registry on this machine only.

Source: OCI Distribution Specification 1.1, "Push"."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

import httpx

from pilotlight.core.backoff import Backoff
from pilotlight.core.oci.image_reference import Repository
from pilotlight.core.oci.registry_login import Login
from pilotlight.core.oci.repository_access import AccessRefused, RepositoryAccess
from pilotlight.errors import Forbidden, InvalidInput, PilotlightError, Unauthenticated, Unavailable
from pilotlight.packaging.oci.layout import MANIFEST, read_manifest

T = TypeVar("T")
Sent = Callable[[int, int], None]
"""Callback for progress: bytes that the registry has, bytes of the image."""

ATTEMPTS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
"""Pauses between attempts: 15 s in all."""
_PIECE_BYTES = 256 * 1024
_TIMEOUT = httpx.Timeout(connect=10.0, read=300.0, write=120.0, pool=None)
"""A registry with a remote store verifies and stores a layer before it answers."""
_MAX_RESPONSE_BYTES = 1024 * 1024
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Retry(Exception):
    """An attempt failed in a way that another may not."""


@dataclass(frozen=True, slots=True)
class _Blob:
    digest: str
    size_bytes: int


class Registry:
    """One repository of a registry, as one user sees it. A context manager. Owner: one thread."""

    def __init__(
        self,
        repository: Repository,
        login: Login | None,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.repository = repository
        self._pause = pause
        self._access = RepositoryAccess(repository, login, actions="pull,push", timeout=_TIMEOUT)
        self._base = f"{self._access.origin}/v2/{repository.name}"

    def __repr__(self) -> str:
        return f"<Registry {self._base}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._access.http.close()

    def check_login(self) -> None:
        """Raise PilotlightError unless the registry answers and accepts the login: before an image
        is made, which takes longer."""

        def look() -> None:
            response = self._send("GET", f"{self._access.origin}/v2/")
            if not response.is_success:
                raise self._refused(response, "answer as a registry")

        self._attempts(look)

    def has_image(self, digest: str) -> bool:
        """Whether the registry has the image (`sha256:…`). Raises PilotlightError."""
        return self._is_there("manifests", digest)

    def push(self, layout: Path, *, tag: str, sent: Sent = lambda *_: None) -> str:
        """Push the image of a layout, and return its digest (`sha256:…`). Raises PilotlightError.

        The tag only keeps registries that delete untagged images from deleting it."""
        digest, raw = read_manifest(layout)
        if self.has_image(digest):
            return digest
        document = json.loads(raw)
        blobs = list(
            dict.fromkeys(
                _Blob(str(one["digest"]), int(one["size"]))
                for one in (document["config"], *document["layers"])
            )
        )
        total, done = sum(blob.size_bytes for blob in blobs), 0
        for blob in blobs:
            before = done
            if not self._is_there("blobs", blob.digest):
                path = layout / "blobs" / "sha256" / blob.digest.removeprefix("sha256:")
                self._upload(
                    blob,
                    path,
                    lambda size, before=before: sent(before + size, total),  # type: ignore[misc]
                )
            done += blob.size_bytes
            sent(done, total)
        self._put_manifest(raw, tag=tag, digest=digest)
        return digest

    # -- requests ----------------------------------------------------------------------------------
    def _is_there(self, kind: str, digest: str) -> bool:
        def look() -> bool:
            response = self._send("HEAD", f"{self._base}/{kind}/{digest}", accept=MANIFEST)
            if response.status_code == 404:
                return False
            # a redirect leads to the blob's bytes in the registry's own store
            if response.is_success or response.is_redirect:
                return True
            raise self._refused(response, "read")

        return self._attempts(look)

    def _upload(self, blob: _Blob, path: Path, sent: Callable[[int], None]) -> None:
        def attempt() -> None:
            begun = self._send("POST", f"{self._base}/blobs/uploads/")
            if begun.status_code != 202:
                raise self._refused(begun, "accept blobs")
            target = self._target(begun).copy_merge_params({"digest": blob.digest})
            with path.open("rb") as file:
                done = self._send(
                    "PUT",
                    str(target),
                    content=_pieces(file, sent),
                    headers={
                        "content-length": str(blob.size_bytes),
                        "content-type": "application/octet-stream",
                    },
                )
            if done.status_code != 201:
                raise self._refused(done, f"accept blob {blob.digest[:19]}")

        self._attempts(attempt)

    def _put_manifest(self, raw: bytes, *, tag: str, digest: str) -> None:
        def attempt() -> None:
            response = self._send(
                "PUT",
                f"{self._base}/manifests/{tag}",
                content=raw,
                headers={"content-type": MANIFEST},
            )
            if not response.is_success:
                raise self._refused(response, "accept the image")

        self._attempts(attempt)
        if not self.has_image(digest):
            raise PilotlightError(
                f"{self.repository} accepted an image, but does not have {digest}: it changes "
                f"what is pushed, which no digest survives; use a registry that keeps images"
            )

    def _target(self, response: httpx.Response) -> httpx.URL:
        """Where the registry wants the bytes of an upload."""
        target = self._access.origin.join(response.headers.get("location", ""))
        if target.scheme != "https" and target.host != self._access.origin.host:
            raise InvalidInput(
                f"{self.repository} wants blobs to be sent to {target.host} without TLS",
                hint="Ask its operator to use https.",
            )
        return target

    def _attempts(self, attempt: Callable[[], T]) -> T:
        backoff = Backoff(first_s=_FIRST_PAUSE_S, max_s=_LONGEST_PAUSE_S)
        while True:
            try:
                return attempt()
            except (_Retry, httpx.TransportError) as e:
                if "CERTIFICATE_VERIFY_FAILED" in str(e):
                    raise Unavailable(
                        f"the certificate of registry {self.repository.host} is not trusted: {e}",
                        hint="Add its authority to the certificates of this machine, or name a "
                        "file with it in SSL_CERT_FILE. The cluster's nodes must trust it, too.",
                    ) from e
                if backoff.failures == ATTEMPTS - 1:
                    raise Unavailable(
                        f"registry {self.repository.host} does not answer: {e}. Deploy again: "
                        f"what has arrived is not sent again"
                    ) from e
                self._pause(backoff.next_s())

    def _send(
        self,
        method: str,
        url: str,
        *,
        accept: str = "*/*",
        content: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send a request, with a new access token if the registry requires one. Raises _Retry,
        httpx.TransportError."""
        access = self._access
        is_own = access.is_own(httpx.URL(url))
        fixed = {"accept": accept, **(headers or {})}
        for _ in range(2):
            known = {"authorization": access.authorization} if access.authorization else {}
            response = self._exchange(method, url, content, {**fixed, **(known if is_own else {})})
            if response.status_code in _AGAIN:
                raise _Retry(f"it answered {response.status_code}")
            if response.status_code != 401 or not is_own:
                break
            self._authorize(response)
            if content is not None and not isinstance(content, bytes):
                raise _Retry("the access token has expired")
        return response

    def _exchange(
        self,
        method: str,
        url: str,
        content: bytes | Iterator[bytes] | None,
        headers: Mapping[str, str],
    ) -> httpx.Response:
        request = self._access.http.build_request(method, url, content=content, headers=headers)
        response = self._access.http.send(request, stream=True, follow_redirects=False)
        try:
            body = bytearray()
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _MAX_RESPONSE_BYTES:
                    raise PilotlightError(f"{self.repository.host} sent more than a document")
            return httpx.Response(
                response.status_code, headers=_plain(response.headers), content=bytes(body)
            )
        finally:
            response.close()

    # -- authentication ----------------------------------------------------------------------------
    def _authorize(self, response: httpx.Response) -> None:
        try:
            self._access.authorize(response)
        except AccessRefused as e:
            if e.status in _AGAIN:
                raise _Retry(str(e)) from e
            if e.status in (401, 403):
                raise self._not_logged_in() from e
            raise Unauthenticated(f"registry {self.repository.host}: {e}") from e

    def _not_logged_in(self) -> Unauthenticated:
        host, login = self.repository.host, self._access.login
        return Unauthenticated(
            f"you are not logged in to registry {host}"
            if login is None
            else f"registry {host} does not accept the login of {login.user or 'its token'}",
            hint=f"Run `docker login {host}`, or `podman login {host}`.",
        )

    def _refused(self, response: httpx.Response, what: str) -> PilotlightError:
        has_token = self._access.login is not None and self._access.authorization.startswith(
            "Bearer "
        )
        if response.status_code == 401 and not has_token:
            return self._not_logged_in()
        try:
            errors = response.json()["errors"]
            reason = "; ".join(str(one.get("message") or one.get("code")) for one in errors)
        except (ValueError, KeyError, TypeError, AttributeError):
            reason = response.text[:200]
        said = f"registry {self.repository.host} does not {what}: {response.status_code} {reason}"
        if response.status_code in (401, 403):
            hint = f"Ask its operator for the right to push to {self.repository}."
            return Forbidden(said[:500], hint=hint)
        return InvalidInput(said[:500], hint=f"The image goes to {self.repository}.")


def _plain(headers: httpx.Headers) -> dict[str, str]:
    """The headers without those about the encoding of a body that was decoded."""
    skipped = ("content-encoding", "content-length", "transfer-encoding")
    return {name: value for name, value in headers.items() if name.lower() not in skipped}


def _pieces(file: IO[bytes], sent: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    while piece := file.read(_PIECE_BYTES):
        yield piece
        done += len(piece)
        sent(done)
