"""Section `controller` of platform.yaml, and the keys of other sections that the controller
needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pilotlight.controller.database.sqlite_file import database_path
from pilotlight.core.dashboard.dashboard_origin import DashboardOrigin, read_dashboard_origin
from pilotlight.core.oidc.settings import CALLBACK_PATH, Issuer, read_issuers
from pilotlight.core.settings import (
    Paths,
    PlatformSettings,
    SettingsInvalid,
    load_named_records,
    load_section,
    load_section_key,
    read_secret,
    require_defaults,
)
from pilotlight.core.transport.listeners import is_loopback, require_tls_or_loopback
from pilotlight.kubernetes.settings import ClusterSettings
from pilotlight.spec.identifiers import Isolation, Scope
from pilotlight.spec.pricing import PriceSettings
from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan
from snapshotter.linux.egress_policy import EgressPolicy
from snapshotter.settings import SnapshotterSettings

_CLUSTER_ONLY = (
    "adopt",
    "wake_url",
    "unschedulable_grace_s",
    "warm_uid",
    "handover_s",
    "idle_templates",
    "idle_template_s",
)
"""Keys of section `cluster` that `pilotlight render` and `doctor --cluster` do not use either."""
MAX_DAYS = 36_500
"""Longest retention in days: a hundred years. null is for ever."""
FLEET = "on a cluster (platform.fleet: knative)"
"""Where an option is refused because pods cannot honour it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Section `controller`.

    Attributes:
        listen: host:port where other machines reach the control plane, with mutual TLS
            (platform.tls_*); None = only this machine, by its socket. Without TLS files it must be
            a loopback address.
        standby: while another controller is active, wait for the database's lock and then take
            over, instead of exiting.
        metrics_listen: host:port of the Prometheus metrics, which require a bearer token
            (`platform.metrics_token_file`), and of /healthz and /readyz, which do not; None = only
            on `<run>/metrics-controller.sock`.
        database_url: None = SQLite in <home>/controller; postgresql+psycopg://… for larger
            platforms.
        database_url_file: file that contains the URL, such as a mounted Secret; None =
            `database_url` is used.
        node_key_file: file with the separate key of a cluster's node agents, which lets them report
            but decrypts nothing; None = they use the platform's.
        bundle_max_bytes: maximum size of a deployed source archive.
        blob_max_bytes: maximum size of an uploaded blob (files of weights are blobs).
        default_plan: plan of new tenants unless another is given.
        invoice_after_days: days after the end of a month when its invoices are issued
            automatically.
        webhooks: `public` (public addresses only) or `any`.
        dashboard_url: the dashboard's own origin, such as https://dashboard.example; None = the
            platform's URL, which it shares with functions. The host must differ from that of
            functions. The activator reads it too.
        plain_http_sign_in: permit sign-in to the dashboard without TLS from another machine.
        observations_days: days for which observations of calls are kept by the minute; by the hour
            they are kept for 100 days.
        feedback_window_days: how many days after its call an outcome may arrive.
        traces_per_tenant: traces kept per tenant; the oldest are deleted first.
        history_days: days after which latencies by hour, feedback, and alerts, rollouts and units
            of experiments that have ended are deleted; None = never.
        revision_days: revisions that cannot be called are pruned so many days after they were made,
            except the newest ten of each function; None = never.
        image_days: images that no revision uses are deleted so many days after they were built;
            None = never.
        usage_days: usage records are archived in the blob store, and removed from the database, so
            many days after their call, if their invoice is issued; None = never.
        blob_grace_s: an unreferenced blob is deleted this long after its tenant last uploaded it or
            checked that it exists.
    """

    listen: str | None = None
    standby: bool = False
    metrics_listen: str | None = None
    database_url: str | None = None
    database_url_file: str | None = None
    node_key_file: str | None = None
    bundle_max_bytes: int = 104_857_600
    blob_max_bytes: int = 53_687_091_200
    default_plan: str = "standard"
    invoice_after_days: int = 3
    webhooks: str = "public"
    dashboard_url: str | None = None
    plain_http_sign_in: bool = False
    observations_days: int = 4
    feedback_window_days: int = 30
    traces_per_tenant: int = 2000
    history_days: int | None = 400
    revision_days: int | None = 180
    image_days: int | None = 90
    usage_days: int | None = 400
    blob_grace_s: float = 86_400.0

    def __post_init__(self) -> None:
        if self.webhooks not in ("public", "any"):
            raise ValueError(f"webhooks = {self.webhooks!r}: must be 'public' or 'any'")
        if self.dashboard_url is not None:
            DashboardOrigin.parse(self.dashboard_url)
        if not 0 <= self.invoice_after_days <= 27:
            raise ValueError(
                f"invoice_after_days = {self.invoice_after_days}: must be between 0 and 27"
            )
        for name, low, high in (
            ("observations_days", 4, 90),
            ("feedback_window_days", 1, 365),
            ("traces_per_tenant", 0, 1_000_000),
            ("history_days", 7, MAX_DAYS),
            ("revision_days", 7, MAX_DAYS),
            ("image_days", 7, MAX_DAYS),
            ("usage_days", 90, MAX_DAYS),
        ):
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise ValueError(f"{name} = {value}: must be between {low} and {high}")
        if not 3600 <= self.blob_grace_s <= 31_536_000:
            raise ValueError(
                f"blob_grace_s = {self.blob_grace_s:g}: must be between 3600 and 31536000; the "
                "uploads of a deploy may take an hour"
            )
        for name in ("bundle_max_bytes", "blob_max_bytes"):
            if getattr(self, name) < 1024:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1024")
        for name in ("metrics_listen", "listen"):
            if (value := getattr(self, name)) is not None and not value.rpartition(":")[
                2
            ].isdigit():
                raise ValueError(f"{name} = {value!r}: must be host:port, or null")
        # resolved here, so that callers need not know whether the URL came from the file
        object.__setattr__(
            self,
            "database_url",
            read_secret("database_url", self.database_url, self.database_url_file),
        )
        if self.database_url is not None and not self.database_url.startswith(
            ("sqlite:", "postgresql+psycopg:")
        ):
            raise ValueError("database_url: must start with 'sqlite:' or 'postgresql+psycopg:'")

    @property
    def dashboard_origin(self) -> DashboardOrigin | None:
        """The dashboard's own origin; None if it has none."""
        return DashboardOrigin.parse(self.dashboard_url) if self.dashboard_url is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """All settings that the controller reads from platform.yaml.

    Attributes:
        uid_base: first uid for tenants; None if the platform does not run as root and cannot change
            uids. In a cluster pods always have uids.
        trust: `isolated` or `shared`; see PlatformSettings.
        platform: section `platform`, such as where blobs are stored.
        plans: all plans by name, including the built-in ones.
        prices: section `prices`.
        cluster: section `cluster`; read if platform.fleet is knative.
        egress: what functions may reach, if each has its own network; None otherwise.
        issuers: section `issuers`, by name.
        issuer_secrets: the secrets of the clients at these issuers, by the issuer's name.
        dashboard_url: where browsers find the dashboard; None = not known, since activators listen
            at another address than those of this machine.
    """

    settings: ControllerSettings
    paths: Paths
    trust: str
    uid_base: int | None
    platform: PlatformSettings = field(default_factory=PlatformSettings)
    plans: Mapping[str, Plan] = field(default_factory=lambda: BUILT_IN_PLANS)
    prices: PriceSettings = field(default_factory=PriceSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    egress: EgressPolicy | None = None
    issuers: Mapping[str, Issuer] = field(default_factory=dict)
    issuer_secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    dashboard_url: str | None = None

    @property
    def database_url(self) -> str:
        """The configured database URL, or SQLite in <home>/controller."""
        return self.settings.database_url or f"sqlite:///{database_path(self.paths.home)}"

    @property
    def is_own_file(self) -> bool:
        """Whether the database is the SQLite file in <home>/controller."""
        return self.database_url == f"sqlite:///{database_path(self.paths.home)}"

    def redirect_url(self, issuer: str) -> str:
        """Return where an issuer sends browsers back to."""
        return self.issuers[issuer].redirect_url or f"{self.dashboard_url}{CALLBACK_PATH}"

    @classmethod
    def read(cls, file: Path | None) -> ControllerConfig:
        """Read `file`. Raises SettingsInvalid."""
        platform = load_section(PlatformSettings, "platform", file)
        node = load_section(SnapshotterSettings, "snapshotter", file)
        node.check_uids(platform)
        settings = load_section(ControllerSettings, "controller", file)
        prices = load_section(PriceSettings, "prices", file)
        plans = load_named_records(Plan, "plans", file, base=BUILT_IN_PLANS)
        cluster = load_section(ClusterSettings, "cluster", file)
        _check_plans(plans, settings, prices)
        if platform.fleet == "knative":
            _check_plans_of_cluster(plans, cluster)
            _check_prices_of_cluster(prices)
        else:
            why = "only activators and controllers with platform.fleet: knative read it"
            require_defaults("cluster", cluster, _CLUSTER_ONLY, why=why)
        dashboard_url = _dashboard_url(file)  # rejects the host of functions
        issuers = read_issuers(file)
        secrets = _check_issuers(issuers, dashboard_url)
        require_tls_or_loopback(
            "controller.listen", settings.listen, is_known=platform.tls_cert is not None
        )
        return cls(
            settings=settings,
            plans=plans,
            prices=prices,
            paths=Paths.of(platform, os.environ),
            trust=platform.trust,
            platform=platform,
            uid_base=node.uid_base if os.geteuid() == 0 or platform.fleet == "knative" else None,
            cluster=cluster,
            egress=node.egress()
            if platform.fleet == "local" and node.function_network == "own" and os.geteuid() == 0
            else None,
            issuers=issuers,
            issuer_secrets=secrets,
            dashboard_url=dashboard_url,
        )


def refused_plan(plan: Plan, settings: ClusterSettings) -> tuple[str, str, str] | None:
    """Return the first term of a plan that this cluster cannot keep: its name, the reason and the
    way out; None if there is none."""
    if plan.isolation is Isolation.DEDICATED and settings.dedicated_key is None:
        hint = (
            "Set cluster.dedicated_key of platform.yaml to the key with which nodes are labelled "
            "and tainted for a tenant, or change the plan's isolation."
        )
        return "isolation", "no node is dedicated to a tenant", hint
    if plan.isolation is Isolation.RESERVED and settings.reserved_priority_class is None:
        hint = (
            "Create a PriorityClass and set cluster.reserved_priority_class of platform.yaml to "
            "its name, or change the plan's isolation."
        )
        return "isolation", "no PriorityClass is set for tenants with a reservation", hint
    if plan.reserved_memory_bytes:
        hint = (
            "Set it to 0: pods of a reserved plan have cluster.reserved_priority_class, and "
            "min_instances of a function keeps pods running."
        )
        return "reserved_memory_bytes", "no memory of a node can be kept free", hint
    return None


def _dashboard_url(file: Path | None) -> str | None:
    """Return the URL of the dashboard's origin, as far as it is known. Raises SettingsInvalid."""
    if (origin := read_dashboard_origin(file)) is not None:
        return origin.url
    listen = str(load_section_key("activator", "listen", file) or "127.0.0.1:8700")
    host, _, port = listen.rpartition(":")
    return f"http://{host}:{port}" if is_loopback(host.strip("[]")) else None


def _check_issuers(issuers: Mapping[str, Issuer], dashboard_url: str | None) -> dict[str, str]:
    """Return the secrets of our clients at issuers, by issuer. Raises SettingsInvalid."""
    found = {}
    for name, issuer in issuers.items():
        for number, rule in enumerate(issuer.sign_in):
            if rule.scope not in [scope.value for scope in Scope]:
                raise SettingsInvalid(
                    f"issuers.{name}.sign_in[{number}].scope = {rule.scope!r}: must be one of "
                    f"{', '.join(Scope)}"
                )
        if issuer.sign_in and issuer.redirect_url is None and dashboard_url is None:
            raise SettingsInvalid(
                f"issuers.{name}.redirect_url is missing: the address of the dashboard is not "
                f"known: set it, or controller.dashboard_url"
            )
        try:
            secret = read_secret("client_secret", None, issuer.client_secret_file)
        except ValueError as e:
            raise SettingsInvalid(f"issuers.{name}.{e}") from e
        if secret is not None:
            found[name] = secret
    return found


def _check_plans(
    plans: Mapping[str, Plan], settings: ControllerSettings, prices: PriceSettings
) -> None:
    if settings.default_plan not in plans:
        raise SettingsInvalid(
            f"controller.default_plan = {settings.default_plan!r}: no such plan; available: "
            f"{', '.join(plans)}"
        )
    for name, plan in plans.items():
        if plan.prices is not None and plan.prices not in prices.lists():
            known = ", ".join(prices.lists())
            raise SettingsInvalid(
                f"plans.{name}.prices = {plan.prices!r}: no such price list; available: {known} "
                "(prices.others)"
            )


def _check_plans_of_cluster(plans: Mapping[str, Plan], cluster: ClusterSettings) -> None:
    """Raise SettingsInvalid for the first term of a plan that this cluster cannot keep."""
    for name, plan in plans.items():
        if (refused := refused_plan(plan, cluster)) is not None:
            key, why, hint = refused
            raise SettingsInvalid(
                f"plans.{name}.{key} = {getattr(plan, key)}: {FLEET} {why}. {hint}"
            )
        default = BUILT_IN_PLANS[name].log_bytes if name in BUILT_IN_PLANS else None
        if plan.log_bytes != default:
            raise SettingsInvalid(
                f"plans.{name}.log_bytes = {plan.log_bytes}: {FLEET} the kubelet keeps the logs "
                f"(containerLogMaxSize, containerLogMaxFiles): remove it"
            )


def _check_prices_of_cluster(prices: PriceSettings) -> None:
    """Raise SettingsInvalid for the first price of what is never metered in pods: CPU time outside
    of calls, builds of images, snapshots."""
    default = PriceSettings().rates()
    for version, rates in prices.lists().items():
        for key in ("cpu_factor", "build_factor", "snapshot_gib_month"):
            if (value := getattr(rates, key)) != getattr(default, key):
                others = "" if version == prices.version else f"others.{version}."
                where = f"prices.{others}{key}"
                raise SettingsInvalid(
                    f'{where} = "{value}": {FLEET} this is not metered '
                    "(docs/reference/kubernetes.md): remove it"
                )
