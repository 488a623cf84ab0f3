"""Knative's admission webhook restated, as far as the reference goes (§2.3): what a Service,
Configuration or Revision may not be.

Its settings are read live from the ConfigMaps config-features, config-autoscaler and
config-defaults of namespace knative-serving, as the real one does; what they do not say has
Knative's default. Independent of the deployer's own restatement, which is held against it."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.knative_pods import PodRules
from tests.fakes.kubernetes.knative_traffic import traffic_faults
from tests.fakes.kubernetes.problems import Refused
from tests.fakes.kubernetes.store import Store
from tests.fakes.kubernetes.writing import Review

Json = dict[str, Any]
GROUP = "serving.knative.dev"
NAME = "validation.webhook.serving.knative.dev"
_SCALES = "autoscaling.knative.dev/"
_CLASSES = ("kpa.autoscaling.knative.dev", "hpa.autoscaling.knative.dev")


class KnativeWebhook:
    """A hook of the API server. `store` holds the ConfigMaps."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, review: Review) -> None:
        """Raises Refused 400 with everything that is wrong."""
        if review.resource.group != GROUP or review.resource.kind == "Route":
            return
        faults = self._faults(review)
        if faults:
            raise Refused(
                400,
                f'admission webhook "{NAME}" denied the request: validation failed: '
                + "\n".join(dict.fromkeys(faults)),
            )

    def _faults(self, review: Review) -> list[str]:
        body, before = review.body, review.before
        if review.resource.kind == "Revision":
            if before is not None and before["spec"] != body["spec"]:
                return ["Immutable fields changed (-old +new): spec\n{*v1.RevisionSpec}"]
            return (
                []
                if before is not None
                else self._pod(body["spec"], "spec", review)
                + self._annotations(body["metadata"], "metadata")
            )
        template = body["spec"].get("template") or {}
        found = self._own_metadata(body["metadata"])
        if before is None or before["spec"] != body["spec"]:
            found += self._template(template, body["metadata"]["name"], review)
            found += _unnamed_change(before, template)
        if review.resource.kind == "Service":
            found += traffic_faults(body["spec"].get("traffic") or [])
        return found

    def _template(self, template: Json, service: str, review: Review) -> list[str]:
        metadata = template.get("metadata") or {}
        found = []
        name = metadata.get("name")
        if name and not name.startswith(f"{service}-"):
            found.append(f'"{name}" must have prefix "{service}-": spec.template.metadata.name')
        found += self._annotations(metadata, "spec.template.metadata")
        return found + self._pod(template.get("spec") or {}, "spec.template.spec", review)

    def _pod(self, spec: Json, path: str, review: Review) -> list[str]:
        limits = self.config("config-defaults")
        rules = PodRules(
            features=self.config("config-features"),
            max_timeout_s=int(limits.get("max-revision-timeout-seconds", 600)),
            max_concurrency=int(limits.get("container-concurrency-max-limit", 1000)),
            warn=review.warn,
        )
        return rules.faults(spec, path)

    def _own_metadata(self, metadata: Json) -> list[str]:
        return [
            f'invalid key name "{key}": metadata.annotations\nautoscaling annotations must be put '
            f"under "
            '"spec.template.metadata.annotations" to work'
            for key in metadata.get("annotations") or ()
            if key.startswith(_SCALES)
        ]

    def _annotations(self, metadata: Json, path: str) -> list[str]:
        annotations = {
            key.removeprefix(_SCALES): value
            for key, value in (metadata.get("annotations") or {}).items()
            if _SCALES in key
        }
        where = f"{path}.annotations"
        low, high = _whole(annotations, "min-scale"), _whole(annotations, "max-scale")
        found = [
            f"invalid value: {annotations[name]}: {where}.{_SCALES}{name}"
            for name in ("min-scale", "max-scale", "initial-scale", "activation-scale")
            if name in annotations
            and (_whole(annotations, name) or 0) < (2 if name == "activation-scale" else 0)
        ]
        if high and low is not None and low > high:
            found.append(f"max-scale={high} is less than min-scale={low}: {where}")
        limit = int(self.config("config-autoscaler").get("max-scale-limit", 0))
        if limit and "max-scale" in annotations and not 1 <= (high or 0) <= limit:
            found.append(f"expected 1 <= {high or 0} <= {limit}: {where}.{_SCALES}max-scale")
        allowed = self.config("config-autoscaler").get("allow-zero-initial-scale", "false")
        if annotations.get("initial-scale") == "0" and allowed != "true":
            found.append(f"invalid value: {_SCALES}initial-scale=0 not allowed by cluster: {where}")
        return found + self._numbers(annotations, where)

    def _numbers(self, annotations: Json, where: str) -> list[str]:
        found = []
        bounds = {
            "target": (0.01, 1e9),
            "target-utilization-percentage": (1, 100),
            "panic-window-percentage": (1, 100),
            "panic-threshold-percentage": (110, 1000),
        }
        for name, (low, high) in bounds.items():
            if name in annotations and not low <= _number(annotations[name]) <= high:
                found.append(
                    f"expected {low} <= {annotations[name]} <= {high}: {where}.{_SCALES}{name}"
                )
        burst = annotations.get("target-burst-capacity")
        if burst is not None and _number(burst) < 0 and burst != "-1":
            found.append(f"invalid value: {burst}: {where}.{_SCALES}target-burst-capacity")
        for name, low_s in (
            ("window", 6.0),
            ("scale-down-delay", 0.0),
            ("scale-to-zero-pod-retention-period", 0.0),
        ):
            if name in annotations and not low_s <= duration_s(annotations[name]) <= 3600:
                found.append(
                    f"expected {low_s:g}s <= {annotations[name]} <= 1h0m0s: {where}.{_SCALES}{name}"
                )
        kind = annotations.get("class")
        metric = annotations.get("metric")
        if kind in (None, _CLASSES[0]) and metric not in (None, "concurrency", "rps"):
            found.append(f"invalid value: {metric}: {where}.{_SCALES}metric")
        return found

    def config(self, name: str) -> Json:
        """The data of one of Knative's ConfigMaps."""
        stored = self._store.get(("", "configmaps"), ("knative-serving", name))
        return (stored.body.get("data") or {}) if stored is not None else {}


def _unnamed_change(before: Json | None, template: Json) -> list[str]:
    """A named template that changes needs another name."""
    old = (before or {}).get("spec", {}).get("template") or {}
    name = (template.get("metadata") or {}).get("name")
    if (
        before is None
        or not name
        or (old.get("metadata") or {}).get("name") != name
        or old == template
    ):
        return []
    return [
        (
            "Saw the following changes without a name change (-old +new): "
            "spec.template.metadata.name\n{*v1.RevisionTemplateSpec}"
        )
    ]


def _whole(annotations: Json, name: str) -> int | None:
    try:
        return int(annotations[name])
    except KeyError:
        return None
    except ValueError:
        return -1


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def duration_s(text: str) -> float:
    """A Go duration of h, m, s and ms; NaN = none."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    total, number = 0.0, ""
    rest = text
    while rest:
        length = next((i for i, c in enumerate(rest) if not (c.isdigit() or c == ".")), len(rest))
        number, rest = rest[:length], rest[length:]
        unit = next((u for u in ("ms", "h", "m", "s") if rest.startswith(u)), None)
        if unit is None or not number:
            return 0.0 if text == "0" else float("nan")
        total += float(number) * units[unit]
        rest = rest[len(unit) :]
    return total
