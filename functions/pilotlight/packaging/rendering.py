"""Rendering of an app to the Kubernetes manifests of its first deploy, without a platform.

Values that only a platform knows have fixed placeholders: the id and uid of the tenant, and the
number of the next revision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.controller.registry import launch_spec
from pilotlight.kubernetes.manifests.knative_service import function_manifests
from pilotlight.kubernetes.manifests.labels import Manifest
from pilotlight.kubernetes.manifests.secrets import secret_manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy, namespace_manifests
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import FunctionSpec
from pilotlight.spec.traffic import single_revision_traffic

UNKNOWN_TENANT = "t-000000000000"
"""Placeholder for the id of a tenant, which only the platform knows."""
UNKNOWN_PLATFORM = "p-0000000000000000"
"""Placeholder for the platform's own id."""
UNKNOWN_DIGEST = f"sha256:{'0' * 64}"
"""Placeholder for the digest of an image that was not made."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFunction:
    """The manifests of the function `name`."""

    name: str
    manifests: tuple[Manifest, ...]


def render_namespace(tenancy: Tenancy, specs: Sequence[FunctionSpec]) -> list[Manifest]:
    """Return the namespace of the tenant, with the secrets that the functions use but without their
    values."""
    names = sorted({secret for spec in specs for secret in spec.secrets})
    return [
        *namespace_manifests(tenancy),
        *(secret_manifest(name, tenancy, values=None) for name in names),
    ]


def render_function(app: str, spec: FunctionSpec, tenancy: Tenancy) -> RenderedFunction:
    """Render one function as in a first deploy. Raises InvalidInput if the cluster cannot run
    it."""
    revision = f"v1-{spec.digest()[:_DIGITS]}"
    document = launch_spec.function_route(
        tenant=tenancy.id,
        uid=tenancy.uid,
        environment=tenancy.environment,
        app=app,
        function=spec.name,
        document=single_revision_traffic(revision, salt=spec.name),
        specs={revision: spec},
        stopped=False,
        snapshots=True,
        variables={},
    )
    return RenderedFunction(
        name=spec.name,
        manifests=tuple(function_manifests(FunctionRoute.from_json(document), tenancy)),
    )
