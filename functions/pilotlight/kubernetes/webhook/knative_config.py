"""The part of Knative's configuration that affects a Service. Without a cluster: Knative's
defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pilotlight.kubernetes.knative_features import BY_FLAG, Feature, patch_config, switch_on

DEFAULT_MAX_TIMEOUT_S = 600
DEFAULT_MAX_CONCURRENCY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class KnativeConfig:
    """Data of Knative's ConfigMaps.

    Attributes:
        features, autoscaler, defaults: data of `config-features`, `config-autoscaler`,
            `config-defaults`; {} = Knative's own defaults.
        is_known: whether they were read from a cluster.
        namespace: Knative's namespace, for the commands in fixes.
    """

    features: Mapping[str, str] = field(default_factory=dict)
    autoscaler: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    is_known: bool = False
    namespace: str = "knative-serving"

    @classmethod
    def unknown(cls, namespace: str = "knative-serving") -> KnativeConfig:
        """For a cluster whose configuration cannot be read: permits everything, so that the cluster
        decides."""
        everything = dict.fromkeys(BY_FLAG, "enabled")
        return cls(
            features=everything,
            autoscaler={"allow-zero-initial-scale": "true"},
            defaults={
                "max-revision-timeout-seconds": str(1 << 31),
                "container-concurrency-max-limit": str(1 << 31),
            },
            namespace=namespace,
        )

    def lacks(self, flag: str) -> Feature | None:
        """The feature of a flag if it is not sufficiently enabled, else None."""
        feature = BY_FLAG[flag]
        return None if feature.is_on(self.features) else feature

    def switch_on(self, feature: Feature) -> str:
        """The command that enables a feature."""
        return switch_on(feature, knative_namespace=self.namespace)

    def set_autoscaler(self, key: str, value: str) -> str:
        """The command that sets a key of config-autoscaler."""
        return patch_config("config-autoscaler", {key: value}, knative_namespace=self.namespace)

    def set_default(self, key: str, value: str) -> str:
        """The command that sets a key of config-defaults."""
        return patch_config("config-defaults", {key: value}, knative_namespace=self.namespace)

    @property
    def max_timeout_s(self) -> int:
        """Limit of `timeoutSeconds`."""
        return _number(self.defaults.get("max-revision-timeout-seconds"), DEFAULT_MAX_TIMEOUT_S)

    @property
    def max_concurrency(self) -> int:
        """Limit of `containerConcurrency`."""
        return _number(
            self.defaults.get("container-concurrency-max-limit"), DEFAULT_MAX_CONCURRENCY
        )

    @property
    def allows_zero_initial_scale(self) -> bool:
        """Whether a revision may become ready without ever having had a pod."""
        return self.autoscaler.get("allow-zero-initial-scale", "false").strip().lower() == "true"


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.strip().isdigit() else default
