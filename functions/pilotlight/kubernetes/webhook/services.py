"""Checks a Service for everything that Knative would refuse or drop (`check`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pilotlight.kubernetes.errors import FieldProblem
from pilotlight.kubernetes.manifests.difference import differences
from pilotlight.kubernetes.webhook import pods, scaling, schema
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig

MAX_NAME = 63
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_NAMED_SO = (
    "Use at most 63 lower-case letters, digits and -, starting with a letter and not ending with -."
)
_WHOLE = 100


def check(
    service: Mapping[str, Any],
    config: KnativeConfig | None = None,
    *,
    live: Mapping[str, Any] | None = None,
) -> list[FieldProblem]:
    """The problems of a Service, in the order of its fields; [] = it would be accepted.

    `config`: the cluster's, or Knative's defaults. `live`: the existing Service, to detect changes
    of immutable fields."""
    return list(_problems(service, config or KnativeConfig(), live))


def _problems(
    service: Mapping[str, Any], config: KnativeConfig, live: Mapping[str, Any] | None
) -> Iterator[FieldProblem]:
    metadata, spec = service.get("metadata") or {}, service.get("spec") or {}
    template = spec.get("template") or {}
    name = str(metadata.get("name", ""))
    yield from _name("metadata.name", name)
    yield from _annotations(metadata.get("annotations") or {})
    yield from (
        FieldProblem(f"spec.{key}", "unknown field: it would be dropped silently", "Remove it.")
        for key in spec
        if key not in ("template", "traffic")
    )
    yield from _revision(name, template.get("metadata") or {}, config)
    yield from schema.dropped(template.get("spec") or {})
    yield from pods.problems(template.get("spec") or {}, config)
    yield from traffic(spec.get("traffic") or ())
    if live is not None:
        yield from _unchanged(template, (live.get("spec") or {}).get("template") or {})


def _name(field: str, name: str) -> Iterator[FieldProblem]:
    if len(name) > MAX_NAME or not _DNS_1035.match(name):
        yield FieldProblem(field, f"{name!r} is not a DNS-1035 label", _NAMED_SO)


def _annotations(annotations: Mapping[str, str]) -> Iterator[FieldProblem]:
    for key in annotations:
        if key.startswith(scaling.PREFIX):
            said = (
                "autoscaling annotations must be put under "
                '"spec.template.metadata.annotations" to work'
            )
            yield FieldProblem(f"metadata.annotations[{key}]", said)
    rollout = annotations.get("serving.knative.dev/rollout-duration")
    if rollout is not None and scaling.seconds(rollout) is None:
        yield FieldProblem(
            "metadata.annotations[serving.knative.dev/rollout-duration]",
            f"{rollout!r}: must be whole seconds",
        )


def _revision(
    service: str, metadata: Mapping[str, Any], config: KnativeConfig
) -> Iterator[FieldProblem]:
    name = metadata.get("name")
    if name is not None:
        yield from _name("spec.template.metadata.name", str(name))
        if not str(name).startswith(f"{service}-"):
            yield FieldProblem(
                "spec.template.metadata.name", f"{name!r} must have prefix {service + '-'!r}"
            )
    annotations = metadata.get("annotations") or {}
    yield from scaling.problems(annotations, config)
    deadline = annotations.get("serving.knative.dev/progress-deadline")
    if deadline is not None and not scaling.seconds(deadline):
        where = "spec.template.metadata.annotations[serving.knative.dev/progress-deadline]"
        yield FieldProblem(where, f"{deadline!r}: must be whole seconds, more than 0")


def traffic(listed: Sequence[Mapping[str, Any]]) -> Iterator[FieldProblem]:
    """The problems of `spec.traffic`."""
    tags: set[str] = set()
    total = 0
    for index, entry in enumerate(listed):
        path = f"spec.traffic[{index}]"
        percent = entry.get("percent", 0)
        if isinstance(percent, bool) or not isinstance(percent, int) or not 0 <= percent <= _WHOLE:
            yield FieldProblem(f"{path}.percent", f"expected 0 <= {percent} <= {_WHOLE}")
        else:
            total += percent
        yield from _target(entry, path)
        tag = entry.get("tag")
        if tag:
            yield from _name(f"{path}.tag", str(tag))
            if tag in tags:
                yield FieldProblem(f"{path}.tag", f"two entries have the tag {tag!r}")
            tags.add(str(tag))
    if listed and total != _WHOLE:
        yield FieldProblem(
            "spec.traffic",
            f"Traffic targets sum to {total}, want {_WHOLE}",
            "Make the weights add up to 100.",
        )


def _target(entry: Mapping[str, Any], path: str) -> Iterator[FieldProblem]:
    is_named = bool(entry.get("revisionName"))
    if is_named == bool(entry.get("latestRevision", not is_named)):
        yield FieldProblem(
            f"{path}.latestRevision", "must be true if and only if no revisionName is set"
        )
    for key in entry:
        if key not in schema.TRAFFIC:
            yield FieldProblem(
                f"{path}.{key}",
                "unknown field: it would be dropped silently",
                "Remove it.",
            )
    for key in ("url", "configurationName"):
        if entry.get(key):
            yield FieldProblem(
                f"{path}.{key}", f"must not set the field(s): {path}.{key}", "Remove it."
            )


def _unchanged(template: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """Revisions are immutable: a changed template needs another name."""
    name = (template.get("metadata") or {}).get("name")
    if name is None or name != (live.get("metadata") or {}).get("name"):
        return
    if changed := list(
        differences(template.get("spec") or {}, live.get("spec") or {}, "spec.template.spec")
    ):
        said = f"Saw the following changes without a name change: {', '.join(changed)}"
        yield FieldProblem("spec.template.metadata.name", said, "Give the revision another name.")
