"""A request to the API server: one verb on one object or kind, as in RBAC."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from pilotlight.kubernetes.kinds import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """One request to the API server.

    Attributes:
        verb: RBAC verb: get, list, watch, create, patch, update, delete.
        namespace: None for kinds without namespaces, and for all namespaces.
        name: None for a whole kind.
        subresource: "" or `status`, `scale`, `log`, `exec`, `resize`.
    """

    verb: str
    kind: Kind
    namespace: str | None = None
    name: str | None = None
    subresource: str = ""

    @property
    def path(self) -> str:
        """Path of the request's URL."""
        parts = [self.kind.path]
        if self.kind.namespaced and self.namespace is not None:
            parts += ["namespaces", quote(self.namespace, safe="")]
        parts.append(self.kind.plural)
        if self.name is not None:
            parts.append(quote(self.name, safe=""))
        if self.subresource:
            parts.append(self.subresource)
        return "/".join(parts)

    @property
    def target(self) -> str:
        """The object, such as `Deployment fn-acme/embed`."""
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.kind.kind} {where}".rstrip()

    @property
    def rule(self) -> str:
        """The RBAC rule that allows it, as YAML of one line."""
        resource = (
            f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural
        )
        return (
            f'{{apiGroups: ["{self.kind.group}"], resources: ["{resource}"], verbs: '
            f'["{self.verb}"]}}'
        )

    def __str__(self) -> str:
        return f"{self.verb} {self.target}{'/' + self.subresource if self.subresource else ''}"
