"""Metadata of all our objects: ownership labels, and the hash of the applied manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pilotlight.kubernetes import names
from pilotlight.kubernetes.kinds import Kind
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.record_json import canonical_json

Manifest = dict[str, Any]
_OURS = "app.kubernetes.io/managed-by"


def object_manifest(
    kind: Kind,
    name: str,
    *,
    namespace: str | None = None,
    labels: Mapping[str, str],
    annotations: Mapping[str, str] | None = None,
    **body: Any,
) -> Manifest:
    """A manifest with the hash annotation. `body`: its fields besides metadata."""
    metadata: Manifest = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    metadata["labels"] = dict(sorted(labels.items()))
    metadata["annotations"] = dict(sorted((annotations or {}).items()))
    return with_hash(
        {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **body}
    )


def ownership_labels(settings: ClusterSettings, platform: str) -> dict[str, str]:
    """Labels of all objects that this platform applies. `platform`: its id."""
    return {
        _OURS: "pilotlight",
        names.MANAGED_BY: names.manager_of(settings),
        names.PLATFORM: platform,
    }


def with_hash(made: Manifest) -> Manifest:
    """The same manifest with its hash as an annotation.

    Of a Service's template only the name is hashed: it only creates revisions, which are
    immutable."""
    metadata = made["metadata"]
    annotations = {
        key: value for key, value in metadata["annotations"].items() if key != names.APPLIED
    }
    spec = made.get("spec", {})
    if "name" in spec.get("template", {}).get("metadata", {}):
        spec = {**spec, "template": spec["template"]["metadata"]["name"]}
    said = {**made, "metadata": {**metadata, "annotations": annotations}, "spec": spec}
    digest = hashlib.sha256(canonical_json(said)).hexdigest()
    return {
        **made,
        "metadata": {
            **metadata,
            "annotations": dict(sorted({**annotations, names.APPLIED: digest}.items())),
        },
    }
