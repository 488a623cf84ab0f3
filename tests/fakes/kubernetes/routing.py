"""From a request's path to the resource it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.fakes.kubernetes.kinds import Resource, Target
from tests.fakes.kubernetes.problems import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a path names: `namespace` None = all of them; `name` "" = the collection."""

    resource: Resource
    namespace: str | None
    name: str
    subresource: str

    @property
    def target(self) -> Target:
        """The same, of one object."""
        return Target(
            resource=self.resource,
            namespace=self.namespace or "",
            name=self.name,
            subresource=self.subresource,
        )

    def verb(self, method: str, *, is_watch: bool, is_apply: bool) -> str:
        """Kubernetes' verb for an HTTP method here. Raises Refused 405."""
        if method == "GET":
            return "watch" if is_watch else ("get" if self.name else "list")
        if method == "DELETE":
            return "delete" if self.name else "deletecollection"
        if method == "PATCH" and self.name:
            return "apply" if is_apply else "patch"
        if method == "POST":
            return "create"
        if method == "PUT" and self.name:
            return "update"
        raise Refused(405, "the server does not allow this method on the requested resource")


def route(parts: list[str], resources: Mapping[tuple[str, str, str], Resource]) -> Route:
    """Raises Refused 404 for a path that names nothing."""
    group, version, rest = (
        ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    )
    namespace: str | None = None
    if (
        rest[0] == "namespaces"
        and len(rest) >= 3
        and not (group == "" and len(rest) == 3 and rest[2] in ("status", "finalize"))
    ):
        namespace, rest = rest[1], rest[2:]
    resource = resources.get((group, version, rest[0]))
    if resource is None or len(rest) > 3 or (namespace is not None and not resource.namespaced):
        raise Refused(404, "404 page not found")
    name = rest[1] if len(rest) > 1 else ""
    if name and resource.namespaced and namespace is None:
        raise Refused(404, "404 page not found")
    return Route(
        resource=resource,
        namespace=namespace if resource.namespaced else (namespace or None),
        name=name,
        subresource=rest[2] if len(rest) > 2 else "",
    )


def authorized_as(verb: str) -> str:
    """The right that a verb needs: an apply is a patch."""
    return "patch" if verb == "apply" else verb
