"""The settings of a platform.yaml that differ from the defaults.

`pilotlight up` writes only these into the home: a default that it repeated there would stay what it
was when a later release changes it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml

from pilotlight.core.settings import load_named_records, load_section

_RECORDS = {
    "platform": ("pilotlight.core.settings", "PlatformSettings"),
    "cluster": ("pilotlight.kubernetes.settings", "ClusterSettings"),
    "activator": ("activator.settings", "ActivatorSettings"),
    "controller": ("pilotlight.controller.settings", "ControllerSettings"),
    "snapshotter": ("snapshotter.settings", "SnapshotterSettings"),
    "weight_cache": ("weight_cache.settings", "WeightCacheSettings"),
    "prices": ("pilotlight.spec.pricing", "PriceSettings"),
}
"""Module and record of each section. By name, as the supervisor starts the processes that own them:
they are in a layer above."""


def read_sections(file: Path) -> dict[str, Any]:
    """The sections of `file` as they are written; empty if it does not exist."""
    try:
        return yaml.safe_load(file.read_text()) or {}
    except FileNotFoundError:
        return {}


def changed_settings(file: Path) -> dict[str, Any]:
    """The sections of `file` without the keys that have their default. Raises SettingsInvalid."""
    changed = {
        section: _changed_section(file, section, written)
        for section, written in read_sections(file).items()
        if written
    }
    return {section: kept for section, kept in changed.items() if kept}


def _changed_section(file: Path, section: str, written: dict[str, Any]) -> dict[str, Any]:
    if section == "plans":
        return _changed_plans(file, written)
    if section == "issuers":  # there are none by default
        from pilotlight.core.oidc.settings import read_issuers

        read_issuers(file)
        return written
    return _changed_keys(file, section, written)


def _changed_keys(file: Path, section: str, written: dict[str, Any]) -> dict[str, Any]:
    module, name = _RECORDS[section]
    kind = getattr(importlib.import_module(module), name)
    record, default = load_section(kind, section, file), kind()
    return {
        key: value
        for key, value in written.items()
        if getattr(record, key) != getattr(default, key)
    }


def _changed_plans(file: Path, written: dict[str, Any]) -> dict[str, Any]:
    from pilotlight.spec.quotas import BUILT_IN_PLANS, Plan

    plans = load_named_records(Plan, "plans", file, base=BUILT_IN_PLANS)
    return {name: plan for name, plan in written.items() if plans[name] != BUILT_IN_PLANS.get(name)}
