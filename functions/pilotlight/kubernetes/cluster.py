"""Client of a cluster: objects are dicts, every call has a deadline and a maximum number of
attempts, and errors are our own types."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Self

from pilotlight.kubernetes import exec
from pilotlight.kubernetes.api_request import ApiRequest
from pilotlight.kubernetes.client import VERSION, VERSION_PATH, ApiCalls, CallDeadlines
from pilotlight.kubernetes.credentials import Credentials, find_credentials
from pilotlight.kubernetes.errors import (
    ClusterError,
    ClusterUnreachable,
    Gone,
    ManifestWarned,
    NotFound,
)
from pilotlight.kubernetes.kinds import ACCESS_REVIEW, POD, Kind, kind_of
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.kubernetes.transport import Transport
from pilotlight.kubernetes.watch_events import Listing, Object, WatchChange
from pilotlight.kubernetes.watch_stream import watch_forever

__all__ = ["CallDeadlines", "Cluster", "Listing", "Object"]

logger = logging.getLogger(__name__)

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_PAGE = 500  # objects; the API server's own clients use as many


class Cluster:
    """Client of one cluster's API server. Owner: one event loop; calls may run concurrently. Close
    it, or use it as a context manager."""

    def __init__(
        self,
        transport: Transport,
        *,
        settings: ClusterSettings,
        patience: CallDeadlines | None = None,
        tolerated: Collection[str] = (),
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Use a transport (see also `connect`).

        Args:
            tolerated: texts; Warning headers that contain one of them (or of the settings') are
                logged instead of raised.
            chance, clock, sleep: inject randomness and time.
        """
        self.settings = settings
        self.patience = patience or CallDeadlines()
        self._calls = ApiCalls(
            transport, patience=self.patience, chance=chance, clock=clock, sleep=sleep
        )
        self._transport = transport
        self._tolerated = (*settings.tolerated_warnings, *tolerated)

    @classmethod
    async def connect(
        cls,
        settings: ClusterSettings,
        *,
        credentials: Credentials | None = None,
        patience: CallDeadlines | None = None,
        tolerated: Collection[str] = (),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> Cluster:
        """Find credentials, without sending a request.

        Raises:
            BadCredentials: none were found.
        """
        found = credentials or await find_credentials(settings)
        transport = Transport(found, knative_namespace=settings.knative_namespace)
        return cls(
            transport, settings=settings, patience=patience, tolerated=tolerated, sleep=sleep
        )

    def __repr__(self) -> str:
        return f"<Cluster {self._transport.host}>"

    @property
    def host(self) -> str:
        """The API server's URL."""
        return self._transport.host

    @property
    def away_s(self) -> float:
        """For how many seconds the API server has not answered; 0 if it did when it was last
        asked. It is asked again all the time while a watch is open."""
        return self._calls.away_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    # -- reading -----------------------------------------------------------------------------------

    async def get(
        self, kind: Kind, name: str, namespace: str | None = None, *, timeout_s: float | None = None
    ) -> Object | None:
        """The object, or None.

        Raises:
            KindMissing: the cluster does not serve the kind.
        """
        deed = ApiRequest(verb="get", kind=kind, namespace=namespace, name=name)
        try:
            return (await self._calls.call(deed, "GET", timeout_s=timeout_s)).document()
        except NotFound:
            return None

    async def list(
        self, kind: Kind, namespace: str | None = None, selector: str = "", *, fields: str = ""
    ) -> Listing:
        """A consistent listing of all objects of a kind, read in pages; of all namespaces if
        `namespace` is None.

        Args:
            selector: label selector.
            fields: field selector, such as `spec.nodeName=a`.
        """
        for attempt in range(3):
            try:
                return await self._list(kind, namespace, selector, fields)
            except Gone:  # the continue token has expired
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def _list(self, kind: Kind, namespace: str | None, selector: str, fields: str) -> Listing:
        deed = ApiRequest(verb="list", kind=kind, namespace=namespace)
        query = {"limit": str(_PAGE), **_selectors(selector, fields)}
        items: list[Object] = []
        while True:
            page = (await self._calls.call(deed, "GET", query=query)).document()
            meta = page.get("metadata") or {}
            # a proxy's page must not be taken for an empty listing
            if not meta.get("resourceVersion"):
                raise ClusterUnreachable(
                    f"cannot {deed}: the response is not a list: check for a proxy in front of "
                    f"the API server",
                    deed=deed,
                )
            # items of a list lack apiVersion and kind
            items += [
                {"apiVersion": kind.api_version, "kind": kind.kind, **item}
                for item in page.get("items") or ()
            ]
            if not meta.get("continue"):
                return Listing(
                    items=tuple(items), resource_version=str(meta.get("resourceVersion") or "")
                )
            query = {**query, "continue": meta["continue"]}

    def watch(
        self, kind: Kind, namespace: str | None = None, selector: str = "", *, fields: str = ""
    ) -> AsyncGenerator[WatchChange, None]:
        """List, then watch endlessly (`watch_stream.watch_forever`). Close it
        (`contextlib.aclosing`)."""
        how = self._calls
        return watch_forever(
            self,
            kind,
            namespace,
            selector,
            fields=fields,
            chance=how.chance,
            clock=how.clock,
            sleep=how.sleep,
        )

    async def changes(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        resource_version: str,
        selector: str = "",
        fields: str = "",
    ) -> AsyncGenerator[bytes, None]:
        """One watch starting at a resourceVersion, as raw bytes, until it ends or breaks.

        Raises:
            ClusterError: it was refused (`Gone`: list again), or broke.
        """
        deed = ApiRequest(verb="watch", kind=kind, namespace=namespace)
        wait_s = self.patience.watch_s * (1 + self._calls.chance())
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(max(1, round(wait_s))),
            **_selectors(selector, fields),
        }
        silence_s = self.patience.silence_s
        try:
            async with self._calls.stream(deed, query=query, silence_s=silence_s) as pieces:
                async for piece in pieces:
                    yield piece
        except ClusterError as error:
            self._calls.note(error)
            raise

    async def logs(
        self,
        name: str,
        namespace: str,
        *,
        container: str | None = None,
        follow: bool = False,
        tail_lines: int | None = None,
        since_time: str | None = None,
        timestamps: bool = False,
        previous: bool = False,
        limit_bytes: int | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Stream the logs of a pod's container, in pieces. Close it (`contextlib.aclosing`).

        Args:
            since_time: RFC 3339; the server compares whole seconds.

        Raises:
            NotFound: the pod does not exist.
        """
        deed = ApiRequest(verb="get", kind=POD, namespace=namespace, name=name, subresource="log")
        wanted: dict[str, object] = {
            "container": container,
            "follow": "true" if follow else None,
            "tailLines": tail_lines,
            "sinceTime": since_time,
            "timestamps": "true" if timestamps else None,
            "previous": "true" if previous else None,
            "limitBytes": limit_bytes,
        }
        query = {key: str(value) for key, value in wanted.items() if value is not None}
        silence_s = None if follow else self.patience.call_s
        async with self._calls.stream(deed, query=query, silence_s=silence_s) as pieces:
            async for piece in pieces:
                yield piece

    def exec(
        self, name: str, namespace: str, argv: Sequence[str], *, container: str
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Run a command in a pod's container (`exec.run`). Close it (`contextlib.aclosing`)."""
        deed = ApiRequest(verb="get", kind=POD, namespace=namespace, name=name, subresource="exec")
        return exec.run(
            self._transport, deed, argv, container=container, open_s=self.patience.attempt_s
        )

    async def version(self) -> Object:
        """The API server's `/version`: `{"gitVersion": "v1.34.1", …}`."""
        return (
            await self._calls.call(ApiRequest(verb="get", kind=VERSION), "GET", path=VERSION_PATH)
        ).document()

    async def may(self, deed: ApiRequest) -> bool:
        """Whether our credentials permit a request, according to the API server's authorizer
        (SelfSubjectAccessReview)."""
        asked = {
            "verb": deed.verb,
            "group": deed.kind.group,
            "resource": deed.kind.plural,
            "subresource": deed.subresource,
            "namespace": deed.namespace or "",
            "name": deed.name or "",
        }
        review = {
            "apiVersion": ACCESS_REVIEW.api_version,
            "kind": ACCESS_REVIEW.kind,
            "metadata": {},
            "spec": {"resourceAttributes": {key: value for key, value in asked.items() if value}},
        }
        answer = (
            await self._calls.call(
                ApiRequest(verb="create", kind=ACCESS_REVIEW), "POST", body=review
            )
        ).document()
        return bool((answer.get("status") or {}).get("allowed"))

    # -- writing -----------------------------------------------------------------------------------

    async def apply(
        self, manifest: Mapping[str, Any], *, dry_run: bool = False, force: bool = True
    ) -> Object:
        """Server-side apply: set the manifest's fields, and remove those that it no longer
        contains.

        Args:
            dry_run: validate (schema, webhooks, quotas) without changing anything.
            force: take over fields that another manager owns.

        Raises:
            Invalid, Forbidden, Conflict, NamespaceEnding, QuotaExceeded: refused.
            ManifestWarned: it returned warnings (and was carried out, unless `dry_run`).
        """
        deed = _deed("patch", manifest)
        query = {**self._write(dry_run), "force": "true" if force else "false"}
        return await self._written(
            deed, "PATCH", manifest, query=query, content_type=_APPLY, is_conditional=not force
        )

    async def create(
        self, manifest: Mapping[str, Any], *, dry_run: bool = False, timeout_s: float | None = None
    ) -> Object:
        """Create an object.

        Raises:
            AlreadyExists: its name is in use.
        """
        deed = _deed("create", manifest)
        return await self._written(
            deed,
            "POST",
            manifest,
            query=self._write(dry_run),
            is_conditional=True,
            timeout_s=timeout_s,
        )

    async def patch(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        body: Mapping[str, Any],
        *,
        subresource: str = "",
        timeout_s: float | None = None,
    ) -> Object:
        """Apply a merge patch (RFC 7386).

        Raises:
            NotFound: the object does not exist.
            Conflict: the patch has a stale `resourceVersion`.
        """
        deed = ApiRequest(
            verb="patch", kind=kind, namespace=namespace, name=name, subresource=subresource
        )
        conditional = "resourceVersion" in (body.get("metadata") or {})
        query = self._write(dry_run=False)
        return await self._written(
            deed,
            "PATCH",
            body,
            query=query,
            content_type=_MERGE,
            is_conditional=conditional,
            timeout_s=timeout_s,
        )

    async def json_patch(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        operations: Sequence[Mapping[str, Any]],
        *,
        subresource: str = "",
        timeout_s: float | None = None,
    ) -> Object:
        """Apply a JSON patch (RFC 6902), all of its operations or none. If an answer was lost, it
        may be carried out twice: the second time its tests fail.

        Raises:
            NotFound: the object does not exist.
            KindMissing: the cluster does not serve the subresource.
            Invalid: an operation does not fit the object, or a test failed.
            Conflict: it was changed by others again and again.
        """
        deed = ApiRequest(
            verb="patch", kind=kind, namespace=namespace, name=name, subresource=subresource
        )
        return await self._written(
            deed,
            "PATCH",
            operations,
            query=self._write(dry_run=False),
            content_type=_JSON_PATCH,
            is_conditional=True,
            timeout_s=timeout_s,
        )

    async def replace(
        self, manifest: Mapping[str, Any], *, subresource: str = "", timeout_s: float | None = None
    ) -> Object:
        """Replace the whole object; its `resourceVersion` must be the current one.

        Raises:
            Conflict: it has changed in between: read it again.
        """
        deed = _deed("update", manifest, subresource=subresource)
        return await self._written(
            deed,
            "PUT",
            manifest,
            query=self._write(dry_run=False),
            is_conditional=True,
            timeout_s=timeout_s,
        )

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace_s: float | None = None,
    ) -> bool:
        """Delete an object; returns False if it did not exist.

        Args:
            uid: delete only the object with this uid; `Conflict` for another one.
            grace_s: rounded up to whole seconds; None = the object's own.
        """
        deed = ApiRequest(verb="delete", kind=kind, namespace=namespace, name=name)
        body: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
        }
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = int(-(-grace_s // 1))
        try:
            await self._calls.call(deed, "DELETE", body=body, is_conditional=True)
        except NotFound:
            return False
        return True

    async def pause(self, seconds: float) -> None:
        """Sleep, by this cluster's clock."""
        await self._calls.sleep(seconds)

    # -- helpers -----------------------------------------------------------------------------------

    def _write(self, dry_run: bool) -> dict[str, str]:
        query = {"fieldManager": self.settings.field_manager, "fieldValidation": "Strict"}
        return {**query, "dryRun": "All"} if dry_run else query

    async def _written(
        self,
        deed: ApiRequest,
        method: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        **how: Any,
    ) -> Object:
        answer = await self._calls.call(deed, method, body=body, **how)
        document = answer.document()
        grave = [
            text for text in answer.warnings if not any(piece in text for piece in self._tolerated)
        ]
        for text in answer.warnings:
            if text not in grave:
                logger.info("tolerated warning deed=%s text=%s", deed, text)
        if grave:
            said = (
                f"{deed}: the API server warns: {'; '.join(grave)}. Change the manifest, or "
                f"tolerate the warning (cluster.tolerated_warnings)"
            )
            raise ManifestWarned(
                said, warnings=grave, result=document, status=answer.status, deed=deed
            )
        return document


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {
        key: value for key, value in (("labelSelector", labels), ("fieldSelector", fields)) if value
    }


def _deed(verb: str, manifest: Mapping[str, Any], *, subresource: str = "") -> ApiRequest:
    meta = manifest.get("metadata") or {}
    kind = kind_of(manifest)
    name = None if verb == "create" else meta.get("name")
    return ApiRequest(
        verb=verb, kind=kind, namespace=meta.get("namespace"), name=name, subresource=subresource
    )
