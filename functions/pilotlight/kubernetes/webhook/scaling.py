"""Checks autoscaling annotations: keys and limits of knative/serving
pkg/apis/autoscaling/annotation_validation.go."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pilotlight.kubernetes.errors import FieldProblem
from pilotlight.kubernetes.webhook.knative_config import KnativeConfig

PREFIX = "autoscaling.knative.dev/"
_PATH = "spec.template.metadata.annotations"
_KPA, _HPA = "kpa.autoscaling.knative.dev", "hpa.autoscaling.knative.dev"
_COUNTS = {"min-scale": 0, "max-scale": 0, "initial-scale": 0, "activation-scale": 2}
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "target": (0.01, float("inf")),
    "target-utilization-percentage": (1, 100),
    "panic-window-percentage": (1, 100),
    "panic-threshold-percentage": (110, 1000),
}
_SECONDS: Mapping[str, tuple[int, int]] = {
    "window": (6, 3600),
    "scale-down-delay": (0, 3600),
    "scale-to-zero-pod-retention-period": (0, 3600),
}
_TEXTS = frozenset({"class", "metric", "metric-aggregation-algorithm", "target-burst-capacity"})
_DURATION = re.compile(r"([0-9]+h)?([0-9]+m)?([0-9]+s)?\Z")


def problems(annotations: Mapping[str, str], config: KnativeConfig) -> Iterator[FieldProblem]:
    """The problems of a template's annotations."""
    own = {
        key.removeprefix(PREFIX): value
        for key, value in annotations.items()
        if key.startswith(PREFIX)
    }
    for key, value in own.items():
        if not isinstance(value, str):
            yield _at(key, f"{value!r}: annotations must be strings", f'Write "{value}".')
        elif message := _wrong(key, value):
            yield _at(key, f"{value!r}: {message}")
    yield from _together(
        {key: value for key, value in own.items() if isinstance(value, str)}, config
    )


def seconds(text: str) -> int | None:
    """Parse a duration of whole seconds in Go's format (`90s`, `1h30m`); None if invalid."""
    if not text or not (found := _DURATION.match(text)):
        return None
    return sum(
        int(part[:-1]) * unit
        for part, unit in zip(found.groups(), (3600, 60, 1), strict=True)
        if part
    )


def _wrong(key: str, value: str) -> str:
    if key in _COUNTS:
        is_right = value.isdigit() and int(value) >= _COUNTS[key]
        return "" if is_right else f"must be a whole number of at least {_COUNTS[key]}"
    if key in _NUMBERS:
        low, high = _NUMBERS[key]
        return "" if _is_within(value, low, high) else f"must be between {low:g} and {high:g}"
    if key in _SECONDS:
        least, most = _SECONDS[key]
        found = seconds(value)
        return (
            ""
            if found is not None and least <= found <= most
            else f"must be whole seconds between {least}s and {most}s"
        )
    if key == "target-burst-capacity":
        return (
            ""
            if value == "-1" or _is_within(value, 0, float("inf"))
            else "must be -1, or 0 or more"
        )
    if key == "class" and value.endswith(".autoscaling.knative.dev") and value not in (_KPA, _HPA):
        return f"must be {_KPA} or {_HPA}, or a class of another domain"
    return "" if key in _TEXTS else "the autoscaler has no such key"


def _is_within(text: str, low: float, high: float) -> bool:
    try:
        return low <= float(text) <= high
    except ValueError:
        return False


def _together(own: Mapping[str, str], config: KnativeConfig) -> Iterator[FieldProblem]:
    if own.get("class", _KPA) == _KPA and own.get("metric", "concurrency") not in (
        "concurrency",
        "rps",
    ):
        yield _at("metric", f"{own['metric']!r}: this class supports only concurrency and rps")
    least, most = (
        int(own.get(key, "0")) if own.get(key, "0").isdigit() else 0
        for key in ("min-scale", "max-scale")
    )
    if most and least > most:
        yield _at("min-scale", f"{least} is more than max-scale, {most}")
    if own.get("initial-scale") == "0" and not config.allows_zero_initial_scale:
        yield _at(
            "initial-scale",
            "this cluster does not allow 0",
            config.set_autoscaler("allow-zero-initial-scale", "true"),
        )


def _at(key: str, message: str, fix: str = "") -> FieldProblem:
    return FieldProblem(f"{_PATH}[{PREFIX}{key}]", message, fix)
