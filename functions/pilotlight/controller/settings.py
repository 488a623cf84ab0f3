"""Section `controller` of platform.yaml, and the few keys of other sections that the controller needs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.settings import SnapshotterSettings
from weight_cache.settings import Paths, PlatformSettings, load


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Section `controller`.

    Attributes:
        metrics_listen: host:port of the Prometheus text; None = only on `<run>/metrics-controller.sock`.
        database_url: None = SQLite in <home>; postgresql+psycopg://… where that is outgrown.
        bundle_max_bytes: largest source archive that may be deployed.
        blob_max_bytes: largest blob that may be uploaded (files of weights are blobs).
    """

    metrics_listen: str | None = "127.0.0.1:8702"
    database_url: str | None = None
    bundle_max_bytes: int = 104_857_600
    blob_max_bytes: int = 53_687_091_200

    def __post_init__(self) -> None:
        for name in ("bundle_max_bytes", "blob_max_bytes"):
            if getattr(self, name) < 1024:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1024")
        if self.metrics_listen is not None and not self.metrics_listen.rpartition(":")[2].isdigit():
            raise ValueError(f"metrics_listen = {self.metrics_listen!r}: must be host:port, or null")
        if self.database_url is not None and not self.database_url.startswith(("sqlite:", "postgresql+psycopg:")):
            raise ValueError("database_url: must start with 'sqlite:' or 'postgresql+psycopg:'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """All that the controller reads from platform.yaml.

    Attributes:
        uid_base: first uid given to a tenant, or None where the platform does not run as root and cannot change uids.
        trust: `isolated` or `shared`; see PlatformSettings.
        platform: section `platform`: where blobs lie.
    """

    settings: ControllerSettings
    paths: Paths
    trust: str
    uid_base: int | None
    platform: PlatformSettings = field(default_factory=PlatformSettings)

    @property
    def database_url(self) -> str:
        """The database: what was set, else SQLite in <home>."""
        return self.settings.database_url or f"sqlite:///{self.paths.home / 'controller.db'}"

    @classmethod
    def read(cls, file: Path | None) -> ControllerConfig:
        """Read `file`. Raises SettingsInvalid."""
        platform = load(PlatformSettings, "platform", file)
        node = load(SnapshotterSettings, "snapshotter", file)
        return cls(
            settings=load(ControllerSettings, "controller", file),
            paths=Paths.of(platform, os.environ),
            trust=platform.trust,
            platform=platform,
            uid_base=node.uid_base if os.geteuid() == 0 else None,
        )
