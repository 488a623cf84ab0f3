"""What things are called in a cluster: names of objects, keys of labels and annotations. Pure, and
the same in every process.

Users' names have capitals, `_`, and up to 63 characters; Kubernetes wants labels of RFC 1035 (small
letters, digits, `-`, at most 63). A name that fits stays as it is. One that does not, or that could
be read in two ways (`a-b` + `c` and `a` + `b-c`), gets a mark behind it: `--`, a digit, and 8 hex
digits of the hash of what it stands for. No name without a mark looks like one with it, so two
things share a name only if 35 bits of their hashes do; whoever creates objects still compares
`PATH` with what it wanted to create."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from pilotlight.kubernetes.settings import ClusterSettings
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
"""Of pods: `open` or `none`: what they reach."""
MANAGED_BY: Final = f"{DOMAIN}/managed-by"
"""`manager_of(settings)`, on everything that we apply: several platforms on one cluster leave each
other's things alone."""
KNATIVE_REVISION: Final = "serving.knative.dev/revision"
"""Knative's own label of revisions' pods: `revision_name`."""
KNATIVE_SERVICE: Final = "serving.knative.dev/service"

# -- annotations -----------------------------------------------------------------------------------
KEY: Final = f"{DOMAIN}/key"
"""Of a revision's template, so of its pods: the platform-wide key, `<function id>@<revision>`,
which no label may hold."""
APPLIED: Final = f"{DOMAIN}/applied"
"""sha256 of what was applied last: what differs from it in the cluster was changed by somebody
else."""
MADE_FOR: Final = f"{DOMAIN}/purpose"
"""Why an object is as it is, for people who find it."""
PATH: Final = f"{DOMAIN}/path"
"""`<tenant id>/<environment>/<app>/<function>`, exactly: by which a name that two functions share
is noticed."""

# -- labels of nodes, set by the controller from what their agents report --------------------------
CACHE_DOMAIN: Final = f"cache.{DOMAIN}"
HOT: Final = "hot"
"""Value of the labels below."""

MAX_NAME: Final = 63
MAX_SERVICE: Final = 46
"""With `-` and a revision of 16 characters (`v12345678-3f2a1c`), and as `<tag>-<service>`, still a
label."""
MAX_REVISION_PART: Final = MAX_NAME - MAX_SERVICE - 1

_WORD = re.compile(r"[a-z][a-z0-9]*\Z")
_KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_MARK_CHARS = 11
_CACHE_HEX = 12


def tenant_namespace(settings: ClusterSettings, tenant_name: str, environment: str) -> str:
    """`fn-acme`, or `fn-acme--staging` for another environment than the default one."""
    parts = (tenant_name,) if environment == DEFAULT_ENVIRONMENT else (tenant_name, environment)
    is_plain = all(_KEBAB.match(part) for part in parts)
    return _named(
        "--".join(parts), parts, is_plain=is_plain, most=MAX_NAME, prefix=settings.namespace_prefix
    )


def service_name(app: str, function: str) -> str:
    """`search-embed`: of the Knative Service, and of what belongs to the function as a whole."""
    is_plain = bool(_KEBAB.match(app) and _WORD.match(function))
    return _named(f"{app}-{function}", (app, function), is_plain=is_plain, most=MAX_SERVICE)


def revision_name(service: str, revision: str) -> str:
    """`search-embed-v7-3f2a1c`: Knative wants the Service's name and `-` in front."""
    return f"{service}-{revision_tag(revision)}"


def revision_tag(revision: str) -> str:
    """The revision's name as a label of its own: the tag under which Knative reaches one that has
    no share of the traffic."""
    return _named(
        revision, (revision,), is_plain=bool(_KEBAB.match(revision)), most=MAX_REVISION_PART
    )


def secret_name(secret: str) -> str:
    """Of the Kubernetes Secret with the values of a tenant's secret."""
    return _named(
        secret, (secret,), is_plain=bool(_KEBAB.match(secret)), most=MAX_NAME, prefix="secret-"
    )


def manager_of(settings: ClusterSettings) -> str:
    """The field manager's name, as a label's value."""
    name = settings.field_manager
    return _named(name, (name,), is_plain=bool(_KEBAB.match(name)), most=MAX_NAME)


def function_selector(settings: ClusterSettings) -> str:
    """A label selector: whatever belongs to a function of this platform, in any namespace."""
    return f"{MANAGED_BY}={manager_of(settings)},{FUNCTION_ID}"


def weights_label(manifest: str) -> str:
    """Of nodes that hold the weights with that manifest (sha256, hex)."""
    return f"{CACHE_DOMAIN}/w-{manifest.removeprefix('sha256:')[:_CACHE_HEX]}"


def snapshot_label(revision_key: str) -> str:
    """Of nodes with a proven snapshot of the revision `<function id>@<revision>`."""
    return f"{CACHE_DOMAIN}/s-{hashlib.sha256(revision_key.encode()).hexdigest()[:_CACHE_HEX]}"


def tenant_directory(settings: ClusterSettings, tenant_id: str) -> str:
    """On a node: what its agent shows to pods of that tenant."""
    return f"{settings.node_path.rstrip('/')}/{tenant_id}"


def _named(
    text: str, parts: tuple[str, ...], *, is_plain: bool, most: int, prefix: str = ""
) -> str:
    """`prefix` + `text` where that is a name and stands for nothing else; otherwise what can be
    read of it, and a mark."""
    if is_plain and len(prefix) + len(text) <= most:
        return prefix + text
    readable = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")
    if not prefix and not readable[:1].isalpha():
        readable = f"x-{readable}".rstrip("-")
    return (prefix + readable)[: most - _MARK_CHARS].rstrip("-") + _mark(parts)


def _mark(parts: tuple[str, ...]) -> str:
    """`--`, a digit (no name of ours begins with one, so a mark is no second part), and 8 hex
    digits."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return f"--{digest[0] % 8}{digest[1:5].hex()}"
