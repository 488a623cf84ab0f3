"""Knative's configuration, read from the cluster."""

from __future__ import annotations

import logging

from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import ClusterError
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig

log = logging.getLogger(__name__)


async def read_config(cluster: Cluster) -> KnativeConfig:
    """Read Knative's configuration; unknown if it cannot be read."""
    namespace = cluster.settings.knative_namespace
    found: dict[str, dict[str, str]] = {}
    for name in ("config-features", "config-autoscaler", "config-defaults"):
        try:
            item = await cluster.get(kinds.CONFIG_MAP, name, namespace)
        except ClusterError as e:
            log.info("event=knative_config_unknown name=%s error=%s", name, e)
            return KnativeConfig.unknown(namespace)
        if item is None:
            return KnativeConfig.unknown(namespace)
        found[name] = {
            key: str(value)
            for key, value in (item.get("data") or {}).items()
            if not key.startswith("_")
        }
    return KnativeConfig(
        features=found["config-features"],
        autoscaler=found["config-autoscaler"],
        defaults=found["config-defaults"],
        is_known=True,
        namespace=namespace,
    )
