"""Journals of activators that are gone for good: a smaller StatefulSet leaves their volumes, with
records that nobody ships.

A volume claim of an ordinal that the StatefulSet no longer has gets a Job that mounts it and drains
the journal into the ledger (`activator --drain-journal`), made from the StatefulSet's own pod
template. A claim that was drained says so by a label, and is kept: whether a disk goes is the
operator's decision. When an activator comes back under that ordinal, the label goes: it writes new
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
"""Label of a claim whose journal the ledger has, and of the Job that did it: `true`."""
_COMPONENT = "app.kubernetes.io/component"
SELECTOR = f"{_COMPONENT}=activator"
"""Of the activators' StatefulSet, in the platform's namespace."""
JOURNAL = "journal"
"""Name of the volume claim template."""
LOOK_S = 60.0
DEADLINE_S = 3600
_RETRIES = 6
_FOR_ONE = ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "ports")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanedJournal:
    """A claim of an activator that is no longer wanted. `ordinal` was its number."""

    claim: Object
    ordinal: int

    @property
    def name(self) -> str:
        """Of the claim."""
        return str(self.claim["metadata"]["name"])

    @property
    def is_drained(self) -> bool:
        """The ledger has all of it."""
        return (self.claim["metadata"].get("labels") or {}).get(DRAINED) == "true"


async def run(cluster: Cluster) -> None:
    """Look each minute, until cancelled."""
    while True:
        try:
            await drain_orphans(cluster)
        except ClusterError as e:
            log.warning("event=departed_not_looked_at error=%s", e)
        await cluster.pause(LOOK_S)


async def drain_orphans(cluster: Cluster) -> None:
    """One look: begin what is left to drain, and note what was drained. Raises ClusterError."""
    namespace = cluster.settings.namespace
    for activators in (await cluster.list(STATEFUL_SET, namespace, SELECTOR)).items:
        claims = (await cluster.list(PERSISTENT_VOLUME_CLAIM, namespace)).items
        await _welcome_back(cluster, activators, claims)
        for journal in orphaned_journals(activators, claims):
            if not journal.is_drained:
                await _drain(cluster, activators, journal)


def orphaned_journals(activators: Object, claims: Sequence[Object]) -> Iterator[OrphanedJournal]:
    """Journals of ordinals that the StatefulSet does not have, and has no pod of any more, in their
    order."""
    wanted = _wanted(activators)
    # pods that end count until they are gone
    still = int((activators.get("status") or {}).get("replicas") or 0)
    for ordinal, claim in sorted(_journals(activators, claims)):
        if ordinal not in (*wanted, *range(wanted.start, wanted.start + still)) and not claim[
            "metadata"
        ].get("deletionTimestamp"):
            yield OrphanedJournal(claim=claim, ordinal=ordinal)


async def _welcome_back(cluster: Cluster, activators: Object, claims: Sequence[Object]) -> None:
    """Who is back writes again: what was drained then says nothing of what comes now.

    The Job goes first, and whether the claim says that it was drained or not: one that ended and
    was not looked at yet would be taken for the drain of the records that come now."""
    wanted, namespace = _wanted(activators), cluster.settings.namespace
    for ordinal, claim in _journals(activators, claims):
        journal = OrphanedJournal(claim=claim, ordinal=ordinal)
        if ordinal not in wanted:
            continue
        if await cluster.get(JOB, job_name(journal), namespace) is not None:
            await cluster.delete(JOB, job_name(journal), namespace)
        if journal.is_drained:
            await _label(cluster, journal, None)


async def _drain(cluster: Cluster, activators: Object, journal: OrphanedJournal) -> None:
    namespace = cluster.settings.namespace
    job = await cluster.get(JOB, job_name(journal), namespace)
    if job is None:
        pod = await cluster.get(
            POD, f"{activators['metadata']['name']}-{journal.ordinal}", namespace
        )
        if pod is not None:  # it still has the volume, and may still write
            return
        try:
            await cluster.create(
                drain_job(activators, journal, labels=ownership_labels(cluster.settings))
            )
        except AlreadyExists:
            return
        except ManifestWarned as e:  # it took place
            log.warning("event=drain_warned claim=%s warnings=%s", journal.name, list(e.warnings))
        log.info("event=drain_begun claim=%s ordinal=%d", journal.name, journal.ordinal)
    elif _has_condition(job, "Complete"):
        await _label(cluster, journal, "true")
        log.info("event=drained claim=%s ordinal=%d", journal.name, journal.ordinal)
    elif _has_condition(job, "Failed"):
        # Its pods' logs say why; it is tried again once somebody has deleted it.
        hint = f"kubectl logs job/{job_name(journal)} -n {namespace}; delete the job to try again"
        log.error("event=drain_failed claim=%s hint=%r", journal.name, hint)


async def _label(cluster: Cluster, journal: OrphanedJournal, value: str | None) -> None:
    body = {"metadata": {"labels": {DRAINED: value}}}
    await cluster.patch(PERSISTENT_VOLUME_CLAIM, journal.name, cluster.settings.namespace, body)


def job_name(journal: OrphanedJournal) -> str:
    """One for each claim: of two controllers that want to drain it, one makes the Job."""
    return f"drain-{journal.name}"[: names.MAX_NAME].rstrip("-")


def drain_job(
    activators: Object, journal: OrphanedJournal, *, labels: Mapping[str, str]
) -> Manifest:
    """The Job: the activators' own pod, with the departed one's volume in the place of its own, and
    another command line."""
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
    # Its pods are no activators: nobody sends them calls.
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
            names.MADE_FOR: f"ships what activator {journal.ordinal} had not shipped when it went"
        },
        spec={
            "backoffLimit": _RETRIES,
            "activeDeadlineSeconds": DEADLINE_S,
            "template": {"metadata": {"labels": of_job}, "spec": spec},
        },
    )


def _draining(container: Mapping[str, Any], journal: OrphanedJournal) -> dict[str, Any]:
    """The activator's container as it is, told to drain in place of serving; it has the name of the
    one that is gone."""
    kept = {key: value for key, value in container.items() if key not in _FOR_ONE}
    args = [word for word in kept.pop("args", []) if word != "from-hostname"]
    if "--index" in args:
        args.remove("--index")
    return {**kept, "args": [*args, "--index", str(journal.ordinal), "--drain-journal"]}


def _wanted(activators: Object) -> range:
    """Ordinals that it shall have."""
    start = int((activators["spec"].get("ordinals") or {}).get("start") or 0)
    return range(start, start + int(activators["spec"].get("replicas", 1)))


def _journals(activators: Object, claims: Sequence[Object]) -> Iterator[tuple[int, Object]]:
    """Ordinal and claim of every journal of this StatefulSet, whether wanted or not."""
    pattern = re.compile(
        rf"{JOURNAL}-{re.escape(activators['metadata']['name'])}-(0|[1-9][0-9]*)\Z"
    )
    for claim in claims:
        if found := pattern.match(claim["metadata"]["name"]):
            yield int(found[1]), claim


def _has_condition(job: Object, wanted: str) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == wanted and each.get("status") == "True" for each in conditions)
