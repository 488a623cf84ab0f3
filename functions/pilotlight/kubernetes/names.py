"""Names of objects and keys of labels and annotations in a cluster. Pure, and the same in every
process.

Users' names have capitals, `_`, and up to 63 characters; Kubernetes requires RFC 1035 labels
(lower-case letters, digits, `-`, at most 63 characters). A name that fits is unchanged. A name that
does not fit or is ambiguous (`a-b` + `c` and `a` + `b-c`) gets a suffix: `--`, a digit, and 8 hex
digits of the hash of its parts. No name without a suffix looks like one with it, so two objects
share a name only if 35 bits of their hashes are equal; code that creates objects additionally
compares `PATH`."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from pilotlight.kubernetes.settings import DEFAULT_NAMESPACE, WARM_SUFFIX, ClusterSettings
from pilotlight.spec.identifiers import DEFAULT_ENVIRONMENT

DOMAIN: Final = "pilotlight.dev"

# -- labels: on namespaces, Services, revisions (by their template), and so on pods, private services and EndpointSlices ----
TENANT: Final = f"{DOMAIN}/tenant"
"""The tenant's id."""
ENVIRONMENT: Final = f"{DOMAIN}/environment"
APP: Final = f"{DOMAIN}/app"
FUNCTION: Final = f"{DOMAIN}/function"
REVISION: Final = f"{DOMAIN}/revision"
"""The platform's name of the revision, `v7-3f2a1c`."""
FUNCTION_ID: Final = f"{DOMAIN}/function-id"
NETWORK: Final = f"{DOMAIN}/network"
"""Of pods: their network access, `open` or `none`."""
MANAGED_BY: Final = f"{DOMAIN}/managed-by"
"""`manager_of(settings)`, on everything that we apply, to separate several platforms on one
cluster."""
PLATFORM: Final = f"{DOMAIN}/platform"
"""The platform's id, made with its database, on everything that we apply: a controller with another
database must not take it for its own. Also an annotation of the leader's Lease."""
WARM_SHAPE: Final = f"{DOMAIN}/warm-shape"
"""Of a warm pod that was not promoted: the name of its shape, the selector of its Deployment."""
PROMOTED: Final = f"{DOMAIN}/promoted"
"""Of a promoted pod: the name of the shape that it had."""
KNATIVE_REVISION: Final = "serving.knative.dev/revision"
"""Knative's own label of revisions' pods: `revision_name`."""

# -- annotations -----------------------------------------------------------------------------------
KEY: Final = f"{DOMAIN}/key"
"""Of a revision's template and its pods: the platform-wide key, `<function id>@<revision>`, which
is not a valid label value."""
ATTEMPT: Final = f"{DOMAIN}/attempt"
"""Of a promoted pod: the start that it was claimed for."""
PROMOTED_AT: Final = f"{DOMAIN}/promoted-at"
"""Of a promoted pod: when, RFC 3339."""
APPLIED: Final = f"{DOMAIN}/applied"
"""sha256 of the last applied manifest, to detect changes by others."""
MADE_FOR: Final = f"{DOMAIN}/purpose"
"""Explanation of an object, for people."""
PATH: Final = f"{DOMAIN}/path"
"""`<tenant id>/<environment>/<app>/<function>`, to detect a name that two functions share."""

# -- labels of nodes, set by the controller from their agents' reports -----------------------------
_CACHE: Final = f"cache.{DOMAIN}"
HOT: Final = "hot"
"""Value of the labels below."""

MAX_NAME: Final = 63
MAX_SERVICE: Final = 46
"""Leaves room for `-` and a revision of 16 characters (`v12345678-3f2a1c`), also as
`<tag>-<service>`."""
MAX_REVISION_PART: Final = MAX_NAME - MAX_SERVICE - 1

_WORD = re.compile(r"[a-z][a-z0-9]*\Z")
_KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_DEFAULT_MANAGER = "pilotlight"
_MARK_CHARS = 11
_CACHE_HEX = 12


def tenant_namespace(settings: ClusterSettings, tenant_name: str, environment: str) -> str:
    """Name of a tenant's namespace: `fn-acme`, or `fn-acme--staging` for an environment other than
    the default."""
    parts = (tenant_name,) if environment == DEFAULT_ENVIRONMENT else (tenant_name, environment)
    is_plain = all(_KEBAB.match(part) for part in parts)
    return _named(
        "--".join(parts), parts, is_plain=is_plain, most=MAX_NAME, prefix=settings.namespace_prefix
    )


