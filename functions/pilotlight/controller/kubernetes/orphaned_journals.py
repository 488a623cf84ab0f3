"""Draining of journals that removed activators left: after a StatefulSet is scaled down, its
volumes contain records that no activator ships.

A volume claim of an ordinal that the StatefulSet no longer has gets a Job that mounts it and drains
the journal into the ledger (`activator --drain-journal`), created from the StatefulSet's pod
template. A drained claim gets a label and is kept: the operator decides whether to delete the
volume. When an activator returns under that ordinal, the label is removed, because it writes new
records."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlight.kubernetes import names
from pilotlight.kubernetes.cluster import Cluster
from pilotlight.kubernetes.errors import AlreadyExists, ClusterError, ManifestWarned
from pilotlight.kubernetes.kinds import JOB, PERSISTENT_VOLUME_CLAIM, POD, STATEFUL_SET
from pilotlight.kubernetes.manifests.labels import Manifest, object_manifest, ownership_labels
from pilotlight.kubernetes.watch_events import Object

log = logging.getLogger(__name__)

DRAINED = f"{names.DOMAIN}/journal-drained"
"""Label of a claim whose journal is in the ledger, and of the Job that drained it: `true`."""
_COMPONENT = "app.kubernetes.io/component"
SELECTOR = f"{_COMPONENT}=activator"
"""Selects the activators' StatefulSet in the platform's namespace."""
JOURNAL = "journal"
"""Name of the volume claim template."""
LOOK_S = 60.0
DEADLINE_S = 3600
_RETRIES = 6
_FOR_ONE = ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedJournal:
    """The claim of a removed activator. `ordinal` was its number."""

    claim: Object
    ordinal: int

    @property
    def name(self) -> str:
        """Name of the claim."""
        return str(self.claim["metadata"]["name"])

    @property
    def is_drained(self) -> bool:
        """Whether the ledger has all its records."""
        return (self.claim["metadata"].get("labels") or {}).get(DRAINED) == "true"


async def run(cluster: Cluster, *, platform: str) -> None:
    """Look for orphaned journals each minute, until cancelled. `platform`: our id."""
    while True:
        try:
            await drain_orphans(cluster, platform=platform)
        except ClusterError as e:
            log.warning("event=departed_not_looked_at error=%s", e)
        await cluster.pause(LOOK_S)


async def drain_orphans(cluster: Cluster, *, platform: str) -> None:
    """Start missing drains and label drained claims once. Raises ClusterError."""
    namespace = cluster.settings.namespace
    for activators in (await cluster.list(STATEFUL_SET, namespace, SELECTOR)).items:
        claims = (await cluster.list(PERSISTENT_VOLUME_CLAIM, namespace)).items
        await _welcome_back(cluster, activators, claims)
        for journal in orphaned_journals(activators, claims):
            if not journal.is_drained:
                await _drain(cluster, activators, journal, platform)


def orphaned_journals(activators: Object, claims: Sequence[Object]) -> Iterator[OrphanedJournal]:
    """Yield the journals of ordinals that the StatefulSet neither wants nor has a pod of, in
    order."""
    wanted = _wanted(activators)
    # terminating pods count until they are deleted
    still = int((activators.get("status") or {}).get("replicas") or 0)
    for ordinal, claim in sorted(_journals(activators, claims)):
        if ordinal not in (*wanted, *range(wanted.start, wanted.start + still)) and not claim[
            "metadata"
        ].get("deletionTimestamp"):
            yield OrphanedJournal(claim=claim, ordinal=ordinal)


async def _welcome_back(cluster: Cluster, activators: Object, claims: Sequence[Object]) -> None:
    """Remove drain Jobs and labels of activators that returned: they write new records.

    The Job is deleted first, also if the claim is not labelled: a Job that ended but was not looked
    at yet would be mistaken for the drain of the new records."""
    wanted, namespace = _wanted(activators), cluster.settings.namespace
    for ordinal, claim in _journals(activators, claims):
        journal = OrphanedJournal(claim=claim, ordinal=ordinal)
        if ordinal not in wanted:
            continue
        if await cluster.get(JOB, job_name(journal), namespace) is not None:
            await cluster.delete(JOB, job_name(journal), namespace)
        if journal.is_drained:
            await _label(cluster, journal, None)


async def _drain(
    cluster: Cluster, activators: Object, journal: OrphanedJournal, platform: str
) -> None:
    namespace = cluster.settings.namespace
    job = await cluster.get(JOB, job_name(journal), namespace)
    if job is None:
        pod = await cluster.get(
            POD, f"{activators['metadata']['name']}-{journal.ordinal}", namespace
        )
        if pod is not None:  # it still has the volume, and may still write
            return
        try:
            labels = ownership_labels(cluster.settings, platform)
            await cluster.create(drain_job(activators, journal, labels=labels))
        except AlreadyExists:
            return
        except ManifestWarned as e:  # the API server created it
            log.warning("event=drain_warned claim=%s warnings=%s", journal.name, list(e.warnings))
        log.info("event=drain_begun claim=%s ordinal=%d", journal.name, journal.ordinal)
    elif _has_condition(job, "Complete"):
        await _label(cluster, journal, "true")
        log.info("event=drained claim=%s ordinal=%d", journal.name, journal.ordinal)
    elif _has_condition(job, "Failed"):
        # The logs of its pods have the cause. Deleting the Job starts another attempt.
        hint = f"kubectl logs job/{job_name(journal)} -n {namespace}; delete the job to try again"
        log.error("event=drain_failed claim=%s hint=%r", journal.name, hint)


async def _label(cluster: Cluster, journal: OrphanedJournal, value: str | None) -> None:
    body = {"metadata": {"labels": {DRAINED: value}}}
    await cluster.patch(PERSISTENT_VOLUME_CLAIM, journal.name, cluster.settings.namespace, body)


def job_name(journal: OrphanedJournal) -> str:
    """Return the Job's name, one per claim: of two controllers that drain it, one creates the
    Job."""
    return f"drain-{journal.name}"[: names.MAX_NAME].rstrip("-")


def drain_job(
    activators: Object, journal: OrphanedJournal, *, labels: Mapping[str, str]
) -> Manifest:
    """Build the Job: the activators' pod with the orphaned volume in place of its own and another
    command line."""
    template = activators["spec"]["template"]
    spec: dict[str, Any] = {**template["spec"], "restartPolicy": "Never"}
    spec["containers"] = [
        _draining(container, journal) for container in template["spec"]["containers"][:1]
    ]
    volumes = [volume for volume in spec.get("volumes") or () if volume["name"] != JOURNAL]
    spec["volumes"] = [
        *volumes,
        {"name": JOURNAL, "persistentVolumeClaim": {"claimName": journal.name}},
    ]
    # Its pods are no activators and must receive no calls.
    kept = {
        key: value
        for key, value in (template["metadata"].get("labels") or {}).items()
        if key != _COMPONENT
    }
    of_job = {**kept, **labels, _COMPONENT: "journal-drain"}
    return object_manifest(
        JOB,
        job_name(journal),
        namespace=activators["metadata"]["namespace"],
        labels=of_job,
        annotations={
            names.MADE_FOR: f"ships the unshipped records of removed activator {journal.ordinal}"
        },
        spec={
            "backoffLimit": _RETRIES,
            "activeDeadlineSeconds": DEADLINE_S,
            "template": {"metadata": {"labels": of_job}, "spec": spec},
        },
    )


def _draining(container: Mapping[str, Any], journal: OrphanedJournal) -> dict[str, Any]:
    """Return the activator's container with the arguments to drain instead of serving, under the
    removed activator's ordinal."""
    kept = {key: value for key, value in container.items() if key not in _FOR_ONE}
    args = [word for word in kept.pop("args", []) if word != "from-hostname"]
    if "--index" in args:
        args.remove("--index")
    return {**kept, "args": [*args, "--index", str(journal.ordinal), "--drain-journal"]}


def _wanted(activators: Object) -> range:
    """Ordinals that the StatefulSet should have."""
    start = int((activators["spec"].get("ordinals") or {}).get("start") or 0)
    return range(start, start + int(activators["spec"].get("replicas", 1)))


def _journals(activators: Object, claims: Sequence[Object]) -> Iterator[tuple[int, Object]]:
    """Yield ordinal and claim of every journal of this StatefulSet, wanted or not."""
    pattern = re.compile(
        rf"{JOURNAL}-{re.escape(activators['metadata']['name'])}-(0|[1-9][0-9]*)\Z"
    )
    for claim in claims:
        if found := pattern.match(claim["metadata"]["name"]):
            yield int(found[1]), claim


def _has_condition(job: Object, wanted: str) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == wanted and each.get("status") == "True" for each in conditions)
