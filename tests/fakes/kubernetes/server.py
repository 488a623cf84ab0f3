"""The API server itself: everything put together, and a listener that can go away and come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.kubernetes import kinds
from tests.fakes.kubernetes.deleting import Deleter
from tests.fakes.kubernetes.faults import ADMIN, Faults, Rights
from tests.fakes.kubernetes.handling import Handling
from tests.fakes.kubernetes.http import Answer, Connection, Request, drop_packets
from tests.fakes.kubernetes.kinds import Resource, Target
from tests.fakes.kubernetes.knative_settings import config_maps
from tests.fakes.kubernetes.knative_webhook import KnativeWebhook
from tests.fakes.kubernetes.logs import Logs
from tests.fakes.kubernetes.policies import Policies
from tests.fakes.kubernetes.quotas import Quotas
from tests.fakes.kubernetes.rbac import GROUP as RBAC_GROUP
from tests.fakes.kubernetes.rbac import Rbac
from tests.fakes.kubernetes.reading import Reader
from tests.fakes.kubernetes.requests import RequestLog
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.writing import Hook, Options, Review, Writer

Json = dict[str, Any]
NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")


class ApiServer:
    """An API server on 127.0.0.1. Owner: the event loop that started it; `async with` starts and
    stops it.

    Attributes:
        faults: what goes wrong.
        rights: what clients may do.
        requests: what they asked for.
        hooks: admission webhooks, called with each write (Knative's own rules are the first).
        store: the objects, for assertions; writes of tests go through a client.
        logs: of pods without a kubelet.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        knative: bool = True,
        ready: bool = True,
        without_kinds: Iterable[str] = (),
    ) -> None:
        """`knative`: whether its CRDs are there; `ready`: whether its settings are those that the
        platform needs (else Knative's defaults); `without_kinds`: single kinds that are not there
        (by `plural.group`)."""
        self.store = Store()
        self.faults = Faults()
        self.rights = Rights(rbac=Rbac(self.store))
        self.requests = RequestLog()
        self.logs = Logs(self._node)
        self.hooks: list[Hook] = [
            *([KnativeWebhook(self.store)] if knative else []),
            Quotas(self.store),
        ]
        self.port = port
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._without = set(without_kinds)
        self._ready = ready
        self._resources: Mapping[tuple[str, str, str], Resource] = {}
        policies = Policies(self.store)
        self._writer = Writer(self.store, self.faults, self.hooks, (self._check_binding, policies))
        self.reader = Reader(self.store, self.faults)
        self._deleter = Deleter(self.store, self.faults, _soon)
        self._handling = Handling(
            store=self.store,
            reader=self.reader,
            writer=self._writer,
            deleter=self._deleter,
            faults=self.faults,
            rights=self.rights,
            requests=self.requests,
            logs=self.logs,
            resources=lambda: self._resources,
            on_delete=policies,
        )
        self._set_resources(knative=knative)

    def __repr__(self) -> str:
        state = "up" if self._server is not None else "away"
        return f"<ApiServer {self.url} {state} {self.store!r} watches={self.reader.watches}>"

    @property
    def url(self) -> str:
        """`http://127.0.0.1:<port>`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def watches(self) -> int:
        """How many watches are open."""
        return self.reader.watches

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(self._handle, self._connections, lambda: self.faults.clock_skew_s)

        self._server = await loop.create_server(
            connection, "127.0.0.1", self.port, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self.store.get(("", "namespaces"), ("", "default")) is None:
            self._seed()

    async def stop(self) -> None:
        """Away, with all connections cut; `start` brings it back on the same port, with everything
        that it knew."""
        if self._server is None:
            return
        self._server.close()
        for _ in range(3):  # connections that were accepted become known a turn or two later
            await asyncio.sleep(0)
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()
        self._server = None
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    def partition(self, *, is_cut: bool) -> None:
        """Whether packets of clients, of present and of new connections, are dropped."""
        assert self._server is not None
        for one in (*self._server.sockets, *(link.socket for link in self._connections)):
            drop_packets(one, drops=is_cut)

    def cut_connections(self) -> None:
        """Reset every connection, watches included."""
        for connection in list(self._connections):
            connection.abort()

    def expire_watches(self) -> None:
        """410 into every open watch; lists and watches from now on must start anew."""
        self.store.compact()
        self.reader.expire_watches()

    def put(self, body: Json) -> Json:
        """Create or replace an object behind the clients' back (set-up of tests, in the server's
        event loop)."""
        resource = self.resource(body["apiVersion"], body["kind"])
        metadata = body["metadata"]
        namespace = metadata.get("namespace", "default") if resource.namespaced else ""
        if namespace and self.store.get(("", "namespaces"), ("", namespace)) is None:
            self.add_namespace(namespace)
        options = Options(manager="test")
        if self.store.get(resource.key, (namespace, metadata["name"])) is None:
            stored = self._writer.create(resource, namespace, body, options)
            if resource.has_status and "status" in body:
                stored = self._status(resource, namespace, stored.body, body["status"])
            return stored.body
        replaced = self._writer.replace(
            Target(resource=resource, namespace=namespace, name=metadata["name"]), body, options
        )
        return (
            self._status(resource, namespace, replaced.body, body["status"])
            if "status" in body
            else replaced
        ).body

    def _status(self, resource: Resource, namespace: str, body: Json, status: Json) -> Any:
        body = {**body, "status": status}
        target = Target(
            resource=resource,
            namespace=namespace,
            name=body["metadata"]["name"],
            subresource="status",
        )
        return self._writer.replace(target, body, Options(manager="test"))

    def get(self, api_version: str, kind: str, name: str, namespace: str = "") -> Json | None:
        """An object as it is stored; None = there is none."""
        found = self.store.get(self.resource(api_version, kind).key, (namespace, name))
        return found.body if found is not None else None

    def list(self, api_version: str, kind: str, namespace: str | None = None) -> list[Json]:
        """Objects as they are stored."""
        return [
            stored.body
            for _, stored in self.store.all(self.resource(api_version, kind).key, namespace)
        ]

    def resource(self, api_version: str, kind: str) -> Resource:
        """A served resource. Raises KeyError."""
        for resource in self._resources.values():
            if (resource.api_version, resource.kind) == (api_version, kind):
                return resource
        raise KeyError(f"{api_version} {kind} is not served")

    def add_namespace(self, name: str) -> None:
        """A namespace with what Kubernetes puts into each."""
        if self.store.get(("", "namespaces"), ("", name)) is not None:
            return
        options = Options(manager="kube-apiserver")
        self._writer.create(
            self.resource("v1", "Namespace"), "", _named("v1", "Namespace", name), options
        )

    def kubeconfig(self, token: str = "test-token") -> str:
        """A kubeconfig file's text (JSON is YAML); without a token, the administrator's."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "admin", "namespace": "default"},
                }
            ],
        }
        return json.dumps(document, indent=2)

    def write_kubeconfig(self, path: Path, token: str = "test-token") -> Path:
        """Write it; returns the path."""
        path.write_text(self.kubeconfig(token))
        return path

    def remove_kind(self, qualified: str) -> None:
        """Take a kind away, as if its CRD were deleted (`services.serving.knative.dev`)."""
        self._without.add(qualified)
        self._set_resources(knative=any(resource.custom for resource in self._resources.values()))

    def _check_binding(self, review: Review) -> None:
        if review.resource.key == (RBAC_GROUP, "rolebindings") and review.user != ADMIN:
            self.rights.rbac.check_binding(review.user, review.body)

    def _set_resources(self, *, knative: bool) -> None:
        served = tuple(
            r
            for r in (*kinds.BUILTIN, *(kinds.KNATIVE if knative else ()))
            if r.qualified not in self._without
        )
        self._resources = kinds.by_path(served)

    def _handle(self, request: Request) -> Any:
        if request.target.startswith("/-/"):
            return self._control(request)
        return self._handling.answer(request)

    def _control(self, request: Request) -> Answer:
        """Faults and counts over HTTP, for servers in another process (see `control`)."""
        from tests.fakes.kubernetes import control

        return control.answer(self, request)

    def _node(self, name: str) -> Json | None:
        found = self.store.get(("", "nodes"), ("", name))
        return found.body if found is not None else None

    def _seed(self) -> None:
        for resource in self._resources.values():
            self._deleter.watch_kind(resource.key)
        self.store.listen(
            ("", "namespaces"),
            lambda event: self._furnish(event.place[1]) if event.kind == "ADDED" else None,
        )
        for name in (*NAMESPACES, *(["knative-serving"] if self._knative_is_here() else [])):
            self.add_namespace(name)
        for resource in [one for one in self._resources.values() if one.custom]:
            self._add_definition(resource)
        if self._ready and self._knative_is_here():
            for body in config_maps():
                self.put(body)

    def _knative_is_here(self) -> bool:
        return any(resource.custom for resource in self._resources.values())

    def _furnish(self, namespace: str) -> None:
        """What Kubernetes' controllers put into every namespace."""
        options = Options(manager="kube-controller-manager")
        account = _named("v1", "ServiceAccount", "default", namespace)
        self._writer.create(self.resource("v1", "ServiceAccount"), namespace, account, options)
        bundle = _named("v1", "ConfigMap", "kube-root-ca.crt", namespace) | {"data": {"ca.crt": ""}}
        self._writer.create(self.resource("v1", "ConfigMap"), namespace, bundle, options)

    def _add_definition(self, resource: Resource) -> None:
        names = {
            "plural": resource.plural,
            "kind": resource.kind,
            "singular": resource.kind.lower(),
            "listKind": f"{resource.kind}List",
        }
        open_schema = {
            "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        }
        version = {"name": resource.version, "served": True, "storage": True, "schema": open_schema}
        body = _named("apiextensions.k8s.io/v1", "CustomResourceDefinition", resource.qualified)
        body["metadata"]["labels"] = {
            "app.kubernetes.io/version": "1.20.0",
            "app.kubernetes.io/name": "knative-serving",
        }
        body["spec"] = {
            "group": resource.group,
            "names": names,
            "scope": "Namespaced",
            "versions": [version],
        }
        conditions = [{"type": name, "status": "True"} for name in ("NamesAccepted", "Established")]
        body["status"] = {
            "acceptedNames": names,
            "storedVersions": [resource.version],
            "conditions": conditions,
        }
        self.put(body)


def _soon(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


def _named(api_version: str, kind: str, name: str, namespace: str = "") -> Json:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
