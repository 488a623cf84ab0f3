"""`render`: an app as the manifests that a cluster would get, without a platform and without
sending anything.

What only a platform knows is made up, always the same, and said so: a tenant's id and uid, the
number of the next revision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pilotlight.cluster.manifests.function import function_manifests
from pilotlight.cluster.manifests.marks import Manifest
from pilotlight.cluster.manifests.secrets import secret_manifest
from pilotlight.cluster.manifests.tenancy import Tenancy, namespace_manifests
from pilotlight.controller import launch
from pilotlight.protocol import FunctionRoute
from pilotlight.spec import FunctionSpec
from pilotlight.traffic import of_one

UNKNOWN_TENANT = "t-000000000000"
"""The id of a tenant that only the platform knows."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """The manifests of one function: `name` of the function."""

    name: str
    manifests: tuple[Manifest, ...]


def namespace(tenancy: Tenancy, specs: Sequence[FunctionSpec]) -> list[Manifest]:
    """The tenant's namespace, with the secrets that the functions name; without their values."""
    names = sorted({secret for spec in specs for secret in spec.secrets})
    return [
        *namespace_manifests(tenancy),
        *(secret_manifest(name, tenancy, values=None) for name in names),
    ]


def function(app: str, spec: FunctionSpec, tenancy: Tenancy) -> Rendered:
    """One function, as a first deploy makes it. Raises InvalidInput for what the cluster cannot
    run."""
    revision = f"v1-{spec.digest()[:_DIGITS]}"
    document = launch.route(
        tenant=tenancy.id,
        uid=tenancy.uid,
        environment=tenancy.environment,
        app=app,
        function=spec.name,
        document=of_one(revision, salt=spec.name),
        specs={revision: spec},
        stopped=False,
        snapshots=True,
        variables={},
    )
    return Rendered(
        name=spec.name,
        manifests=tuple(function_manifests(FunctionRoute.from_json(document), tenancy)),
    )