def warm_namespace(settings: ClusterSettings) -> str:
    """Name of the namespace of warm and promoted pods: `pilotlight-warm`."""
    return f"{settings.namespace}{WARM_SUFFIX}"


def tenant_repository(registry: str, tenant_name: str) -> str:
    """Repository of a tenant's container images below `registry`: `<registry>/acme`."""
    is_plain = bool(_KEBAB.match(tenant_name))
    return f"{registry}/{_named(tenant_name, (tenant_name,), is_plain=is_plain, most=MAX_NAME)}"


def service_name(app: str, function: str) -> str:
    """Name of a function's Knative Service and other objects, such as `search-embed`."""
    is_plain = bool(_KEBAB.match(app) and _WORD.match(function))
    return _named(f"{app}-{function}", (app, function), is_plain=is_plain, most=MAX_SERVICE)


def revision_name(service: str, revision: str) -> str:
    """Name of a revision, such as `search-embed-v7-3f2a1c`; Knative requires the Service's name and
    `-` as its prefix."""
    return f"{service}-{revision_tag(revision)}"


def revision_tag(revision: str) -> str:
    """The tag of a revision, by which Knative routes to one without a share of the traffic."""
    return _named(
        revision, (revision,), is_plain=bool(_KEBAB.match(revision)), most=MAX_REVISION_PART
    )


def secret_name(secret: str) -> str:
    """Name of the Kubernetes Secret with the values of a tenant's secret."""
    return _named(
        secret, (secret,), is_plain=bool(_KEBAB.match(secret)), most=MAX_NAME, prefix="secret-"
    )


def manager_of(settings: ClusterSettings) -> str:
    """The field manager's name as a label value, with the platform's namespace unless that is the
    default one: platforms in different namespaces never see each other's objects."""
    name, namespace = settings.field_manager, settings.namespace
    if namespace == DEFAULT_NAMESPACE:
        return _named(name, (name,), is_plain=bool(_KEBAB.match(name)), most=MAX_NAME)
    is_plain = bool(_KEBAB.match(name))
    return _named(f"{namespace}.{name}", (namespace, name), is_plain=is_plain, most=MAX_NAME)


def cache_domain(settings: ClusterSettings) -> str:
    """Domain of our labels of nodes; each platform has its own, since each has its own cache."""
    manager = manager_of(settings)
    return _CACHE if manager == _DEFAULT_MANAGER else f"{manager}.{_CACHE}"


def function_selector(settings: ClusterSettings) -> str:
    """Label selector of all objects of this platform's functions, in any namespace."""
    return f"{MANAGED_BY}={manager_of(settings)},{FUNCTION_ID}"


def weights_label(settings: ClusterSettings, manifest: str) -> str:
    """Label of nodes that hold the weights with that manifest (sha256, hex)."""
    return f"{cache_domain(settings)}/w-{manifest.removeprefix('sha256:')[:_CACHE_HEX]}"


def snapshot_label(settings: ClusterSettings, revision_key: str) -> str:
    """Label of nodes with a proven snapshot of the revision `<function id>@<revision>`."""
    digest = hashlib.sha256(revision_key.encode()).hexdigest()[:_CACHE_HEX]
    return f"{cache_domain(settings)}/s-{digest}"


def tenant_directory(settings: ClusterSettings, tenant_id: str) -> str:
    """Directory on a node that its agent provides to pods of that tenant."""
    return f"{settings.node_path.rstrip('/')}/{tenant_id}"


def warm_directory(settings: ClusterSettings) -> str:
    """Directory on a node that its agent provides to warm pods: it has the agent's socket only."""
    return f"{settings.node_path.rstrip('/')}/warm"


def _named(
    text: str, parts: tuple[str, ...], *, is_plain: bool, most: int, prefix: str = ""
) -> str:
    """`prefix` + `text` if that is a valid and unambiguous name; otherwise its valid characters and
    a suffix."""
    if is_plain and len(prefix) + len(text) <= most:
        return prefix + text
    readable = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if not prefix and not readable[:1].isalpha():
        readable = f"x-{readable}".rstrip("-")
    return (prefix + readable)[: most - _MARK_CHARS].rstrip("-") + _mark(parts)


def _mark(parts: tuple[str, ...]) -> str:
    """The suffix: `--`, a digit (our names never begin with one, so it is not a second part), and 8
    hex digits."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return f"--{digest[0] % 8}{digest[1:5].hex()}"
