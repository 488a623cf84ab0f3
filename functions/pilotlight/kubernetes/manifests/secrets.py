"""Manifest of a tenant's secret, whose variables become a pod's environment."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from pilotlight.kubernetes import kinds, names
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest
from pilotlight.kubernetes.manifests.tenant_namespace import Tenancy


def secret_manifest(secret: str, tenancy: Tenancy, *, values: Mapping[str, str] | None) -> Manifest:
    """The Kubernetes Secret with the given values; with None, without any, for display."""
    data = {
        name: base64.b64encode(value.encode()).decode()
        for name, value in sorted((values or {}).items())
    }
    return object_manifest(
        kinds.SECRET,
        names.secret_name(secret),
        namespace=tenancy.namespace,
        labels=tenancy.labels,
        annotations={
            names.PATH: f"{tenancy.path}/{secret}",
            **(
                {names.MADE_FOR: "its values are written by the platform alone"}
                if values is None
                else {}
            ),
        },
        type="Opaque",
        **({"data": data} if values is not None else {}),
    )
