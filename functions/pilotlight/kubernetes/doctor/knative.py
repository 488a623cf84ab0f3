"""Checks versions and components: Kubernetes, Knative Serving, its kinds, webhook and processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pilotlight.kubernetes import kinds
from pilotlight.kubernetes.api_errors import install_hint
from pilotlight.kubernetes.doctor.facts import Facts
from pilotlight.kubernetes.doctor.findings import BROKEN, NOTE, OK, Finding
from pilotlight.kubernetes.settings import ClusterSettings

Version = tuple[int, int]

LEAST_KUBERNETES: Version = (1, 27)  # strict field validation is final
KNOWN_KUBERNETES: tuple[Version, Version] = ((1, 30), (1, 36))
LEAST_KNATIVE: Version = (1, 17)  # podspec-volumes-hostpath
KNOWN_KNATIVE: tuple[Version, Version] = ((1, 17), (1, 23))
"""Versions whose source was reviewed; none was tested on a real cluster yet."""

_NEEDED = (
    kinds.SERVICE,
    kinds.CONFIGURATION,
    kinds.REVISION,
    kinds.ROUTE,
    kinds.POD_AUTOSCALER,
    kinds.SERVERLESS_SERVICE,
)
_WEBHOOK = "validation.webhook.serving.knative.dev"
_PROCESSES = ("controller", "autoscaler", "activator", "webhook")
_VERSION_LABEL = "app.kubernetes.io/version"


def check(facts: Facts, settings: ClusterSettings) -> Iterator[Finding]:
    """Findings about versions and components."""
    yield _kubernetes(facts)
    yield _definitions(facts)
    yield _knative(facts)
    yield _webhook(facts)
    yield _processes(facts, settings)


def _kubernetes(facts: Facts) -> Finding:
    text = str(facts.version.get("gitVersion") or "unknown")
    return _judged(
        "Kubernetes", text, LEAST_KUBERNETES, KNOWN_KUBERNETES, way_out="Upgrade the cluster."
    )


def _knative(facts: Facts) -> Finding:
    labelled = [
        *facts.knative.values(),
        *(facts.definitions[d.resource] for d in _NEEDED if d.resource in facts.definitions),
    ]
    versions = {
        str((one["metadata"].get("labels") or {}).get(_VERSION_LABEL, "")) for one in labelled
    } - {""}
    unread = next((n for n in ("definitions", "knative") if not facts.is_known(n)), None)
    if not versions and unread is not None:
        detail = f"not checked: {facts.troubles[unread]}"
        return Finding(what="Knative Serving", state=NOTE, detail=detail)
    if not versions:
        return Finding(
            what="Knative Serving",
            state=BROKEN,
            detail="not found",
            way_out=_capital(install_hint(kinds.SERVICE.group)),
        )
    if len(versions) > 1:
        detail = f"components of several versions: {', '.join(sorted(versions))}"
        return Finding(
            what="Knative Serving",
            state=NOTE,
            detail=detail,
            way_out="Finish the upgrade of Knative Serving.",
        )
    return _judged(
        "Knative Serving",
        versions.pop(),
        LEAST_KNATIVE,
        KNOWN_KNATIVE,
        way_out="Upgrade Knative Serving.",
    )


def _judged(
    what: str, text: str, least: Version, known: tuple[Version, Version], *, way_out: str
) -> Finding:
    version = _parse(text)
    if version is None:
        return Finding(what=what, state=NOTE, detail=f"version {text!r} cannot be parsed")
    if version < least:
        return Finding(
            what=what,
            state=BROKEN,
            detail=f"{text}: at least {_show(least)} is required",
            way_out=way_out,
        )
    if not known[0] <= version <= known[1]:
        detail = f"{text}: outside of the known versions, {_show(known[0])} to {_show(known[1])}"
        return Finding(
            what=what, state=NOTE, detail=detail, way_out="Test a function before relying on it."
        )
    return Finding(what=what, state=OK, detail=text)


def _definitions(facts: Facts) -> Finding:
    what = "kinds"
    if not facts.is_known("definitions"):
        return Finding(
            what=what, state=NOTE, detail=f"not checked: {facts.troubles['definitions']}"
        )
    missing = [kind for kind in _NEEDED if kind.resource not in facts.definitions]
    if missing:
        listed = ", ".join(kind.resource for kind in missing)
        return Finding(
            what=what,
            state=BROKEN,
            detail=f"missing: {listed}",
            way_out=_capital(install_hint(missing[0].group)),
        )
    return Finding(what=what, state=OK, detail=f"{len(_NEEDED)} of Knative Serving")


def _webhook(facts: Facts) -> Finding:
    what = "Knative's webhook"
    if not facts.is_known("webhooks"):
        return Finding(what=what, state=NOTE, detail=f"not checked: {facts.troubles['webhooks']}")
    if _WEBHOOK not in facts.webhooks:
        way_out = "Without it Services are neither validated nor defaulted. " + _capital(
            install_hint(kinds.SERVICE.group)
        )
        return Finding(
            what=what, state=BROKEN, detail=f"{_WEBHOOK} is not registered", way_out=way_out
        )
    return Finding(what=what, state=OK, detail="registered")


def _processes(facts: Facts, settings: ClusterSettings) -> Finding:
    what, namespace = "Knative's processes", settings.knative_namespace
    if not facts.is_known("knative"):
        return Finding(what=what, state=NOTE, detail=f"not checked: {facts.troubles['knative']}")
    away = [
        name
        for name in _PROCESSES
        if name not in facts.knative or not _available(facts.knative[name])
    ]
    if not away:
        return Finding(what=what, state=OK, detail=", ".join(_PROCESSES))
    commands = tuple(f"kubectl describe deployment/{name} -n {namespace}" for name in away)
    detail = f"not available in {namespace}: {', '.join(away)}"
    way_out = "If Knative is in another namespace, set cluster.knative_namespace of platform.yaml."
    return Finding(what=what, state=BROKEN, detail=detail, way_out=way_out, commands=commands)


def _available(deployment: dict[str, object]) -> bool:
    status = deployment.get("status")
    return isinstance(status, dict) and int(status.get("availableReplicas") or 0) > 0


def _parse(text: str) -> Version | None:
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def _show(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
